"""Runs of seconds, which share their compiled programs, and the processes of some of them."""

import pytest
from runs import SMALL, TEXT, free_address, mesh

QUICK = [
    *SMALL,
    "--model.num-layers",
    "1",
    # With a rate that does not depend on the number of steps, runs of any length share the program
    # of a step.
    "--optimizer.schedule=constant",
]


def quick_flags(folder, text, *sizes):
    """Returns the flags of a run on a text, by default over fsdp 2 and tp 2, in `folder`."""
    return [
        *QUICK,
        f"--data.path={text}",
        *mesh(*(sizes or (1, 2, 2))),
        f"--run.dir={folder}",
    ]


@pytest.fixture
def text(tmp_path):
    """A file of text to train on."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def command(tmp_path, text):
    """The flags of a quick run in `run`, on four devices; a flag that follows them replaces one
    of them.
    """
    return quick_flags(tmp_path / "run", text)


def start_together(start, flags, count, devices):
    """Starts the processes of one run, each with some virtual devices."""
    address = free_address()
    return [
        start(
            flags,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES=str(count),
            JAX_PROCESS_ID=str(process),
            JAX_NUM_CPU_DEVICES=str(devices),
        )
        for process in range(count)
    ]
