"""Configuration files into frozen dataclasses; errors that name the key.

A schema is a frozen dataclass of frozen dataclasses. Each field has a type (with `pydantic` constraints where a
range applies), a default, and a docstring that becomes its help. YAML files give some of the values, flags
(`jaxtp.command_line`) replace them.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import pydantic
import tyro
import yaml
from pydantic.fields import FieldInfo

from jaxtp.entry import UserError
from jaxtp.reading import MAX_YAML, parse_yaml, read_bytes, shown

T = TypeVar("T")

_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = cache(pydantic.TypeAdapter)


BASE = "base"
"""The key of a YAML file that includes another."""

_MAX_BASES = 16
_MAX_PROBLEMS = 20
"""Most problems of one file in a message."""


class ConfigError(UserError):
    """A user's mistake, complete in its message: what is wrong, the value, and the nearest that works."""


def allowed(values: str) -> Any:
    """Returns an annotation that shows the range of a field beside its default in `--help`: `allowed("1 or more")`."""
    return tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {default}; {values})")


Count = Annotated[int, pydantic.Field(ge=1, lt=2**31), allowed("1 or more")]
CountOrZero = Annotated[int, pydantic.Field(ge=0, lt=2**31), allowed("0 or more")]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False), allowed("above 0")]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False), allowed("0 or more")]


def expand(path: Path) -> Path:
    """Returns a path that may begin with ~ as one that does not.

    Raises:
      ConfigError: it begins with the name of a user that there is not, holds a null byte, as no path does, or names an
        object store or another address.
    """
    if "\0" in str(path):
        raise ConfigError("should be a path, and holds a null byte")
    # Orbax could write a run's checkpoints to gs:// or s3://. The rest of a run needs a file system: its folder is
    # locked, files in it are appended to and renamed into place, and what is damaged is moved aside by a rename.
    if url := re.match(r"([a-z][a-z0-9+.-]+):/+(.*)", str(path)):
        raise ConfigError(
            f"should be a path, and {url[1]}://{url[2]} is an address. A run needs a folder that all hosts mount, on a "
            "file system that locks, appends and renames (NFS, Lustre); what is only read may also lie in a mounted "
            "bucket (gcsfuse, Mountpoint for S3)"
        )
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"should be a path, and {path.parts[0]} is nobody's home") from None


def _not_empty(path: Any) -> Any:
    """Returns a path as it is given; an empty one would be the current folder, as of a variable that is not set."""
    if path == "":
        raise ConfigError("should be a path, and is empty; . is the current folder")
    return path


UserPath = Annotated[Path, pydantic.BeforeValidator(_not_empty), pydantic.AfterValidator(expand)]
"""May begin with ~."""
Keys = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY")]
"""Words that a flag gives one at a time."""
Switch = tyro.conf.FlagCreatePairsOff[bool]
"""A flag that is given or not, without --no-... beside it."""


def from_yaml(schema: type[T], path: str | Path) -> T:
    """Reads a YAML file; keys that it leaves out keep the schema's defaults.

    `base: other.yaml`, relative to the file, includes another: what this one says replaces what that one says.

    Raises:
      ConfigError: a file cannot be read or parsed, includes itself, or `validate` refuses it.
    """
    return validate(schema, read_values(Path(path)), source=str(path))


def read_values(path: Path) -> Any:
    """Returns the plain values in a YAML file, and those of the files that it includes by `base`.

    Raises:
      ConfigError: a file cannot be read or parsed, or includes itself.
    """
    return _with_base(path, ())


def read_yaml(path: Path, asked_by: str = "") -> Any:
    """Returns the plain values in a YAML file, None for an empty one.

    Args:
      path: the file.
      asked_by: what names it, for the message where it cannot be read.

    Raises:
      ConfigError: it cannot be read, or is not YAML; see `jaxtp.reading`.
    """
    try:
        return parse_yaml(read_bytes(path, MAX_YAML))
    except OSError as error:
        hint = nearest_file(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{shown(path)}{asked_by}: {error.strerror}{hint}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a YAML file: {error}") from None


def _with_base(path: Path, including: tuple[str, ...]) -> Any:
    values = read_yaml(path, f" (the base of {including[-1]})" if including else "")
    real = os.path.realpath(path)
    if real in including:
        raise ConfigError(f"{path}: includes itself by way of base")
    if len(including) == _MAX_BASES:
        raise ConfigError(f"{path}: more than {_MAX_BASES} files include each other by way of base")
    if values is None:
        return {}
    if not isinstance(values, Mapping) or BASE not in values:
        return values
    own = {key: value for key, value in values.items() if key != BASE}
    if not isinstance(values[BASE], str):
        raise ConfigError(f"{path}: base = {shown(repr(values[BASE]))}: should be the name of a YAML file")
    return merged(_with_base(path.parent / values[BASE], (*including, real)), own)


def merged(below: Any, above: Any) -> Any:
    """Returns mappings merged key by key, those inside of them too; of anything else what is above."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    shared = {key: merged(below[key], above[key]) for key in below.keys() & above.keys()}
    return {**below, **above, **shared}


def hints_of(schema: Any) -> Mapping[str, Any]:
    """Returns the type of each field of a schema, with what annotates it."""
    return _hints(schema)


_hints: Callable[[Any], Mapping[str, Any]] = cache(partial(get_type_hints, include_extras=True))


def flag(schema: Any, keys: Sequence[Any]) -> str:
    """Returns the flag that sets a value of a schema: `--mesh.tp` for `mesh.tp`; without a section that has no name."""
    names = []
    for key in keys:
        key = _aliases(schema).get(key, key)
        annotated = hints_of(schema).get(key) if dataclasses.is_dataclass(schema) else None
        if annotated is None:
            break  # within the value
        given = [name for part in get_args(annotated)[1:] if (name := getattr(part, "name", None)) is not None]
        names += [name for name in (given or [key]) if name]
        schema = get_args(annotated)[0] if get_origin(annotated) is Annotated else annotated
    return f"--{'.'.join(names).replace('_', '-')}"


def _setting(keys: Sequence[Any], value: Any) -> str:
    return f"{shown('.'.join(map(str, keys)))} = {shown(repr(value))}"


def validate(
    schema: type[T], values: Any, *, source: str, spelled: Callable[[Sequence[Any], Any], str] = _setting
) -> T:
    """Builds the schema from plain values, and reports every problem at once.

    Args:
      schema: the dataclass.
      values: a mapping of sections.
      source: where the values come from, for the message.
      spelled: a value and the keys that lead to it, as they are written there.

    Raises:
      ConfigError: an unknown key (with the nearest known one), a wrong type, or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: expected a mapping of sections such as 'model:', found {shown(repr(values))}")
    problems = list(_unknown_keys(schema, values, ""))
    try:
        config: T = _adapter(schema).validate_python(values, by_alias=True, by_name=True)
    except pydantic.ValidationError as error:
        problems += [f"{spelled(item['loc'], item['input'])}: {_complaint(item)}" for item in error.errors()]
    if problems:
        more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
        raise ConfigError("\n  ".join([f"{source}:", *problems[:_MAX_PROBLEMS], *more]))
    return config


def changed(config: T, values: Mapping[str, Any]) -> T:
    """Returns the configuration with other values, by their dotted names: `changed(config, {"mesh.tp": 4})`."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        section, _, rest = name.partition(".")
        inner = sections.get(section, getattr(config, section))
        sections[section] = changed(inner, {rest: value}) if rest else value
    return dataclasses.replace(config, **sections) if sections else config  # type: ignore[type-var]


def to_plain(config: Any) -> dict[str, Any]:
    """Returns the configuration as plain dicts, lists, strings and numbers; each section as the class that it is."""
    plain: dict[str, Any] = _adapter(type(config)).dump_python(config, mode="json", by_alias=True)
    inner = {name: to_plain(value) for name, value in vars(config).items() if dataclasses.is_dataclass(value)}
    return plain | inner


def to_yaml(config: Any) -> str:
    """Returns the whole configuration as YAML that `from_yaml` reads back."""
    return yaml.safe_dump(to_plain(config), sort_keys=False)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the leaves in which two plain configurations differ: `model.d_model: 128 -> 256`."""
    lines = []
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before} -> {after}")
    return lines


def nearest_file(path: Path) -> str:
    """Names the file beside a missing one that is spelled most like it: `; did you mean data/a.txt?`, or nothing."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    others = [name for name in names if name != path.name]
    close = difflib.get_close_matches(path.name, others, n=1, cutoff=0.75)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of what a YAML file gives."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _complaint(item: Mapping[str, Any]) -> str:
    if item["type"] == "tuple_type":
        return "should be a list, such as [a, b]"
    if item["type"] == "dict_type":
        return "should be a mapping, such as {a: 1}"
    if item["type"] == "too_long":
        return f"has {item['ctx']['actual_length']:,} values, and at most {item['ctx']['max_length']:,} are taken"
    if item["type"] == "path_type":
        return "should be a path"
    if item["type"] == "dataclass_type":
        return "should be a section: keys and their values"
    return str(item["msg"]).removeprefix("Input ").removeprefix("Value error, ")


def _aliases(schema: Any) -> dict[str, str]:
    """Returns the names of the fields whose key is another: one that no field can have, as it is a word of Python."""
    hints = hints_of(schema) if dataclasses.is_dataclass(schema) else {}
    extras = ((name, extra) for name, kind in hints.items() for extra in get_args(kind))
    return {extra.alias: name for name, extra in extras if isinstance(extra, FieldInfo) and extra.alias is not None}


def _unknown_keys(schema: Any, values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    types, aliases = get_type_hints(schema), _aliases(schema)
    known = {field.name: types[field.name] for field in dataclasses.fields(schema)}
    known |= {key: types[name] for key, name in aliases.items()}
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(shown(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(known)}"
            yield f"{prefix}{shown(key)}: unknown key; {hint}"
        elif (
            isinstance(value, bool)
            and {int, float} & (kinds := {known[key], *get_args(known[key])})
            and bool not in kinds
        ):
            yield f"{prefix}{key} = {value}: should be a number"  # YAML reads yes and on as true, and true as 1
        elif dataclasses.is_dataclass(known[key]) and isinstance(value, Mapping):
            yield from _unknown_keys(known[key], value, f"{prefix}{key}.")
        elif get_origin(known[key]) is dict and isinstance(value, Mapping):
            of = get_args(known[key])[1]
            for name, inner in value.items():
                if dataclasses.is_dataclass(of) and isinstance(inner, Mapping):
                    yield from _unknown_keys(of, inner, f"{prefix}{key}.{shown(name)}.")
