"""`jaxtp train`."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack

from jaxtp import config as configuration
from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.launch.agreement import together
from jaxtp.launch.joining import join_processes
from jaxtp.launch.peers import leaving, tell_failure, watch
from jaxtp.train.config import TrainConfig
from jaxtp.train.defaults import fit
from jaxtp.train.loop import Loop
from jaxtp.train.setup import start

PROGRAM = "jaxtp train"
DESCRIPTION = """Trains a tensor-parallel decoder.

Without flags: a small Llama on the sources of the Python standard library, over eight virtual CPU devices, in a
minute or two. --config FILE reads a YAML file (see configs/), which may include another (base: other.yaml); dotted
flags override it; --print-config prints the result and does nothing else. The same command again resumes the run in
--run.dir, on any mesh.
"""

INTERRUPTED = "interrupted; the same command goes on from the newest checkpoint, if there is one"


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      Its exit code: 0, also when a signal stopped it, if `train.stopped_exit_code` is not set; 2 for a mistake; 3 where
      a loss, gradient or update was not finite, or a verification found a difference; 75 where another process was
      lost; 130 for a second Ctrl-C.
    """
    _quieten()
    return leaving(lambda: entry.attempt(PROGRAM, lambda: _train(argv), INTERRUPTED))


def _train(argv: Sequence[str]) -> int:
    join_processes()
    watch()
    with together():
        config, notes = configuration.load(TrainConfig, argv, prog=PROGRAM, description=DESCRIPTION, fit=fit)
    with ExitStack() as held:
        try:
            done = Loop(start(config, notes, held)).run_to_end()
        except BaseException as error:
            tell_failure(error)
            raise
    return 0 if done else config.train.stopped_exit_code


def _quieten() -> None:
    """Keeps the libraries' own log lines and deprecation notices out of a run's output."""
    quieten()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|grain|flax")


if __name__ == "__main__":
    entry.run(PROGRAM, main)
