"""Command lines: the settings that a command offers, how flags and a YAML file set them, and what its help shows.

Every command is a `Command`: a schema (see `jaxtp.config`) and how much of it the help shows first. All of them spell
the same things alike: `--config FILE` for values in YAML, dotted flags that replace them (`--mesh.tp 4`), `--mesh
fsdp=2,tp=4` for a whole mesh, `--print-config`, `--help`, `--help SECTION` and `--help-all`.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_type_hints

import tyro
from docstring_parser import parse_from_object

from jaxtp.config import ConfigError, Switch, flag, leaves, read_values, to_yaml, validate
from jaxtp.reading import shown

T = TypeVar("T")

HELP, SHORT_HELP, ALL_HELP = "--help", "-h", "--help-all"
CONFIG, MESH, PRINT = "--config", "--mesh", "--print-config"
_SECTION = "mesh"
"""The section that --mesh sets as a whole."""


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
        path, flags = _taken(CONFIG, argv, "a file, as in --config configs/tiny.yaml")
        if self._has_one_mesh:
            mesh, flags = _taken(MESH, flags, "sizes of axes, as in --mesh fsdp=2,tp=4")
            flags = [*([] if mesh is None else self._sizes(mesh)), *flags]
        values, default = self._file(path)
        if {HELP, SHORT_HELP, ALL_HELP} & set(flags):
            self._print_help(flags, default)
            raise SystemExit(0)
        self._refuse_foreign(flags)
        given = [name for name in flags if name != PRINT]
        parsed = _parse(self.schema, _joined(given), default, self.program)
        config = validate(
            self.schema,
            dataclasses.asdict(parsed),
            source="command line",
            spelled=lambda keys, value: f"{flag(self.schema, keys)} {value}",
        )
        config, notes = fit(config, {*leaves(values), *_named(given)}) if fit else (config, [])
        if PRINT in flags:
            print("".join(f"# {note}\n" for note in notes) + to_yaml(self.printed(config)), end="")
            raise SystemExit(0)
        return config, notes

    def everything(self) -> Any:
        """Returns a schema of all that the command line takes, flags of this module too, for completion in a shell."""
        return self._offered(lambda name: not self._is_foreign(name))

    @property
    def _has_one_mesh(self) -> bool:
        """Whether it runs on one mesh, a section; others take a list of meshes to ask about."""
        lists = any(flag(self.schema, [name]) == MESH for name in get_type_hints(self.schema) if name != _SECTION)
        return not lists and dataclasses.is_dataclass(get_type_hints(self.schema).get(_SECTION))

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

    def _refuse_foreign(self, flags: Sequence[str]) -> None:
        for name in _named(flags):
            if self._is_foreign(name) or self._is_foreign(name.removeprefix("no_").replace(".no_", ".")):
                spelled = name.replace("_", "-")
                raise ConfigError(
                    f"--{spelled}: {self.program} has no use for it; leave it out (in a {CONFIG} file it may stay)"
                )

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
            view = self._first_settings(default)
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

    def _first_settings(self, default: Any) -> Any:
        """Returns a schema of the first settings, each with the beginning of its text, and of this module's flags."""
        fields = [(name, kind, dataclasses.field(default=value)) for name, kind, value in self._own_flags()]
        for name in self.first:
            if self._is_foreign(name):
                continue
            keys = name.split(".")
            schema = reduce(lambda schema, key: get_type_hints(schema)[key], keys[:-1], self.schema)
            kind = get_type_hints(schema, include_extras=True)[keys[-1]]
            said = _begun(_docstrings(schema).get(keys[-1], ""))
            spelled = flag(self.schema, keys).removeprefix("--")
            value = reduce(getattr, keys, default)
            fields.append(("_".join(keys), _shown(kind, said, value, spelled), dataclasses.field(default=value)))
        return dataclasses.make_dataclass("Settings", fields, frozen=True, kw_only=True, namespace={"__doc__": ""})

    def _own_flags(self) -> list[tuple[str, Any, Any]]:
        """Returns the flags of this module that the command takes: name of the field, type, and default."""
        own: list[tuple[str, Any, Any]] = []
        if not any(_is_required(field) for field in dataclasses.fields(self.schema)):  # type: ignore[arg-type]
            words = "YAML file of settings, which flags replace."
            own.append(("config_", _shown(Path | None, words, None, "config", "FILE"), None))
        if self._has_one_mesh:
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
        fill = partial(textwrap.fill, width=shutil.get_terminal_size().columns, subsequent_indent=" " * (width + 2))
        print(*(fill(f"  {command:<{width}}{text}") for command, text in commands.items()), sep="\n")
        print(note or f"\n{program} COMMAND --help says more.")
        raise SystemExit(0)
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {program} {close[0]}?" if close else f"there are {', '.join(commands)}"
        raise ConfigError(f"{shown(repr(name))} is not a command of {program}; {hint}")
    return name, rest


def completion(program: str, commands: Mapping[str, Command[Any] | Mapping[str, Command[Any]]], shell: str) -> str:
    """Returns the script by which a shell completes commands and their flags.

    Args:
      program: name of the program.
      commands: by name, those of a family by the names in it.
      shell: bash, zsh or fish.
    """
    kinds = tuple(_subcommand(name, command) for name, command in commands.items())
    markers = (tyro.conf.AvoidSubcommands, tyro.conf.OmitSubcommandPrefixes)
    flags = ["--tyro-print-completion", shell]
    return _printed(lambda: tyro.cli(Union[kinds], args=flags, prog=program, config=markers))  # type: ignore  # noqa: UP007


def _subcommand(name: str, command: Command[Any] | Mapping[str, Command[Any]]) -> Any:
    if isinstance(command, Command):
        return Annotated[command.everything(), tyro.conf.subcommand(name=name)]
    inner: Any = Union[tuple(_subcommand(*item) for item in command.items())]  # noqa: UP007
    family = dataclasses.make_dataclass(name, [("command", inner)])
    return Annotated[family, tyro.conf.subcommand(name=name)]


def _parse(schema: Any, flags: Sequence[str], default: Any, program: str) -> Any:
    given = {} if default is tyro.MISSING else {"default": default}
    return tyro.cli(schema, args=flags, prog=program, description="", config=(tyro.conf.AvoidSubcommands,), **given)


def _view(schema: Any, is_offered: Callable[[str], bool], prefix: str, own: list[tuple[str, Any, Any]]) -> Any:
    """Returns a subclass of a schema in which what is not offered has no flag, with fields of its own before others."""
    fields: list[tuple[str, Any, Any]] = [(name, kind, dataclasses.field(default=value)) for name, kind, value in own]
    texts, hints = _docstrings(schema), get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        kind, marks = hints[field.name], getattr(hints[field.name], "__metadata__", ())
        if dataclasses.is_dataclass(inner := getattr(kind, "__origin__", kind)):
            section = _view(inner, is_offered, f"{prefix}{field.name}.", [])
            kind = Annotated[(section, *marks)] if marks else section
            fields.append((field.name, kind, dataclasses.field(default=section())))
        elif not is_offered(prefix + field.name):
            fields.append((field.name, Annotated[kind, tyro.conf.Suppress], field))
        else:
            fields.append((field.name, _shown(kind, texts.get(field.name, ""), field.default), field))
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


def _metavar(kind: Any) -> str | None:
    """Returns a name for the values of a setting that may have none; None where tyro's own says it."""
    plain = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    others = [getattr(part, "__origin__", part) for part in get_args(plain) if part is not type(None)]
    if len(others) != 1 or len(get_args(plain)) != 2:
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
    width = shutil.get_terminal_size().columns
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
                whole = f"{values[-1]},{arguments[0]}"
                raise ConfigError(f"{MESH} {values[-1]} {arguments[0]}: one mesh is {MESH} {whole}, without a space")
        elif argument.startswith(f"{name}="):
            values.append(argument.removeprefix(f"{name}="))
        else:
            others.append(argument)
    if len(values) > 1:
        raise ConfigError(f"{name} is given twice, as {shown(values[0])} and {shown(values[1])}; give it once")
    return (values[0] if values else None), others


def _joined(flags: Sequence[str]) -> list[str]:
    """Returns flags in which a list of meshes that is given in parts, as `--mesh tp=2 --mesh tp=4`, is one."""
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
    return [*others, MESH, *meshes] if MESH in {name.partition("=")[0] for name in flags} else list(flags)


def _named(flags: Sequence[str]) -> Iterator[str]:
    """Yields the dotted names of what flags give; -- may be followed by - or _ between words, and the value by =."""
    for name in flags:
        if name.startswith("--"):
            yield name.partition("=")[0].removeprefix("--").replace("-", "_")
