"""Cuts documents into windows, and packs windows into rows.

A window is at most T + 1 consecutive tokens: all but the last are read, and all but the first are predicted from
earlier tokens in the window. A token that overlapping windows predict twice counts the first time. So every token
counts once, except a document's first, or its prompt.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.packing import pack
from jaxtp.data.rows import IGNORE, SEGMENTS, Row, empty_row

GROUPS = "groups"
"""Key of a row: the group of documents that each label counts for, `[T]`; -1 for none."""
POOL_TOKENS = 2**20
"""Number of tokens whose windows are packed together. Independent of the batch size, so packing is reproducible."""
MIN_ROW = 64
"""Shortest row length if each window has its own row."""


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


def concatenated(documents: Iterable[tuple[NDArray[np.int32], int]], length: int) -> Iterator[Window]:
    """Yields windows of each group's joined documents (tokens and group); each token is an input once."""
    rest, rest_group = np.zeros(0, np.int32), None
    for tokens, group in documents:
        if group != rest_group:
            yield from _last_window(rest, rest_group)
            rest, rest_group = np.zeros(0, np.int32), group
        rest = np.concatenate([rest, tokens])
        while len(rest) > length:
            yield Window(rest[: length + 1], length, group)
            rest = rest[length:]
    yield from _last_window(rest, rest_group)


def _last_window(rest: NDArray[np.int32], group: int | None) -> Iterator[Window]:
    if len(rest) > 1 and group is not None:
        yield Window(rest, len(rest) - 1, group)


def rows(windows: Iterable[Window], length: int, *, packed: bool, multiple: int = 1) -> Iterator[Row]:
    """Yields rows `[T]` of `inputs`, `labels` and `GROUPS`, with `SEGMENTS` if windows are packed.

    Packed windows share rows of T tokens (fewer if one row holds all). Other windows have rows of few lengths, which
    `multiple` divides, as it divides T.
    """
    for pool in _pools(windows):
        sizes = np.array([len(window.tokens) - 1 for window in pool], np.int64)
        if packed:
            room = row_length(int(sizes.sum()), length, multiple)
            order, _, counts = pack(np.arange(len(pool))[:, None], sizes, room)
            ends = np.cumsum(counts)
            for first, last in zip(ends - counts, ends, strict=True):
                yield _packed_row([pool[index] for index in order[first:last, 0]], room)
        else:  # windows of one length come together
            for index in np.argsort(-sizes, kind="stable").tolist():
                row = _empty(row_length(int(sizes[index]), length, multiple))
                _place(row, 0, pool[index])
                yield row


def row_length(size: int, length: int, multiple: int = 1) -> int:
    """Returns the row length for `size` tokens: a power of two, rounded up to `multiple`, at most T."""
    power = max(MIN_ROW, 1 << (size - 1).bit_length())
    return min(-(-power // multiple) * multiple, length)


def batches(rows: Iterable[Row], size: int, multiple: int = 1) -> Iterator[Row]:
    """Yields batches `[B, T]` of rows of equal length; ignored rows fill up the last batches.

    Args:
      size: B; a length with fewer rows gets a smaller batch, also a single shape.
      multiple: divides B.
    """
    waiting: dict[int, list[Row]] = {}
    seen: set[int] = set()
    for row in rows:
        length = len(row["inputs"])
        same_length = waiting.setdefault(length, [])
        same_length.append(row)
        if len(same_length) == size:
            seen.add(length)
            yield _stack(waiting.pop(length), size)
    for length, same_length in waiting.items():
        yield _stack(same_length, size if length in seen else -(-len(same_length) // multiple) * multiple)


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


def _packed_row(windows: Sequence[Window], length: int) -> Row:
    row = _empty(length) | {SEGMENTS: np.zeros(length, np.int32)}
    at = 0
    for segment, window in enumerate(windows, start=1):
        used = _place(row, at, window)
        row[SEGMENTS][at : at + used] = segment
        at += used
    return row


def _place(row: Mapping[str, NDArray[np.int32]], at: int, window: Window) -> int:
    used = len(window.tokens) - 1
    row["inputs"][at : at + used] = window.tokens[:-1]
    row["labels"][at + used - window.counted : at + used] = window.tokens[-window.counted :]
    row[GROUPS][at + used - window.counted : at + used] = window.group
    return used


def _stack(rows: Sequence[Row], size: int) -> Row:
    padding = {"inputs": 0, "labels": IGNORE, SEGMENTS: 0, GROUPS: -1}
    ignored = {name: np.full_like(array, padding[name]) for name, array in rows[0].items()}
    return {name: np.stack([row[name] for row in [*rows, *[ignored] * (size - len(rows))]]) for name in ignored}
