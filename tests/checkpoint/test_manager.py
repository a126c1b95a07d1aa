import dataclasses
import shutil
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flips import with_flip
from support import by_name, compilations, sweep

import jaxtp
from jaxtp.checkpoint.checksum import NonFiniteError, Sums, UnequalCopiesError
from jaxtp.checkpoint.io_errors import UnwritableError
from jaxtp.checkpoint.logical import abstract_logical, from_logical, replace_arrays, to_logical
from jaxtp.checkpoint.manager import CheckpointError, Checkpoints, load_weights, restore_newest
from jaxtp.config.entry import UserError
from jaxtp.layers.embedding import vocabulary_table
from jaxtp.train import optimizer
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.state import named_arrays, plan_state

MODEL = jaxtp.ModelConfig(
    vocab_size=19,
    d_model=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    d_ff=24,
    attention_bias=True,
)
MESHES = [(1, 1, 1), (1, 1, 8), (2, 2, 2), (1, 2, 4), (8, 1, 1)]


def blueprint(mesh, model=MODEL):
    return plan_state(model, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(*mesh))


def nowhere_zero(array, index):
    return array + ((array == 0) * 0.5 * np.cos(index)).astype(array.dtype)


def random_state(plan):
    """Every array random, padding zero, so that nothing can hide behind a zero moment."""
    state = plan.create(seed=0)
    leaves, tree = jax.tree.flatten(state)
    with jax.set_mesh(plan.mesh):
        nonzero = [
            leaf if leaf.ndim == 0 else jax.device_put(nowhere_zero(np.asarray(leaf), i), leaf.sharding)
            for i, leaf in enumerate(leaves)
        ]
    return jax.tree.unflatten(tree, nonzero)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint written on (2, 2, 2), where 19 tokens are padded to 20, and what it holds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plan = blueprint((2, 2, 2))
    state = random_state(plan)
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, state, plan.mesh, {"next_sample": 48})
    checkpoints.close()
    return folder, by_name(state, plan.mesh)


@pytest.mark.parametrize("mesh", sweep(MESHES, (1, 2, 4)), ids=str)
def test_restored_on_any_mesh(written, mesh):
    folder, expected = written
    plan = blueprint(mesh)
    checkpoints = Checkpoints(folder)
    assert checkpoints.steps() == [3]
    assert checkpoints.info(3)["next_sample"] == 48
    state = checkpoints.restore(3, plan.abstract, plan.mesh)
    checkpoints.close()
    actual = by_name(state, plan.mesh)
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(plan.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_a_second_save_or_restore_compiles_nothing():
    """To cut the padding off an array, and to pad it again, is a program."""
    mesh = jaxtp.make_mesh(tp=4)
    with jax.set_mesh(mesh):
        table = vocabulary_table(21, 26, jaxtp.Precision(), nnx.Rngs(0))
    state = nnx.State({"table": table})

    def there_and_back():
        logical = to_logical(state, mesh)
        assert logical["table"].shape == (21, 26)
        assert from_logical(logical, state, mesh)["table"].shape == (24, 26)

    with compilations() as first:
        there_and_back()
    assert len(first) == 2
    with compilations() as again:
        there_and_back()
    assert not again


def test_arrays_on_disk_have_logical_shapes(written):
    folder, _ = written
    manager = ocp.CheckpointManager(
        folder, item_names=("state",), item_handlers={"state": ocp.StandardCheckpointHandler()}
    )
    assert manager.item_metadata(3)["state"].tree["model.embedding.embedding"].shape == (19, 16)
    manager.close()


@pytest.mark.parametrize(("mesh", "vocab"), [((1, 1, 8), 19), ((1, 2, 4), 19), ((2, 2, 2), 21)])
def test_an_unpadded_table_is_still_split_over_every_device_that_held_it(mesh, vocab):
    plan = blueprint(mesh, dataclasses.replace(MODEL, vocab_size=vocab))
    table = abstract_logical(plan.abstract, plan.mesh)["model.embedding.embedding"]
    assert table.shape == (vocab, 16)
    assert table.sharding.shard_shape(table.shape) == (vocab, 16 // (mesh[1] * mesh[2]))


@pytest.mark.wide
def test_padding_is_zero_after_a_restore(written):
    folder, _ = written
    plan = blueprint((1, 1, 8))
    checkpoints = Checkpoints(folder)
    state = checkpoints.restore(3, plan.abstract, plan.mesh)
    checkpoints.close()
    table = np.asarray(nnx.merge(plan.graph, state).model.embedding.embedding[...])
    assert table.shape == (24, 16)
    assert not table[19:].any()


@pytest.mark.wide
def test_restored_in_another_dtype(written):
    folder, expected = written
    plan = blueprint((1, 2, 4), dataclasses.replace(MODEL, precision=jaxtp.Precision(param="bfloat16")))
    checkpoints = Checkpoints(folder)
    actual = by_name(checkpoints.restore(3, plan.abstract, plan.mesh), plan.mesh)
    checkpoints.close()
    assert {array.dtype for name, array in actual.items() if name.startswith("model.")} == {jax.numpy.dtype("bfloat16")}
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name].astype(array.dtype), err_msg=name)


def test_another_models_checkpoint_is_refused(written):
    folder, _ = written
    plan = blueprint((1, 1, 1), dataclasses.replace(MODEL, tie_embeddings=True))
    checkpoints = Checkpoints(folder)
    with pytest.raises(CheckpointError, match="does not hold this model's state"):
        checkpoints.restore(3, plan.abstract, plan.mesh)
    checkpoints.close()


@pytest.mark.parametrize(
    ("settings", "kept", "then"),
    [
        pytest.param({"keep": 2}, [5, 6], [6, 7], marks=pytest.mark.wide),
        pytest.param({"keep": 1, "keep_every": 3}, [3, 6], [3, 6, 7], marks=pytest.mark.wide),
        pytest.param({"keep": 1, "keep_best": True}, [2, 6], [2, 7], marks=pytest.mark.wide),
        ({"keep": 1, "keep_every": 4, "keep_best": True}, [2, 4, 6], [2, 4, 7]),
    ],
)
def test_what_is_kept(tmp_path, settings, kept, then):
    """Validation losses by step: the best is at 2; the newest has none, and is kept all the same."""
    plan = blueprint((1, 1, 2), TINY)
    state = plan.create(seed=0)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 5: 1.5}
    checkpoints = Checkpoints(tmp_path, **settings)
    for step in range(1, 7):
        checkpoints.save(step, state, plan.mesh, {}, eval_loss=losses.get(step))
    checkpoints.close()
    reopened = Checkpoints(tmp_path, **settings)
    assert reopened.steps() == kept
    reopened.save(7, state, plan.mesh, {}, eval_loss=1.2)
    reopened.close()
    reopened = Checkpoints(tmp_path, **settings)
    assert reopened.steps() == then, "the best may be of before it was opened again"
    reopened.close()


TINY = jaxtp.ModelConfig(vocab_size=19, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=8)


def damages(path):
    """A file cut short, with one bit turned, and gone; what each was is restored afterwards."""
    whole = path.read_bytes()
    for position in sorted({0, len(whole) // 2, max(len(whole) - 1, 0)}):
        if whole:
            turned = bytearray(whole)
            turned[position] ^= 0x10
            path.write_bytes(turned)
            yield f"{path.name}: bit turned at {position}"
    path.write_bytes(whole[: len(whole) // 2])
    yield f"{path.name}: cut short"
    path.unlink()
    yield f"{path.name}: deleted"
    path.write_bytes(whole)


@pytest.mark.wide
def test_every_damage_is_found_or_harmless(tmp_path):
    """Each file of a checkpoint in turn: what is restored is right, or the one before it, which is right too."""
    plan = blueprint((1, 2, 1), TINY)
    states = {step: random_state(plan) for step in (1, 2)}
    states[2] = jax.tree.map(lambda a: a + 1, states[2])
    checkpoints = Checkpoints(tmp_path / "good")
    for step, state in states.items():
        checkpoints.save(step, state, plan.mesh, {"next_sample": step})
    checkpoints.close()
    expected = {step: by_name(state, plan.mesh) for step, state in states.items()}
    files = sorted(p.relative_to(tmp_path / "good") for p in (tmp_path / "good/2").rglob("*") if p.is_file())
    assert len(files) > 4
    outcomes, alone = set(), set()
    for file in files:
        work = tmp_path / "work"
        for damage in damages(tmp_path / "good" / file):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(tmp_path / "good", work / "checkpoints")
            opened, warnings = Checkpoints(work / "checkpoints"), []
            step, state, info = restore_newest(opened, plan.abstract, plan.mesh, lambda info: None, warnings.append)
            opened.close()
            assert info["next_sample"] == step, damage
            assert len(warnings) == 2 - step, damage
            for name, array in by_name(state, plan.mesh).items():
                np.testing.assert_array_equal(array, expected[step][name], err_msg=f"{damage}: {name}")
            outcomes.add(step)
            if step == 1:
                shutil.move(work / "damaged/2", work / "checkpoints/2")
            weights = weights_or_none(work, plan)
            for name, array in (weights or {}).items():
                np.testing.assert_array_equal(array, expected[2][f"model.{name}"], err_msg=f"{damage}: {name}")
            alone.add(weights is None)
    assert outcomes == {1, 2}
    assert alone == {True, False}


@pytest.mark.wide
@pytest.mark.parametrize("file", ["info/metadata", "state/_METADATA", "state/d/*"])
def test_what_cannot_be_read_is_not_taken_for_damage(tmp_path, file, monkeypatch):
    """A healthy checkpoint stays where it is while the file system fails, and is used when it answers again."""
    monkeypatch.setattr("jaxtp.checkpoint.io_errors.PAUSES", (0.0,))
    plan = blueprint((1, 1, 1), TINY)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, plan.create(seed=step), plan.mesh, {})
    checkpoints.wait()
    (path,) = (tmp_path / "checkpoints/2").glob(file)
    path.rename(tmp_path / "away")
    path.symlink_to("/proc/self/mem")  # opens, and fails with EIO when it is read
    with pytest.raises(CheckpointError, match=rf"2 cannot be read \(\[Errno 5\].*{path.name}.*proves no damage"):
        restore_newest(checkpoints, plan.abstract, plan.mesh, lambda info: None, pytest.fail)
    (tmp_path / "away").rename(path)
    step, *_ = restore_newest(checkpoints, plan.abstract, plan.mesh, lambda info: None, pytest.fail)
    checkpoints.close()
    assert step == 2
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_is_not_after_the_newest_is_refused_aloud(tmp_path, step):
    plan = blueprint((1, 1, 1), TINY)
    state = plan.create(seed=0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, plan.mesh, {})
    with pytest.raises(CheckpointError, match=f"step {step} is not after the newest.*step 2 is complete"):
        checkpoints.save(step, state, plan.mesh, {})
    checkpoints.close()


def test_two_arrays_with_one_path_are_not_saved_as_one(tmp_path):
    plan = blueprint((1, 1, 1), TINY)
    one, two = (nnx.Param(jax.numpy.full(4, value)) for value in (1.0, 2.0))
    state = nnx.State({"a": {"b": one}, "a.b": two})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"two things at 'a\.b'"):
            checkpoints.save(1, state, plan.mesh, {})
        assert not checkpoints.steps()


def save_and_wait(checkpoints, step, state, mesh):
    checkpoints.save(step, state, mesh, {})
    checkpoints.wait()


def test_a_save_does_not_wait_for_its_sums(tmp_path, monkeypatch):
    """Nothing is committed before them, and `confirm` raises what `wait` would."""
    plan = blueprint((1, 1, 1), TINY)
    state, summed = plan.create(seed=0), threading.Event()
    rows = Sums.rows.func
    monkeypatch.setattr(Sums, "rows", property(lambda self: summed.wait(60) and rows(self)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, plan.mesh, {})
        assert checkpoints.steps() == []
        summed.set()
        checkpoints.confirm()
        checkpoints.wait()
        assert checkpoints.steps() == [1]
        arrays = named_arrays(state)
        bad = replace_arrays(state, arrays | {name: array * np.nan for name, array in arrays.items() if array.ndim})
        checkpoints.save(2, bad, plan.mesh, {})
        with pytest.raises(NonFiniteError, match=r"step 2 is not saved: .* not finite.*step 1 is complete"):
            checkpoints.confirm()
        checkpoints.save(3, state, plan.mesh, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]


def test_what_is_not_finite_is_not_saved(tmp_path):
    """It would take the place of those that are finite, and no step can mend it."""
    plan = blueprint((1, 1, 1), TINY)
    state = plan.create(seed=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, plan.mesh, {})
        arrays = named_arrays(state)
        name = next(each for each in arrays if "nu" in each.split("."))
        for step, wrong in enumerate((np.nan, np.inf, -np.inf), start=2):
            bad = replace_arrays(state, arrays | {name: arrays[name].at[(0,) * arrays[name].ndim].set(wrong)})
            with pytest.raises(
                NonFiniteError, match=rf"step {step} is not saved: {name} has 1 element that is not fin"
            ):
                save_and_wait(checkpoints, step, bad, plan.mesh)
        assert checkpoints.steps() == [1]


@pytest.mark.parametrize("sizes", sweep([(2, 1, 1), (2, 2, 2)], (2, 2, 2)), ids=str)
def test_a_copy_that_differs_is_found_by_the_save(tmp_path, sizes):
    """One exponent bit, in the copy of one device: the checksum of an array read another copy."""
    plan = blueprint(sizes)
    state, count = plan.create(seed=0), np.prod(sizes)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, plan.mesh, {})
        for step, position in ((2, 0), (3, count - 1)):
            bad = with_flip(state, "model.blocks.mlp.down.kernel", position, bit=29)
            which = rf".*device.* {position}" if count > 2 else " on devices 0, 1"
            with pytest.raises(
                UnequalCopiesError, match=f"step {step} is not saved: .*model.blocks.mlp.down.kernel{which}"
            ):
                save_and_wait(checkpoints, step, bad, plan.mesh)
        assert checkpoints.steps() == [1]


def test_steps_are_those_on_the_disk(tmp_path):
    plan = blueprint((1, 1, 1), TINY)
    with Checkpoints(tmp_path / "run", keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, plan.create(seed=0), plan.mesh, {})
        checkpoints.wait()
        (tmp_path / "run/3").rename(tmp_path / "run/3.orbax-checkpoint-tmp")
        (tmp_path / "run/notes").mkdir()
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.describe_disk() == "the checkpoint at step 2 is complete"
        shutil.rmtree(tmp_path / "run")
        assert checkpoints.steps() == []
        with pytest.raises(UnwritableError, match=r"could not be written .*; there is no checkpoint$"):
            checkpoints.save(4, plan.create(seed=0), plan.mesh, {})
        (tmp_path / "run").mkdir()


def test_a_save_that_fails_in_the_background_hides_no_other_error(tmp_path, monkeypatch):
    plan = blueprint((1, 1, 1), TINY)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, plan.create(seed=0), plan.mesh, {})
    checkpoints.close()

    def full():
        file = f'local file "{tmp_path}/2.orbax-checkpoint-tmp/ocdbt.process_0/{"d/" * 300}"'
        raise ValueError(
            f"RESOURCE_EXHAUSTED: Error writing {file}: Failed to write 14779 bytes to file 7: No space left on device "
            "[os_error_code='28']"
        )

    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", full)
    monkeypatch.setattr(checkpoints._manager, "close", lambda: None)
    message = r"written \(No space left on device\); the checkpoint at step 1 is complete; free some space"
    with pytest.raises(CheckpointError, match=message), checkpoints:
        pass
    with pytest.raises(KeyError, match="the run's own"), checkpoints:
        raise KeyError("the run's own")


def test_a_damaged_checkpoint_that_cannot_be_moved(tmp_path):
    plan = blueprint((1, 1, 1), TINY)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, plan.create(seed=step), plan.mesh, {})
    checkpoints.wait()
    (tmp_path / "checkpoints/2/info/metadata").unlink()
    (tmp_path / "damaged").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"checkpoints/2 is damaged, and cannot be moved to .*damaged/2"):
        restore_newest(checkpoints, plan.abstract, plan.mesh, lambda info: None, pytest.fail)
    checkpoints.close()


def weights_or_none(run, plan):
    """What a new run would start from, unless it is refused."""
    try:
        weights, _ = load_weights(run, plan.abstract["model"], plan.mesh)
    except CheckpointError:
        return None
    return by_name(weights, plan.mesh)


def test_if_all_are_damaged_nothing_is_touched(tmp_path):
    plan = blueprint((1, 1, 1), TINY)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, plan.create(seed=0), plan.mesh, {})
    checkpoints.close()
    for path in (tmp_path / "checkpoints/1/info").iterdir():
        path.write_text("{}")
    opened = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"1 is damaged.*name another --run.dir to start a new run"):
        restore_newest(opened, plan.abstract, plan.mesh, lambda info: None, pytest.fail)
    opened.close()
    assert (tmp_path / "checkpoints/1").is_dir()


def test_checksums_do_not_depend_on_the_mesh_and_see_every_bit():
    values = np.arange(48, dtype=np.float32).reshape(4, 12)
    plain = Sums({"a": jax.numpy.asarray(values)}).checksums()
    for mesh in ((1, 1, 4), (2, 2, 1)):
        sharding = jax.sharding.NamedSharding(jaxtp.make_mesh(*mesh), jax.sharding.PartitionSpec(("dp", "fsdp"), "tp"))
        assert Sums({"a": jax.device_put(values, sharding)}).checksums() == plain
    seen = {plain["a"]}
    for bit in range(32):
        turned = values.view(np.uint32).copy()
        turned[1, 2] ^= np.uint32(1 << bit)
        seen.add(Sums({"a": jax.numpy.asarray(turned.view(np.float32))}).checksums()["a"])
    assert len(seen) == 33
    assert Sums({"a": jax.numpy.asarray(values[::-1])}).checksums() != plain, "order counts"
    for dtype in (jax.numpy.bfloat16, np.int32, np.uint32, np.bool_, np.int8):
        assert len(Sums({"a": jax.numpy.ones(3, dtype)}).checksums()["a"]) == 16


def test_sums_of_many_arrays_are_those_of_each(monkeypatch):
    """Programs sum groups of equal arrays, and give the order of the names."""
    monkeypatch.setattr("jaxtp.checkpoint.checksum._GROUP", 2)
    many = {f"{i}": jax.numpy.full((i % 2 + 1, 3), i, np.float32) for i in range(6)}
    together = Sums(many).checksums()
    assert list(together) == list(many)
    assert together == {name: Sums({name: array}).checksums()[name] for name, array in many.items()}
    assert len({*together.values()}) == len(many)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_alone(written, dtype):
    folder, expected = written
    plan = blueprint((1, 1, 8), dataclasses.replace(MODEL, precision=jaxtp.Precision(param=dtype)))
    weights, origin = load_weights(folder, plan.abstract["model"], plan.mesh)
    assert origin == folder / "3"
    for name, array in by_name(weights, plan.mesh).items():
        np.testing.assert_array_equal(array, expected[f"model.{name}"].astype(array.dtype), err_msg=name)


@pytest.mark.parametrize(
    ("model", "message"),
    [({"vocab_size": 21}, r"model.embedding.embedding is \(19, 16\), not \(21, 16\)"), ({}, "no finished checkpoint")],
)
def test_weights_that_cannot_be_used(written, tmp_path, model, message):
    plan = blueprint((1, 1, 1), dataclasses.replace(MODEL, **model))
    with pytest.raises(CheckpointError, match=message):
        load_weights(written[0] if model else tmp_path, plan.abstract["model"], plan.mesh)


RESHARDED = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 4), (2, 2, 2), (8, 1, 1), (1, 8, 1)]
"""19 tokens are padded on some of them, two kv heads are shared on others."""


@pytest.fixture(scope="module")
def muon_plans():
    """A state with muon's momentum, Adam's moments and factored shapes, planned on every mesh."""
    rule = optimizer.build(OptimizerConfig(name="muon"), 10)
    return {mesh: plan_state(MODEL, rule, jaxtp.make_mesh(*mesh)) for mesh in RESHARDED}


@pytest.mark.wide
@pytest.mark.parametrize("origin", RESHARDED, ids=str)
def test_written_on_any_mesh_and_restored_on_any_other(tmp_path, muon_plans, origin):
    plan = muon_plans[origin]
    state = random_state(plan)
    expected = by_name(state, plan.mesh)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, plan.mesh, {})
    checkpoints.wait()
    for other in muon_plans.values():
        restored = by_name(checkpoints.restore(1, other.abstract, other.mesh), other.mesh)
        assert restored.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(restored[name], array, err_msg=name)
    checkpoints.close()
