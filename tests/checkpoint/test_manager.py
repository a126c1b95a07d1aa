"""Saves and restores of a run: on any mesh, kept as asked for, and never of damaged or wrong
numbers.
"""

import contextlib
import shutil
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flips import with_flip
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal
from small_state import save_steps, small_state, variable, weight_of
from support import MESHES, compilations, mesh_by_size, state_on_mesh, swept

import jaxtp
from jaxtp.checkpoint import checksum
from jaxtp.checkpoint.checksum import NonFiniteError, Sums, UnequalCopiesError
from jaxtp.checkpoint.io_errors import UnwritableError
from jaxtp.checkpoint.logical import abstract_logical, from_logical, to_logical
from jaxtp.checkpoint.manager import CheckpointError, Checkpoints, load_weights, restore_newest
from jaxtp.checkpoint.storage import open_checkpoint
from jaxtp.config.entry import UserError
from jaxtp.layers.attention import PaddedHeads
from jaxtp.layers.embedding import vocabulary_table
from jaxtp.layers.parameter import PaddedDim, parameter
from jaxtp.mesh import make_mesh

MESH = make_mesh()


class Padded(nnx.Module):
    """A table of 19 tokens, 9 heads, and a matrix of 22 columns, which most meshes pad."""

    def __init__(self, param="float32"):
        rngs = nnx.Rngs(0)
        self.table = vocabulary_table(19, 16, jaxtp.Precision(param=param), rngs)
        matrix = jax.random.normal(rngs.params(), (16, 22), param)
        heads = jax.random.normal(rngs.params(), (36, 16), param)
        self.heads = parameter(
            "heads", heads, PartitionSpec("tp"), padding=((-2, PaddedHeads((3, 3, 4), 4)),)
        )
        self.matrix = parameter(
            "matrix", matrix, PartitionSpec("fsdp", "tp"), padding=((-1, PaddedDim((22,))),)
        )


WEIGHTS = {
    "heads": np.random.default_rng(2).standard_normal((36, 16), np.float32),
    "table": np.random.default_rng(0).standard_normal((19, 16), np.float32),
    "matrix": np.random.default_rng(1).standard_normal((16, 22), np.float32),
}


def padded_state(mesh, dtype="float32"):
    _, state = state_on_mesh(
        lambda: Padded(dtype), {n: w.astype(dtype) for n, w in WEIGHTS.items()}, mesh
    )
    return nnx.State({"model": state, "step": variable(np.int32(3), mesh)})


def save_and_wait(checkpoints, step, state, mesh):
    checkpoints.save(step, state, mesh, {})
    checkpoints.wait()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint written on (1, 2, 2), where 19 tokens are padded to 20."""
    folder = tmp_path_factory.mktemp("checkpoints")
    mesh = make_mesh(fsdp=2, tp=2)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, padded_state(mesh), mesh, {"next_sample": 48})
    return folder


def test_a_checkpoint_without_padding_is_restored_on_another_mesh(written):
    assert open_checkpoint(written).arrays["model.table"].shape == (19, 16)
    mesh = make_mesh(tp=8)
    expected = padded_state(mesh)
    with Checkpoints(written) as checkpoints:
        assert checkpoints.info(3)["next_sample"] == 48
        state = checkpoints.restore(3, expected, mesh)
    assert_same_state(state, expected)
    table = np.asarray(state["model"]["table"][...])
    assert table.shape == (24, 16)
    assert not table[19:].any()


def assert_same_state(found, expected):
    for array, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_array_equal(array, other)
        assert array.sharding.is_equivalent_to(other.sharding, array.ndim)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_alone_are_read_in_the_dtype_that_is_asked_for(written, dtype):
    mesh = make_mesh(tp=2)
    expected = padded_state(mesh, dtype)["model"]
    weights, origin = load_weights(written, expected, mesh)
    assert origin == written / "3"
    jax.tree.map(assert_array_equal, weights, expected)


def test_a_checkpoint_of_another_model_is_refused(written):
    with (
        Checkpoints(written) as checkpoints,
        pytest.raises(CheckpointError, match=r"this model's state.*model\.table"),
    ):
        checkpoints.restore(3, small_state(), MESH)
    larger = nnx.State({"table": variable(np.ones((21, 16)), MESH)})
    with pytest.raises(CheckpointError, match=r"model.table is \(19, 16\), not \(21, 16\)"):
        load_weights(written, larger, MESH)


@pytest.mark.wide
def test_written_on_any_mesh_and_restored_on_two_others(tmp_path):
    meshes = [mesh_by_size(*sizes) for sizes in MESHES]
    states = [padded_state(mesh) for mesh in meshes]
    with Checkpoints(tmp_path, keep=len(meshes)) as checkpoints:
        for step, mesh in enumerate(meshes):
            save_and_wait(checkpoints, step, states[step], mesh)
        for step in range(len(meshes)):
            for other in (step - 1, step - 3):
                restored = checkpoints.restore(step, states[other], meshes[other])
                assert_same_state(restored, states[other])


def test_a_second_save_or_restore_compiles_nothing():
    """To cut the padding off an array, and to pad it again, is a program."""
    mesh = make_mesh(tp=4)
    with jax.set_mesh(mesh):
        table = vocabulary_table(21, 26, jaxtp.Precision(), nnx.Rngs(0))
    state = nnx.State({"table": table})
    programs = []
    for _ in range(2):
        with compilations() as compiled:
            logical = to_logical(state, mesh)
            assert logical["table"].shape == (21, 26)
            assert from_logical(logical, state, mesh)["table"].shape == (24, 26)
        programs.append(len(compiled))
    assert programs == [2, 0]


def test_an_unpadded_table_is_still_split_over_every_device_that_held_it():
    mesh = make_mesh(fsdp=2, tp=4)
    table = abstract_logical(padded_state(mesh), mesh)["model.table"]
    assert table.shape == (19, 16)
    assert table.sharding.shard_shape(table.shape) == (19, 2)


@pytest.mark.parametrize("best", [False, True])
def test_the_newest_the_best_and_every_fourth_checkpoint_are_kept(tmp_path, best):
    """Validation losses by step: the best is at 2; the newest has none, and is kept all the
    same.
    """
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 5: 1.5, 7: 1.2}
    settings = {"keep": 1, "keep_every": 4, "keep_best": True} if best else {"keep": 2}
    kept = {6: [2, 4, 6], 7: [2, 4, 7]} if best else {6: [5, 6], 7: [6, 7]}
    # The best may be of before it was opened again.
    for steps in (range(1, 7), [7]):
        with Checkpoints(tmp_path, **settings) as checkpoints:
            for step in steps:
                checkpoints.save(step, small_state(), MESH, {}, eval_loss=losses.get(step))
            checkpoints.wait()
            assert checkpoints.steps() == kept[step]


def damages(path):
    """Cuts a file short, turns a bit over and deletes it; then restores what it was."""
    whole = path.read_bytes()
    for position in {0, len(whole) // 2, len(whole) - 1} if whole else ():
        turned = bytearray(whole)
        turned[position] ^= 0x10
        path.write_bytes(turned)
        yield f"{path.name}: bit turned at {position}"
    path.write_bytes(whole[: len(whole) // 2])
    yield f"{path.name}: cut short"
    path.unlink()
    yield f"{path.name}: deleted"
    path.write_bytes(whole)


def newest(checkpoints, warn=pytest.fail):
    return restore_newest(checkpoints, small_state(), MESH, lambda info: None, warn)


def weights_or_none(run):
    """What a new run would start from, unless it is refused."""
    with contextlib.suppress(CheckpointError):
        return load_weights(run, small_state()["model"], MESH)[0]["weight"][...]


@pytest.mark.wide
def test_every_damage_is_found_or_harmless(tmp_path):
    """Each file of a checkpoint in turn: what is restored is right, or the one before it, which
    is right too.
    """
    good = tmp_path / "good"
    save_steps(good, 1, 2).close()
    expected = {step: weight_of(small_state(step)) for step in (1, 2)}
    files = sorted(path.relative_to(good) for path in (good / "2").rglob("*") if path.is_file())
    found = set()
    alone = set()
    work = tmp_path / "work"
    for file in files:
        for damage in damages(good / file):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(good, work / "checkpoints")
            warnings = []
            with Checkpoints(work / "checkpoints") as opened:
                step, state, info = newest(opened, warnings.append)
            assert (info["next_sample"], len(warnings)) == (step, 2 - step), damage
            assert_array_equal(weight_of(state), expected[step], err_msg=damage)
            found.add(step)
            if step == 1:
                shutil.move(work / "damaged/2", work / "checkpoints/2")
            weights = weights_or_none(work)
            alone.add(weights is None)
            if weights is not None:
                assert_array_equal(weights, expected[2], err_msg=damage)
    assert found == {1, 2}
    assert alone == {True, False}


@swept("file", ["info/metadata", "state/_METADATA", "state/d/*"])
def test_what_cannot_be_read_is_not_taken_for_damage(tmp_path, file, monkeypatch):
    """A healthy checkpoint stays where it is while the file system fails, and is used when it
    answers again.
    """
    monkeypatch.setattr("jaxtp.checkpoint.io_errors.PAUSES", (0.0,))
    with save_steps(tmp_path / "checkpoints", 1, 2) as checkpoints:
        (path,) = (tmp_path / "checkpoints/2").glob(file)
        path.rename(tmp_path / "away")
        path.symlink_to("/proc/self/mem")  # opens, and fails with EIO when it is read
        with pytest.raises(
            CheckpointError, match=rf"2 cannot be read \(\[Errno 5\].*{path.name}.*proves no damage"
        ):
            newest(checkpoints)
        (tmp_path / "away").rename(path)
        assert newest(checkpoints)[0] == 2
    assert not (tmp_path / "damaged").exists()


def test_after_a_damaged_checkpoint_its_step_is_saved_again(tmp_path):
    with save_steps(tmp_path / "checkpoints", 1, 2) as checkpoints:
        for moved in ("2", "2_"):
            (tmp_path / "checkpoints/2/info/metadata").unlink()
            assert newest(checkpoints, lambda warning: None)[0] == 1
            assert (tmp_path / "damaged" / moved).is_dir()
            checkpoints.save(2, small_state(2), MESH, {"next_sample": 2})
            checkpoints.wait()
            assert newest(checkpoints)[0] == 2


def test_a_damaged_checkpoint_that_cannot_be_moved_is_one_message(tmp_path):
    with save_steps(tmp_path / "checkpoints", 1, 2) as checkpoints:
        (tmp_path / "checkpoints/2/info/metadata").unlink()
        (tmp_path / "damaged").write_text("in the way")
        with pytest.raises(
            CheckpointError, match=r"checkpoints/2 is damaged, and cannot be moved to .*damaged/2"
        ):
            newest(checkpoints)


def test_if_all_are_damaged_nothing_is_touched(tmp_path):
    with save_steps(tmp_path / "checkpoints", 1) as checkpoints:
        for path in (tmp_path / "checkpoints/1/info").iterdir():
            path.write_text("{}")
        with pytest.raises(
            CheckpointError, match=r"1 is damaged.*name another --run.dir to start a new run"
        ):
            newest(checkpoints)
    assert (tmp_path / "checkpoints/1").is_dir()


def test_a_step_that_is_not_after_the_newest_is_refused_aloud(tmp_path):
    with save_steps(tmp_path, 2) as checkpoints:
        for step in (1, 2):
            with pytest.raises(
                CheckpointError, match=f"step {step} is not after the newest.*step 2 is complete"
            ):
                checkpoints.save(step, small_state(), MESH, {})


def test_two_arrays_with_one_path_are_not_saved_as_one(tmp_path):
    state = nnx.State({"a": {"b": variable(np.ones(4), MESH)}, "a.b": variable(np.zeros(4), MESH)})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"two things at 'a\.b'"):
            checkpoints.save(1, state, MESH, {})
        assert not checkpoints.steps()


def test_a_save_does_not_wait_for_its_sums(tmp_path, monkeypatch):
    """Nothing is committed before them, and `confirm` raises what `wait` would."""
    summed = threading.Event()
    rows = Sums.rows.func
    monkeypatch.setattr(Sums, "rows", property(lambda self: summed.wait(60) and rows(self)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_state(), MESH, {})
        assert checkpoints.steps() == []
        summed.set()
        checkpoints.confirm()
        checkpoints.wait()
        assert checkpoints.steps() == [1]
        checkpoints.save(2, small_state(np.nan), MESH, {})
        with pytest.raises(
            NonFiniteError, match=r"step 2 is not saved: .* not finite.*step 1 is complete"
        ):
            checkpoints.confirm()
        save_and_wait(checkpoints, 3, small_state(), MESH)
        assert checkpoints.steps() == [1, 3]


def test_what_is_not_finite_is_not_saved(tmp_path):
    """It would take the place of those that are finite, and no step can mend it."""
    with save_steps(tmp_path, 1, keep=1) as checkpoints:
        for step, wrong in enumerate((np.nan, np.inf, -np.inf), start=2):
            state = nnx.State({"model": {n: variable([1.0, wrong], MESH) for n in ("weight", "x")}})
            with pytest.raises(
                NonFiniteError,
                match=f"step {step} is not saved: model.weight has 1 .*, as does 1 more array",
            ):
                save_and_wait(checkpoints, step, state, MESH)
        assert checkpoints.steps() == [1]


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 2)], ids=str)
def test_a_copy_that_differs_is_found_by_the_save(tmp_path, sizes):
    """One exponent bit, in the copy of one device: the checksum of an array read another copy."""
    mesh = mesh_by_size(*sizes)
    state = small_state(1, mesh, "fsdp")
    with Checkpoints(tmp_path) as checkpoints:
        for step, position in ((1, 0), (2, mesh.size - 1)):
            bad = with_flip(state, "model.weight", position, bit=29)
            which = rf".*device.* {position}" if mesh.size > 2 else " on devices 0, 1"
            with pytest.raises(
                UnequalCopiesError, match=f"step {step} is not saved: .*model.weight{which}"
            ):
                save_and_wait(checkpoints, step, bad, mesh)
        assert checkpoints.steps() == []


def test_steps_are_those_on_the_disk(tmp_path):
    with save_steps(tmp_path / "run", 1, 2, 3, keep=3) as checkpoints:
        (tmp_path / "run/3").rename(tmp_path / "run/3.orbax-checkpoint-tmp")
        (tmp_path / "run/notes").mkdir()
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.describe_disk() == "the checkpoint at step 2 is complete"
        shutil.rmtree(tmp_path / "run")
        assert checkpoints.steps() == []
        with pytest.raises(
            UnwritableError, match=r"could not be written .*; there is no checkpoint$"
        ):
            checkpoints.save(4, small_state(), MESH, {})
        (tmp_path / "run").mkdir()


def test_a_save_that_fails_in_the_background_hides_no_other_error(tmp_path, monkeypatch):
    save_steps(tmp_path, 1).close()

    def full(self):
        raise ValueError(
            "RESOURCE_EXHAUSTED: Error writing ...: No space left on device [os_error_code='28']"
        )

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", full)
    monkeypatch.setattr(ocp.CheckpointManager, "close", lambda self: None)
    message = (
        r"written \(No space left on device\); the checkpoint at step 1 is complete; free "
        r"some space"
    )
    with pytest.raises(CheckpointError, match=message), Checkpoints(tmp_path):
        pass
    with pytest.raises(KeyError, match="the run's own"), Checkpoints(tmp_path):
        raise KeyError("the run's own")


def sums_of(array):
    return Sums({"a": array}).checksums()["a"]


def test_checksums_do_not_depend_on_the_mesh_and_see_every_bit():
    values = np.arange(48, dtype=np.float32).reshape(4, 12)
    plain = sums_of(jax.device_put(values))
    sharding = NamedSharding(make_mesh(dp=2, fsdp=2, tp=2), PartitionSpec(("dp", "fsdp"), "tp"))
    assert sums_of(jax.device_put(values, sharding)) == plain
    seen = {plain, sums_of(jax.device_put(values[::-1]))}
    for bit in range(32):
        turned = values.copy()
        turned.view(np.uint32)[1, 2] ^= np.uint32(1 << bit)
        seen.add(sums_of(jax.device_put(turned)))
    assert len(seen) == 34
    for dtype in (jax.numpy.bfloat16, np.int32, np.uint32, np.bool_, np.int8):
        assert len(sums_of(jax.device_put(np.ones(3, dtype)))) == 16


def test_sums_of_many_arrays_are_those_of_each():
    """Programs sum groups of equal arrays, and give the order of the names."""
    count = checksum.GROUP + 2
    many = {f"{i}": jax.device_put(np.full((i % 2 + 1, 3), i, np.float32)) for i in range(count)}
    together = Sums(many).checksums()
    assert list(together) == list(many)
    assert together == {name: sums_of(array) for name, array in many.items()}


def test_an_infinite_scalar_is_sound_and_nan_is_not():
    """The lowest loss so far starts at infinity."""
    arrays = {
        "best": np.float32(np.inf),
        "nan": np.float32(np.nan),
        "vector": np.array([np.inf], np.float32),
    }
    assert Sums(jax.tree.map(jax.device_put, arrays)).not_finite() == {"nan": 1, "vector": 1}
