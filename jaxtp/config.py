"""Configuration files and flags into frozen dataclasses; errors that name the key.

A schema is a frozen dataclass of frozen dataclasses. Each field has a type (with `pydantic` constraints where a
range applies), a default, and a docstring that becomes its help. YAML files give some of the values, dotted flags
override them: `--mesh.tp 4`.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import pydantic
import tyro
import yaml

T = TypeVar("T")


BASE = "base"
"""The key of a YAML file that includes another."""

PRINT = "--print-config"


class ConfigError(ValueError):
    """A user's mistake, complete in its message: what is wrong, the value, and the nearest that works."""


def allowed(values: str) -> Any:
    """An annotation that shows the range of a field beside its default in `--help`: `allowed("1 or more")`."""
    return tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {default}; {values})")


Count = Annotated[int, pydantic.Field(ge=1, lt=2**31), allowed("1 or more")]
CountOrZero = Annotated[int, pydantic.Field(ge=0, lt=2**31), allowed("0 or more")]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False), allowed("above 0")]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False), allowed("0 or more")]
UserPath = Annotated[Path, pydantic.AfterValidator(Path.expanduser)]
"""May begin with ~."""
Switch = tyro.conf.FlagCreatePairsOff[bool]
"""A flag that is given or not, without --no-... beside it."""


def load(schema: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """The configuration that a command line asks for.

    Args:
      schema: the dataclass of sections; every field has a default.
      argv: flags; `--config FILE` names a YAML file whose values replace the defaults, `--print-config` prints the
        result instead of returning.
      prog: how the program is called, for `--help`.
      description: what it does, for `--help`.

    Raises:
      ConfigError: unreadable YAML, an unknown key, a value of the wrong type or out of range.
      SystemExit: `--help` or `--print-config` (0), or a flag that does not parse (2), after a message on stderr.
    """
    path, flags = _take_config_flag(argv)
    show = PRINT in flags
    flags = [flag for flag in flags if flag != PRINT]
    default = schema() if path is None else from_yaml(schema, path)
    parsed = tyro.cli(
        schema,
        args=flags,
        default=default,
        prog=prog,
        description=description,
        config=(tyro.conf.AvoidSubcommands,),
    )
    config = validate(schema, dataclasses.asdict(parsed), source="command line")  # type: ignore[call-overload]
    if show:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def from_yaml(schema: type[T], path: str | Path) -> T:
    """Reads a YAML file; keys that it leaves out keep the schema's defaults.

    `base: other.yaml`, relative to the file, includes another: what this one says replaces what that one says.

    Raises:
      ConfigError: a file cannot be read or parsed, includes itself, or `validate` refuses it.
    """
    return validate(schema, _with_base(Path(path), ()), source=str(path))


def _with_base(path: Path, including: tuple[Path, ...]) -> Any:
    if path.resolve() in including:
        raise ConfigError(f"{path}: includes itself by way of base")
    values = _read_yaml(path, including)
    if not isinstance(values, Mapping) or BASE not in values:
        return values
    own = {key: value for key, value in values.items() if key != BASE}
    if not isinstance(values[BASE], str):
        raise ConfigError(f"{path}: base = {values[BASE]!r}: should be the name of a YAML file")
    return _merged(_with_base(path.parent / values[BASE], (*including, path.resolve())), own)


def _read_yaml(path: Path, including: tuple[Path, ...]) -> Any:
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, Loader=UniqueKeys)  # a SafeLoader
    except OSError as error:
        asked = f" (the base of {including[-1]})" if including else ""
        raise ConfigError(f"{path}{asked}: {error.strerror}{nearest_file(path)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {error}") from None
    return {} if values is None else values


def _merged(below: Any, above: Any) -> Any:
    """Mappings key by key, anything else replaced."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    shared = {key: _merged(below[key], above[key]) for key in below.keys() & above.keys()}
    return {**below, **above, **shared}


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML does, once the keys have been looked at."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def validate(schema: type[T], values: Any, *, source: str) -> T:
    """Builds the schema from plain values, and reports every problem at once.

    Args:
      schema: the dataclass.
      values: a mapping of sections.
      source: where the values come from, for the message.

    Raises:
      ConfigError: an unknown key (with the nearest known one), a wrong type, or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: expected a mapping of sections such as 'model:', found {values!r}")
    problems = list(_unknown_keys(schema, values, ""))
    try:
        config = pydantic.TypeAdapter(schema).validate_python(values)
    except pydantic.ValidationError as error:
        problems += [
            f"{'.'.join(map(str, item['loc']))} = {item['input']!r}: {_complaint(item)}" for item in error.errors()
        ]
    if problems:
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


def to_plain(config: Any) -> dict[str, Any]:
    """The configuration as plain dicts, lists, strings and numbers."""
    plain: dict[str, Any] = pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")
    return plain


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML that `from_yaml` reads back."""
    return yaml.safe_dump(to_plain(config), sort_keys=False)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The leaves in which two plain configurations differ: `model.d_model: 128 -> 256`."""
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


def _take_config_flag(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    path, flags = None, []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            path = next(arguments, None)
            if path is None:
                raise ConfigError("--config needs a file, as in --config configs/tiny.yaml")
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        else:
            flags.append(argument)
    return path, flags


def _complaint(item: Mapping[str, Any]) -> str:
    if item["type"] == "tuple_type":
        return "should be a list, such as [a, b]"
    if item["type"] == "path_type":
        return "should be a path"
    if item["type"] == "dataclass_type":
        return "should be a section: keys and their values"
    return str(item["msg"]).removeprefix("Input ")


def _unknown_keys(schema: Any, values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    known = {field.name: types[field.name] for field in dataclasses.fields(schema)}
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(known)}"
            yield f"{prefix}{key}: unknown key; {hint}"
        elif isinstance(value, bool) and known[key] in (int, float):
            yield f"{prefix}{key} = {value}: should be a number"  # YAML reads yes and on as true, and true as 1
        elif dataclasses.is_dataclass(known[key]) and isinstance(value, Mapping):
            yield from _unknown_keys(known[key], value, f"{prefix}{key}.")
        elif get_origin(known[key]) is dict and isinstance(value, Mapping):
            of = get_args(known[key])[1]
            for name, inner in value.items():
                if dataclasses.is_dataclass(of) and isinstance(inner, Mapping):
                    yield from _unknown_keys(of, inner, f"{prefix}{key}.{name}.")
