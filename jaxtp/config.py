"""Configuration files and flags into frozen dataclasses; errors that name the key.

A schema is a frozen dataclass of frozen dataclasses. Each field has a type (with `pydantic` constraints where a
range applies), a default, and a docstring that becomes its help. YAML files give some of the values, dotted flags
override them: `--mesh.tp 4`.
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import pydantic
import tyro
import yaml

T = TypeVar("T")


class ConfigError(ValueError):
    """A user's mistake, complete in its message: what is wrong, the value, and the nearest that works."""


def load(schema: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """The configuration that a command line asks for.

    Args:
      schema: the dataclass of sections; every field has a default.
      argv: flags; `--config FILE` names a YAML file whose values replace the defaults.
      prog: how the program is called, for `--help`.
      description: what it does, for `--help`.

    Raises:
      ConfigError: unreadable YAML, an unknown key, a value of the wrong type or out of range.
      SystemExit: `--help` (0), or a flag that does not parse (2), after a message on stderr.
    """
    path, flags = _take_config_flag(argv)
    default = schema() if path is None else from_yaml(schema, path)
    parsed = tyro.cli(
        schema,
        args=flags,
        default=default,
        prog=prog,
        description=description,
        config=(tyro.conf.AvoidSubcommands,),
    )
    return validate(schema, dataclasses.asdict(parsed), source="command line")  # type: ignore[call-overload]


def from_yaml(schema: type[T], path: str | Path) -> T:
    """Reads a YAML file; keys that it leaves out keep the schema's defaults.

    Raises:
      ConfigError: the file cannot be read or parsed, or `validate` refuses it.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{_nearest_file(Path(path))}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {error}") from None
    return validate(schema, {} if values is None else values, source=str(path))


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
            f"{'.'.join(map(str, item['loc']))} = {item['input']!r}: {item['msg'].removeprefix('Input ')}"
            for item in error.errors()
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


def fail(program: str, error: Exception) -> int:
    """Prints a user's mistake on stderr; returns the exit code, 2."""
    print(f"{program}: error: {error}", file=sys.stderr)
    return 2


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


def _unknown_keys(schema: Any, values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    known = {field.name: types[field.name] for field in dataclasses.fields(schema)}
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(known)}"
            yield f"{prefix}{key}: unknown key; {hint}"
        elif dataclasses.is_dataclass(known[key]) and isinstance(value, Mapping):
            yield from _unknown_keys(known[key], value, f"{prefix}{key}.")


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
