"""`jaxtp explain`."""

from collections.abc import Sequence

from jaxtp import entry
from jaxtp.command_line import Command
from jaxtp.explain.command import Explain, run

PROGRAM = "jaxtp explain"
DESCRIPTION = """Shows how a model is split over a mesh and what a forward and backward pass moves, without the devices.

jaxtp explain model.py:build --plan plan.py:PLAN --input 64x16x16x1 --mesh fsdp=2,tp=4

Each module has a line with its style, how its parameters are split, and the bytes that a device stores; then come
the collectives by module, and notes on what the plan costs that another would not. A configuration of jaxtp train
is a model, too:

jaxtp explain configs/llama3_8b.yaml --mesh fsdp=4,tp=8
"""
COMMAND = Command(program=PROGRAM, schema=Explain, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    return entry.attempt(PROGRAM, lambda: run(COMMAND.load(argv)[0]))


if __name__ == "__main__":
    entry.run(PROGRAM, main)
