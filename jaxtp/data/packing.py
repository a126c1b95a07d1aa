"""Packs whole documents into rows, with the least padding that is quick to find.

Best fit decreasing, on the histogram of lengths rather than on the documents one by one (Krell et al., arXiv
2107.02027): each step places all documents of a length that fit the rows with the same room. It takes time by the
number of different lengths, hardly by that of the documents.

Rows are planned, not streamed: which documents share a row is decided once, so any row can be asked for by its index.
Grain's own packing is an iterator with a state for each process.
"""

import bisect
import hashlib
import json
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.documents import Documents
from jaxtp.data.plans import Block, Wanted, find_plan
from jaxtp.data.rows import SEGMENTS, Row, Rows, check_vocabulary, empty_row
from jaxtp.entry import UserError

VERSION = 1
"""Version of the packing: one that gives other rows for the same documents is another."""
BLOCK = 2**17
"""Number of documents that are packed among themselves. A plan takes some MB of memory while it is made, however many
there are."""

Pattern = tuple[int, ...]
"""Lengths of the documents in a row."""


class Packed(Rows):
    """Rows of whole documents, each with a segment of its own; what is left of a row is padding.

    A document longer than a row is cut into full rows and a rest, if `long` is "split": each token is an input once.

    Args:
      documents: documents to pack.
      length: T.
      vocab_size: every token is below it.
      long: what to do with a document longer than a row: "split", "drop" or "stop".

    Raises:
      LongDocumentError: there is one, and `long` is "stop".
    """

    algorithm = f"best fit {VERSION}"

    def __init__(self, documents: Documents, length: int, vocab_size: int, long: str = "split"):
        super().__init__(documents, length, vocab_size)
        key = plan_key(documents, length, long)
        most = documents.num_documents + documents.num_tokens // length
        # Its arrays are memory maps: the plan is on disk, and in memory only where it is read.
        plan = find_plan(Wanted(key, documents.num_documents, most, partial(self._plan, long)))
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
        """Writes a document from token `start` on into a row; returns how many of its tokens are inputs there."""
        tokens = self._documents.document(document, start, start + self._length + 1)
        check_vocabulary(tokens, self._documents, document, self._vocab_size)
        used = min(len(tokens), self._length)
        prompt = max(self._documents.prompt_length(document) - start - 1, 0) if self._documents.has_prompts else 0
        row["inputs"][at : at + used] = tokens[:used]
        row["labels"][at + prompt : at + len(tokens) - 1] = tokens[1 + prompt :]
        row[SEGMENTS][at : at + used] = segment
        return used

    def _plan(self, long: str) -> Iterator[Block]:
        """Yields the rows of the documents, of at most `BLOCK` documents at a time."""
        first = 0
        for lengths in _blocks(self._documents.lengths()):
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
            drops = long == "drop"
            if drops:
                documents, lengths = documents[~too_long], lengths[~too_long]
            pieces, sizes, counts = pack(*_pieces(documents, lengths, self._length), self._length)
            yield Block(pieces, counts, int(sizes.sum()), 0 if drops else count, count if drops else 0)


class LongDocumentError(UserError):
    """A document longer than a row, where the configuration does not allow it."""


def plan_key(documents: Documents, length: int, long: str) -> bytes:
    """Returns a hash `[32]` of all that a plan depends on: the documents' lengths, as they are read, and settings.

    Raises:
      DatasetError: the lengths are not those that their dataset was made with.
    """
    digest = hashlib.sha256(json.dumps([Packed.algorithm, BLOCK, length, long]).encode())
    for part in documents.lengths():
        digest.update(len(part).to_bytes(8, "little"))  # documents of two shards do not share a block
        digest.update(part.astype("<i8").tobytes())
    return digest.digest()


def _blocks(parts: Iterator[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
    for part in parts:
        for start in range(0, len(part), BLOCK):
            yield part[start : start + BLOCK]


def _pieces(
    documents: NDArray[np.int64], lengths: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns documents cut at multiples of `room`: document and first token `[n, 2]`, and number of tokens `[n]`."""
    parts = -(-lengths // room)
    owner = np.repeat(np.arange(len(lengths)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = part * room
    sizes = np.minimum(lengths[owner] - start, room)
    return np.stack([documents[owner], start], axis=1), sizes


def pack(
    pieces: NDArray[np.int64], sizes: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the pieces in the order of their rows, the size of each, and the number of pieces in each row."""
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
    """Returns rows for documents, the longest first, each where it leaves the least room.

    Args:
      histogram: number of documents `[room + 1]` of each length; those of length 0 need no row.
      room: length of a row.

    Returns:
      The patterns of lengths, each with the number of rows that are filled like it.
    """
    rows = _OpenRows()
    for size in range(room, 0, -1):
        remaining = int(histogram[size])
        while remaining:
            pattern, count, left = rows.take(size) or ((), remaining, room)
            each = left // size  # what is left after the first of them is still the least room that suffices
            full, rest = divmod(min(remaining, count * each), each)
            rows.leave((*pattern, *[size] * each), full, left - each * size)
            rows.leave((*pattern, *[size] * rest), min(rest, 1), left - rest * size)
            rows.leave(pattern, (count - full - min(rest, 1)) if pattern else 0, left)
            remaining -= full * each + rest
    return rows.all()


class _OpenRows:
    """Rows that are begun, by the room that is left in them."""

    def __init__(self) -> None:
        self._by_room: dict[int, list[tuple[Pattern, int]]] = {}
        self._rooms: list[int] = []  # the keys that have rows, ascending

    def leave(self, pattern: Pattern, count: int, room: int) -> None:
        """Adds `count` rows of a pattern."""
        if count:
            if not self._by_room.setdefault(room, []):
                bisect.insort(self._rooms, room)
            self._by_room[room].append((pattern, count))

    def take(self, size: int) -> tuple[Pattern, int, int] | None:
        """Removes the rows with the least room that suffices; returns their pattern, their number, and the room."""
        fitting = bisect.bisect_left(self._rooms, size)
        if fitting == len(self._rooms):
            return None
        room = self._rooms[fitting]
        pattern, count = self._by_room[room].pop()
        if not self._by_room[room]:
            del self._rooms[fitting]
        return pattern, count, room

    def all(self) -> list[tuple[Pattern, int]]:
        """Returns every pattern, with the number of its rows."""
        return [row for rows in self._by_room.values() for row in rows]
