"""Windows of documents, and rows of windows: what the model reads together, and which tokens are counted there.

A window is at most T + 1 consecutive tokens of a document: all but the last are read, and all but the first are
predicted from those before them in the window. Windows that overlap predict some tokens twice; only the first time
counts. So every token of a document but its first is counted once, or every one after its prompt.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.packing import pack
from jaxtp.data.rows import IGNORE, SEGMENTS, Row, empty_row

GROUPS = "groups"
"""Key of a row: which of the numbers each label counts for, `[T]`; -1 for none."""
POOL_TOKENS = 2**20
"""Number of tokens whose windows are packed among themselves. It does not hang on the batch, so rows do not either."""
SHORTEST = 64
"""Length of the shortest rows, where each window has one of its own."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a document."""

    tokens: NDArray[np.int32]
    """At least two, at most T + 1."""

    counted: int
    """Number of them that count: the last ones, at least one, and never the first."""

    group: int
    """Index of the numbers that they count for."""


def spans(num_tokens: int, first: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields the windows of a document: first token, the one after the last, and how many of the last ones count.

    Args:
      num_tokens: number of tokens of the document.
      first: index of the first token that counts, at least 1.
      length: T.
      stride: tokens between the beginnings of two windows, at most T.
    """
    done, begin = max(first, 1), 0
    while done < num_tokens:
        end = min(begin + length + 1, num_tokens)
        if end > done:
            yield begin, end, end - done
            done = end
        begin += stride


def concatenated(documents: Iterable[tuple[NDArray[np.int32], int]], length: int) -> Iterator[Window]:
    """Yields windows of all tokens of consecutive documents of one group, each an input once.

    Args:
      documents: tokens and group of each.
      length: T.
    """
    rest, of_rest = np.zeros(0, np.int32), None
    for tokens, group in documents:
        if group != of_rest:
            yield from _last(rest, of_rest)
            rest, of_rest = np.zeros(0, np.int32), group
        rest = np.concatenate([rest, tokens])
        while len(rest) > length:
            yield Window(rest[: length + 1], length, group)
            rest = rest[length:]
    yield from _last(rest, of_rest)


def _last(rest: NDArray[np.int32], group: int | None) -> Iterator[Window]:
    if len(rest) > 1 and group is not None:
        yield Window(rest, len(rest) - 1, group)


def rows(windows: Iterable[Window], length: int, *, packed: bool, multiple: int = 1) -> Iterator[Row]:
    """Yields rows of windows: `inputs`, `labels` and `GROUPS` `[T]`, and `SEGMENTS` of those that are packed.

    Packed windows share rows of T tokens; others have rows of their own, of few different lengths.

    Args:
      windows: windows of at most T + 1 tokens.
      length: T.
      packed: whether windows share rows.
      multiple: divides the length of each row, as it divides T.

    Where there are fewer tokens than T, so few share one row.
    """
    for pool in _pools(windows):
        sizes = np.array([len(window.tokens) - 1 for window in pool], np.int64)
        if packed:
            room = row_of(int(sizes.sum()), length, multiple)  # that is T but for a few short texts
            order, _, counts = pack(np.arange(len(pool))[:, None], sizes, room)
            ends = np.cumsum(counts)
            for first, last in zip(ends - counts, ends, strict=True):
                yield _shared([pool[index] for index in order[first:last, 0]], room)
        else:  # windows of one length come together
            for index in np.argsort(-sizes, kind="stable").tolist():
                yield _row(pool[index], row_of(int(sizes[index]), length, multiple))


def row_of(size: int, length: int, multiple: int = 1) -> int:
    """Returns the length of the row for so many tokens: a power of two, rounded up to a multiple, and at most T."""
    power = max(SHORTEST, 1 << (size - 1).bit_length())
    return min(-(-power // multiple) * multiple, length)


def batches(rows: Iterable[Row], size: int, multiple: int = 1) -> Iterator[Row]:
    """Yields `[B, T]` arrays of rows of one length; of the last ones rows beyond the end count nothing.

    Args:
      rows: rows.
      size: B; where there are fewer rows of a length it is as few, since that is one shape too.
      multiple: divides B.
    """
    waiting: dict[int, list[Row]] = {}
    seen: set[int] = set()
    for row in rows:
        length = len(row["inputs"])
        alike = waiting.setdefault(length, [])
        alike.append(row)
        if len(alike) == size:
            seen.add(length)
            yield _stacked(waiting.pop(length), size)
    for length, alike in waiting.items():
        yield _stacked(alike, size if length in seen else -(-len(alike) // multiple) * multiple)


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


def _empty(length: int) -> Row:
    return {**empty_row(length), GROUPS: np.full(length, -1, np.int32)}


def _row(window: Window, length: int) -> Row:
    row = _empty(length)
    _place(row, 0, window)
    return row


def _shared(windows: Sequence[Window], length: int) -> Row:
    row = _empty(length) | {SEGMENTS: np.zeros(length, np.int32)}
    at = 0
    for segment, window in enumerate(windows, start=1):
        used = _place(row, at, window)
        row[SEGMENTS][at : at + used] = segment
        at += used
    return row


def _place(row: Mapping[str, NDArray[Any]], at: int, window: Window) -> int:
    """Writes a window into a row; returns how many of its tokens are inputs there."""
    used = len(window.tokens) - 1
    row["inputs"][at : at + used] = window.tokens[:-1]
    row["labels"][at + used - window.counted : at + used] = window.tokens[-window.counted :]
    row[GROUPS][at + used - window.counted : at + used] = window.group
    return used


def _stacked(alike: Sequence[Row], size: int) -> Row:
    filling = {"inputs": 0, "labels": IGNORE, SEGMENTS: 0, GROUPS: -1}
    missing = {name: np.full_like(array, filling[name]) for name, array in alike[0].items()}
    return {name: np.stack([row[name] for row in [*alike, *[missing] * (size - len(alike))]]) for name in missing}
