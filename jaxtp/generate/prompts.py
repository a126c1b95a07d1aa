"""Files of prompts, with one on each line, or in JSONL."""

import difflib
import json
from pathlib import Path

from jaxtp.config import ConfigError, nearest_file


def is_jsonl(path: Path) -> bool:
    """Returns whether a file is JSONL, by its name."""
    return path.suffix in (".jsonl", ".ndjson")


MAX_BYTES = 2**30
"""Largest size of a file of prompts."""


def read_prompts(path: Path, field: str) -> list[str | None]:
    """Returns the prompt on each line of a file; None for a blank line.

    Args:
      path: the file.
      field: name of the field that has the text in an object of JSONL.

    Raises:
      ConfigError: the file cannot be read, or has no prompts; the message names the line that is at fault.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{path}: more than {MAX_BYTES // 2**20:,} MiB, the limit for a file of prompts; split it"
            )
        lines = content.decode().split("\n")  # splitlines would cut at characters within a text too
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start:,})") from None
    given = [line.removesuffix("\r") if line.strip() else None for line in lines]
    if not any(given):
        raise ConfigError(f"{path}: no prompts in it")
    if not is_jsonl(path):
        return given
    return [
        None if line is None else _field(f"{path}, line {number}", line, field) for number, line in enumerate(given, 1)
    ]


def _field(where: str, line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected an object such as {{{json.dumps(field)}: ...}}, found {line[:60]}")
    if field not in record:
        close = difflib.get_close_matches(field, record, n=1, cutoff=0.5)
        hint = f"did you mean --field {close[0]}?" if close else f"it has {', '.join(record) or 'none'}"
        raise ConfigError(f"{where}: no field {field!r}; {hint}")
    if not isinstance(record[field], str):
        raise ConfigError(f"{where}: {field} = {json.dumps(record[field])[:60]}: should be text")
    return record[field]
