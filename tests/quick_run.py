"""Runs of seconds, which share their compiled programs, and the processes of some of them."""

from runs import SMALL, free_address, mesh

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
