"""Command lines: the settings that a command offers, how flags and a YAML file set them, and what its help shows.

Every command is a `Command`: a schema (see `jaxtp.config`) and how much of it the help shows first. All of them spell
the same things alike: `--config FILE` for values in YAML, dotted flags that replace them (`--mesh.tp 4`), `--mesh
fsdp=2,tp=4` for a whole mesh, `--print-config`, `--help`, `--help SECTION` and `--help-all`.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object

from jaxtp.config import ConfigError, Switch, flag, hints_of, leaves, merged, read_values, to_yaml, validate
from jaxtp.launch.environment import columns
from jaxtp.reading import shown

T = TypeVar("T")

HELP, SHORT_HELP, ALL_HELP = "--help", "-h", "--help-all"
CONFIG, MESH, PRINT = "--config", "--mesh", "--print-config"
_SECTION = "mesh"
"""The section that --mesh sets as a whole."""
_NONE = ("none", "null")
_LEAST_COLUMNS, _COLUMNS_OF_ERRORS = 20, 80
"""Columns that help needs at least; tyro never ends where there are less than six. It breaks words of errors."""
_REST = "--"
"""All words after it are values, also those that begin with dashes."""
_SIZES = "sizes of axes, as in --mesh fsdp=2,tp=4"
_JOIN = "__"
"""Stands between the keys of a setting in the name of a field."""


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """A command, or one of the commands of a family such as `jaxtp convert import`."""

    program: str
    """How it is called: `jaxtp train`."""

    schema: type[T]
    """Dataclass of its settings."""

    description: str
    """Purpose and examples, for its help; the first line stands in lists of commands."""

    first: tuple[str, ...] = ()
    """Dotted names of the settings that --help shows; all of them, where there are few."""

    without: tuple[str, ...] = ()
    """Dotted names of settings and sections that a --config file may have and the command has no use for."""

    printed: Callable[[T], Any] = lambda config: config
    """Takes the configuration; returns the part of it that --print-config prints."""

    def load(
        self, argv: Sequence[str], fit: Callable[[T, Set[str]], tuple[T, list[str]]] | None = None
    ) -> tuple[T, list[str]]:
        """Returns the configuration that a command line asks for, and notes on its defaults.

        Defaults that depend on what was asked for, or on the devices, are chosen here, by `fit`: this alone knows which
        values were given. A configuration made in Python is taken as it is.

        Args:
          argv: the flags.
          fit: takes the configuration and the dotted names of the settings that a flag or the YAML file gives, which it
            must leave as they are; returns the configuration with its own defaults for others, and notes that say why.

        Raises:
          ConfigError: unreadable YAML, an unknown key, a value of the wrong type or out of range, a setting that the
            command has no use for.
          SystemExit: help or `--print-config` (0), or a flag that does not parse (2), after a message on stderr.
        """
        own = {f"--{name[2:].replace('-', '_')}": name for name in (PRINT, ALL_HELP)}  # spelled as tyro lets others be
        flags = [own.get(name, name) for name in itertools.takewhile(lambda name: name != _REST, argv)]
        rest = argv[len(flags) :]
        path, flags = _taken(CONFIG, flags, "a file, as in --config configs/tiny.yaml")
        if self._meshes in ("section", "text"):
            mesh, flags = _taken(MESH, flags, _SIZES)
            if mesh is not None:
                flags = [*(self._sizes(mesh) if self._meshes == "section" else [f"{MESH}={mesh}"]), *flags]
        values, default = self._file(path)
        if {HELP, SHORT_HELP, ALL_HELP} & set(flags):
            self._print_help(flags, default)
            raise SystemExit(0)
        given = [name for name in flags if name != PRINT]
        named = self._settings(given)
        if missing := [name for name in self._required() if name not in named]:
            raise ConfigError(f"{self.program} needs {flag(self.schema, missing[0])}; see {self.program} {HELP}")
        config = validate(
            self.schema,
            merged(
                {} if default is tyro.MISSING else dataclasses.asdict(default),
                self._words([*_joined(given), *rest], named, default),
            ),
            source="command line",
            spelled=self._spelled,
        )
        config, notes = fit(config, {*leaves(values), *map(".".join, named)}) if fit else (config, [])
        if PRINT in flags:
            print("".join(f"# {note}\n" for note in notes) + to_yaml(self.printed(config)), end="")
            raise SystemExit(0)
        return config, notes

    def _spelled(self, keys: Sequence[Any], value: Any) -> str:
        """Returns a setting and its value as they are typed: a positional one by its name in the help."""
        name = _place(hints_of(self.schema)[keys[0]]) or flag(self.schema, keys)
        return f"{name} {shown(value, 300) or repr(value)}"

    def everything(self) -> Any:
        """Returns a schema of all that the command line takes, flags of this module too, for completion in a shell."""
        marked = ((keys, getattr(kind, "__metadata__", ()), value) for keys, kind, value in _settings_of(self.schema))
        return self._flat({".".join(keys): value for keys, marks, value in marked if tyro.conf.Fixed not in marks})

    @property
    def _meshes(self) -> Literal["section", "text", "several", "none"]:
        """How it takes --mesh: as a section of sizes, as text, as several of these to ask about, or not at all."""
        kinds = [_plain(kind) for keys, kind, _ in _settings_of(self.schema) if flag(self.schema, keys) == MESH]
        if kinds:
            return "several" if get_origin(kinds[0]) is tuple else "text"
        return "section" if dataclasses.is_dataclass(get_type_hints(self.schema).get(_SECTION)) else "none"

    def _sizes(self, text: str) -> list[str]:
        """Returns a mesh as flags of the axes that the command's mesh has.

        Raises:
          MeshError: the text is not of that form.
          ConfigError: it divides along an axis that the command does not.
        """
        from jaxtp.mesh import parse_mesh  # with JAX, which not every command needs

        sizes = parse_mesh(text, what_is_left=True)
        axes = [field.name for field in dataclasses.fields(get_type_hints(self.schema)[_SECTION])]
        for axis, size in sizes.items():
            if axis not in axes and size != 1:
                raise ConfigError(f"{MESH} {text}: {self.program} takes {' and '.join(axes)}, and not {axis}")
        return [f"{MESH}.{axis}={size}" for axis, size in sizes.items() if axis in axes]

    def _file(self, path: str | None) -> tuple[Any, Any]:
        """Returns the values of a file, and the configuration with them: none where flags are required."""
        if not any(_is_required(field) for field in dataclasses.fields(self.schema)):  # type: ignore[arg-type]
            values = {} if path is None else read_values(Path(path))
            return values, validate(self.schema, values, source=str(path))
        if path is not None:
            raise ConfigError(f"{CONFIG} {path}: {self.program} has no settings in files; give flags alone")
        return {}, tyro.MISSING

    def _is_foreign(self, name: str) -> bool:
        return any(name == other or name.startswith(f"{other}.") for other in self.without)

    def _settings(self, flags: Sequence[str]) -> set[tuple[str, ...]]:
        """Returns the settings that flags name, each by its keys.

        Raises:
          ConfigError: there is no such setting, it has no flag, or the command has no use for it.
        """
        known: Mapping[str, tuple[str, ...]] = spellings(self.schema)  # type: ignore[arg-type]
        switches = {keys for keys, kind, _ in _settings_of(self.schema) if _plain(kind) is bool}
        named: set[tuple[str, ...]] = set()
        for given, after in itertools.pairwise([*flags, ""]):
            spelled, equals, value = given.partition("=")
            if re.match("-[a-z]", spelled) and spelled[1:].replace("-", "_") in known:
                raise ConfigError(f"{spelled}: flags begin with two dashes; did you mean -{spelled}?")
            if not re.fullmatch(r"--[^\W_][^\s]*", spelled):  # a value, such as "-- and more", or for tyro to refuse
                continue
            name = spelled.removeprefix("--").replace("-", "_")
            keys = known.get(name, tuple(name.split(".")))
            if self._is_foreign(".".join(keys)):
                raise ConfigError(
                    f"{spelled}: {self.program} has no use for it; leave it out (in a {CONFIG} file it may stay)"
                )
            if name not in known:
                raise ConfigError(f"{shown(spelled)}: {self._instead(name)}")
            if keys in switches and (equals or after.lower() in ("true", "false")):
                on, off = list(_names(self.schema, keys, bool))[:2]
                whole = f"{spelled}{equals or ' '}{shown(value if equals else after)}"
                raise ConfigError(f"{whole}: it takes no value; {_spelled(on)} turns it on, and {_spelled(off)} off")
            named.add(keys)
        return named

    def _required(self) -> list[tuple[str, ...]]:
        """Returns the keys of the settings that have no default and are not told by their place."""
        return [
            keys
            for keys, kind, default in _settings_of(self.schema)
            if default is dataclasses.MISSING and tyro.conf.Positional not in getattr(kind, "__metadata__", ())
        ]

    def _instead(self, name: str) -> str:
        """Says why a flag is none of the command, and what to give instead; its name as in `spellings`."""
        if f"--{name.replace('_', '-')}" in (PRINT, HELP, ALL_HELP):
            return "it takes no value"
        keys = tuple(name.split("."))
        kind = next((kind for known, kind, _ in _settings_of(self.schema) if known == keys), None)
        marks = getattr(kind, "__metadata__", ())
        if tyro.conf.Positional in marks:
            return "give its value alone, without a flag"
        for fixed, kind_of, _ in _settings_of(self.schema):
            if fixed == keys[: len(fixed)] and tyro.conf.Fixed in getattr(kind_of, "__metadata__", ()):
                return f"{'.'.join(fixed)} has no flag; set it in a {CONFIG} file"
        if turned_off := self._off(name):
            return f"{self.program} has no such setting; did you mean {turned_off}?"
        offered = [
            other
            for other, there in spellings(self.schema).items()  # type: ignore[arg-type]
            if not self._is_foreign(".".join(there))
        ]
        if within := next((other for other in offered if other.startswith(f"{name}.")), None):
            return f"it is a section of settings, such as {_spelled(within)}"
        own = [] if self._required() else [CONFIG, PRINT, *([MESH] if self._meshes == "section" else [])]
        known = [*offered, *(flag.removeprefix("--").replace("-", "_") for flag in (*own, HELP))]
        close = next(_names(self.schema, keys, kind)) if kind is not None else _closest(name, known)
        section = keys[0] if any(other.startswith(f"{keys[0]}.") for other in offered) else None
        more = f"{HELP} {section}" if section else ALL_HELP if self.first else HELP
        hint = f"did you mean {_spelled(close)}?" if close else f"{self.program} {more} shows all"
        return f"{self.program} has no such setting; {hint}"

    def _off(self, name: str) -> str | None:
        """Returns the flag that turns off what a name with no_ before it, or before its last part, is to turn off."""
        section, dot, last = name.removeprefix("no_").rpartition(".")
        meant = f"{section}{dot}{last.removeprefix('no_')}"
        kinds = {".".join(keys): kind for keys, kind, _ in _settings_of(self.schema)}
        keys: tuple[str, ...] = spellings(self.schema).get(meant, ())  # type: ignore[arg-type]
        kind = _plain(kinds.get(".".join(keys)))
        if meant == name or (kind is not bool and bool not in get_args(kind)):
            return None
        return _spelled(list(_names(self.schema, keys, kind))[1]) if kind is bool else f"{_spelled(meant)}=false"

    def _words(self, flags: Sequence[str], named: Set[tuple[str, ...]], default: Any) -> dict[str, Any]:
        """Returns the plain values that flags give, by section.

        tyro takes half a millisecond for each field of a schema, so it sees only those that are named. It decides which
        words belong to which flag; `validate` then checks the words, as it checks a file.

        Args:
          flags: the flags.
          named: keys of the settings in them.
          default: the configuration that they change, `tyro.MISSING` if there is none.

        Raises:
          ConfigError: a flag without its value, or a value without its flag.
        """
        view = _for_words(self.schema, default, named)
        if not dataclasses.fields(view) and not flags:
            return {}
        errors, no_terminal = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(no_terminal):
                words = vars(_parse(view, flags, tyro.MISSING, self.program, _COLUMNS_OF_ERRORS))
        except SystemExit:
            problem = self._explained(_within_frame(errors.getvalue()))
            raise ConfigError(f"{problem}; see {self.program} {HELP}") from None
        kinds = {_JOIN.join(keys): kind for keys, kind, _ in _settings_of(self.schema)}
        values: dict[str, Any] = {}
        for name, value in words.items():
            *sections, key = name.split(_JOIN)
            if _is_none(kinds[name], value):
                value = None
            reduce(lambda inner, section: inner.setdefault(section, {}), sections, values)[key] = value
        return values

    def _explained(self, problem: str) -> str:
        """Returns what tyro says of a missing value, or of one without a flag, in this program's words."""
        places = {keys[0]: kind for keys, kind, _ in _settings_of(self.schema) if _place(kind)}
        if missing := re.match(r"Missing value for argument '([^']+)'", problem):
            name = missing[1].rpartition("/")[2]  # the last of its names is the whole one
            if name in places:
                return f"{_place(places[name])} is missing; one that begins with - is given after {_REST}"
            keys: tuple[str, ...] = spellings(self.schema).get(name[2:].replace("-", "_"), ())  # type: ignore[arg-type]
            kind = next((_plain(kind) for known, kind, _ in _settings_of(self.schema) if known == keys), None)
            if bool in get_args(kind):
                return f"{name} needs a value: true, false or none"
            return f"{name} needs a value; one that begins with - is given as {name}=-..."
        head, colon, words = problem.partition("Unrecognized options:")
        if colon and not head:
            several = [_place(kind) for kind in places.values() if get_origin(_plain(kind)) is tuple]
            together = f", and {several[0]}s stand together" if several else ""
            return f"{shown(words.strip(), 300) or repr('')}: no flag takes this{together}"
        return shown(problem, 300)

    def _print_help(self, flags: Sequence[str], default: Any) -> None:
        """Prints the help that is asked for: the first settings, those of a section, or all."""
        at = next(i for i, name in enumerate(flags) if name in (HELP, SHORT_HELP, ALL_HELP))
        after = flags[at + 1] if flags[at] != ALL_HELP and at + 1 < len(flags) else ""
        hints = get_type_hints(self.schema)
        sections = [
            name for name, kind in hints.items() if dataclasses.is_dataclass(kind) and not self._is_foreign(name)
        ]
        if after and after not in sections and not after.startswith("-"):
            close = difflib.get_close_matches(after, sections, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sections) or 'none'}"
            raise ConfigError(f"{HELP} {shown(after)}: {self.program} has no such section of settings; {hint}")
        short = bool(self.first) and flags[at] != ALL_HELP and after not in sections
        if short:
            view = self._flat({name: reduce(getattr, name.split("."), default) for name in self.first})
            filled = view()
        else:
            within = f"{after}." if after in sections else ""
            view = self._offered(lambda name: name.startswith(within) and not self._is_foreign(name))
            filled = default if default is tyro.MISSING else _filled(view, default)
        usage, _, settings = _printed(lambda: _parse(view, [HELP], filled, self.program)).partition("\n")
        print(usage, _wrapped(self.description), settings.strip("\n"), sep="\n\n")
        if short:
            more = f"{HELP} SECTION ({', '.join(sections)}), or {ALL_HELP}" if sections else ALL_HELP
            print(_wrapped(f"More settings, and more about these: {more}"))

    def _offered(self, is_offered: Callable[[str], bool]) -> Any:
        """Returns the schema with the flags of this module, and without the settings that are not offered.

        Args:
          is_offered: takes a dotted name.
        """
        return _view(self.schema, is_offered, "", self._own_flags())

    def _flat(self, values: Mapping[str, Any]) -> Any:
        """Returns a schema without sections: settings, each with the beginning of its text, and this module's flags.

        Args:
          values: defaults of the settings by dotted name.
        """
        fields = [(name, kind, dataclasses.field(default=value)) for name, kind, value in self._own_flags()]
        for name, value in values.items():
            if self._is_foreign(name):
                continue
            keys = name.split(".")
            schema = reduce(lambda schema, key: get_type_hints(schema)[key], keys[:-1], self.schema)
            kind = get_type_hints(schema, include_extras=True)[keys[-1]]
            said = _begun(_docstrings(schema).get(keys[-1], ""))
            spelled = flag(self.schema, keys).removeprefix("--")
            fields.append((_JOIN.join(keys), _shown(kind, said, value, spelled), dataclasses.field(default=value)))
        return dataclasses.make_dataclass("Settings", fields, frozen=True, kw_only=True, namespace={"__doc__": ""})

    def _own_flags(self) -> list[tuple[str, Any, Any]]:
        """Returns the flags of this module that the command takes: name of the field, type, and default."""
        own: list[tuple[str, Any, Any]] = []
        if not any(_is_required(field) for field in dataclasses.fields(self.schema)):  # type: ignore[arg-type]
            words = "YAML file of settings, which flags replace."
            own.append(("config_", _shown(Path | None, words, None, "config", "FILE"), None))
        if self._meshes == "section":
            words = "Size of each axis of the mesh; one that is left out is 1."
            own.append(("mesh_", _shown(str | None, words, None, "mesh", "fsdp=2,tp=4"), None))
        if own:
            words = "Prints the settings that all of this comes to, as YAML, and does nothing else."
            own.append(("print_config_", _shown(Switch, words, False, "print-config"), False))
        return own


def choose(program: str, commands: Mapping[str, Command[Any]], argv: Sequence[str]) -> tuple[Command[Any], list[str]]:
    """Returns the command of a family that a command line begins with, and what follows; prints them for `--help`.

    Raises:
      ConfigError, SystemExit: as `choose_name`.
    """
    summaries = {name: command.description.partition("\n")[0] for name, command in commands.items()}
    name, rest = choose_name(program, summaries, argv)
    return commands[name], rest


def choose_name(
    program: str, commands: Mapping[str, str], argv: Sequence[str], note: str = ""
) -> tuple[str, list[str]]:
    """Returns the name of the command that a command line begins with, and what follows.

    Args:
      program: how the family is called: `jaxtp convert`.
      commands: what each does, in a line.
      argv: the command line.
      note: ends the list of them; by default it names the help of each.

    Raises:
      ConfigError: it begins with none of them.
      SystemExit: `--help` (0), after the list of them.
    """
    name, *rest = argv or (HELP,)
    if name in (HELP, SHORT_HELP, ALL_HELP):
        width = max(map(len, commands)) + 2
        print(f"usage: {program} COMMAND ...\n")
        with columns(_LEAST_COLUMNS) as there:
            fill = partial(textwrap.fill, width=there, subsequent_indent=" " * (width + 2))
        print(*(fill(f"  {command:<{width}}{text}") for command, text in commands.items()), sep="\n")
        print(note or f"\n{program} COMMAND --help says more.")
        raise SystemExit(0)
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {program} {close[0]}?" if close else f"there are {', '.join(commands)}"
        raise ConfigError(f"{shown(repr(name))} is not a command of {program}; {hint}")
    return name, rest


Commands = Mapping[str, Command[Any] | Mapping[str, Command[Any]]]
"""Commands by name; those of a family by the names in it."""


def completion(program: str, commands: Commands, words: Mapping[str, Sequence[str]], shell: str) -> str:
    """Returns the script by which a shell completes commands and their flags.

    Args:
      program: name of the program.
      commands: its commands.
      words: other commands, each with the words of which it takes one.
      shell: bash, zsh or fish.
    """
    kinds = tuple(_subcommand(name, command) for name, command in {**commands, **words}.items())
    markers = (tyro.conf.AvoidSubcommands, tyro.conf.OmitSubcommandPrefixes)
    flags = ["--tyro-print-completion", shell]
    return _printed(lambda: tyro.cli(Union[kinds], args=flags, prog=program, config=markers))  # type: ignore  # noqa: UP007


def _subcommand(name: str, command: Command[Any] | Mapping[str, Command[Any]] | Sequence[str]) -> Any:
    if isinstance(command, Command):
        return Annotated[command.everything(), tyro.conf.subcommand(name=name)]
    if isinstance(command, Mapping):
        kinds = [_subcommand(*item) for item in command.items()]
    else:
        kinds = [Annotated[dataclasses.make_dataclass(word, []), tyro.conf.subcommand(name=word)] for word in command]
    if len(kinds) == 1:  # tyro would take it for the family, and complete its flags without its name
        kinds.append(Annotated[None, tyro.conf.subcommand(name=HELP)])
    inner: Any = Union[tuple(kinds)]  # noqa: UP007
    family = dataclasses.make_dataclass(name, [("command", inner)])
    return Annotated[family, tyro.conf.subcommand(name=name)]


def _parse(schema: Any, flags: Sequence[str], default: Any, program: str, least: int = _LEAST_COLUMNS) -> Any:
    given = {} if default is tyro.MISSING else {"default": default}
    config = (tyro.conf.AvoidSubcommands,)
    with columns(least):
        return tyro.cli(schema, args=flags, prog=program, description="", config=config, **given)


def _view(schema: Any, is_offered: Callable[[str], bool], prefix: str, own: list[tuple[str, Any, Any]]) -> Any:
    """Returns a subclass of a schema in which what is not offered has no flag, with fields of its own before others."""
    fields: list[tuple[str, Any, Any]] = [(name, kind, dataclasses.field(default=value)) for name, kind, value in own]
    texts, hints = _docstrings(schema), get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        name, kind = field.name, hints[field.name]
        marks = getattr(kind, "__metadata__", ())
        if dataclasses.is_dataclass(inner := _plain(kind)):
            section = _view(inner, is_offered, f"{prefix}{name}.", [])
            kind = Annotated[(section, *marks)] if marks else section
            fields.append((name, kind, dataclasses.field(default=section())))
        elif not is_offered(prefix + name):
            if _is_required(field):  # tyro hides none without a default
                nothing = dataclasses.field(default=None)
                fields.append((name, Annotated[_plain(kind) | None, tyro.conf.Suppress], nothing))
            else:
                fields.append((name, Annotated[kind, tyro.conf.Suppress], field))
        else:
            fields.append((name, _shown(kind, texts.get(name, ""), field.default), field))
    documented = {"__doc__": schema.__doc__}
    return dataclasses.make_dataclass(
        schema.__name__, fields, bases=(schema,), frozen=True, kw_only=True, namespace=documented
    )


def _shown(kind: Any, text: str, default: Any, name: str | None = None, metavar: str | None = None) -> Any:
    """Returns the type of a setting with what the help says of it; that it has no value by default says nothing."""
    marks = getattr(kind, "__metadata__", ())
    given = any(getattr(part, "help", None) for part in marks)
    if metavar is None and not any(getattr(part, "metavar", None) for part in marks):
        metavar = _metavar(kind)
    hint = "" if default is None or default is False or default == () else None
    said = tyro.conf.arg(name=name, metavar=metavar, help=None if given else text, help_behavior_hint=hint)
    return Annotated[kind, said]


def _plain(kind: Any) -> Any:
    """Returns a type without what annotates it."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _metavar(kind: Any) -> str | None:
    """Returns a name for the values of a setting that may have none; None where tyro's own says it."""
    inner = get_args(_plain(kind))
    others = [_plain(part) for part in inner if part is not type(None)]
    if len(others) != 1 or len(inner) != 2:
        return None
    return {Path: "PATH", str: "TEXT", int: "INT", float: "FLOAT"}.get(others[0])


def _docstrings(schema: Any) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass, its bases' too, as one line."""
    classes = (kind for kind in reversed(schema.__mro__) if dataclasses.is_dataclass(kind))
    found = (text for kind in classes for text in parse_from_object(kind).params)
    return {text.arg_name: " ".join((text.description or "").split()) for text in found}


def _begun(text: str) -> str:
    """Returns the first clause of a text, as a sentence."""
    return re.split(r"[.;:](?=\s|$)", text, maxsplit=1)[0] + "."


def _wrapped(text: str) -> str:
    """Returns a text with its paragraphs as wide as the terminal; those of commands and what is indented stay whole."""
    with columns(_LEAST_COLUMNS) as width:
        fill = partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        is_code = paragraph.startswith(("jaxtp ", " "))
        lines = (f"  {line.strip()}" for line in paragraph.splitlines())
        paragraphs.append("\n".join(lines) if is_code else fill(" ".join(paragraph.split())))
    return "\n\n".join(paragraphs)


class _Captured(io.StringIO):
    """Text that is printed as on standard output: in colours if that is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stdout

    def isatty(self) -> bool:
        """Returns whether standard output is a terminal."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of standard output."""
        return self._stream.encoding


def _printed(action: Callable[[], object]) -> str:
    """Returns what an action prints until it ends, or ends the process."""
    captured = _Captured()
    with contextlib.redirect_stdout(captured), contextlib.suppress(SystemExit):
        action()
    return captured.getvalue()


def _filled(view: Any, values: Any) -> Any:
    """Returns an object of a view with the values of one of its schema."""
    hints = {field.name: field.default for field in dataclasses.fields(view)}
    names = {field.name for field in dataclasses.fields(values)}
    return view(
        **{
            name: _filled(type(hints[name]), value) if dataclasses.is_dataclass(value) else value
            for name, value in vars(values).items()
            if name in names
        }
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _taken(name: str, argv: Sequence[str], needs: str) -> tuple[str | None, list[str]]:
    """Returns the value of a flag that is given once at most, and the other flags.

    Raises:
      ConfigError: it has no value, or is given twice.
    """
    values: list[str] = []
    others: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument == name:
            if not arguments or arguments[0].startswith("--"):
                raise ConfigError(f"{name} needs {needs}")
            values.append(arguments.pop(0))
            if name == MESH and arguments and re.match(r"\w+=", arguments[0]):
                whole = f"{values[-1].rstrip(',')},{arguments[0]}"
                raise ConfigError(f"{MESH} {values[-1]} {arguments[0]}: one mesh is {MESH} {whole}, without a space")
        elif argument.startswith(f"{name}="):
            values.append(argument.removeprefix(f"{name}="))
        else:
            others.append(argument)
    if "" in values:
        raise ConfigError(f"{name} is empty; it needs {needs}")
    if len(values) > 1:
        raise ConfigError(f"{name} is given twice, as {shown(values[0])} and {shown(values[1])}; give it once")
    return (values[0] if values else None), others


def _joined(flags: Sequence[str]) -> list[str]:
    """Returns flags in which a list of meshes that is given in parts, as `--mesh tp=2 --mesh tp=4`, is one.

    Raises:
      ConfigError: there is no mesh in it.
    """
    meshes: list[str] = []
    others: list[str] = []
    into = others
    for name in flags:
        if name == MESH or name.startswith(f"{MESH}="):
            into = meshes
            meshes.extend([name.removeprefix(f"{MESH}=")] if "=" in name else [])
        else:
            into = others if name.startswith("-") else into
            into.append(name)
    if MESH not in {name.partition("=")[0] for name in flags}:
        return list(flags)
    if not meshes:
        raise ConfigError(f"{MESH} needs {_SIZES}")
    return [*others, MESH, *meshes]


@cache
def spellings(schema: Any) -> dict[str, tuple[str, ...]]:
    """Returns the keys of the setting that each flag gives, by the flag without --, its words joined by _."""
    return {name: keys for keys, kind, _ in _settings_of(schema) for name in _names(schema, keys, kind)}


def _settings_of(schema: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yields the keys, the type and the default of each setting."""
    for field in dataclasses.fields(schema):
        kind, keys = hints_of(schema)[field.name], (*prefix, field.name)
        if dataclasses.is_dataclass(section := _plain(kind)):
            yield from _settings_of(section, keys)
        else:
            made = field.default_factory
            yield keys, kind, field.default if made is dataclasses.MISSING else made()


def _names(schema: Any, keys: tuple[str, ...], kind: Any) -> Iterator[str]:
    """Yields the names of the flags that give a setting, as tyro makes them of its type."""
    marks = getattr(kind, "__metadata__", ())
    if tyro.conf.Positional in marks or tyro.conf.Fixed in marks:
        return
    name = flag(schema, keys).removeprefix("--").replace("-", "_")
    yield name
    section, dot, last = name.rpartition(".")
    if _plain(kind) is bool:
        yield f"{section}{dot}no_{last}"
    for alias in (alias for mark in marks for alias in getattr(mark, "aliases", None) or ()):
        yield alias.removeprefix("--").replace("-", "_")


def _for_words(schema: Any, default: Any, named: Set[tuple[str, ...]]) -> Any:
    """Returns a schema of the settings that are named, and of those without a flag, with words for their values.

    It has no sections: the name of a field is the setting's keys, joined.
    """
    fields: list[tuple[str, Any, Any]] = []
    for keys, kind, value in _settings_of(schema):
        plain, marks = _plain(kind), getattr(kind, "__metadata__", ())
        if keys not in named and tyro.conf.Positional not in marks:
            continue
        if default is not tyro.MISSING:
            value = reduce(getattr, keys, default)
        if (word := _word(plain)) != plain and value is not None and value is not dataclasses.MISSING:
            value = tuple(map(str, value)) if isinstance(value, tuple) else str(value)
        if tyro.conf.UseAppendAction in marks:
            value = ()  # or tyro would add to those of a file
        said = tyro.conf.arg(name=flag(schema, keys).removeprefix("--"), help="")
        kept = (mark for mark in marks if mark is not tyro.conf.FlagCreatePairsOff)  # a file may have turned it on
        fields.append((_JOIN.join(keys), Annotated[(word, *kept, said)], dataclasses.field(default=value)))
    return dataclasses.make_dataclass("Settings", fields, frozen=True, kw_only=True)


def _word(kind: Any) -> Any:
    """Returns the type of what is typed for a value, before it is validated: a word, words, or as it is."""
    kind = _plain(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return str if all(isinstance(value, str) for value in inner) else kind
    if origin in (Union, UnionType):
        return reduce(or_, (str if _plain(part) is bool else _word(part) for part in inner))
    if origin is tuple:
        return tuple[_word(inner[0]), ...]  # type: ignore[misc]
    return str if kind in (int, float, Path) else kind


def _place(kind: Any) -> str | None:
    """Returns the name that the help has for a positional value; None of a setting with a flag."""
    marks = getattr(kind, "__metadata__", ())
    names = (mark.metavar for mark in marks if getattr(mark, "metavar", None))
    return next(names, None) if tyro.conf.Positional in marks else None


def _is_none(kind: Any, value: Any) -> bool:
    """Returns whether a word is none, as YAML and Python spell it, of a setting that may be none and no text."""
    inner = {_plain(part) for part in get_args(_plain(kind))}
    return type(None) in inner and not {str, Path} & inner and isinstance(value, str) and value.lower() in _NONE


def _closest(name: str, known: Sequence[str]) -> str | None:
    """Returns the dotted name that is meant: the same in another section, else one like it, best of its section."""
    section, dot, last = name.rpartition(".")
    same = [other for other in known if other.rpartition(".")[2] == last]
    beside = [other.removeprefix(f"{section}.") for other in known if dot and other.startswith(f"{section}.")]
    if same:
        close = difflib.get_close_matches(name, same, n=1, cutoff=0)
    elif beside:
        close = [f"{section}.{other}" for other in difflib.get_close_matches(last, beside, n=1, cutoff=0.5)]
    else:
        close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None


def _spelled(name: str) -> str:
    """Returns the flag of a name in `spellings`."""
    return f"--{name.replace('_', '-')}"


def _within_frame(message: str) -> str:
    """Returns the first paragraph of an error that tyro has drawn a frame around."""
    lines = [line.strip("│ ") for line in message.splitlines() if not line.startswith(("╭", "╰"))]
    first = itertools.takewhile(lambda line: not line.startswith("─"), lines)
    return " ".join(first).rstrip(".")
