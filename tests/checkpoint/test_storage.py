"""What saves and restores hold in memory, and that plain Orbax and older checkpoints can be read."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from structures import plant, watched

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

TINY = jaxtp.ModelConfig(vocab_size=19, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=8)
HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "jaxtp/train/README.md"


def blueprint(mesh):
    return plan_state(TINY, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(*mesh))


def peak(action, folder, at_once):
    command = [sys.executable, str(HERE / "memory.py"), action, str(folder), str(at_once)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1]) if action == "restore" else 0.0


@pytest.mark.slow
def test_a_restore_holds_little_more_than_what_it_reads(tmp_path):
    peak("save", tmp_path, storage.MAX_BYTES_IN_FLIGHT)
    bounded, unbounded = (peak("restore", tmp_path, at_once) for at_once in (20 * 10**6, 96 * 10**9))
    assert bounded < 1.5
    assert unbounded > bounded + 0.2, "else nothing shows that it is the bound"


def test_the_largest_part_passes_any_limit(tmp_path, monkeypatch):
    """Orbax refuses what is not smaller than its limit."""
    monkeypatch.setattr(storage, "MAX_BYTES_IN_FLIGHT", 10)
    plan = blueprint((1, 2, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plan.create(seed=0), plan.mesh, {})
        checkpoints.wait()
        other = blueprint((1, 1, 4))
        checkpoints.restore(1, other.abstract, other.mesh)


def test_whole_chunks_are_counted():
    sharding = NamedSharding(jaxtp.make_mesh(fsdp=4), PartitionSpec("fsdp"))
    chunks = SimpleNamespace(chunk_shape=(8, 6))
    there = SimpleNamespace(shape=(16, 6), dtype=np.dtype(np.float32), storage=chunks)
    assert storage._read_bytes(there, jax.ShapeDtypeStruct((16, 6), np.float32, sharding=sharding)) == 16 * 6 * 4


def test_no_pinned_memory_is_used(tmp_path, monkeypatch):
    given = []
    init = ocp.PyTreeCheckpointHandler.__init__
    monkeypatch.setattr(
        ocp.PyTreeCheckpointHandler, "__init__", lambda self, **given_: given.append(given_) or init(self, **given_)
    )
    plan = blueprint((1, 1, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plan.create(seed=0), plan.mesh, {})
    assert given[-1] == {
        "save_concurrent_gb": storage.MAX_BYTES_IN_FLIGHT / 10**9,
        "enable_pinned_host_transfer": False,
    }
    assert storage.BoundedHandler.typestr() == ocp.PyTreeCheckpointHandler.typestr()


def test_a_save_restores_the_switch_interval_of_threads(tmp_path):
    plan, before = blueprint((1, 1, 2)), sys.getswitchinterval()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plan.create(seed=0), plan.mesh, {})
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("absent", [("dtypes",), pytest.param(("dtypes", "shapes"), marks=pytest.mark.wide)], ids=str)
def test_a_checkpoint_of_an_older_version_is_read(tmp_path, absent):
    """Those of 0.1 and 0.2 were written by Orbax's handler of standard states."""
    plan = blueprint((1, 1, 2))
    state = plan.create(seed=0)

    arrays = to_logical(state, plan.mesh)
    with ocp.CheckpointManager(tmp_path, item_names=("state", "info")) as written:
        described = {name: entry for name, entry in describe_arrays(Sums(arrays)).items() if name not in absent}
        info = ocp.args.JsonSave(seal(described))
        written.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), info=info))
    assert "StandardCheckpointHandler" in (tmp_path / "1/_CHECKPOINT_METADATA").read_text()
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(1, plan.abstract, plan.mesh)
        checkpoints.save(2, restored, plan.mesh, {})
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert "PyTreeCheckpointHandler" in (tmp_path / "2/_CHECKPOINT_METADATA").read_text()


@pytest.mark.parametrize(
    "entries",
    [
        {"dtypes": {"a": "bogus"}},
        {"dtypes": 3},
        {"shapes": {"a": ["2"]}},
        {"shapes": {"a": [[2]]}},
        {"checksums": {"a": 1}},
        {"checksums": []},
        {"specs": {"a": 1}},
    ],
    ids=str,
)
def test_an_info_that_describes_no_arrays_is_damaged(tmp_path, entries):
    described = {"shapes": {"a": [2]}, "dtypes": {"a": "float32"}, "checksums": {"a": "0" * 16}}
    (tmp_path / "info").mkdir()
    (tmp_path / "info/metadata").write_text(json.dumps(seal(described)))
    assert storage.read_info(tmp_path) == described
    (tmp_path / "info/metadata").write_text(json.dumps(seal(described | entries)))
    with pytest.raises(storage.DamagedError, match="its info describes no arrays"):
        storage.read_info(tmp_path)


def test_a_restore_opens_each_array_once_and_finds_those_that_are_not_as_saved(tmp_path, monkeypatch):
    mesh = jaxtp.make_mesh(fsdp=2)
    split = NamedSharding(mesh, PartitionSpec("fsdp"))

    def state(size, dtype):
        values = jax.random.normal(jax.random.key(0), (size,), dtype)
        return nnx.State({name: nnx.Param(jax.device_put(values, split), out_sharding=("fsdp",)) for name in "ab"})

    with jax.set_mesh(mesh):
        states = [state(4, "float32"), state(6, "float32"), state(4, "bfloat16")]
    for index, each in enumerate(states):
        with Checkpoints(tmp_path / str(index)) as checkpoints:
            checkpoints.save(1, each, mesh, {})
    monkeypatch.setattr(storage, "read_metadata", lambda folder: pytest.fail("opens each array once more"))
    stored = tmp_path / "0/1/state"
    with Checkpoints(tmp_path / "0") as checkpoints:
        for restored, saved in zip(
            *map(jax.tree.leaves, (checkpoints.restore(1, states[0], mesh), states[0])), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(restored), np.asarray(saved))
        record = json.loads((stored / "_METADATA").read_text())
        del record["tree_metadata"]["('b',)"]
        (stored / "_METADATA").write_text(json.dumps(record))
        with pytest.raises(DamagedError, match="arrays are missing: b"):
            checkpoints.restore(1, states[0], mesh)
        for index, why in ((1, "Requested shape"), (2, "checksums differ")):
            shutil.rmtree(stored)
            shutil.copytree(tmp_path / str(index) / "1/state", stored)
            with pytest.raises(DamagedError, match=f"1 is damaged.*{why}"):
                checkpoints.restore(1, states[0], mesh)


@pytest.mark.journey
def test_plain_orbax_reads_a_checkpoint_on_one_device(tmp_path):
    """By the lines of the guide, in a process that never imports jaxtp."""
    plan = blueprint((1, 2, 4))
    state = plan.create(seed=0)
    with Checkpoints(tmp_path / "runs/a/checkpoints") as checkpoints:
        checkpoints.save(80, state, plan.mesh, {})
    (lines,) = re.findall(r"```py\n(import jax(?:(?!```).)*?RestoreArgs.*?)```", GUIDE.read_text(), re.DOTALL)
    after = "import sys; assert 'jaxtp' not in sys.modules; print(jax.device_count(), len(arrays))\n"
    done = subprocess.run(
        [sys.executable, "-c", lines + after + 'np.save("embedding.npy", arrays["model.embedding.embedding"])'],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", str(len(jax.tree.leaves(state)))]
    embedding = np.asarray(state["model"]["embedding"]["embedding"][...])[: TINY.vocab_size]
    np.testing.assert_array_equal(np.load(tmp_path / "embedding.npy"), embedding)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("info/metadata", "pipe"),
        ("info/metadata", "device"),
        ("info/metadata", "sparse file"),
        ("info/metadata", "empty file"),
        ("state/_METADATA", "pipe"),
        ("state/_METADATA", "sparse file"),
        ("state/manifest.ocdbt", "device"),
    ],
)
def test_what_is_no_file_of_a_checkpoint_is_damage(name, kind, tmp_path):
    plan = blueprint((1, 1, 1))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, plan.create(seed=0), plan.mesh, {})
    folder = tmp_path / "checkpoints/1"
    assert (folder / name).is_file()
    plant(folder / name, kind)
    with watched(), pytest.raises(DamagedError) as caught:
        storage.read_info(folder)
    if kind != "empty file":
        assert re.search(rf"{re.escape(name)} (is not a regular file|has [\d,]+ bytes)", str(caught.value))


@pytest.mark.parametrize("name", ["1/_CHECKPOINT_METADATA", "1/pipe", "pipe"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_checkpoints_with_a_pipe_among_them_are_not_opened(name, kind, tmp_path):
    (tmp_path / "1").mkdir()
    plant(tmp_path / name, kind)
    with watched(), pytest.raises(CheckpointError, match=f"{name} is not a regular file; delete it"):
        Checkpoints(tmp_path)
