"""`python -m jaxtp.explain`."""

import signal
import sys
from collections.abc import Sequence

import tyro

from jaxtp import config as configuration
from jaxtp.explain.command import Explain, run
from jaxtp.mesh import MeshError
from jaxtp.parallel.plan import PlanError

PROGRAM = "python -m jaxtp.explain"
MISTAKES = (configuration.ConfigError, MeshError, PlanError)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    command = tyro.cli(Explain, args=list(argv), prog=PROGRAM)
    return configuration.attempt(PROGRAM, lambda: run(command), MISTAKES)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main(sys.argv[1:]))
