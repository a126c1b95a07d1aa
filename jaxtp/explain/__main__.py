"""`python -m jaxtp.explain`."""

from collections.abc import Sequence

import tyro

from jaxtp import config as configuration
from jaxtp import entry
from jaxtp.explain.command import Explain, run
from jaxtp.mesh import MeshError
from jaxtp.parallel.plan import PlanError

PROGRAM = "python -m jaxtp.explain"
MISTAKES = (configuration.ConfigError, MeshError, PlanError)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    return entry.attempt(PROGRAM, lambda: run(tyro.cli(Explain, args=list(argv), prog=PROGRAM)), MISTAKES)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
