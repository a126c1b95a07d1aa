"""`jaxtp train`."""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start("jaxtp train")

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

import jaxtp
from jaxtp.checkpoint import silence_orbax
from jaxtp.config import entry
from jaxtp.config.affects import in_short_help
from jaxtp.config.command_line import Command
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.schema import OptionalFile, to_plain
from jaxtp.distributed.agreement import raise_everywhere, run_and_report, watch
from jaxtp.distributed.environment import is_launched
from jaxtp.mesh import mesh_sizes
from jaxtp.train.config import TrainConfig, training_of
from jaxtp.train.defaults import Decider
from jaxtp.train.metrics import last_values
from jaxtp.train.trainer import Trainer

PROGRAM = "jaxtp train"
DESCRIPTION = """Trains a tensor-parallel decoder, or a Flax model of your own.

Without flags: a small Llama on the sources of the Python standard library, over eight virtual CPU
devices, in a minute or two. --config FILE reads a YAML file (see configs/); dotted flags override
it; --print-config prints the result and does nothing else. The same command again resumes the run
in --run.dir, on any mesh.
"""


@dataclass(frozen=True, kw_only=True)
class RunCommand(TrainConfig):
    """The configuration of a run, and what only the command has."""

    json: OptionalFile = None
    """JSON file for the last numbers of the run and its configuration, written at its end."""


COMMAND = Command(
    program=PROGRAM,
    schema=RunCommand,
    description=DESCRIPTION,
    short_help=(*in_short_help(TrainConfig), "json"),
    printed=training_of,
)
INTERRUPTED = "interrupted; the same command resumes from the newest checkpoint, if there is one"


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      Exit code: 0; `train.stopped_exit_code` after a signal; 2 for a user's mistake; 3 for a
      non-finite number or silent corruption; 74 if files could not be written; 75 if another
      process was lost; 130 for a second Ctrl-C.
    """
    silence_orbax()
    return run_and_report(lambda: entry.attempt(PROGRAM, lambda: _train(argv), INTERRUPTED))


def _train(argv: Sequence[str]) -> int:
    bind = None
    if is_launched():
        from jaxtp.distributed.joining import join_processes

        bind = _bind(argv)
        join_processes(bind=bind)
    decider = Decider()
    # Reads the flags first, because they determine the number of virtual devices.
    with raise_everywhere(partial(watch, bind)):
        config, _ = COMMAND.load(argv, decider)
        require_writable("--json", config.json)
    with Trainer.of(decider.decided) as trainer:
        finished = trainer.run_to_end()
        if config.json is not None and jax.process_index() == 0:
            _write(config.json, trainer)
    return 0 if finished else config.train.stopped_exit_code


def _bind(argv: Sequence[str]) -> str | None:
    # Reads `launch.bind` before the processes meet. Mistakes in the flags are reported afterwards.
    nowhere = io.StringIO()
    with (
        suppress(UserError, OSError, SystemExit),
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        return COMMAND.load(argv)[0].launch.bind
    return None


def _write(file: Path, trainer: Trainer) -> None:
    folder = trainer.config.run.dir
    record = {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "folder": str(folder),
        "finished": trainer.done,
        "step": trainer.step,
        "mesh": mesh_sizes(trainer.mesh),
        "metrics": last_values(folder),
        "config": to_plain(trainer.config),
    }
    write_json("--json", file, record)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
