"""Command lines: the settings that a command offers, how flags and a YAML file set them, and what its help shows.

Every command is a `Command`: a schema (see `jaxtp.config`) and how much of it the help shows first. All of them spell
the same things alike: `--config FILE` for values in YAML, dotted flags that replace them (`--mesh.tp 4`), `--mesh
fsdp=2,tp=4` for a whole mesh, `--print-config`, `--help`, `--help SECTION` and `--help-all`.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import tyro

from jaxtp.config import ConfigError, Switch, flag, leaves, merged, read_values, shown, to_yaml, validate

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
    """What it does, for its help."""

    first: tuple[str, ...] = ()
    """Dotted names of the settings that --help shows; all of them, where there are few."""

    without: tuple[str, ...] = ()
    """Dotted names of settings and sections that a --config file may have and the command has no use for."""

    def load(
        self, argv: Sequence[str], fit: Callable[[T, Set[str]], tuple[T, list[str]]] | None = None
    ) -> tuple[T, list[str]]:
        """Returns the configuration that a command line asks for, and notes on its defaults.

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
        values: Any = {} if path is None else read_values(Path(path))
        if self._has_one_mesh:
            mesh, flags = _taken(MESH, flags, "sizes of axes, as in --mesh fsdp=2,tp=4")
            if mesh is not None and isinstance(values, Mapping):
                values = merged(values, {_SECTION: self._sizes(mesh)})
        default = self._default(values, path)
        if {HELP, SHORT_HELP, ALL_HELP} & set(flags):
            self._print_help(flags, default)
            raise SystemExit(0)
        self._refuse_foreign(flags)
        given = [name for name in flags if name != PRINT]
        parsed = _parse(self.schema, _joined(given), default, self.program, self.description)
        config = validate(
            self.schema,
            dataclasses.asdict(parsed),
            source="command line",
            spelled=lambda keys, value: f"{flag(self.schema, keys)} {value}",
        )
        config, notes = fit(config, {*leaves(values), *_named(given)}) if fit else (config, [])
        if PRINT in flags:
            print("".join(f"# {note}\n" for note in notes) + to_yaml(config), end="")
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

    def _sizes(self, text: str) -> dict[str, int]:
        """Returns the sizes of the axes that the command's mesh has.

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
        return {axis: size for axis, size in sizes.items() if axis in axes}

    def _default(self, values: Mapping[str, Any], path: str | None) -> Any:
        """Returns the configuration without flags; where it needs some, what tyro takes for no default."""
        required = any(_is_required(field) for field in dataclasses.fields(self.schema))  # type: ignore[arg-type]
        if required and path is not None:
            raise ConfigError(f"{CONFIG} {path}: {self.program} has no settings in files; give flags alone")
        return tyro.MISSING if required else validate(self.schema, values, source=str(path))

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
        sections = [
            field
            for field, kind in get_type_hints(self.schema).items()
            if dataclasses.is_dataclass(kind) and not self._is_foreign(field)
        ]
        chosen = self._is_offered_in_help(after if after in sections else "", everything=flags[at] == ALL_HELP)
        short = flags[at] != ALL_HELP and after not in sections and bool(self.first)
        description = self.description
        if short:
            description += f"\nMore settings: {HELP} SECTION ({', '.join(sections)}), or {ALL_HELP}.\n" * bool(sections)
            description += f"\nMore settings: {ALL_HELP}.\n" * (not sections)
        view = self._offered(chosen, bare=short)
        filled = default if default is tyro.MISSING else _filled(view, default)
        _parse(view, [HELP], filled, self.program, description)

    def _is_offered_in_help(self, section: str, *, everything: bool) -> Callable[[str], bool]:
        if section:
            return lambda name: name.startswith(f"{section}.") and not self._is_foreign(name)
        if everything or not self.first:
            return lambda name: not self._is_foreign(name)
        return lambda name: name in self.first

    def _offered(self, is_offered: Callable[[str], bool], *, bare: bool = False) -> Any:
        """Returns the schema with the flags of this module, and without the settings that are not offered.

        Args:
          is_offered: takes a dotted name.
          bare: leaves the texts of sections out.
        """
        own: list[tuple[str, Any, Any]] = []
        if not any(_is_required(field) for field in dataclasses.fields(self.schema)):  # type: ignore[arg-type]
            words = "YAML file of settings, which flags replace."
            own.append(("config_", Annotated[Path | None, tyro.conf.arg(name="config", metavar="FILE", help=words)], None))
        if self._has_one_mesh:
            words = "Size of each axis of the mesh; one that is left out is 1."
            kind = Annotated[str | None, tyro.conf.arg(name="mesh", metavar="fsdp=2,tp=4", help=words)]
            own.append(("mesh_", kind, None))
        if own:
            words = "Prints the settings that all of this comes to, as YAML, and does nothing else."
            own.append(("print_config_", Annotated[Switch, tyro.conf.arg(name="print-config", help=words)], False))
        return _view(self.schema, is_offered, "", own, bare)


def choose(program: str, commands: Mapping[str, str], argv: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command of a family that a command line begins with, and what follows.

    Args:
      program: how the family is called: `jaxtp convert`.
      commands: what each does, in a line.
      argv: the command line.

    Raises:
      ConfigError: it begins with none of them.
      SystemExit: `--help` (0), after the list of them.
    """
    name, *rest = argv or (HELP,)
    if name in (HELP, SHORT_HELP, ALL_HELP):
        width = max(map(len, commands)) + 2
        print(f"usage: {program} COMMAND ...\n")
        print(*(f"  {command:<{width}}{text}" for command, text in commands.items()), sep="\n")
        print(f"\n{program} COMMAND --help says more.")
        raise SystemExit(0)
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {program} {close[0]}?" if close else f"there are {', '.join(commands)}"
        raise ConfigError(f"{shown(repr(name))} is not a command of {program}; {hint}")
    return name, rest


def _parse(schema: Any, flags: Sequence[str], default: Any, program: str, description: str) -> Any:
    given = {} if default is tyro.MISSING else {"default": default}
    markers = (tyro.conf.AvoidSubcommands,)
    return tyro.cli(schema, args=flags, prog=program, description=description, config=markers, **given)


def _view(
    schema: Any, is_offered: Callable[[str], bool], prefix: str, own: list[tuple[str, Any, Any]], bare: bool
) -> Any:
    """Returns a subclass of a schema in which what is not offered has no flag, with fields of its own before others."""
    fields: list[tuple[str, Any, Any]] = [(name, kind, dataclasses.field(default=value)) for name, kind, value in own]
    for field in dataclasses.fields(schema):
        kind = get_type_hints(schema, include_extras=True)[field.name]
        if dataclasses.is_dataclass(inner := getattr(kind, "__origin__", kind)):
            unnamed = any(getattr(part, "name", None) == "" for part in getattr(kind, "__metadata__", ()))
            kind = _view(inner, is_offered, prefix if unnamed else f"{prefix}{field.name}.", [], bare)
            annotated = Annotated[kind, tyro.conf.arg(name="")] if unnamed else kind
            fields.append((field.name, annotated, dataclasses.field(default=kind())))
        elif not is_offered(prefix + field.name):
            fields.append((field.name, Annotated[kind, tyro.conf.Suppress], field))
    documented = {"__doc__": "" if bare else schema.__doc__}
    return dataclasses.make_dataclass(
        schema.__name__, fields, bases=(schema,), frozen=True, kw_only=True, namespace=documented
    )


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
    arguments = iter(argv)
    for argument in arguments:
        if argument == name:
            value = next(arguments, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{name} needs {needs}")
            values.append(value)
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
