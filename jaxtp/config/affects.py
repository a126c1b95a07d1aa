"""The settings of a configuration, and their annotations.

Annotations state the effects of a change, and whether `--help` lists a setting, as in
`steps: Annotated[Count, STEP, SHORT_HELP] = 400`. A field without `Affects` has the effects of its
section. This file imports only the standard library, so any room can use it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Affects:
    """The effects of changing a setting."""

    numbers: bool = False  # Changes losses and weights by more than rounding
    cost: bool = False  # Changes time or memory of a step
    # Changes only the training data: commands that use a synthetic batch ignore it
    samples: bool = False
    architecture: bool = False  # Changes shapes or meaning of parameters
    fixed: bool = False  # A run cannot resume from a checkpoint with another value


NOTHING = Affects()
COST = Affects(cost=True)
NUMBERS = Affects(numbers=True)
STEP = Affects(cost=True, numbers=True)
SAMPLES = Affects(samples=True)
ARCHITECTURE = Affects(cost=True, numbers=True, architecture=True, fixed=True)

SHORT_HELP = "short help"
RUNS_CODE = "runs code"
"""Marks a setting whose value names code that jaxtp runs; in a file it needs the user's consent."""
POSITIONAL = "positional"  # Marks a setting without a flag
REPEATED = "repeated"  # Marks a list whose flag takes one word and may be repeated
ONLY_IN_FILES = "only in files"  # Marks a setting that the command line cannot set


@dataclass(frozen=True)
class Argument:
    """How a command line names a setting."""

    value: str = ""  # Name of its value in the help (`FILE.yaml`), by default of its type
    # Replaces the key in the flag; empty for a section whose settings have no prefix
    name: str | None = None
    other_flag: str = ""  # Another spelling


@dataclass(frozen=True)
class WithinSection:
    """Marks a section of a root schema: files and flags have its settings in another section."""

    name: str  # Field of the other section


@dataclass(frozen=True)
class ArgumentsOf:
    """Marks a mapping of arguments for the code that another setting names."""

    reference: str  # The other setting's field, in the same section


@dataclass(frozen=True, eq=False)
class Setting:
    """A field of a configuration, or of one of its sections."""

    owner: type
    path: tuple[str, ...]  # Field names from the root dataclass down to this setting
    keys: tuple[str, ...]  # Keys in a file: `path` with aliases
    flag: str  # `--mesh.tp`
    kind: object  # Type, without annotations
    marks: tuple[object, ...]  # Metadata of `Annotated`
    default: object
    effects: Affects | None  # The setting's `Affects`, or its section's
    argument: Argument = Argument()
    is_section: bool = False  # Whether it has settings of its own

    @property
    def name(self) -> str:
        """`mesh.tp`."""
        return ".".join(self.keys)

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.kind) is tuple

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING


@cache
def settings_of(schema: Any) -> Mapping[str, Setting]:
    """Returns the settings and sections of a dataclass by dotted name."""
    return {
        setting.name: setting
        for setting in _walk(schema, Setting(schema, (), (), "--", schema, (), None, None))
    }


def leaf_settings(schema: object) -> Mapping[str, Setting]:
    """Returns the settings of a dataclass by dotted name, without its sections."""
    settings = settings_of(schema).items()
    return {name: setting for name, setting in settings if not setting.is_section}


def _walk(schema: Any, section: Setting) -> Iterator[Setting]:
    hints = get_type_hints(schema, include_extras=True)
    kinds = get_type_hints(schema)
    guests = sections_within(schema)
    for field in dataclasses.fields(schema):
        if field.name in guests:
            continue
        marks = _marks(hints[field.name])
        if any(getattr(mark, "exclude", None) for mark in marks):  # set by code, and in no file
            continue
        key = next(filter(None, (getattr(mark, "alias", None) for mark in marks)), field.name)
        # The marks of a named type, such as `Keys`, come before the field's own.
        arguments = [mark for mark in marks if isinstance(mark, Argument)]
        argument = arguments[-1] if arguments else Argument()
        name = key if argument.name is None else argument.name
        flag = ".".join(filter(None, (section.flag.removeprefix("--"), name)))
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        setting = Setting(
            owner=schema,
            path=(*section.path, field.name),
            keys=(*section.keys, key),
            flag=f"--{flag.replace('_', '-')}",
            kind=kinds[field.name],
            marks=marks,
            default=default,
            effects=next((mark for mark in marks if isinstance(mark, Affects)), section.effects),
            argument=argument,
            is_section=dataclasses.is_dataclass(kinds[field.name]),
        )
        yield setting
        if not setting.is_section:
            continue
        for guest, (kind, host) in guests.items():
            if host == field.name:
                yield from _walk(kind, replace(setting, path=(*section.path, guest)))
        yield from _walk(setting.kind, setting)


@cache
def sections_within(schema: Any) -> Mapping[str, tuple[type, str]]:
    """Returns the fields that are marked by `WithinSection`: their types, and the fields of their
    hosts."""
    sections = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        for mark in _marks(hint):
            if isinstance(mark, WithinSection):
                sections[name] = get_args(hint)[0], mark.name
    return sections


def _marks(hint: object) -> tuple[object, ...]:
    """Returns the metadata of a type's parts, as in `Reference | None`, and then its own."""
    own: tuple[object, ...] = getattr(hint, "__metadata__", ())
    return (*chain(*map(_marks, get_args(hint))), *own)


def find_setting(schema: type, name: str) -> Setting | None:
    """Returns the setting of a dotted name, which may extend into its value
    (`data.mixture.code`)."""
    by_name = settings_of(schema)
    while name and name not in by_name:
        name, _, _ = name.rpartition(".")
    return by_name.get(name)


def affects(schema: type, name: str, default: Affects = STEP) -> Affects:
    """Returns the `Affects` of a setting or of its section, else `default`."""
    setting = find_setting(schema, name)
    return default if setting is None else setting.effects or default


def settings(schema: type, accept: Callable[[Affects], bool]) -> list[str]:
    """Returns the dotted names of the settings whose `Affects`, by default `STEP`, are accepted."""
    leaves = leaf_settings(schema).items()
    return [name for name, setting in leaves if accept(setting.effects or STEP)]


def in_short_help(schema: type) -> Iterator[str]:
    """Yields dotted names of the settings with `SHORT_HELP`."""
    return (name for name, setting in settings_of(schema).items() if SHORT_HELP in setting.marks)
