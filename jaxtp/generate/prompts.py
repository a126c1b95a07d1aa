"""Files of prompts: one on each line, or JSONL."""

import difflib
import json
from pathlib import Path

from jaxtp.config import ConfigError, nearest_file


def is_jsonl(path: Path) -> bool:
    """Whether a file is JSONL, by its name."""
    return path.suffix in (".jsonl", ".ndjson")


def read_prompts(path: Path, field: str) -> list[str]:
    """The prompts of a file; lines with nothing on them are left out.

    Args:
      path: the file.
      field: of an object of JSONL, the text.

    Raises:
      ConfigError: it cannot be read, with the line where that is one line's fault; or there are no prompts in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at characters within a text too
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start:,})") from None
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path}: no prompts in it")
    if not is_jsonl(path):
        return [line for _, line in numbered]
    return [_field(f"{path}, line {number}", line, field) for number, line in numbered]


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
