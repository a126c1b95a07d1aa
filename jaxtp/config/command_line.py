"""Command lines: dataclasses filled from a YAML file and flags, and their help.

Every command takes `--config FILE` (YAML), dotted flags that override it (`--mesh.tp 4`),
`--mesh fsdp=2,tp=4`, `--print-config`, `--help`, `--help SECTION` and `--help-all`. pydantic
validates flags as it validates files, so an error is one line that names the flag.
"""

import ast
import contextlib
import dataclasses
import inspect
import math
import re
import shlex
import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxtp.config.affects import (
    ONLY_IN_FILES,
    POSITIONAL,
    REPEATED,
    RUNS_CODE,
    Argument,
    Setting,
    find_setting,
    leaf_settings,
    settings_of,
)
from jaxtp.config.console import folded
from jaxtp.config.hints import REMOVED_COMMANDS, closest, dotted, hint_for, nearest_name
from jaxtp.config.python_object import require_consent
from jaxtp.config.reading import parse_yaml, truncate
from jaxtp.config.schema import (
    ConfigError,
    leaves,
    merged,
    nested,
    read_values,
    to_yaml,
    validate,
)

T = TypeVar("T")

HELP = "--help"
ALL_HELP = "--help-all"
_HELP_WORDS = (HELP, "-h", ALL_HELP, "--help_all")
_MAX_LABEL = 22  # Columns; the text of a longer flag begins below it
_VALUES = {Path: "PATH", str: "TEXT", int: "INT", float: "FLOAT", bool: "{true,false}"}
"""Names of values by their type."""
_LIMITS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "multiple_of": "a multiple of",
}
"""Words for limits, by the name that pydantic gives them."""
_MAX_LIMIT = 2**16  # Help does not show limits that nobody reaches


@dataclass(frozen=True, kw_only=True)
class _CommonFlags:
    config: Annotated[Path | None, Argument("FILE")] = None
    """YAML file of settings; flags override it. It may include another file (base: other.yaml)."""

    print_config: bool = False
    """Prints the resulting settings as YAML, and exits."""

    allow_code: bool = False
    """Runs the Python code that the --config file names. Use it only if you trust the file and this
    code."""

    mesh: Annotated[str | None, Argument("fsdp=2,tp=4")] = None
    """Size of each mesh axis, 1 by default; -1 takes all remaining devices."""


_CONFIG, _PRINT, _ALLOW, _MESH = settings_of(_CommonFlags).values()


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """A command, or a member of a family such as `jaxtp convert import`."""

    program: str  # `jaxtp train`
    schema: type[T]  # dataclass of its settings
    # Purpose and examples, for the help; a list of commands shows the first sentence
    description: str
    # Dotted names of the settings that --help shows; empty for all
    short_help: tuple[str, ...] = ()
    # Dotted names of unused settings and sections, which a --config file may contain
    ignored: tuple[str, ...] = ()
    # Returns the part of the configuration that --print-config prints
    printed: Callable[[T], object] = lambda config: config

    def load(
        self, argv: Sequence[str], fit: Callable[[T, Set[str]], tuple[T, list[str]]] | None = None
    ) -> tuple[T, list[str]]:
        """Returns the configuration of a command line, and notes on its defaults.

        Args:
          fit: takes the configuration and the dotted names of explicit settings; returns the
            configuration with other defaults filled in, and notes. It must not change explicit
            settings.

        Raises:
          ConfigError: a file is not YAML, a key or flag is unknown, or a value has a wrong type or
            is out of range.
          SystemExit: after help or `--print-config`, with code 0.
        """
        for position, word in enumerate(takewhile("--".__ne__, argv)):
            if word in _HELP_WORDS:
                self._print_help(*argv[position : position + 2])
                raise SystemExit(0)
        values = self._parse(argv)
        printing = values.pop(_PRINT, False)
        is_code_allowed = bool(values.pop(_ALLOW, False))
        path = values.pop(_CONFIG, None)
        mesh = values.pop(_MESH, None)
        flags = {setting.keys: value for setting, value in values.items()}
        if mesh is not None:
            flags = self._mesh_flags(str(mesh)) | flags
        in_file: dict[str, object] = {}
        if path is not None:
            file = Path(str(path))
            in_file = read_values(file)
            file_config = validate(self.schema, in_file, source=str(file))
        config = validate(
            self.schema,
            merged(in_file, nested(flags.items())),
            source="command line",
            describe=self._describe,
        )
        if path is not None and not printing:
            require_consent(file, config, file_config, flags, is_allowed=is_code_allowed)
        notes: list[str] = []
        if fit:
            explicit = set(map(dotted, (*dict(leaves(in_file)), *flags)))
            config, notes = fit(config, explicit)
        if printing:
            for note in notes:
                print(f"# {note}")
            print(to_yaml(self.printed(config)), end="")
            raise SystemExit(0)
        return config, notes

    def _mesh_flags(self, text: str) -> dict[tuple[str, ...], object]:
        kinds = get_type_hints(get_type_hints(self.schema)["mesh"])
        axes = [name for name, kind in kinds.items() if int in (kind, *get_args(kind))]
        sizes = parse_mesh(text, axes, allow_rest=True)
        return {("mesh", axis): size for axis, size in sizes.items()}

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return _first_sentence(" ".join(self.description.split()))

    def used_settings(self) -> list[Setting]:
        """Returns the common flags, then the settings that the command uses."""
        unused = tuple(f"{name}." for name in self.ignored)
        settings = [
            setting
            for name, setting in leaf_settings(self.schema).items()
            if not f"{name}.".startswith(unused)
        ]
        common = []
        if not any(setting.is_required for setting in settings):
            common = [_CONFIG, _PRINT]
            if any(RUNS_CODE in setting.marks for setting in settings):
                common.append(_ALLOW)
        mesh = find_setting(self.schema, "mesh")
        # The command check has its own --mesh.
        if mesh and mesh.is_section and not any(s.flag == mesh.flag for s in settings):
            common.append(_MESH)
        return common + settings

    def _print_help(self, flag: str, section: str = "") -> None:
        settings = self.used_settings()
        sections = list(dict.fromkeys(s.keys[0] for s in settings if len(s.keys) > 1))
        description = self.description.strip()
        is_short = False
        if flag in (HELP, "-h"):
            if section and not section.startswith("-"):
                if section not in sections:
                    raise self._unknown_section(section, sections)
                settings = [setting for setting in settings if setting.keys[0] == section]
            elif self.short_help:
                is_short = True
                by_name = {setting.name: setting for setting in settings}
                settings = [setting for setting in settings if setting in (_CONFIG, _PRINT, _MESH)]
                settings += [by_name[name] for name in self.short_help if name in by_name]
                section_help = f"{HELP} SECTION ({', '.join(sections)}), or " if sections else ""
                description += f"\n\nMore settings: {section_help}{ALL_HELP}"
        columns = shutil.get_terminal_size().columns
        positional = [_label(setting) for setting in settings if POSITIONAL in setting.marks]
        print("usage:", self.program, "[FLAGS]", *positional)
        print("", _filled(description, columns), "", sep="\n")
        rows = []
        for setting in settings:
            text = help_text(setting)
            text = _first_sentence(text) if is_short else text
            rows.append((_label(setting), text + _default_and_limits(setting)))
        _print_table(rows, columns)

    def _unknown_section(self, section: str, sections: Sequence[str]) -> ConfigError:
        close = nearest_name(section, sections)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(sections) or 'none'}"
        return ConfigError(
            f"{HELP} {truncate(section)}: {self.program} has no such section; {hint}"
        )

    def _parse(self, argv: Sequence[str]) -> dict[Setting, object]:
        values: dict[Setting, Any] = {}
        arguments: list[str] = []
        words = deque(argv)
        while words:
            word = words.popleft()
            if word == "--":
                arguments += words
                break
            if not _is_flag(word):
                arguments.append(word)
                continue
            flag, equals, text = word.partition("=")
            setting = self._find(flag)
            if setting.kind is bool:
                if equals:
                    raise ConfigError(
                        f"{word}: takes no value; {' or '.join(map(_flag, spellings(setting)))}"
                    )
                values[setting] = _key(flag) != _negated(_key(setting.flag))
                continue
            if setting in values and setting.flag in ("--config", "--mesh") and not setting.is_list:
                raise ConfigError(f"{flag} is given twice")
            texts = [text] if equals else _take_values(setting, words)
            if not texts or (setting.owner is _CommonFlags and texts == [""]):
                example = ", such as true" if setting.kind is object else ""
                raise ConfigError(
                    f"{flag} needs a value{example}; a value that begins with - is written "
                    f"{flag}=-..."
                )
            if setting.is_list:
                values[setting] = (*values.get(setting, ()), *texts)
            else:
                values[setting] = _value(setting, texts[0])
        self._add_positional(values, arguments)
        return values

    def _add_positional(self, values: dict[Setting, Any], arguments: list[str]) -> None:
        for setting in leaf_settings(self.schema).values():
            if POSITIONAL in setting.marks and arguments:
                if setting.is_list:
                    values[setting] = tuple(arguments)
                    arguments = []
                else:
                    values[setting], *arguments = arguments
            if setting.is_required and setting not in values:
                raise ConfigError(
                    f"{self.program} needs {_name_in_errors(setting)}; see {self.program} {HELP}"
                )
        if arguments:
            first = arguments[0]
            hint = f"see {self.program} {HELP}"
            is_file = first.endswith((".yaml", ".yml"))
            if is_file and _CONFIG not in values and _CONFIG in self.used_settings():
                hint = f"to read the file, use {_CONFIG.flag} {truncate(shlex.quote(first), 300)}"
            raise ConfigError(f"{truncate(first, 300) or repr('')}: unexpected argument; {hint}")

    @cached_property
    def _by_spelling(self) -> dict[str, Setting]:
        by_spelling: dict[str, Setting] = {}
        for setting in self.used_settings():
            by_spelling |= dict.fromkeys(spellings(setting), setting)
        return by_spelling

    def _find(self, flag: str) -> Setting:
        name = _key(flag)
        by_name = self._by_spelling
        section, _, key = name.rpartition(".")
        mapping = by_name.get(section)
        if mapping is not None and get_origin(mapping.kind) is dict:
            return dataclasses.replace(
                mapping,
                path=(*mapping.path, key),
                keys=(*mapping.keys, key),
                flag=flag,
                kind=object,
            )
        if name not in by_name:
            raise ConfigError(f"{truncate(flag)}: {self._suggestion(name, list(by_name))}")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag}: flags begin with two dashes; did you mean -{flag}?")
        return by_name[name]

    def _suggestion(self, name: str, names: Sequence[str]) -> str:
        if any(name in spellings(setting) for setting in leaf_settings(self.schema).values()):
            return f"{self.program} does not use it; leave it out (a --config file may contain it)"
        setting = find_setting(self.schema, name)
        if setting is not None and POSITIONAL in setting.marks:
            return f"give {_name_in_errors(setting)} without a flag"
        if setting is not None and ONLY_IN_FILES in setting.marks:
            return f"{setting.name} has no flag; set it in a --config file"
        example = next((other for other in names if other.startswith(f"{name}.")), None)
        if example is not None:
            return f"is a section of settings, such as {_flag(example)}"
        all_help = ALL_HELP if self.short_help else HELP
        hint = hint_for(name, names, _flag) or f"see {self.program} {all_help}"
        return f"{self.program} has no such setting; {hint}"

    def _describe(self, keys: Sequence[object], value: object) -> str:
        setting = find_setting(self.schema, dotted(keys))
        name = _name_in_errors(setting) if setting else keys[0]
        return f"{name} {truncate(value, 300) or repr(value)}"


def _take_values(setting: Setting, words: deque[str]) -> list[str]:
    takes_many = setting.is_list and REPEATED not in setting.marks
    texts: list[str] = []
    while words and words[0] != "--" and not _is_flag(words[0]) and (takes_many or not texts):
        texts.append(words.popleft())
    return texts


def parse_mesh(text: str, axes: Sequence[str], *, allow_rest: bool = False) -> dict[str, int]:
    """Parses `fsdp=2,tp=4`; other axes have size 1.

    `allow_rest` accepts -1: all remaining devices.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = map(str.strip, part.partition("="))
        if axis not in axes:
            problem = (
                f"{truncate(repr(axis))} is not an axis; they are {', '.join(axes)}, as in "
                "fsdp=2,tp=4"
            )
        elif not (re.fullmatch("0*[1-9][0-9]{0,9}", size) or (allow_rest and size == "-1")):
            problem = f"{axis}={truncate(size)} is not a number of devices: 1, 2, ..."
        elif axis in sizes:
            problem = f"{axis} is given twice"
        else:
            sizes[axis] = int(size)
            continue
        raise ConfigError(f"--mesh {truncate(text)}: {problem}")
    devices = math.prod(sizes.values())
    if devices >= 2**31:  # JAX counts devices in 32 bits
        raise ConfigError(f"--mesh {truncate(text)}: {devices:,} devices are too many for JAX")
    return dict.fromkeys(axes, 1) | sizes


def choose(
    program: str, commands: Mapping[str, str | Command[Any]], argv: Sequence[str], note: str = ""
) -> tuple[str, list[str]]:
    """Splits off the name of a command of `program`, such as `jaxtp convert`.

    `--help` lists the names and exits.

    Args:
      commands: commands, or their summaries, by name.
      note: last lines of the list.
    """
    name, *arguments = argv or (HELP,)
    if name in _HELP_WORDS:
        print(f"usage: {program} COMMAND ...\n")
        rows = [
            (name, command if isinstance(command, str) else command.summary)
            for name, command in commands.items()
        ]
        _print_table(rows, shutil.get_terminal_size().columns)
        print(note or f"\n{program} COMMAND --help says more.")
        raise SystemExit(0)
    if name not in commands:
        successor = REMOVED_COMMANDS.get(f"{program} {name}")
        if successor is not None:
            raise ConfigError(f"{program} {name} is now {successor}")
        close = closest(name, commands)
        hint = f"there are {', '.join(commands)}"
        if close:
            hint = f"did you mean {program} {close}?"
        raise ConfigError(f"{truncate(repr(name))} is not a command of {program}; {hint}")
    return name, arguments


def useful_flags(setting: Setting) -> list[str]:
    """Returns a setting's flags, without `--no-...` where the default is off."""
    flags = list(map(_flag, spellings(setting)))
    if setting.kind is bool and setting.default is False:
        flags.remove(_flag(_negated(_key(setting.flag))))
    return flags


def _name_in_errors(setting: Setting) -> str:
    if ONLY_IN_FILES in setting.marks:
        return setting.name
    if POSITIONAL in setting.marks:
        return setting.argument.value
    return setting.flag


def spellings(setting: Setting) -> Iterator[str]:
    """Yields the flags of a setting, without leading dashes, with _ between words."""
    if POSITIONAL in setting.marks or ONLY_IN_FILES in setting.marks:
        return
    yield _key(setting.flag)
    if setting.kind is bool:
        yield _negated(_key(setting.flag))
    if setting.argument.other_flag:
        yield _key(setting.argument.other_flag)


def _value(setting: Setting, word: str) -> object:
    """Returns a word as a value that pydantic validates.

    The value of a mapping's key has no type, so it is read as in a YAML file.
    """
    if setting.kind is object:
        with contextlib.suppress(ValueError):
            return parse_yaml(word.encode())
    choices = get_args(setting.kind)
    if type(None) in choices and not {str, Path} & {*choices} and word.lower() in ("none", "null"):
        return None
    return next((choice for choice in literal_choices(setting.kind) if str(choice) == word), word)


def _is_flag(word: str) -> bool:
    return re.match(r"--?[^\W\d_]", word) is not None


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _negated(key: str) -> str:
    section, dot, last = key.rpartition(".")
    return f"{section}{dot}no_{last}"


def _label(setting: Setting) -> str:
    """Returns a setting as a command line has it: `--mesh.tp INT`."""
    if ONLY_IN_FILES in setting.marks or POSITIONAL in setting.marks:
        return _name_in_errors(setting)
    flags = ", ".join(useful_flags(setting))
    if setting.kind is bool:
        return flags
    if get_origin(setting.kind) is dict:
        return f"{setting.flag}.NAME VALUE"
    kinds = {setting.kind, *get_args(setting.kind)}
    value = next((name for kind, name in _VALUES.items() if kind in kinds), "")
    if choices := ",".join(map(str, literal_choices(setting.kind))):
        value = f"{{{choices}}}"
    takes_many = setting.is_list and REPEATED not in setting.marks
    return f"{flags} {setting.argument.value or value}{' ...' if takes_many else ''}"


def literal_choices(kind: object) -> tuple[object, ...]:
    """Returns the values of a `Literal`, which may be optional or in a tuple."""
    parts = get_args(kind)
    return parts if get_origin(kind) is Literal else tuple(chain(*map(literal_choices, parts)))


def help_text(setting: Setting) -> str:
    """Returns the description of a setting."""
    own = (getattr(mark, "description", None) for mark in setting.marks)
    return next(filter(None, own), _docstring(setting))


def _default_and_limits(setting: Setting) -> str:
    """Returns ` (default: 4; at least 1)`, or nothing."""
    notes = []
    if setting.is_required:
        notes.append("required")
    elif setting.default is not False and setting.default not in (None, (), "", {}):
        default: Any = setting.default if setting.is_list else (setting.default,)
        notes.append(" ".join(["default:", *map(str, default)]))
    for limit in chain(*(getattr(mark, "metadata", ()) for mark in setting.marks)):
        for name, words in _LIMITS.items():
            value = getattr(limit, name, _MAX_LIMIT)
            if value < _MAX_LIMIT:
                notes.append(f"{words} {value}")
    return f" ({'; '.join(notes)})" if notes else ""


def _print_table(rows: Sequence[tuple[str, str]], columns: int) -> None:
    """Prints labels and texts in two columns."""
    width = min(_MAX_LABEL, max((len(label) for label, _ in rows), default=0))
    margin = " " * (width + 4)
    for label, text in rows:
        first = f"  {label:<{width}}  "
        if len(label) > width:
            if len(label) + 2 > columns:
                label = label.replace(",", ", ")
            print(folded(label, columns, initial_indent="  ", subsequent_indent="    "))
            first = margin
        print(folded(text, columns, initial_indent=first, subsequent_indent=margin))


def _docstring(setting: Setting) -> str:
    """Returns the string below the field of a setting."""
    for kind in filter(dataclasses.is_dataclass, setting.owner.__mro__):
        texts = _docstrings(inspect.getsourcefile(kind) or "")
        if text := texts.get((kind.__name__, setting.path[-1])):
            return " ".join(text.split())
    return ""


@cache
def _docstrings(path: str) -> dict[tuple[str, str], str]:
    texts = {}
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for statement in pairwise(node.body):
                match statement:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        texts[node.name, name] = text
    return texts


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _filled(text: str, width: int) -> str:
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = list(map(str.strip, paragraph.splitlines()))
        is_code = paragraph.startswith(("jaxtp ", " "))
        filled = folded(" ".join(lines), width)
        paragraphs.append(textwrap.indent("\n".join(lines), "  ") if is_code else filled)
    return "\n\n".join(paragraphs)
