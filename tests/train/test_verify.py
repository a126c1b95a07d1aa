"""Verification: a wrong bit in one device's memory or gradient is found, and the device named."""

import re
import socket
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import flipped, with_flip
from jax.sharding import NamedSharding, PartitionSpec
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from quick_run import QUICK, quick_flags
from runs import mesh, records
from support import journeys, sizes_of, sweep
from tables import raised_by
from variants import small_model

from jaxtp.checkpoint.checksum import minority_devices, replica_groups_by_name
from jaxtp.checkpoint.logical import named_arrays, named_variables
from jaxtp.collectives import batch_spec
from jaxtp.config import entry
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.guards import verify
from jaxtp.guards.verify import CorruptionError, Verifier, changed
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import AXES, CP, mesh_of, mesh_shape
from jaxtp.tools.launch.__main__ import main as launch
from jaxtp.train import memory_check
from jaxtp.train import optimizer as optimizers
from jaxtp.train import step as steps
from jaxtp.train.__main__ import main
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.parts import Parts, step_settings
from jaxtp.train.setup import Plan
from jaxtp.train.state import plan_state, trained_parameters
from jaxtp.train.step import compiler_options

MODEL = small_model(vocab_size=32, num_heads=8, num_kv_heads=8, d_ff=32)
# every gradient is clipped
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, clip_norm=1e-3)
SCALE = "norm.scale"  # split over fsdp alone
KERNEL = "blocks.mlp.gate_up.kernels.0"  # split over fsdp and tp
WRONG = "wrong"  # the column of a batch that has the wrong bits
TESTS = Path(__file__).parents[1]


class Rig:
    """A step whose gradients get wrong bits on any device: the batch says which, so that one
    program makes all.
    """

    def __init__(self, sizes):
        self.mesh = mesh_of(sizes_of(sizes))
        loop = LoopConfig(steps=10, verify_every=4)
        self.config = TrainConfig(optimizer=SETTINGS, train=loop)
        self.plan = plan_state(MODEL, optimizers.build(SETTINGS, 10), self.mesh)
        length = 5 if self.mesh.shape[CP] == 1 else 6  # tp does not divide what cp leaves
        tokens = default_rng(0).integers(MODEL.vocab_size, size=(8, length + 1), dtype=np.int32)
        where = NamedSharding(self.mesh, batch_spec(None))
        self.batch = {
            "inputs": jax.device_put(tokens[:, :-1], where),
            "labels": jax.device_put(tokens[:, 1:], where),
        }
        self.step = steps.make_train_step(
            step_settings(self.config), self.plan, with_checksums=True
        )
        self.first = self.plan.create(seed=0)
        self.copies = replica_groups_by_name(named_arrays(self.first))
        self.restart()

    def restart(self, saved=(), verified=None):
        """Begins again, with the steps of checkpoints and the last verified one."""
        checkpoints = SimpleNamespace(
            steps=lambda: list(saved), wait=lambda: None, folder="checkpoints"
        )
        trained = trained_parameters(self.plan)
        self.verifier = Verifier(self.mesh, trained, 4, checkpoints, verified)

    def state(self):
        """A copy of the first state, which a step may donate."""
        return jax.tree.map(jnp.copy, self.first)

    def compute(self, wrong=(), name=SCALE):
        """A step in which the gradient of a parameter has another bit at some positions of the
        mesh.
        """
        bits = np.zeros((2, self.mesh.size), np.uint32)
        bits[(SCALE, KERNEL).index(name), list(wrong)] = 1 << 20
        placed = jax.device_put(bits, NamedSharding(self.mesh, PartitionSpec(None, AXES)))
        return lambda state: self.step(state, self.batch | {WRONG: placed})

    def verify(self, first, second, state=None, damage=lambda state: state):
        """Verifies step 4; returns the state after it."""

        def compute(state):
            state, output = first(state)
            return state, output.checksums

        state = self.state() if state is None else state
        state = self.verifier.begin(4, state, self.batch, compute)
        state, output = second(state)
        state = damage(state)
        self.verifier.record(4, output.checksums)
        self.verifier.finish(4, state, output.checksums)
        return state

    def fails(self, first, second, **more):
        return raised_by(lambda: self.verify(first, second, **more), kind=CorruptionError)

    def holders(self, name, position):
        """The positions of the devices that should hold what one of them does."""
        return next(set(group) for group in self.copies[name] if position in group)

    def suspects(self, name, position):
        """The positions that copies tell to be wrong: all holders, if there are two of them."""
        holders = self.holders(name, position)
        if len(holders) == 1:
            pytest.skip("there is no copy to compare with")
        return holders if len(holders) == 2 else {position}


def add_wrong_bits(grads, bits):
    """The gradients, of which each device turns over the bits that it is given in the first
    element of two of them.
    """
    for row, name in enumerate((SCALE, KERNEL)):
        variable = named_variables(grads)[name]
        spec = spec_of(variable)

        def turn(shard, bits, row=row):
            first = jnp.zeros(shard.size, jnp.uint32).at[0].set(bits[row, 0]).reshape(shard.shape)
            return jax.lax.bitcast_convert_type(
                jax.lax.bitcast_convert_type(shard, jnp.uint32) ^ first, shard.dtype
            )

        view = jax.shard_map(
            turn, in_specs=(spec, PartitionSpec(None, AXES)), out_specs=spec, check_vma=False
        )
        variable.set_value(view(variable[...], bits))
    return grads


MESHES = [(2, 1, 1), (1, 4, 1), (2, 1, 2, 2)]


@pytest.fixture(scope="module", params=sweep(MESHES, MESHES[0]), ids=str)
def rig_of_mesh(request):
    original = steps.loss_and_grads

    def wrapped(model, batch, *args, **kwargs):
        batch = dict(batch)
        bits = batch.pop(WRONG)
        terms, choices, grads = original(model, batch, *args, **kwargs)
        return terms, choices, add_wrong_bits(grads, bits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "loss_and_grads", wrapped)
        rig = Rig(request.param)
        with jax.set_mesh(rig.mesh):
            rig.compute()(rig.state())
    return rig


@pytest.fixture
def rig(rig_of_mesh):
    rig_of_mesh.restart()
    with jax.set_mesh(rig_of_mesh.mesh):
        yield rig_of_mesh


def named(message):
    """The ids of the devices that a message names."""
    return {
        int(each) for each in re.search(r" on devices? ([\d, ]+), number", message)[1].split(", ")
    }


def bits_of(state):
    return {
        name: [np.array(s.data) for s in a.addressable_shards]
        for name, a in named_arrays(state).items()
    }


@pytest.mark.heavy  # the first case compiles what the others run
def test_a_wrong_bit_in_any_array_of_any_device_is_seen(rig):
    arrays = named_arrays(rig.state())
    right = np.asarray(verify.checksums(arrays))
    assert not minority_devices(right, rig.copies)
    for turn, name in enumerate(arrays):
        position = turn % rig.mesh.size
        damaged = arrays | {name: flipped(arrays[name], position, bit=7 * turn)}
        wrong = np.asarray(verify.checksums(damaged))
        assert changed(list(arrays), right, wrong) == {name: {position}}
        holders = rig.holders(name, position)
        expected = {1: {}, 2: {name: holders}}.get(len(holders), {name: {position}})
        assert minority_devices(wrong, rig.copies) == expected


@pytest.mark.wide
def test_a_verification_changes_nothing(rig):
    expected = bits_of(rig.compute()(rig.state())[0])
    jax.tree.map(assert_array_equal, bits_of(rig.verify(rig.compute(), rig.compute())), expected)
    assert rig.verifier.verified == 4


@pytest.mark.parametrize("array", [f"model.{SCALE}", f"model.{KERNEL}", "optimizer.step"])
def test_a_wrong_copy_is_found_at_the_next_verification(rig, array):
    position = rig.mesh.size - 2
    suspects = rig.suspects(array, position)
    rig.restart(saved=[1, 3], verified=1)
    message = rig.fails(rig.compute(), rig.compute(), state=with_flip(rig.state(), array, position))
    assert f"step 4: silent corruption: copies differ before the step: {array} on device" in message
    assert named(message) == suspects
    assert f"of process 0 (on {socket.gethostname()})" in message
    assert "checkpoint at step 1 is good" in message
    assert "move the checkpoint at 3 out of checkpoints" in message


@pytest.mark.parametrize("name", [SCALE, KERNEL])
@pytest.mark.parametrize("wrong", [0, 1], ids=["first", "second"])
def test_a_wrong_gradient_of_one_computation_names_its_device(rig, wrong, name):
    position = rig.mesh.size - 1
    computations = [rig.compute(), rig.compute()]
    computations[wrong] = rig.compute({position}, name)
    message = rig.fails(*computations)
    assert f"computed twice from the same state and batch, differ: {name} on device " in message
    assert named(message) == {position}
    assert ("may precede the reduction" in message) == (
        len(rig.holders(f"model.{name}", position)) == 1
    )
    assert "There is no checkpoint" in message


def test_a_wrong_gradient_of_any_step_is_traced_to_the_step_and_the_device(rig):
    position = rig.mesh.size - 1
    suspects = rig.suspects(f"model.{SCALE}", position)
    state = rig.state()
    for step, wrong in {1: (), 2: {position}, 3: ()}.items():
        state, output = rig.compute(wrong)(state)
        rig.verifier.record(step, output.checksums)
    message = rig.fails(rig.compute(), rig.compute(), state=state)
    assert (
        f"the gradients of step 2 differed between copies, and the state since then: {SCALE} on dev"
        in message
    )
    assert named(message) == suspects


def test_a_device_that_is_always_wrong_is_named(rig):
    position = rig.mesh.size - 1
    suspects = rig.suspects(f"model.{SCALE}", position)
    rig.restart(saved=[2, 3])
    wrong = rig.compute({position})
    message = rig.fails(wrong, wrong)
    assert "copies of the gradients differ, each time in the same way" in message
    assert named(message) == suspects
    assert "No verification followed the checkpoints at 2, 3" in message
    assert "step 3, which may be corrupted too" in message


def test_a_gradient_that_is_wrong_in_all_copies_was_wrong_before_their_sum(rig):
    holders = rig.holders(f"model.{KERNEL}", 0)
    message = rig.fails(rig.compute(holders, KERNEL), rig.compute())
    assert named(message) == holders
    assert "may precede the reduction" in message


def test_a_wrong_update_is_told_from_a_wrong_gradient(rig):
    position = rig.mesh.size - 1
    rig.restart(saved=[2, 3], verified=3)
    wrong = lambda state: with_flip(state, f"model.{KERNEL}", position)
    message = rig.fails(rig.compute(), rig.compute(), damage=wrong)
    assert "the update, computed twice from equal gradients, differs" in message
    assert named(message) == {position}
    assert "step 3, which the verification at step 3 shows to be good" in message


def test_a_host_that_remembers_something_else_is_named(rig, monkeypatch):
    back = verify.to_devices
    state = rig.state()
    monkeypatch.setattr(verify, "to_devices", lambda held, like: flipped(back(held, like), 1))
    message = rig.fails(rig.compute(), rig.compute(), state=state)
    assert "the state changed on its way to host memory and back" in message
    assert named(message) == {1}


def test_only_gpus_need_an_option():
    for loop in (LoopConfig(verify_every=10), LoopConfig(deterministic=True)):
        assert loop.excludes_nondeterministic
    assert not LoopConfig().excludes_nondeterministic
    assert not compiler_options(MODEL, "cuda")
    assert not compiler_options(MODEL, "cpu", deterministic=True)
    assert compiler_options(MODEL, "cuda", deterministic=True) == {
        "xla_gpu_exclude_nondeterministic_ops": True
    }
    for changes in ({"precision.matmul": "float8"}, {"overlap": "ring"}):
        assert compiler_options(replace_nested(MODEL, changes), "cuda") == {
            "xla_gpu_enable_triton_gemm": False
        }


def test_a_host_without_the_memory_is_refused(monkeypatch):
    plan = plan_state(MODEL, optimizers.build(SETTINGS, 10), mesh_of(mesh_shape()))
    size = memory_check.verification_bytes(plan)
    assert size == sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(plan.sharded))
    # and the state itself has no place
    monkeypatch.setattr(memory_check, "host_memory", lambda: size)
    run = Plan(config=TrainConfig(), parts=Parts(), shapes={})
    memory_check.require_memory(run, plan)
    run.config = TrainConfig(train=LoopConfig(verify_every=3))
    with pytest.raises(ConfigError, match=r"train.verify_every=3 .*--train.verify-every 0"):
        memory_check.require_memory(run, plan)


@pytest.mark.journey
def test_a_run_is_the_same_with_verification_and_a_flipped_bit_ends_it(tmp_path, text, capfd):
    command = [*quick_flags(tmp_path / "plain", text, 2, 2, 2), "--train.steps=12"]
    assert main(command) == 0
    run = tmp_path / "run"
    command += ["--train.verify-every=4", f"--run.dir={run}"]
    assert main([*command, "--train.callbacks", f"{TESTS}/accidents.py:flip_a_bit"]) == entry.WRONG
    said = capfd.readouterr()
    assert "step 4: verified" in said.out
    assert (
        "step 8: silent corruption: copies differ before the step: model.norm.scale on device 3, "
        in said.err
    )
    assert "there is no checkpoint" not in said.err
    assert max(records(run)) == 7
    assert main(command) == 0
    said = capfd.readouterr()
    assert "resumed from the checkpoint at step 5" in said.out
    assert "step 12: verified" in said.out
    for key in ("loss", "grad_norm", "param_norm", "eval_loss"):
        assert records(run, key) == records(tmp_path / "plain", key)
    assert records(run, "lost_to_verify")


FOUND = {"4": "step 8: silent corruption", "0": "step 10 is not saved: silent corruption"}


@pytest.mark.parametrize("every", journeys(list(FOUND), "4"))
def test_all_processes_end_with_the_device_of_one(tmp_path, monkeypatch, every):
    """A verification finds it, and without one the next save."""
    monkeypatch.chdir(tmp_path)
    flags = [
        *QUICK,
        *mesh(4, 1, 1),
        "--train.steps=12",
        f"--train.verify-every={every}",
        "--run.dir=run",
        "--train.callbacks",
        f"{TESTS}/accidents.py:flip_a_bit",
    ]
    together = ["--processes=2", "--devices=2", "--", "-m", "jaxtp.train"]
    assert launch([*together, *flags]) == entry.WRONG
    logs = [(tmp_path / f"logs/process-{index}.log").read_text() for index in range(2)]
    (message,), (other,) = (re.findall(rf"{FOUND[every]}.*", log) for log in logs)
    assert message == other
    place = rf"number 1 of process 1 \(on {re.escape(socket.gethostname())}\)"
    assert re.search(rf"model.{SCALE} on device \d+, {place}", message)
    assert Path("run/checkpoints/5").is_dir()
    assert not Path("run/checkpoints/10").exists()
