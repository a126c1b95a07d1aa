"""`jaxtp generate`."""

from collections.abc import Sequence

from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.command_line import Command
from jaxtp.generate.command import run
from jaxtp.generate.config import FIRST, GenerateConfig, check

PROGRAM = "jaxtp generate"
DESCRIPTION = """Continues texts with a model: a run of jaxtp train, or a folder in Hugging Face's format.

jaxtp generate --model runs/a --prompt "def main(" --prompt "import " --max-tokens 64

One text is printed as it comes, several each as a whole; --json FILE writes an object for each. The likeliest token is
taken unless --temperature is given, with --top-p, --top-k and --min-p to leave out unlikely ones. The same --seed gives
the same texts, on any mesh and in any batch, but for rounding.

jaxtp generate --model DIR --chat --temperature 0.7 --max-tokens 1000

talks to a model that has a chat template; /help there lists commands, such as /save. --mesh tp=2 splits the model and
its cache over devices, virtual ones on a CPU. How fast prompts were read (prefill) and tokens made (decode) is said at
the end, on standard error.
"""
COMMAND = Command(program=PROGRAM, schema=GenerateConfig, description=DESCRIPTION, first=FIRST)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    quieten()
    return entry.attempt(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str]) -> None:
    config, _ = COMMAND.load(argv)
    run(config, check(config))


if __name__ == "__main__":
    entry.run(PROGRAM, main)
