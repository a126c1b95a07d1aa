"""Cuts documents into windows, and packs windows into rows.

A window is at most T + 1 consecutive tokens: all but the last are read, and all but the first are predicted from
earlier tokens in the window. A token that overlapping windows predict twice counts the first time. So every token
counts once, except a document's first, or its prompt.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.packing import pack
from jaxtp.data.rows import SEGMENTS, Row, empty_row

GROUPS = "groups"
"""Key of a row: the group of documents that each label counts for, `[T]`; -1 for none."""
POOL_TOKENS = 2**20
"""Number of tokens whose windows are packed together. Independent of the batch size, so packing is reproducible."""
MIN_ROW = 64
"""Shortest length of a row."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a document."""

    tokens: NDArray[np.int32]
    """2 to T + 1 tokens."""
    counted: int
    """Number of counted tokens, which are the last ones; never the first token."""
    group: int
    """The group of documents they count for."""


def spans(num_tokens: int, first: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields a document's windows: begin, end, and the number of counted tokens, at the end.

    Args:
      first: index of the first counted token, at least 1.
      length: T.
      stride: tokens between the starts of two windows, at most T.
    """
    done, begin = max(first, 1), 0
    while done < num_tokens:
        end = min(begin + length + 1, num_tokens)
        if end > done:
            yield begin, end, end - done
            done = end
        begin += stride


def rows(windows: Iterable[Window], length: int, multiple: int = 1) -> Iterator[Row]:
    """Yields rows `[T]` of `inputs`, `labels`, `GROUPS` and `SEGMENTS`, which windows share.

    A row is shorter if it holds everything; `multiple` divides its length, as it divides T.
    """
    for pool in _pools(windows):
        sizes = np.array([len(window.tokens) - 1 for window in pool], np.int64)
        room = row_length(int(sizes.sum()), length, multiple)
        order, _, counts = pack(np.arange(len(pool))[:, None], sizes, room)
        ends = np.cumsum(counts)
        for first, last in zip(ends - counts, ends, strict=True):
            yield _row([pool[index] for index in order[first:last, 0]], room)


def row_length(size: int, length: int, multiple: int = 1) -> int:
    """Returns the row length for `size` tokens: a power of two, rounded up to `multiple`, at most T."""
    power = max(MIN_ROW, 1 << (size - 1).bit_length())
    return min(-(-power // multiple) * multiple, length)


def batches(rows: Iterable[Row], size: int, multiple: int = 1) -> Iterator[Row]:
    """Yields batches `[B, T]` of successive rows of equal length; ignored rows fill up the last.

    Args:
      size: B; a length with fewer rows gets a smaller batch, also a single shape.
      multiple: divides B.
    """
    for _, same_length in itertools.groupby(rows, lambda row: len(row["inputs"])):
        count = 0
        while batch := list(itertools.islice(same_length, size)):
            count = count or math.ceil(len(batch) / multiple) * multiple
            batch += [_empty_row(len(batch[0]["inputs"]))] * (count - len(batch))
            yield {name: np.stack([row[name] for row in batch]) for name in batch[0]}


def _pools(windows: Iterable[Window]) -> Iterator[list[Window]]:
    pool: list[Window] = []
    tokens = 0
    for window in windows:
        pool.append(window)
        tokens += len(window.tokens)
        if tokens >= POOL_TOKENS:
            yield pool
            pool, tokens = [], 0
    if pool:
        yield pool


def _empty_row(length: int) -> Row:
    return {**empty_row(length), GROUPS: np.full(length, -1, np.int32), SEGMENTS: np.zeros(length, np.int32)}


def _row(windows: Iterable[Window], length: int) -> Row:
    row = _empty_row(length)
    start = 0
    for segment, window in enumerate(windows, start=1):
        end = start + len(window.tokens) - 1
        row["inputs"][start:end] = window.tokens[:-1]
        row[SEGMENTS][start:end] = segment
        counted = slice(end - window.counted, end)
        row["labels"][counted] = window.tokens[-window.counted :]
        row[GROUPS][counted] = window.group
        start = end
    return row
