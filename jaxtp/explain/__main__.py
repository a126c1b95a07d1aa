"""`jaxtp explain`."""

from collections.abc import Sequence

import tyro

from jaxtp import entry
from jaxtp.explain.command import Explain, run

PROGRAM = "jaxtp explain"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    return entry.attempt(PROGRAM, lambda: run(tyro.cli(Explain, args=list(argv), prog=PROGRAM)))


if __name__ == "__main__":
    entry.run(PROGRAM, main)
