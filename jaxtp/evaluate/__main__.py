"""`jaxtp evaluate`."""

import warnings
from collections.abc import Sequence

from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.command_line import Command
from jaxtp.evaluate.command import run
from jaxtp.evaluate.config import FIRST, EvaluateConfig, check
from jaxtp.launch.agreement import together
from jaxtp.launch.joining import join_processes
from jaxtp.launch.peers import leaving, tell_failure, watch

PROGRAM = "jaxtp evaluate"
DESCRIPTION = """Measures a model on text: loss, perplexity and bits per byte, of a run of jaxtp train or a folder in
Hugging Face's format, on datasets of jaxtp prepare or on files.

jaxtp evaluate --model runs/a --data data/own --text notes.txt --by length

Every token of a document but its first is predicted once, from those before it in the same document. The numbers are
the same on any mesh (--mesh fsdp=2,tp=4) and with any --batch-size. --tasks NAME runs tasks of lm-evaluation-harness
instead (pip install 'jaxtp[eval]'). Results go to standard output, as a table or with --json - as JSON; all else goes
to standard error.
"""
COMMAND = Command(program=PROGRAM, schema=EvaluateConfig, description=DESCRIPTION, first=FIRST)


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      Its exit code: 0; 2 for a user's mistake; 3 where a loss is not finite; 75 where another process was lost; 130 for
      Ctrl-C.
    """
    quieten()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|flax")
    return leaving(lambda: entry.attempt(PROGRAM, lambda: _evaluate(argv)))


def _evaluate(argv: Sequence[str]) -> None:
    join_processes()
    watch()
    with together():
        config, _ = COMMAND.load(argv)
        check(config)
    try:
        run(config)
    except BaseException as error:
        tell_failure(error)
        raise


if __name__ == "__main__":
    entry.run(PROGRAM, main)
