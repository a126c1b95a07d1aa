"""Packs whole documents into rows with little padding.

Best fit decreasing on the histogram of lengths (Krell et al., arXiv 2107.02027): each step places all documents of one
length that fit rows with the same room. Its time depends on the number of distinct lengths, hardly on the document
count. Planning ahead gives random access by row index; Grain's packing is an iterator with state in each process.

The user's cache folder has plans, in files named by the hash of all that a plan depends on. A file starts with the
sha256 of the rest, which checkpoints record; a file that does not match is replaced. Concurrent processes write
identical files, and the rename is atomic.
"""

import bisect
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtp.config.entry import UserError
from jaxtp.config.files import PARTIAL
from jaxtp.config.reading import open_regular
from jaxtp.data.documents import Documents
from jaxtp.data.rows import SEGMENTS, Row, Rows, check_vocabulary, empty_row
from jaxtp.distributed.environment import cache_folder, forget_oldest, make_private

VERSION = 1
"""Version of the packing: a change of its rows needs another version."""
BLOCK = 2**17
"""Documents that are packed together; bounds the memory of planning to some MB."""

SUFFIX = ".rows"
FEW = 2**10
"""Plans of at most this many pieces take milliseconds and are not cached."""
_DIGEST = 32

Pattern = tuple[int, ...]
"""Lengths of the documents in a row."""


class Block(NamedTuple):
    """A plan for some of the documents."""

    pieces: NDArray[np.int64]
    """`[n, 2]`, in the order of their rows: document, and its first token in the piece."""
    counts: NDArray[np.int64]
    """Number of pieces in each row."""
    num_tokens: int
    num_split: int
    num_dropped: int


class Plan(NamedTuple):
    """The pieces of documents in each row, as memory maps."""

    pieces: NDArray[np.int64]
    """As in `Block`."""
    rows: NDArray[np.int64]
    """`[number of rows + 1]`: row i holds the pieces from entry i up to entry i + 1."""
    num_tokens: int
    num_split: int
    num_dropped: int
    sha256: str


class Packed(Rows):
    """Rows of whole documents, each a segment, and padding.

    `long` handles documents longer than a row: "split" cuts them into full rows and a rest (each token is an input
    once), "drop" omits them, "stop" raises `LongDocumentError`.
    """

    algorithm = f"best fit {VERSION}"

    def __init__(self, documents: Documents, length: int, vocab_size: int, long: str = "split"):
        super().__init__(documents, length, vocab_size)
        key = plan_key(documents, length, long)
        max_pieces = documents.num_documents + documents.num_tokens // length
        plan = find_plan(key, max_pieces, partial(self._plan, long))
        self._pieces, self._rows, self.identity = plan.pieces, plan.rows, plan.sha256
        self.num_split, self.num_dropped = plan.num_split, plan.num_dropped
        self.padding = 1 - plan.num_tokens / max(len(self) * length, 1)

    def __len__(self) -> int:
        return len(self._rows) - 1

    def _row(self, index: int) -> Row:
        first, last = self._rows[index : index + 2].tolist()
        row = empty_row(self._length)
        row[SEGMENTS] = np.zeros(self._length, np.int32)
        at = 0
        for segment, (document, start) in enumerate(self._pieces[first:last].tolist(), start=1):
            at += self._place(row, at, segment, document, start)
        return row

    def _place(self, row: Row, at: int, segment: int, document: int, start: int) -> int:
        """Copies a document from token `start`; returns its number of inputs."""
        tokens = self._documents.document(document, start, start + self._length + 1)
        check_vocabulary(tokens, self._documents, document, self._vocab_size)
        used = min(len(tokens), self._length)
        prompt = max(self._documents.prompt_length(document) - start - 1, 0) if self._documents.has_prompts else 0
        row["inputs"][at : at + used] = tokens[:used]
        row["labels"][at + prompt : at + len(tokens) - 1] = tokens[1 + prompt :]
        row[SEGMENTS][at : at + used] = segment
        return used

    def _plan(self, long: str) -> Iterator[Block]:
        first, parts = 0, self._documents.lengths()
        for lengths in (part[start : start + BLOCK] for part in parts for start in range(0, len(part), BLOCK)):
            documents = np.arange(first, first + len(lengths))
            first += len(lengths)
            too_long = lengths > self._length
            count = int(too_long.sum())
            if count and long == "stop":
                raise LongDocumentError(
                    f"{self._documents.place(int(documents[too_long][0]))}: {lengths[too_long][0]:,} tokens are more "
                    f"than data.sequence_length={self._length}; --data.long-documents split cuts such documents, drop "
                    "leaves them out"
                )
            if drops := long == "drop":
                documents, lengths = documents[~too_long], lengths[~too_long]
            pieces, sizes, counts = pack(*_pieces(documents, lengths, self._length), self._length)
            yield Block(pieces, counts, int(sizes.sum()), 0 if drops else count, count if drops else 0)


class LongDocumentError(UserError):
    """A document exceeds a row, which the configuration forbids."""


def plan_key(documents: Documents, length: int, long: str) -> bytes:
    """Returns the sha256 of document lengths and settings."""
    digest = hashlib.sha256(json.dumps([Packed.algorithm, BLOCK, length, long]).encode())
    for part in documents.lengths():
        digest.update(len(part).to_bytes(8, "little"))  # a block never spans two shards
        digest.update(part.astype("<i8").tobytes())
    return digest.digest()


def _pieces(
    documents: NDArray[np.int64], lengths: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cuts at multiples of `room`; returns document and first token `[n, 2]`, and sizes `[n]`."""
    parts = -(-lengths // room)
    owner = np.repeat(np.arange(len(lengths)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = part * room
    sizes = np.minimum(lengths[owner] - start, room)
    return np.stack([documents[owner], start], axis=1), sizes


def pack(
    pieces: NDArray[np.int64], sizes: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns pieces in row order, their sizes, and the pieces per row."""
    by_size = np.argsort(sizes, kind="stable")
    histogram = np.bincount(sizes, minlength=room + 1)
    next_of_size = np.cumsum(histogram) - histogram
    order, counts = [], []
    for pattern, repeats in best_fit(histogram, room):
        columns = []
        for size in pattern:
            columns.append(by_size[next_of_size[size] : next_of_size[size] + repeats])
            next_of_size[size] += repeats
        order.append(np.stack(columns, axis=1).reshape(-1))
        counts.append(np.full(repeats, len(pattern)))
    chosen = np.concatenate([*order, np.zeros(0, np.int64)]).astype(np.int64)
    return pieces[chosen], sizes[chosen], np.concatenate([*counts, np.zeros(0, np.int64)]).astype(np.int64)


def best_fit(histogram: NDArray[np.int64], room: int) -> list[tuple[Pattern, int]]:
    """Places documents, longest first, each where it leaves the least room.

    Takes the documents per length, `[room + 1]`; returns patterns of lengths, and the number of rows of each.
    """
    by_room: dict[int, list[tuple[Pattern, int]]] = {}
    rooms: list[int] = []  # the keys with rows, ascending

    def leave(pattern: Pattern, count: int, room: int) -> None:
        if count:
            if not by_room.setdefault(room, []):
                bisect.insort(rooms, room)
            by_room[room].append((pattern, count))

    for size in range(room, 0, -1):
        remaining = int(histogram[size])
        while remaining:
            pattern: Pattern = ()
            count, left = remaining, room
            if (fitting := bisect.bisect_left(rooms, size)) < len(rooms):
                left = rooms[fitting]
                pattern, count = by_room[left].pop()
                if not by_room[left]:
                    del rooms[fitting]
            each = left // size  # after the first, this is still the least room that fits
            full, rest = divmod(min(remaining, count * each), each)
            leave((*pattern, *[size] * each), full, left - each * size)
            leave((*pattern, *[size] * rest), min(rest, 1), left - rest * size)
            leave(pattern, (count - full - min(rest, 1)) if pattern else 0, left)
            remaining -= full * each + rest
    return [row for rows in by_room.values() for row in rows]


def find_plan(key: bytes, max_pieces: int, blocks: Callable[[], Iterator[Block]]) -> Plan:
    """Returns the cached plan, or makes it from `blocks` and tries to cache it; `key` hashes all that it depends on."""
    if max_pieces > FEW:
        try:
            folder = cache_folder() / "plans"
            make_private(folder)
            return _find_in(folder, key, blocks)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
            print(f"the plan of the rows is not cached: {error}", file=sys.stderr)
    with tempfile.TemporaryFile() as file:
        return _make(file, blocks)


def _find_in(folder: Path, key: bytes, blocks: Callable[[], Iterator[Block]]) -> Plan:
    path = folder / f"{key.hex()}{SUFFIX}"
    with suppress(FileNotFoundError, ValueError), open_regular(path) as file:
        plan = _read(file)
        os.utime(path)  # the least recently used plans are deleted first
        return plan
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=PARTIAL, delete=False) as file:
        try:
            plan = _make(file, blocks)
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    with suppress(OSError):
        forget_oldest(folder)
    return plan


def _make(file: IO[bytes], blocks: Callable[[], Iterator[Block]]) -> Plan:
    """Writes block by block, since a plan may exceed memory."""
    rows, totals = [np.zeros(1, np.int64)], np.zeros(5, "<i8")  # pieces, rows, tokens, documents split and dropped
    file.write(bytes(_DIGEST + totals.nbytes))
    for block in blocks():
        file.write(block.pieces.astype("<i8").tobytes())
        rows.append(totals[0] + np.cumsum(block.counts))
        totals += [len(block.pieces), len(block.counts), block.num_tokens, block.num_split, block.num_dropped]
    file.write(np.concatenate(rows).astype("<i8").tobytes())
    file.seek(_DIGEST)
    file.write(totals.tobytes())
    file.flush()
    digest = _sha256(file)
    file.seek(0)
    file.write(digest)
    file.flush()
    return _read(file)


def _read(file: IO[bytes]) -> Plan:
    """Raises `ValueError` for a file that is not a plan."""
    file.seek(0)
    digest = file.read(_DIGEST)
    if digest != _sha256(file):
        raise ValueError("not a plan")
    values = np.memmap(file, "<i8", mode="r").view(np.ndarray)[_DIGEST // 8 :]
    num_pieces, _, num_tokens, num_split, num_dropped = values[:5].tolist()
    pieces, rows = np.split(values[5:], [2 * num_pieces])
    return Plan(pieces.reshape(-1, 2), rows, num_tokens, num_split, num_dropped, digest.hex())


def _sha256(file: IO[bytes]) -> bytes:
    file.seek(_DIGEST)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
