"""The journal of a dataset that is being made, and the hashes of its documents so far."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxtp.data.manifest import SPLITS, DatasetError, TokenizerInfo, read_tokenizer_info
from jaxtp.files import sync_file, write_atomically
from jaxtp.prepare.folder import JOURNAL, damaged
from jaxtp.prepare.sources import Position
from jaxtp.prepare.writer import Progress, parse_progress

_DIGEST = 16
"""Bytes of each hash that are kept: two of 10^12 documents would be confused with a chance of 10^-14."""


@dataclass
class State:
    """Content of the journal."""

    arguments: Mapping[str, Any]
    tokenizer: TokenizerInfo | None = None
    """None until there is one."""
    position: Position = Position(0, 0)
    seen: int = 0
    """Number of hashes in the file of `Seen`."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of items that were left out, by reason."""
    splits: dict[str, Progress] = field(default_factory=lambda: {name: Progress() for name in SPLITS})

    def skip(self, kind: str, count: int = 1) -> None:
        """Counts something that is left out."""
        self.skipped[kind] = self.skipped.get(kind, 0) + count

    def is_empty(self) -> bool:
        """Returns whether there is no document yet: another command loses nothing by starting afresh."""
        return not any(progress.shards or progress.documents for progress in self.splits.values())

    def save(self, folder: Path) -> None:
        """Replaces the journal; what it speaks of must be on the disk."""
        write_atomically(folder / JOURNAL, json.dumps(asdict(self)).encode())


def load(folder: Path, prompts: bool) -> State | None:
    """Returns the state of an unfinished dataset; None where there is none.

    Raises:
      PrepareError: the journal is damaged.
    """
    path = folder / JOURNAL
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")), prompts)
    except FileNotFoundError:
        return None
    except (OSError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def _parse(record: dict[str, Any], prompts: bool) -> State:
    tokenizer = record["tokenizer"]
    position = Position(*record["position"])
    if not all(isinstance(number, int) and number >= 0 for number in (*position, record["seen"])):
        raise DatasetError("positions that are none")
    return State(
        dict(record["arguments"]),
        None if tokenizer is None else read_tokenizer_info(tokenizer),
        position,
        record["seen"],
        {str(kind): int(count) for kind, count in record["skipped"].items()},
        {name: parse_progress(record["splits"][name], prompts) for name in SPLITS},
    )


class Seen:
    """The hashes of documents, in memory and, appended, on the disk.

    Args:
      path: the file.
      count: number of its hashes that hold; the rest is cut off.

    Raises:
      PrepareError: there are fewer.
    """

    def __init__(self, path: Path, count: int):
        self._file = path.open("a+b")
        self._file.seek(0)
        content = self._file.read(count * _DIGEST)
        if len(content) < count * _DIGEST:
            self._file.close()
            raise damaged(path, "it is shorter than it was")
        self._file.truncate(len(content))
        self._digests = {content[i : i + _DIGEST] for i in range(0, len(content), _DIGEST)}

    def __len__(self) -> int:
        return len(self._digests)

    def is_new(self, digest: bytes) -> bool:
        """Returns whether a hash was not there, and remembers it."""
        short = digest[:_DIGEST]
        if short in self._digests:
            return False
        self._digests.add(short)
        self._file.write(short)
        return True

    def save(self) -> None:
        """Brings the file to the disk."""
        sync_file(self._file)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
