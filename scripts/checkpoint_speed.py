"""Compares checkpoints with plain Orbax: pause of the training, throughput, and host memory.

    python scripts/checkpoint_speed.py [--one-device] [--arrays 2000]

The same run measures the disk: it writes a plain file of the state's size with fsync, drops it from
the page cache if the system allows that, and reads it. Plain Orbax saves and restores the same
arrays without checksums, in turns with jaxtp. Numbers are medians of `--repeats`; a ratio to Orbax
is the median of the ratios in each turn. Host memory is the peak of a restore.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

import jaxtp
from jaxtp.checkpoint import silence_orbax
from jaxtp.checkpoint.logical import abstract_logical, to_logical
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.train import optimizer
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.state import Blueprint, plan_state

MESH = {"fsdp": 2, "tp": 4}
"""The virtual CPU devices of the state; `--one-device` empties it."""
ALONE: list[dict[str, object]] = []
"""Blocks that are not stacked, for a state of many arrays."""


def plan(megabytes: int) -> Blueprint:
    """Returns the plan of a decoder's state of about this size."""
    width = 256 * max(1, round((megabytes / 12) ** 0.5 / 3))
    model = jaxtp.ModelConfig(
        vocab_size=8192,
        d_model=width,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=width // 8,
        d_ff=4 * width,
    )
    if ALONE:
        small = {"vocab_size": 256, "d_model": 64, "head_dim": 8, "d_ff": 128, "qk_norm": "head"}
        model = dataclasses.replace(
            model, **small, num_layers=len(ALONE) + 1, first_blocks=tuple(ALONE)
        )
    return plan_state(model, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(**MESH))


def seconds(action: Callable[[], object]) -> float:
    """Returns the duration of an action."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def write_plain(path: Path, data: bytes) -> None:
    """Writes a plain file with fsync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def forget(folder: Path) -> None:
    """Drops a folder's files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(megabytes: int, repeats: int, folder: Path) -> tuple[int, dict[str, list[float]]]:
    """Returns the bytes of the state, and each action's seconds in all turns except the first."""
    blueprint = plan(megabytes)

    def ones(a):
        sharding = NamedSharding(blueprint.mesh, a.sharding.spec)
        return jax.device_put(np.ones(a.shape, a.dtype), sharding)

    # XLA takes minutes to compile the initialisation of many blocks that are not stacked.
    state = jax.tree.map(ones, blueprint.abstract) if ALONE else blueprint.create(seed=0)
    jax.block_until_ready(state)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    plain = folder / "plain"
    data = os.urandom(size)
    times: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(action))

    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    arrays = to_logical(state, blueprint.mesh)
    target = abstract_logical(blueprint.abstract, blueprint.mesh)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(folder / "orbax", options=options) as orbax:

        def ours(step: int) -> None:
            note("save, blocking", lambda: checkpoints.save(step, state, blueprint.mesh, {}))
            note("save, the rest", checkpoints.wait)
            forget(folder)
            restore = lambda: checkpoints.restore(step, blueprint.abstract, blueprint.mesh)  # noqa: E731
            note("restore", lambda: jax.block_until_ready(restore()))

        def plainly(step: int) -> None:
            note("Orbax, blocking", lambda: orbax.save(step, args=ocp.args.StandardSave(arrays)))
            note("Orbax, the rest", orbax.wait_until_finished)
            forget(folder)
            restore = lambda: orbax.restore(step, args=ocp.args.StandardRestore(target))  # noqa: E731
            note("Orbax, restore", lambda: jax.block_until_ready(restore()))

        for step in range(1, repeats + 2):
            for save_and_restore in (ours, plainly) if step % 2 else (plainly, ours):
                save_and_restore(step)
            note("plain write", lambda: write_plain(plain, data))
            forget(folder)
            note("plain read", plain.read_bytes)
            os.sync()
    checkpoints.close()
    return size, {name: found[1:] for name, found in times.items()}


def restore_memory(megabytes: int, folder: Path) -> float:
    """Returns the peak growth in bytes, arrays included, of a separate process that restores."""
    command = [
        sys.executable,
        __file__,
        "--megabytes",
        str(megabytes),
        "--restore-from",
        str(folder / "checkpoints"),
    ]
    command += [] if MESH else ["--one-device"]
    command += ["--blocks", str(len(ALONE))]
    return float(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def restore_here(megabytes: int, folder: Path) -> None:
    """Prints the peak growth of this process's memory during a restore."""
    blueprint = plan(megabytes)
    checkpoints = Checkpoints(folder, keep=1)
    (step,) = checkpoints.steps()
    before = resident()
    state = jax.block_until_ready(checkpoints.restore(step, blueprint.abstract, blueprint.mesh))
    print(most_resident() - before)
    del state
    checkpoints.close()


def resident() -> int:
    """Returns this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_resident() -> int:
    """Returns this process's peak resident bytes; a child inherits `ru_maxrss` from its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=1000, help="approximate size of the state (default 1000)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--one-device", action="store_true", help="a process that has one, as on a cluster"
    )
    parser.add_argument(
        "--arrays", type=int, default=0, help="of about so many small arrays, instead of megabytes"
    )
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--restore-from", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    silence_orbax()
    if arguments.one_device:
        MESH.clear()
    count = arguments.arrays // 32 if arguments.blocks is None else arguments.blocks
    ALONE.extend({"rope_theta": 1e4 + block} for block in range(count))
    if arguments.restore_from is not None:
        restore_here(arguments.megabytes, arguments.restore_from)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size, found = measure(arguments.megabytes, arguments.repeats, folder)
        peak = restore_memory(arguments.megabytes, folder)
    where = "x".join(map(str, plan(arguments.megabytes).mesh.devices.shape))
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    count = len(jax.tree.leaves(plan(arguments.megabytes).abstract))
    print(f"state of {size / 1e6:,.0f} MB in {count:,} arrays on {where} CPU devices")
    for action, seconds_of in found.items():
        median = statistics.median(seconds_of)
        print(
            f"{action:<16}{median:>8.3f} s{size / 1e6 / median:>10,.0f} MB/s   "
            f"{min(seconds_of):.3f} at least"
        )

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))

    found["save"] = [
        sum(both) for both in zip(found["save, blocking"], found["save, the rest"], strict=True)
    ]
    print(f"save / plain write         {ratio('save', 'plain write'):.2f}")
    print(f"restore / plain read       {ratio('restore', 'plain read'):.2f}")
    print(f"blocking / Orbax, blocking {ratio('save, blocking', 'Orbax, blocking'):.2f}")
    print(f"restore / Orbax, restore   {ratio('restore', 'Orbax, restore'):.2f}")
    print(
        "host memory at the peak of a restore, above the arrays themselves: "
        f"{(peak - size) / size:.2f} x the state"
    )


if __name__ == "__main__":
    main()
