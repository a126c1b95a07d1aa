"""`jaxtp train`."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import jax
import tyro

import jaxtp
from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.command_line import Command
from jaxtp.config import UserPath, to_plain
from jaxtp.files import require_picture, require_writable, write_json, write_picture
from jaxtp.launch.agreement import together
from jaxtp.launch.joining import join_processes
from jaxtp.launch.peers import leaving, tell_failure, watch
from jaxtp.mesh import mesh_sizes
from jaxtp.train import curves
from jaxtp.train.config import FIRST, TrainConfig, training_of
from jaxtp.train.defaults import fit
from jaxtp.train.loop import Loop
from jaxtp.train.setup import Run, start

PROGRAM = "jaxtp train"
DESCRIPTION = """Trains a tensor-parallel decoder.

Without flags: a small Llama on the sources of the Python standard library, over eight virtual CPU devices, in a
minute or two. --config FILE reads a YAML file (see configs/), which may include another (base: other.yaml); dotted
flags override it; --print-config prints the result and does nothing else. The same command again resumes the run in
--run.dir, on any mesh.
"""


@dataclass(frozen=True, kw_only=True)
class RunCommand(TrainConfig):
    """Command line of a run: its configuration, and what is written at its end."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the last numbers of the run to at its end, with its configuration, for machines."""

    plot: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE.png")] = None
    """File to draw the curves of the run in at its end (pip install 'jaxtp[plot]')."""


COMMAND = Command(
    program=PROGRAM,
    schema=RunCommand,
    description=DESCRIPTION,
    first=("json", "plot", *FIRST),
    printed=training_of,
)
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
        asked, notes = COMMAND.load(argv, fit)
        require_writable("--json", asked.json)
        require_picture("--plot", asked.plot)
    with ExitStack() as held:
        try:
            run = start(training_of(asked), notes, held)
            done = Loop(run).run_to_end()
        except BaseException as error:
            tell_failure(error)
            raise
        if jax.process_index() == 0:
            _write(asked, run, done)
    return 0 if done else asked.train.stopped_exit_code


def _write(asked: RunCommand, run: Run, done: bool) -> None:
    """Writes what flags ask for at the end of a run, which may have been stopped before its last step."""
    folder = run.config.run.dir
    record = {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "folder": str(folder),
        "finished": done,
        "step": run.step,
        "mesh": mesh_sizes(run.blueprint.mesh),
    }
    if asked.json is not None:
        last = curves.last_values(folder)
        write_json("--json", asked.json, {**record, "metrics": last, "config": to_plain(run.config)})
    write_picture("--plot", asked.plot, partial(curves.draw, [folder]))


def _quieten() -> None:
    """Keeps the libraries' own log lines and deprecation notices out of a run's output."""
    quieten()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|grain|flax")


if __name__ == "__main__":
    entry.run(PROGRAM, main)
