"""What one of several processes does in tests/checkpoint/test_processes.py:
`python processes.py SCENARIO FOLDER`.

Each scenario raises where something is not as it should be; who started the processes sees their
exit codes.
"""

import contextlib
import errno
import itertools
import re
import shutil
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from runs import full_disk
from variants import small_model

import jaxtp
from jaxtp.checkpoint import io_errors, manager, silence_orbax
from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.checkpoint.logical import abstract_logical, from_logical, to_logical
from jaxtp.checkpoint.manager import Checkpoints, SaveBarriers, restore_newest
from jaxtp.distributed import agreement
from jaxtp.distributed.agreement import all_gather_json
from jaxtp.distributed.joining import join_processes
from jaxtp.train import optimizer
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.state import plan_state

MODEL = small_model(vocab_size=19, d_model=64, head_dim=16, d_ff=96)
"""Each device has kilobytes of each matrix: what is smaller Orbax keeps in the files of process
0 alone.
"""


def plan():
    """The state of a tiny model, whose vocabulary is padded, over all devices."""
    tp = 2 if jax.device_count() % 2 == 0 else 1
    return plan_state(
        MODEL, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(fsdp=-1, tp=tp)
    )


def values(name, step, array):
    """The whole of an array at a step, the same in every process."""
    numbers = default_rng([zlib.crc32(name.encode()), step]).normal(scale=100, size=array.shape)
    return np.asarray(numbers, array.dtype)


def state_at(step, planned):
    made = {}
    for name, array in abstract_logical(planned.abstract, planned.mesh).items():
        made[name] = jax.make_array_from_callback(
            array.shape, array.sharding, values(name, step, array).__getitem__
        )
    return from_logical(made, planned.abstract, planned.mesh)


def require_state(state, step, planned):
    for name, array in to_logical(state, planned.mesh).items():
        whole = values(name, step, array)
        for shard in array.addressable_shards:
            assert_array_equal(shard.data, whole[shard.index], err_msg=f"{name} at step {step}")


def first(do):
    """Process 0 does something, the others wait for it."""
    if jax.process_index() == 0:
        do()
    all_gather_json(None)


def restored(place, planned):
    """Restores the newest in a folder; returns its step, once every array of it is right and all
    processes agree.
    """
    warnings = []
    with Checkpoints(place / "checkpoints") as opened:
        step, state, info = restore_newest(
            opened, planned.abstract, planned.mesh, lambda info: None, warnings.append
        )
        assert opened.steps()[-1] == step
    require_state(state, step, planned)
    assert info["next_sample"] == step
    assert len({str(each) for each in all_gather_json([step, warnings, opened.steps()])}) == 1
    return step, warnings


def refused(do):
    """The message by which something is refused, the same in all processes."""
    try:
        do()
    except CheckpointError as error:
        (said,) = set(all_gather_json(str(error)))
        return said
    raise AssertionError("it was done")


def save(place):
    planned = plan()
    with Checkpoints(place / "checkpoints") as opened:
        for step in (1, 2):
            opened.save(step, state_at(step, planned), planned.mesh, {"next_sample": step})


def restore(place):
    assert restored(place, plan()) == (2, [])


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def turn_a_bit(path):
    turned = bytearray(path.read_bytes())
    turned[len(turned) // 2] ^= 0x10
    path.write_bytes(turned)


def damage_files(place):
    """Files of the newest checkpoint in turn: it is restored right, or all set it aside and use the
    one before.

    The largest of each process, and two that describe the others. Each file of one process is in
    test_manager.py.
    """
    planned = plan()
    work = place / "work"
    good = place / "checkpoints"
    parts = [f"ocdbt.process_{part}" for part in range(jax.process_count())]
    files = [
        max((good / "2/state" / part).rglob("*"), key=lambda path: path.stat().st_size)
        for part in parts
    ]
    files += [good / "2/info/metadata", good / "2/state/array_metadatas/process_1"]

    def prepare(file, damage):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(good, work / "checkpoints")
        damage(work / "checkpoints" / file.relative_to(good))

    damages = itertools.cycle([cut, Path.unlink, turn_a_bit])
    for number, (file, damage) in enumerate(zip(files, damages, strict=False)):
        first(partial(prepare, file, damage))
        step, warnings = restored(work, planned)
        assert step == 1 or number >= len(parts), "damage to the arrays of a process is found"
        assert (work / "checkpoints/1").is_dir()
        assert (work / "damaged/2").is_dir() == (step == 1) == (len(warnings) == 1), (
            file,
            warnings,
        )
        assert not (work / "damaged/1").exists()
        all_gather_json(None)  # before the next case replaces the folder
        print(file, step, *warnings, flush=True)


def fail_to_read(place):
    """An error of the file system of one process: it passes, or is the error of all; nothing is
    set aside.
    """
    planned = plan()
    restores = ocp.PyTreeCheckpointHandler.restore
    errors = []

    def failing(*args, **kwargs):
        if jax.process_index() == 1 and errors:
            raise errors.pop()
        return restores(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocp.PyTreeCheckpointHandler, "restore", failing)
        patch.setattr(io_errors, "PAUSES", (0.1, 0.1, 0.1))
        errors += [OSError(errno.EIO, "Input/output error")] * 3
        assert restored(place, planned) == (2, [])
        errors += [OSError(errno.EIO, "Input/output error")] * 99
        said = refused(lambda: restored(place, planned))
    assert re.match(
        r"process 1 \(on .*checkpoints/2 cannot be read \(\[Errno 5\].*proves no damage", said
    ), said
    assert restored(place, planned) == (2, [])


def see_another_folder(place):
    """A folder of one name on each host, which is not one: other steps, or other files in a
    step.
    """
    planned = plan()
    elsewhere = place / "elsewhere/checkpoints"
    first(lambda: shutil.copytree(place / "checkpoints/1", elsewhere / "1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PAUSES", (0.1, 0.1))
        patch.chdir(elsewhere.parent if jax.process_index() == 1 else place)
        for steps in ("other", "same"):
            said = refused(lambda: restored(Path(), planned))
            assert re.search(
                r"not one folder for all: process 1 \(on .* does not see what process 0 sees", said
            ), said
            if steps == "other":
                first(lambda: shutil.copytree(elsewhere / "1", elsewhere / "2"))


def fail_to_write(place):
    """The disk of one process is full, before a save and during it: all fail, and what is there
    stays whole.
    """
    planned = plan()
    # A save first tries to write a page.
    for failing, size in ((0, 100), (0, 5000), (2, 100), (2, 5000)):
        fails = jax.process_index() == failing
        said = save_fails(place, planned, full_disk(size) if fails else contextlib.nullcontext())
        assert re.match(
            rf"process {failing} \(on .*could not be written.*checkpoint at step 2 is complete",
            said,
        ), said


def save_fails(place, planned, where):
    """The message by which a third save fails, after which the second is restored."""
    opened = Checkpoints(place / "checkpoints")
    state = state_at(3, planned)

    def write():
        with where:
            opened.save(3, state, planned.mesh, {"next_sample": 3})
            opened.wait()

    said = refused(write)
    with contextlib.suppress(CheckpointError), opened:
        raise CheckpointError("as a run that ends")
    assert restored(place, planned) == (2, [])
    return said


def come_late(place):
    """A process that does not end its part of a save is given up, by name."""
    planned = plan()
    meet = SaveBarriers.__call__

    def hold_up(self, *, key, timeout_ms):
        if "async_write_complete" in key and jax.process_index() == 2:
            time.sleep(6)
        meet(self, key=key, timeout_ms=timeout_ms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "BARRIER_SECONDS", 3)
        patch.setattr(SaveBarriers, "__call__", hold_up)
        said = save_fails(place, planned, contextlib.nullcontext())
    assert (
        "process 2 did not write its part within 3 s); the checkpoint at step 2 is complete" in said
    ), said


SCENARIOS = {
    "save": save,
    "restore": restore,
    "damage": damage_files,
    "unreadable": fail_to_read,
    "unshared": see_another_folder,
    "unwritable": fail_to_write,
    "late": come_late,
}

if __name__ == "__main__":
    join_processes()
    silence_orbax()
    for scenario in sys.argv[2:]:
        SCENARIOS[scenario](Path(sys.argv[1]))
        all_gather_json(None)
        print(f"{scenario} done", flush=True)
