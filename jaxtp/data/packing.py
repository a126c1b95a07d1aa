"""Packs whole documents into rows with little padding.

Best fit decreasing on the histogram of lengths (Krell et al., arXiv 2107.02027): each step places
all documents of one length that fit rows with the same room. Its time depends on the number of
distinct lengths, hardly on the number of documents. The plan gives random access by row index;
Grain's packing is an iterator with state in each process.
"""

import bisect
import hashlib
from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from jaxtp.config.entry import UserError, paused_collection
from jaxtp.data.documents import Documents
from jaxtp.data.manifest import DatasetError
from jaxtp.data.rows import PAIRS, SEGMENTS, Piece, Row, Rows, check_vocabulary, empty_row
from jaxtp.distributed.devices import host_memory

_BYTES_OF_PIECE = 45  # Memory to plan a document, or a part of one
BLOCK = 2**17  # Number of documents that are packed together

Ints = NDArray[np.int64]
Pattern = tuple[int, ...]  # Lengths of the documents in a row


class Packed(Rows):
    """Rows of whole documents, each a segment, and padding.

    `long` is the treatment of documents that are longer than a row: "split" cuts them into full
    rows and a remainder (each token is an input once), "drop" leaves them out, "stop" raises
    `LongDocumentError`. A pair is placed as one document, and is never cut. Rows without a label
    are left out: a step on such rows would move the weights by old momentum alone. Planning takes a
    sixth of a second and 45 MB of memory for each million documents.
    """

    # A change of the rows needs another number.
    algorithm = "best fit 2"
    _num_tokens = 0

    def __init__(self, documents: Documents, length: int, vocab_size: int, long: str = "split"):
        super().__init__(documents, length, vocab_size)
        _require_memory(documents, length)
        with paused_collection():
            blocks = list(self._blocks(long))
        self._pieces = np.concatenate(
            [np.zeros((0, 2), np.int64), *(pieces for pieces, _ in blocks)]
        )
        """`[n, 2]`, in the order of the rows: the document of each piece, and its first token in
        the piece."""
        self._rows = np.cumsum(np.concatenate([[0], *(counts for _, counts in blocks)]))
        """`[number of rows + 1]`: row i has the pieces from entry i up to entry i + 1."""
        # If every row has a label, the hash is the same as in version 1, which left no rows out.
        totals = [len(self._pieces), len(self), self._num_tokens, self.num_split, self.num_dropped]
        digest = hashlib.sha256()
        for part in (np.array(totals), self._pieces, self._rows):
            digest.update(part.astype("<i8", copy=False).data)
        self.identity = digest.hexdigest()
        self.padding = 1 - self._num_tokens / max(len(self) * length, 1)

    def __len__(self) -> int:
        return len(self._rows) - 1

    def pieces(self, index: int) -> Iterator[Piece]:
        """See `Rows.pieces`."""
        first, last = self._rows[index : index + 2].tolist()
        for document, start in self._pieces[first:last].tolist():
            used = len(self._documents.document(document, start, start + self._length))
            yield Piece(document, start, start + used)

    def _row(self, index: int) -> Row:
        first, last = self._rows[index : index + 2].tolist()
        row = empty_row(self._length)
        row[SEGMENTS] = np.zeros(self._length, np.int32)
        at = 0
        for segment, (document, start) in enumerate(self._pieces[first:last].tolist(), start=1):
            at += self._place(row, at, segment, document, start)
        if self._documents.has_pairs:
            pair = (row[SEGMENTS] + 1) // 2
            row[PAIRS] = np.where(row[SEGMENTS] % 2, pair, -pair)
        return row

    def _place(self, row: Row, at: int, segment: int, document: int, start: int) -> int:
        tokens = self._documents.document(document, start, start + self._length + 1)
        check_vocabulary(tokens, self._documents, document, self._vocab_size)
        used = min(len(tokens), self._length)
        prompt = max(self._documents.prompt_length(document) - start - 1, 0)
        row["inputs"][at : at + used] = tokens[:used]
        row["labels"][at + prompt : at + len(tokens) - 1] = tokens[1 + prompt :]
        row[SEGMENTS][at : at + used] = segment
        return used

    def _blocks(self, long: str) -> Iterator[tuple[Ints, Ints]]:
        """Yields the pieces of a share of the documents, and the number of pieces in each row."""
        pairs = self._documents.has_pairs
        for first, lengths, prompts in self._shares():
            sizes = lengths.reshape(-1, 2).sum(1) if pairs else lengths
            units = np.arange(len(sizes)) + (first // 2 if pairs else first)
            too_long = sizes > self._length
            if pairs and long != "drop" and too_long.any():
                raise LongDocumentError(
                    f"{self._documents.location(2 * int(units[too_long][0]))}: chosen and rejected "
                    f"together have {sizes[too_long][0]:,} tokens, more than "
                    f"data.sequence_length={self._length}, and a pair is never cut; "
                    "--data.long-documents drop leaves such pairs out"
                )
            if long == "stop" and too_long.any():
                raise LongDocumentError(
                    f"{self._documents.location(int(units[too_long][0]))}: {sizes[too_long][0]:,} "
                    f"tokens are more than data.sequence_length={self._length}; "
                    "--data.long-documents split cuts such documents, drop leaves them out"
                )
            if long == "drop":
                self.num_dropped += int(too_long.sum())
                units = units[~too_long]
                sizes = sizes[~too_long]
            else:
                self.num_split += int(too_long.sum())
            pieces, counts = pack(*_pieces(units, sizes, self._length), self._length)
            if pairs:  # a piece of a pair becomes two pieces, one for each document
                pieces = np.repeat(pieces * 2, 2, axis=0)
                counts = counts * 2
                pieces[1::2, 0] += 1
            documents = pieces[:, 0] - first
            yield self._with_labels(pieces, counts, lengths[documents], prompts[documents])

    def _shares(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yields the first index, lengths and prompt lengths of documents to pack together."""
        first = 0
        max_documents = 2 * BLOCK if self._documents.has_pairs else BLOCK
        for lengths, prompts in zip(
            self._documents.lengths(), self._documents.prompt_lengths(), strict=True
        ):
            for start in range(0, len(lengths), max_documents):
                part = slice(start, start + max_documents)
                yield first + start, lengths[part], prompts[part].astype(np.int64)
            first += len(lengths)

    def _with_labels(
        self, pieces: Ints, counts: Ints, lengths: Ints, prompts: Ints
    ) -> tuple[Ints, Ints]:
        """Returns the pieces of the rows that have a label, and the number of pieces per row.

        Args:
          lengths: the length of each piece's document.
          prompts: the prompt length of each piece's document.
        """
        start = pieces[:, 1]
        # The label of an input is the next token of its document, also at the end of a piece that
        # was cut.
        labels_end = np.minimum(lengths - start, self._length + 1) - 1
        labels_start = np.maximum(prompts - start - 1, 0)
        row = np.repeat(np.arange(len(counts)), counts)
        has_label = np.bincount(row[labels_start < labels_end], minlength=len(counts)) > 0
        is_kept = has_label[row]
        self.num_unlabelled += int((~has_label).sum())
        self._num_tokens += int(np.minimum(lengths - start, self._length)[is_kept].sum())
        return pieces[is_kept], counts[has_label]


def _require_memory(documents: Documents, length: int) -> None:
    # An attacker can claim any size in a manifest: a file of zeros takes no room on a disk.
    pieces = max(documents.num_documents, documents.num_tokens // length)
    needed = pieces * _BYTES_OF_PIECE
    if needed > host_memory():
        raise DatasetError(
            f"{documents.location(0)}: {documents.num_documents:,} documents of "
            f"{documents.num_tokens:,} tokens in rows of data.sequence_length={length} need "
            f"{needed / 1e9:,.0f} GB of memory to plan the rows, and this machine has "
            f"{host_memory() / 1e9:,.0f} GB; --data.packing concatenated needs no plan"
        )


class LongDocumentError(UserError):
    """A document is longer than a row, and the configuration does not allow this."""


def _pieces(documents: Ints, lengths: Ints, room: int) -> tuple[Ints, Ints]:
    """Cuts documents at multiples of `room`.

    Returns the document and the first token of each piece `[n, 2]`, and the sizes `[n]`.
    """
    parts = -(-lengths // room)
    start = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * room
    return np.stack([np.repeat(documents, parts), start], axis=1), np.minimum(
        np.repeat(lengths, parts) - start, room
    )


def pack(pieces: Ints, sizes: Ints, room: int) -> tuple[Ints, Ints]:
    """Returns the pieces in row order, and the number of pieces per row."""
    histogram = np.bincount(sizes, minlength=room + 1)
    patterns = best_fit(histogram, room)
    repeats = np.fromiter((count for _, count in patterns), np.int64)
    widths = np.fromiter((len(pattern) for pattern, _ in patterns), np.int64)
    columns = np.fromiter(chain.from_iterable(pattern for pattern, _ in patterns), np.int64)
    # All pieces of a size are placed, column by column.
    dtype = np.min_scalar_type(room)  # NumPy sorts 16 bits by radix
    by_size = np.argsort(sizes.astype(dtype), kind="stable")
    in_order = np.argsort(columns.astype(dtype), kind="stable")
    # For each column, the place of its first piece. Its pieces are the width of a row apart.
    first = np.cumsum(widths * repeats) - widths * repeats - np.cumsum(widths) + widths
    first = (np.repeat(first, widths) + np.arange(len(columns)))[in_order]
    placed = np.repeat(repeats, widths)[in_order]
    step = np.repeat(widths, widths)[in_order]
    row = np.arange(placed.sum()) - np.repeat(np.cumsum(placed) - placed, placed)
    chosen = np.empty_like(row)
    chosen[np.repeat(first, placed) + row * np.repeat(step, placed)] = by_size[histogram[0] :]
    return pieces.take(chosen, axis=0), np.repeat(widths, repeats)


def best_fit(histogram: Ints, room: int) -> list[tuple[Pattern, int]]:
    """Places documents, longest first, each where it leaves the least room.

    Takes the number of documents of each length, `[room + 1]`. Returns patterns of lengths, and the
    number of rows with each pattern.
    """
    by_room: dict[int, list[tuple[Pattern, int]]] = {}
    rooms: list[int] = []  # the keys with rows, ascending

    def add_rows(pattern: Pattern, count: int, room: int) -> None:
        rows = by_room.setdefault(room, [])
        if not rows:
            bisect.insort(rooms, room)
        rows.append((pattern, count))

    for size, remaining in reversed([*enumerate(histogram.tolist())][1:]):
        single = (size,)
        while remaining:
            pattern: Pattern = ()
            count = remaining
            left = room
            fitting = bisect.bisect_left(rooms, size)
            if fitting < len(rooms):
                left = rooms[fitting]
                pattern, count = by_room[left].pop()
                if not by_room[left]:
                    del rooms[fitting]
            per_row = left // size  # after the first, this room is still the smallest that fits
            full, last = divmod(min(remaining, count * per_row), per_row)
            remaining -= full * per_row + last
            if full:
                add_rows(pattern + single * per_row, full, left - per_row * size)
            if last:
                add_rows(pattern + single * last, 1, left - last * size)
            if pattern and (same := count - full - (last > 0)):
                add_rows(pattern, same, left)
    return list(chain.from_iterable(by_room.values()))
