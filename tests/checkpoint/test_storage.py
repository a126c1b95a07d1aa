"""What saves and restores hold in memory, and that plain Orbax and older checkpoints can be
read.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from numpy.testing import assert_array_equal
from runs import run_program
from small_state import save_steps, small_state, weight_of
from structures import plant, watched
from tables import read_json, read_table, write_json

import jaxtp
from jaxtp.checkpoint import storage
from jaxtp.checkpoint.checksum import Sums
from jaxtp.checkpoint.io_errors import CheckpointError, DamagedError
from jaxtp.checkpoint.logical import to_logical
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.checkpoint.storage import describe_arrays, seal
from jaxtp.train import optimizer
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.state import plan_state

TABLES = read_table(__file__)

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "jaxtp/guides/resume_and_repair.md"
MESH = jaxtp.make_mesh()


def peak(action, folder, at_once):
    command = [sys.executable, str(HERE / "memory.py"), action, str(folder), str(at_once)]
    done = run_program(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_restore_holds_little_more_than_what_it_reads(tmp_path):
    peak("save", tmp_path, storage.MAX_BYTES_IN_FLIGHT)
    bounded, unbounded = (
        float(peak("restore", tmp_path, at_once)) for at_once in (20 * 10**6, 96 * 10**9)
    )
    assert bounded < 1.5
    assert unbounded > bounded + 0.2, "else nothing shows that it is the bound"


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 12])
def test_the_chunks_of_a_part_are_counted_in_bytes(chunk):
    """The part that overlaps the most chunks decides; at most one more is counted."""
    stored = mock.Mock(shape=(12, 5), dtype=np.dtype(np.float32))
    stored.storage.chunk_shape = (chunk, 5)
    mesh = jaxtp.make_mesh(fsdp=4)
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
    target = jax.ShapeDtypeStruct((12, 5), np.float32, sharding=sharding)
    chunks_of_rows = np.arange(12).reshape(4, 3) // chunk
    expected = chunk * max(len(set(part)) for part in chunks_of_rows)
    found = storage.bytes_to_read(stored, target) / (5 * 4)
    assert min(12, expected) <= found <= min(12, expected + chunk)


def test_the_largest_part_passes_any_limit(tmp_path, monkeypatch):
    """Orbax refuses what is not smaller than its limit."""
    monkeypatch.setattr(storage, "MAX_BYTES_IN_FLIGHT", 10)
    meshes = [jaxtp.make_mesh(fsdp=4), jaxtp.make_mesh(fsdp=2)]
    with Checkpoints(tmp_path) as checkpoints:
        for step, mesh in enumerate(meshes):
            checkpoints.save(step, small_state(1, mesh, "fsdp"), mesh, {})
        checkpoints.wait()
        for step, mesh in enumerate(reversed(meshes)):
            checkpoints.restore(step, small_state(1, mesh, "fsdp"), mesh)


def test_a_save_uses_no_pinned_memory_and_restores_the_switch_interval_of_threads(
    tmp_path, monkeypatch
):
    init = mock.Mock(wraps=ocp.PyTreeCheckpointHandler)
    monkeypatch.setattr(ocp, "PyTreeCheckpointHandler", init)
    before = sys.getswitchinterval()
    save_steps(tmp_path, 1).close()
    assert sys.getswitchinterval() == before
    assert init.call_args.kwargs["enable_pinned_host_transfer"] is False
    assert init.call_args.kwargs["save_concurrent_gb"] == storage.MAX_BYTES_IN_FLIGHT / 10**9


@pytest.mark.parametrize("absent", [("dtypes",), ("dtypes", "shapes")], ids=str)
def test_a_checkpoint_of_an_older_version_is_read(tmp_path, absent):
    """Those of 0.1 and 0.2 were written by Orbax's handler of standard states."""
    state = small_state()
    arrays = to_logical(state, MESH)
    described = describe_arrays(Sums(arrays))
    for name in absent:
        del described[name]
    info = ocp.args.JsonSave(seal(described))
    with ocp.CheckpointManager(tmp_path, item_names=("state", "info")) as written:
        written.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), info=info))
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(1, state, MESH)
    assert_array_equal(weight_of(restored), weight_of(state))


def test_an_info_that_describes_no_arrays_is_damaged(tmp_path):
    described = {"shapes": {"a": [2]}, "dtypes": {"a": "float32"}, "checksums": {"a": "0" * 16}}
    (tmp_path / "info").mkdir()
    write_json(tmp_path / "info/metadata", seal(described))
    assert storage.read_info(tmp_path) == described
    for entries in TABLES["wrong entries"]:
        write_json(tmp_path / "info/metadata", seal(described | entries))
        with pytest.raises(DamagedError, match="its info describes no arrays"):
            storage.read_info(tmp_path)
    with pytest.raises(DamagedError, match="differ from the saved names"):
        storage.read_verified(tmp_path, {}, described | {"shapes": {}})


def state_of(size, dtype):
    return nnx.State(
        {name: nnx.Param(jax.device_put((np.arange(size) / 7).astype(dtype))) for name in "ab"}
    )


def test_a_restore_opens_each_array_once_and_finds_those_that_are_not_as_saved(
    tmp_path, monkeypatch
):
    states = [state_of(4, "float32"), state_of(6, "float32"), state_of(4, jax.numpy.bfloat16)]
    for index, state in enumerate(states):
        with Checkpoints(tmp_path / str(index)) as checkpoints:
            checkpoints.save(1, state, MESH, {})
    monkeypatch.setattr(
        storage, "read_metadata", lambda folder: pytest.fail("opens each array once more")
    )
    stored = tmp_path / "0/1/state"
    with Checkpoints(tmp_path / "0") as checkpoints:
        restored = checkpoints.restore(1, states[0], MESH)
        jax.tree.map(assert_array_equal, restored, states[0])
        record = read_json(stored / "_METADATA")
        del record["tree_metadata"]["('b',)"]
        write_json(stored / "_METADATA", record)
        with pytest.raises(DamagedError, match="arrays are missing: b"):
            checkpoints.restore(1, states[0], MESH)
        for other, why in (("1", "Requested shape"), ("2", "checksums differ")):
            shutil.rmtree(stored)
            shutil.copytree(tmp_path / other / "1/state", stored)
            with pytest.raises(DamagedError, match=f"1 is damaged.*{why}"):
                checkpoints.restore(1, states[0], MESH)


@pytest.mark.journey
def test_plain_orbax_reads_a_checkpoint_on_one_device(tmp_path):
    """By the lines of the guide, in a process that never imports jaxtp."""
    model = jaxtp.ModelConfig(
        vocab_size=19, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=8
    )
    plan = plan_state(model, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(fsdp=2, tp=2))
    state = plan.create(seed=0)
    with Checkpoints(tmp_path / "runs/a/checkpoints") as checkpoints:
        checkpoints.save(80, state, plan.mesh, {})
    (lines,) = re.findall(
        r"```py\n(import jax(?:(?!```).)*?RestoreArgs.*?)```", GUIDE.read_text(), re.DOTALL
    )
    after = (
        "import sys; assert 'jaxtp' not in sys.modules; print(jax.device_count(), len(arrays))\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            lines + after + 'np.save("embedding.npy", arrays["model.embedding.embedding"])',
        ],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", str(len(jax.tree.leaves(state)))]
    embedding = np.asarray(state["model"]["embedding"]["embedding"][...])[: model.vocab_size]
    assert_array_equal(np.load(tmp_path / "embedding.npy"), embedding)


def test_what_is_no_file_of_a_checkpoint_is_damage(tmp_path):
    save_steps(tmp_path, 1).close()
    for name, kinds in TABLES["planted"].items():
        path = tmp_path / "1" / name
        whole = path.read_bytes()
        for kind in kinds:
            path.unlink()
            plant(path, kind)
            what = (
                None
                if kind == "empty file"
                else rf"{name} (is not a regular file|has [\d,]+ bytes)"
            )
            with watched(), pytest.raises(DamagedError, match=what):
                storage.read_info(tmp_path / "1")
        path.unlink()
        path.write_bytes(whole)


def test_checkpoints_with_a_pipe_among_them_are_not_opened(tmp_path):
    (tmp_path / "1").mkdir()
    for name, kind in (("1/_CHECKPOINT_METADATA", "pipe"), ("1/pipe", "device"), ("pipe", "pipe")):
        plant(tmp_path / name, kind)
        with (
            watched(),
            pytest.raises(CheckpointError, match=f"{name} is not a regular file; delete it"),
        ):
            Checkpoints(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/run: Not a directory"):
        Checkpoints(tmp_path / "file/run")
