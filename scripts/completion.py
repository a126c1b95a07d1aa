"""Prints a completion script of `jaxtp` for a shell.

python scripts/completion.py bash > ~/.local/share/bash-completion/completions/jaxtp
python scripts/completion.py zsh > ~/.zfunc/_jaxtp  # where fpath has ~/.zfunc
python scripts/completion.py fish > ~/.config/fish/completions/jaxtp.fish
"""

import argparse
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from jaxtp.__main__ import COMMANDS
from jaxtp.config.affects import ONLY_IN_FILES, POSITIONAL
from jaxtp.config.command_line import HELP, Command, literal_choices, useful_flags

Commands = Mapping[str, Command[Any] | Mapping[str, Command[Any]]]
"""Commands by name; a family maps the names of its commands."""

_BASH_CASE = "    '{0}'*'{1}') offers='{2}' ;;"
_COMPLETION = {
    "bash": (
        _BASH_CASE,
        """_jaxtp() {
  local offers= line="${COMP_WORDS[*]:0:COMP_CWORD} "
  line="${line// = / }"
  case "${line##* -- }" in
CASES
  esac
  COMPREPLY=($(compgen -W "$offers" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _jaxtp jaxtp""",
    ),
    "zsh": (
        _BASH_CASE,
        """#compdef jaxtp
local offers= line="${words[1,CURRENT-1]} "
case "${line##* -- }" in
CASES
esac
compadd -- ${=offers}
_files""",
    ),
    "fish": (
        "        case '{0}*{1}'\n            string split -- ' ' '{2}'",
        """function _jaxtp
    switch (string join -- ' ' (commandline -opc) | string replace -r '.* -- ' '')' '
CASES
    end
end
complete -c jaxtp -a '(_jaxtp)'""",
    ),
}
"""The line of a case, and the script, of each shell. A list of commands is a case for all that
begins like them, and comes after their own cases."""


def completion(commands: Commands, shell: str) -> str:
    """Returns a completion script of `jaxtp` for bash, zsh or fish.

    It chooses by what was typed before the current word, such as `jaxtp train --model.remat `.
    """
    case, script = _COMPLETION[shell]
    cases = (case.format(*pattern) for pattern in _offers("jaxtp", commands))
    return script.replace("CASES", "\n".join(cases))


def _offers(program: str, commands: Commands) -> Iterator[tuple[str, str, str]]:
    """Yields the beginning and the end of what was typed, and the words that may follow."""
    for name, command in commands.items():
        if not isinstance(command, Command):
            yield from _offers(f"{program} {name}", command)
            continue
        words = [HELP]
        for setting in command.used_settings():
            choices = list(map(str, literal_choices(setting.kind)))
            if POSITIONAL in setting.marks:
                words += choices
            elif get_origin(setting.kind) is dict:
                words.append(f"{setting.flag}.")
            elif ONLY_IN_FILES not in setting.marks:
                words += useful_flags(setting)
                # Where nothing is offered, the shell completes files.
                if setting.kind is not bool:
                    yield f"{program} {name} ", f"{setting.flag} ", " ".join(choices)
        yield f"{program} {name} ", "", " ".join(words)
    yield f"{program} ", "", " ".join(commands)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=_COMPLETION)
    shell = parser.parse_args().shell
    commands = {}
    for name, package in COMMANDS.items():
        module = importlib.import_module(f"{package}.__main__")
        commands[name] = getattr(module, "COMMANDS", None) or module.COMMAND
    print(completion(commands, shell))


if __name__ == "__main__":
    main()
