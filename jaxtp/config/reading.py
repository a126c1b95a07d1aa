"""Reads untrusted files, JSON and YAML, within limits.

It opens no devices and no pipes, and limits the size of each kind of file. It also limits the depth
of nesting, the number of values and the length of integers, so that callers can safely compare,
copy and print the values.
"""

import errno
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

MAX_JSON = 2**25
"""Maximum bytes of a JSON file; the weight index of the largest models has fewer than 10
million."""
MAX_YAML = 2**18  # Maximum bytes of a YAML file
_MAX_JSON_VALUES = 2**22
_MAX_DEPTH = 64
_BLOCK = 2**20  # Number of bytes that are read at a time
_MAX_DIGITS = 100  # Maximum digits of a number; integers of this length fit into a float
_LFS = rb"version https://git-lfs\.github\.com/spec/(?:[^\0]*^size (\d{1,18})$)?"
_BAD_VALUE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors of PyYAML, for example for the 45th day of a month, an invalid code point, or an integer
without digits."""


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file.

    Raises an `OSError` for a folder, pipe, device or unfetched Git LFS pointer.
    """
    try:
        mode = path.stat().st_mode
    except ValueError:  # a null byte, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    file = path.open("rb")
    try:
        pointer = re.match(_LFS, file.read(1000), re.MULTILINE)
        file.seek(0)
    except OSError:
        file.close()
        raise
    if pointer is None:
        return file
    file.close()
    size = f" of {int(pointer[1]):,} bytes" if pointer[1] else ""
    fetch = shlex.join(["git", "-C", str(path.parent), "lfs", "pull", "--include", path.name])
    problem = (
        f"a Git LFS pointer to a file{size} that has not been fetched; fetch it with `{fetch}`"
    )
    raise OSError(errno.EINVAL, problem, str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes.

    Raises an `OSError` for a larger file, and the errors of `open_regular`.
    """
    content = bytearray()
    with open_regular(path) as file:
        is_larger = os.fstat(file.fileno()).st_size > limit
        # Reads in blocks, because `read(limit)` would allocate the memory for the largest file, and
        # compares the size again, because the file may grow meanwhile.
        while not is_larger and (block := file.read(min(_BLOCK, limit + 1))):
            content += block
            is_larger = len(content) > limit
    if is_larger:
        problem = f"larger than {limit:,} bytes, the limit for this kind of file"
        raise OSError(errno.EFBIG, problem, str(path))
    return bytes(content)


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in an untrusted folder; raises an `OSError` if it is outside.

    Symbolic links may point into the folder, or to a blob in a Hugging Face hub cache.
    """
    path = folder / name
    try:
        real = Path(os.path.realpath(path))
        home = Path(os.path.realpath(folder))
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    is_blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not (real.is_relative_to(home) or is_blob):
        problem = f"is a link to {real}, outside of the folder; copy the file into it"
        raise PermissionError(errno.EPERM, problem, str(path))
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "is a broken link", str(path))
    return path


def parse_json(content: bytes, source: str) -> dict[str, Any]:
    """Parses a JSON object with unique keys, or raises a `ValueError` that begins with `source`."""
    if sum(map(content.count, (b",", b"[", b"{"))) > _MAX_JSON_VALUES:
        raise ValueError(f"{source} has more than {_MAX_JSON_VALUES:,} values, the limit")
    try:
        value = json.loads(content, object_pairs_hook=_unique, parse_int=_integer)
        _require_printable(value)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply to be real") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} is not JSON: {str(error)[:200]}") from None
    except ValueError as error:
        raise ValueError(f"{source} {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source} is a {type(value).__name__}, not an object")
    return value


def parse_yaml(content: bytes) -> object:
    """Parses a YAML document; None if empty. Raises a `ValueError` with line and column."""
    try:
        value = yaml.load(content, Loader=_Strict)  # a SafeLoader
        _require_printable(value)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"byte {error.position + 1} is not UTF-8 text: {error.reason}") from None
    except RecursionError:
        raise ValueError("nested too deeply to be real") from None
    except _BAD_VALUE as error:
        raise ValueError(str(error)) from None
    return value


def truncate(value: object, max_length: int = 100) -> str:
    """Returns the beginning of a value's text as one printable line."""
    text = str(value)
    if len(text) > max_length:
        text = f"{text[:max_length]}..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def first_lines(lines: Sequence[str], max_lines: int) -> list[str]:
    """Returns the first lines; if there are more, also a line with the number of the others."""
    if len(lines) <= max_lines:
        return list(lines)
    return [*lines[:max_lines], f"and {len(lines) - max_lines} more"]


class _Strict(yaml.SafeLoader):
    """Refuses duplicate keys, and aliases, which can expand a few lines to billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, "an alias (*name); write the value out", mark
            )
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key that is not a word"
            elif key.value in names:
                problem = f"the key {truncate(key.value)!r} occurs twice"
            if problem:
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            names.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        kind = node.tag.rpartition(":")[2]
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        if kind in ("int", "float") and len(text) > _MAX_DIGITS:
            problem = f"a number of {len(text):,} digits; at most {_MAX_DIGITS} are allowed"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except _BAD_VALUE:
            problem = f"{truncate(text)!r} is not a valid {kind}; in quotes it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        ((duplicate, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"is not valid: the key {truncate(duplicate)!r} occurs twice")
    return mapping


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"is not valid: it has an integer of {len(digits):,} digits")
    return int(digits)


def _require_printable(value: object) -> None:
    # Comparing or printing a value that is nested too deeply would raise a RecursionError.
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise RecursionError
        if isinstance(item, str) and not item.isascii():
            try:
                item.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    "contains half of a surrogate pair, which is not a character"
                ) from None
        if isinstance(item, Mapping):
            item = (*item.keys(), *item.values())
        if isinstance(item, list | tuple | set):
            pending += [(inner, depth + 1) for inner in item]
