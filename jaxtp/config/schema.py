"""Reads configuration files into frozen dataclasses; errors name the key.

A schema is a frozen dataclass of frozen dataclasses. Each field has a type (with `pydantic`
constraints), a default, and a docstring, which is its help text. YAML files set values; flags
(`jaxtp.config.command_line`) override them.
"""

import dataclasses
import datetime
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin, get_type_hints

import pydantic
import yaml
from pydantic_core import ErrorDetails

from jaxtp.config.affects import (
    REPEATED,
    RUNS_CODE,
    Argument,
    leaf_settings,
    sections_within,
    settings_of,
)
from jaxtp.config.entry import UserError
from jaxtp.config.hints import closest, dotted, hint_for
from jaxtp.config.reading import MAX_YAML, first_lines, parse_yaml, read_bytes, truncate

T = TypeVar("T")

_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = cache(pydantic.TypeAdapter)

BASE = "base"  # The key by which a YAML file includes another

_EXCLUSIVE = {"train.steps": "epochs", "train.epochs": "steps"}
"""Keys that exclude each other: a flag or file that sets one of them removes the other one from the
files that it overrides."""

HF_PREFIX = "hf:"  # Prefix of an input of `jaxtp prepare` that the `datasets` library loads

_MAX_BASES = 16
_MAX_PROBLEMS = 20  # Maximum number of problems in one message


class ConfigError(UserError):
    """A mistake in a setting; the message names the problem, the value, and values that work."""


Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, pydantic.Field(gt=0, le=1)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Even = Annotated[int, pydantic.Field(ge=2, multiple_of=2)]
Rank = Annotated[int, pydantic.Field(ge=0, lt=2**16)]


def of_length(count: int) -> Any:
    """Returns a constraint that a tuple has exactly `count` values."""
    return pydantic.Field(min_length=count, max_length=count)


_SCHEMES = ("s3", "gs", "file")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")


class Address(type(Path())):  # type: ignore[misc]
    """The URL of a folder, as a path that does not exist; `jaxtp.data.copies` downloads it."""

    def __str__(self) -> str:
        # A path has one slash where a URL has two or three.
        scheme, _, name = super().__str__().partition(":/")
        return f"{scheme}:///{name}" if scheme == "file" else f"{scheme}://{name}"


def expand(path: Path) -> Path:
    """Expands ~ in a path; refuses unknown users, null bytes, and URLs of object stores."""
    if "\0" in str(path):
        raise ConfigError("should be a path, but contains a null byte")
    # A run needs a file system: it locks its folder, appends to files, renames them into place, and
    # moves damaged files aside.
    if url := _URL.match(str(path)):
        raise ConfigError(
            f"should be a path, but {url[1]}://{url[2]} is an address. A run needs a folder that "
            "all hosts mount, on a file system that locks, appends and renames (NFS, Lustre), and "
            "--run.mirror URL keeps a copy of it in a bucket; with --checkpoint.url gs://BUCKET/A "
            "each host may have its own. Datasets, models and exports may be at URLs, and texts in "
            "a mounted bucket (gcsfuse, Mountpoint for S3)"
        )
    # A path has no slashes at its end.
    if str(path) in {f"{scheme}:" for scheme in _SCHEMES}:
        raise ConfigError(f"{path}// is an address without a bucket or folder; add its name")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"should be a path, but there is no user {path.parts[0][1:]}") from None


def place(path: Path) -> Path:
    """Returns an `Address` for the URL of a folder, and otherwise `expand(path)`."""
    url = _URL.match(str(path))
    if url is None:
        return expand(path)
    if url[1] not in _SCHEMES:
        near = closest(url[1], _SCHEMES, cutoff=0.5)
        hint = f"did you mean {near}://?" if near else "known are s3://, gs:// and file:///"
        raise ConfigError(f"{url[1]}://{url[2]} begins with an unknown scheme; {hint}")
    if not url[2].isprintable() or re.search(r"[?#%\\]|(^|/)\.\.?(/|$)", url[2]):
        raise ConfigError(
            f"{truncate(path)} is no plain address; it should be s3://BUCKET/PATH, "
            "gs://BUCKET/PATH or file:///FOLDER"
        )
    return Address(path)


def _not_empty(path: object) -> object:
    # An empty path, for example from an unset variable, would be the current folder.
    if path == "":
        raise ConfigError("should be a path, but is empty; . is the current folder")
    return path


UserPath = Annotated[Path, pydantic.BeforeValidator(_not_empty), pydantic.AfterValidator(expand)]
"""A path that may begin with ~."""
OptionalFile = Annotated[UserPath | None, Argument("FILE")]
FolderOrUrl = Annotated[Path, pydantic.BeforeValidator(_not_empty), pydantic.AfterValidator(place)]
"""A folder, or its URL (s3://BUCKET/PATH, gs://BUCKET/PATH, file:///FOLDER)."""
OptionalFolder = Annotated[FolderOrUrl | None, Argument("DIR")]


def _prepared(path: T) -> T:
    text = str(path)
    if text.startswith(HF_PREFIX):
        folder = f"data/{text.removeprefix(HF_PREFIX).partition(':')[0].rpartition('/')[2]}"
        raise ConfigError(
            f"jaxtp prepare {text} --out {folder} makes a dataset of it; then use {folder}"
        )
    return path


DataPath = Annotated[FolderOrUrl, pydantic.AfterValidator(_prepared)]
"""A dataset of `jaxtp prepare`, or a text file."""
DataKey = Annotated[str, pydantic.AfterValidator(_prepared)]
"""A dataset of a mixture."""


def _day(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigError("should be a day, such as 2026-01-31") from None


Day = Annotated[str, pydantic.AfterValidator(_day), Argument("YYYY-MM-DD")]

Reference = Annotated[str, Argument("FILE.py:NAME"), RUNS_CODE]
"""A Python object in a file, or in a module (package.module:NAME)."""

Keys = Annotated[tuple[str, ...], REPEATED, Argument("KEY")]


def from_yaml(schema: type[T], path: str | Path) -> T:
    """Reads a YAML file; missing keys keep the schema's defaults.

    `base: other.yaml`, relative to the file, includes a file whose values this file overrides.
    """
    return validate(schema, read_values(Path(path)), source=str(path))


def read_yaml(path: Path, included_by: str = "") -> object:
    """Returns the values in a YAML file; None if empty.

    `included_by` follows the path in errors.
    """
    try:
        return parse_yaml(read_bytes(path, MAX_YAML))
    except OSError as error:
        hint = nearest_file(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{truncate(path)}{included_by}: {error.strerror}{hint}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a YAML file: {error}") from None


def read_values(path: Path, including: tuple[str, ...] = ()) -> dict[str, object]:
    """Returns a YAML file's values, merged over its `base` files; `including` files include it."""
    values = read_yaml(path, f" (the base of {including[-1]})" if including else "")
    real = os.path.realpath(path)
    if real in including:
        raise ConfigError(f"{path}: includes itself through base")
    if len(including) == _MAX_BASES:
        raise ConfigError(f"{path}: more than {_MAX_BASES} files include each other through base")
    if not isinstance(values, Mapping | None):
        raise ConfigError(
            f"{path}: expected a mapping of sections such as 'model:', found "
            f"{truncate(repr(values))}"
        )
    own = dict(values or {})
    if BASE not in own:
        return own
    base = own.pop(BASE)
    if not isinstance(base, str):
        raise ConfigError(
            f"{path}: base = {truncate(repr(base))}: should be the name of a YAML file"
        )
    return merged(read_values(path.parent / base, (*including, real)), own)


def merged(
    below: Mapping[str, object], above: Mapping[str, object], prefix: str = ""
) -> dict[str, object]:
    """Merges nested mappings; `above` wins, and removes keys that it excludes (`_EXCLUSIVE`)."""
    result = {
        key: value
        for key, value in below.items()
        if above.get(_EXCLUSIVE.get(f"{prefix}{key}", "")) is None
    }
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value, f"{prefix}{key}.")
        result[key] = value
    return result


def _assignment(keys: Sequence[object], value: object) -> str:
    # A problem without keys concerns all values together.
    name = f"{truncate(dotted(keys))} = " if keys else ""
    return f"{name}{truncate(repr(value))}"


def validate(
    schema: type[T],
    values: Mapping[str, object],
    *,
    source: str,
    describe: Callable[[Sequence[object], object], str] = _assignment,
) -> T:
    """Builds the schema from plain values; the error lists all problems.

    Args:
      source: origin of the values, for messages.
      describe: formats keys and a value as the source writes them.
    """
    problems = list(_unknown_keys(schema, values, list(leaf_settings(schema))))
    try:
        config: T = _adapter(schema).validate_python(
            _by_field(schema, values), by_alias=True, by_name=True
        )
    except pydantic.ValidationError as error:
        for item in error.errors():
            keys = _keys_in_file(schema, item["loc"])
            problems.append(f"{describe(keys, item['input'])}: {_complaint(item)}")
    if not problems:
        return config
    raise ConfigError("\n  ".join([f"{source}:", *first_lines(problems, _MAX_PROBLEMS)]))


def _keys_in_file(schema: Any, path: Sequence[int | str]) -> Sequence[int | str]:
    for guest, (_, host) in sections_within(schema).items():
        if path[:1] == (guest,):
            return host, *path[1:]
    return path


def _by_field(schema: Any, values: Mapping[str, object]) -> dict[str, object]:
    """Moves the settings of a section `WithinSection` out of its host, in which files have them."""
    by_field = dict(values)
    for guest, (kind, host) in sections_within(schema).items():
        section = values.get(host)
        if isinstance(section, Mapping):
            by_field[guest], by_field[host] = split_settings(section, kind)
    return by_field


def split_settings(values: Mapping[str, Any], kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of settings of a kind, and the other values."""
    names = _kinds_by_key(kind, ())
    settings = {key: value for key, value in values.items() if key in names}
    return settings, {key: value for key, value in values.items() if key not in names}


class Settings:
    """Base class of a dataclass of settings: its constructor checks and converts their values.

    It accepts exactly what a file may contain, and converts it in the same way: a list becomes a
    tuple. Values are checked again when they are copied, so a validator must accept its results.
    """

    # Of types that pydantic does not know it checks the class alone.
    __pydantic_config__ = pydantic.ConfigDict(arbitrary_types_allowed=True)

    def __init_subclass__(cls) -> None:
        # `@dataclass` keeps the representation that a class has.
        if "__repr__" not in vars(cls):
            cls.__repr__ = short_repr  # type: ignore[method-assign]

    def __new__(cls, *args: object, **values: object) -> Self:
        """Refuses unknown names, as in a file: the message has the nearest name."""
        kind: Any = cls
        unknown = {name: values[name] for name in values.keys() - kind.__dataclass_fields__.keys()}
        # A subclass may have a constructor of its own.
        if unknown and not _accepts(kind, args, values):
            validate(_without_constructor(kind), unknown, source=kind.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_values(self)


def _accepts(kind: type, args: Sequence[object], values: Mapping[str, object]) -> bool:
    try:
        inspect.signature(kind).bind(*args, **values)
    except TypeError:
        return False
    return True


def short_repr(instance: Any) -> str:
    """Shows a dataclass without fields that have their defaults, as in `MLPConfig(d_ff=64)`."""
    shown = []
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if field.repr and value != field.default:
            shown.append(f"{field.name}={value!r}")
    return f"{type(instance).__qualname__}({', '.join(shown)})"


def check_values(config: Settings) -> None:
    """Checks the values of settings and converts them in place; raises `ConfigError`."""
    kind: Any = type(config)
    unchecked_kind = _without_constructor(kind)
    settings = _kinds_by_key(kind, ())
    values = {}
    for field in dataclasses.fields(kind):
        value = getattr(config, field.name)
        # Defaults are checked once.
        if value is not field.default and field.name in settings:
            values[field.name] = value
    if not values:
        return
    checked: Any = validate(unchecked_kind, values, source=kind.__name__)
    for name in values:
        object.__setattr__(config, name, getattr(checked, name))


@cache
def _without_constructor(kind: Any) -> type:
    """Returns a dataclass with the same fields, whose constructor checks nothing.

    The defaults of `kind` are checked.
    """
    hints = get_type_hints(kind, include_extras=True)
    settings = _kinds_by_key(kind, ())
    fields = []
    defaults = {}
    for field in dataclasses.fields(kind):
        fields.append((field.name, hints[field.name], None))
        if field.default is not dataclasses.MISSING and field.name in settings:
            defaults[field.name] = field.default
    namespace = {"__pydantic_config__": Settings.__pydantic_config__}
    unchecked_kind = dataclasses.make_dataclass(kind.__name__, fields, namespace=namespace)
    validate(unchecked_kind, defaults, source=f"defaults of {kind.__name__}")
    return unchecked_kind


def as_base(config: object, kind: type[T]) -> T:
    """Returns an instance of `kind`, a base class of the config's class, with its values."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(config, name) for name in names})


def replace_nested(config: T, values: Mapping[str, object]) -> T:
    """Returns a copy with new values by dotted name: `replace_nested(config, {"mesh.tp": 4})`."""
    if not values:
        return config
    sections: dict[str, Any] = {}
    kind: Any = type(config)
    settings = settings_of(kind)
    for name, value in values.items():
        path = ".".join(settings[name].path) if name in settings else name
        section, _, inner_name = path.partition(".")
        if inner_name:
            inner = sections.get(section, getattr(config, section))
            value = replace_nested(inner, {inner_name: value})
        sections[section] = value
    return dataclasses.replace(config, **sections)  # type: ignore[type-var]


def value_at(config: object, path: Iterable[str]) -> Any:
    """Returns the value of a setting by its `Setting.path`."""
    return reduce(getattr, path, config)


def value_of(config: object, name: str) -> Any:
    """Returns the value of a setting by its dotted name."""
    kind: Any = type(config)
    return value_at(config, settings_of(kind)[name].path)


def to_plain(config: object) -> dict[str, Any]:
    """Returns plain dicts, lists, strings and numbers, with the fields of a section's subclass."""
    kind: Any = type(config)
    plain: dict[str, Any] = _adapter(kind).dump_python(config, mode="json", by_alias=True)
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            plain[name] = to_plain(value)
    for guest, (_, host) in sections_within(kind).items():
        plain[host] = plain.pop(guest) | plain[host]
    return plain


def to_yaml(config: object) -> str:
    """Returns YAML for `from_yaml`."""
    return yaml.safe_dump(to_plain(config), sort_keys=False)


def to_short_yaml(config: object, always: Set[str]) -> str:
    """Returns YAML of the values that are not defaults, and of the settings in `always`."""
    defaults = dict(leaves(to_plain(type(config)())))
    values = leaves(to_plain(config))
    written = (
        (keys, value)
        for keys, value in values
        if value != defaults.get(keys) or dotted(keys) in always
    )
    return yaml.safe_dump(nested(written), sort_keys=False)


def differences(
    old: Mapping[str, object], new: Mapping[str, object], prefix: str = ""
) -> list[str]:
    """Returns the leaves that differ: `model.d_model: 128 -> 256`."""
    before = dict(leaves(old))
    after = dict(leaves(new))
    return [
        f"{prefix}{dotted(keys)}: {before.get(keys)} -> {after.get(keys)}"
        for keys in before | after
        if before.get(keys) != after.get(keys)
    ]


def leaves(
    values: Mapping[str, object], keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yields the keys and the value of each leaf of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*keys, key))
        else:
            yield (*keys, key), value


def nested(values: Iterable[tuple[Sequence[str], object]]) -> dict[str, object]:
    """Builds nested mappings, the inverse of `leaves`."""
    outer: dict[str, Any] = {}
    for (*sections, key), value in values:
        inner = outer
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return outer


def nearest_file(path: Path) -> str:
    """Suggests an existing file with a similar name: `; did you mean data/a.txt?`, or nothing."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.name != path.name]
    except OSError:
        return ""
    close = closest(path.name, names, cutoff=0.75)
    return f"; did you mean {path.parent / close}?" if close else ""


_HUB_NAME = re.compile(r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}(?<!\.json)")


def missing_model(path: Path) -> str:
    """Suggests a folder with a similar name, or the command that downloads a model of this name."""
    near = nearest_file(path)
    if near:
        return near
    name = str(path)
    if not _HUB_NAME.fullmatch(name) or (path.parent != Path() and path.parent.exists()):
        return "; hf download NAME --local-dir FOLDER makes one"
    folder = Path("models", path.name)
    return (
        f"; if it is the name of a model on the Hugging Face hub, `hf download {name} --local-dir "
        f"{folder}` downloads it, and then its folder is {folder}"
    )


_COMPLAINTS = {
    "tuple_type": "should be a list, such as [a, b]",
    "dict_type": "should be a mapping, such as {{a: 1}}",
    "too_long": "has {actual_length:,} values; at most {max_length:,} are allowed",
    "too_short": "has {actual_length:,} values; {min_length:,} are needed",
    "path_type": "should be a path",
    "dataclass_type": "should be a section: keys and their values",
}


def _complaint(item: ErrorDetails) -> str:
    if item["type"] == "tuple_type" and isinstance(item["input"], str):
        return f"should be a list, such as [{item['input']!r}]"
    if item["type"] in _COMPLAINTS:
        return _COMPLAINTS[item["type"]].format(**item.get("ctx", {}))
    return str(item["msg"]).removeprefix("Input ").removeprefix("Value error, ")


_GONE = {
    "launch.preflight_bandwidth": False,
    "model.lora.from": None,
    "model.precision.matmul_layers": "*",
}
"""Settings that jaxtp had, with the values that files of its runs may still have."""


def _unknown_keys(
    schema: object,
    values: Mapping[str, object],
    names: Sequence[str],
    section: tuple[str, ...] = (),
    prefix: str = "",
) -> Iterator[str]:
    """Yields problems of the keys of a section.

    Args:
      schema: the schema of the file, or of an item in a mapping of the file.
      values: the values of the section.
      names: dotted names of settings, for hints.
      section: the keys of the section in the schema.
      prefix: the keys of the section in the file.
    """
    kinds = _kinds_by_key(schema, section)
    for key, value in values.items():
        kind = kinds.get(key)
        if key not in kinds:
            name = f"{prefix}{truncate(key)}"
            if name in _GONE and value == _GONE[name]:
                continue
            hint = f"known keys: {', '.join(kinds)}"
            if close := closest(truncate(key), kinds):
                hint = f"did you mean {prefix}{close}?"
            yield f"{name}: unknown key; {hint_for(name, names, str) or hint}"
        elif isinstance(value, bool) and _is_number(kind):
            # YAML reads yes and on as true, which pydantic would take for 1.
            yield f"{prefix}{key} = {value}: should be a number"
        elif dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            inner = (*section, key)
            yield from _unknown_keys(schema, value, names, inner, f"{prefix}{key}.")
        elif get_origin(kind) is dict and isinstance(value, Mapping):
            item_kind = get_args(kind)[1]
            for name, item in value.items():
                if dataclasses.is_dataclass(item_kind) and isinstance(item, Mapping):
                    place = f"{prefix}{key}.{truncate(name)}."
                    yield from _unknown_keys(item_kind, item, names=(), prefix=place)


@cache
def _kinds_by_key(schema: object, section: tuple[str, ...]) -> Mapping[str, object]:
    kinds: dict[str, object] = {}
    for setting in settings_of(schema).values():
        if setting.keys[:-1] == section:
            kinds |= dict.fromkeys((setting.keys[-1], setting.path[-1]), setting.kind)
    return kinds


def _is_number(kind: object) -> bool:
    kinds = {kind, *get_args(kind)}
    return bool not in kinds and not kinds.isdisjoint((int, float))
