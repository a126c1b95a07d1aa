"""Streams of batches, which a run can resume.

A record of a stream has its epoch, its state before the last batch, and that batch's checksum. To resume, the state is
loaded and the batch read again. If the checksum differs, the state omits something, as Hugging Face's omits the content
of shuffle buffers: then the stream is read again from its beginning, like one without a state.
"""

import base64
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, repeat
from typing import Any, TypeVar

import jax
import numpy as np

from jaxtp.data.batches import Batches, Position, Record
from jaxtp.data.columns import (
    BatchError,
    Columns,
    EndOfDataError,
    Layout,
    checksum,
    num_rows,
    reading,
    rows_layout,
    short_batch,
    take,
    to_columns,
)
from jaxtp.distributed.agreement import all_gather_json, is_multiprocess

T = TypeVar("T")

_STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
ITERABLE = (
    "an object whose iter() begins anew, such as a DataLoader, or a function without parameters that yields batches"
)
_BYTES, _ARRAY = "jaxtp.bytes", "jaxtp.array"


Read = Iterator[tuple[Columns, Record]]
"""Batches, and the record after each."""


class Stream:
    """An iterable of batches; endless, unless `once` or an iterator."""

    def __init__(self, source: Iterable[object], *, once: bool = False):
        self._source, self._once = source, once
        self._opened: Iterator[tuple[object, Record]] | None = None
        self._start: Record | None = None  # of the first batch, once it is read
        self._loaded = False

    def peek(self) -> Columns:
        """Returns the first batch; the next `read` from the beginning yields it too.

        Raises:
          BatchError: the stream has no batches.
        """
        batches = self._passes(0, None)
        if (first := next(batches, None)) is None:
            raise BatchError("has no batches")
        self._opened, self._start = chain([first], batches), first[1]
        return to_columns(first[0])

    def read(self, step: int, record: Record | None, report: Callable[[str], None]) -> Read:
        """Reads batches from a step.

        Raises:
          BatchError: the order is not the record's.
        """
        if not step:
            return _with_checksums(self._from_beginning())
        record = record or {}
        state, crc32 = record.get("state"), record.get("crc32")
        if state is None:
            report(f"it has no state, so its first {step:,} batches are read again")
        else:
            if self._start is None:
                self.peek()  # its first state, to which a source that has loaded another one can return
            batches = _with_checksums(self._passes(record["epoch"], state, step - 1))
            if (last := next(batches, None)) is not None and last[1]["crc32"] == crc32:
                self._opened = None
                return batches
            report(f"its state omits something (a shuffle buffer?), so its first {step:,} batches are read again")
        again = self._from_beginning()
        deque(islice(again, step - 1), maxlen=0)
        batches = _with_checksums(again)
        last = next(batches, None)
        if crc32 is not None and (last is None or last[1]["crc32"] != crc32):
            raise BatchError(
                f"its batch {step} is not the checkpoint's: its order or the size of its batches changed. Seed its "
                "shuffle, or use a loader with state_dict and load_state_dict, such as torchdata's StatefulDataLoader"
            )
        return batches

    def _from_beginning(self) -> Iterator[tuple[object, Record]]:
        if self._start is None:
            self.peek()
        assert self._start is not None
        opened, self._opened = self._opened, None
        if opened is not None and not self._loaded:
            return opened
        if isinstance(self._source, Iterator) and self._start["state"] is None:
            raise BatchError(f"is an iterator, which can be read only once; give {ITERABLE}")
        return self._passes(0, self._start["state"])

    def _passes(self, epoch: int, state: object, read: int = 0) -> Iterator[tuple[object, Record]]:
        # Also yields epoch and state before each batch; `read` is the number of batches before the first.
        while True:
            resumed, before = state is not None, read
            iterator = self._open(epoch, state)
            state = self._state(iterator)
            for batch in iterator:
                read += 1
                yield batch, {"epoch": epoch, "state": state}
                state = self._state(iterator)
            if self._once:
                return
            if isinstance(self._source, Iterator):
                raise EndOfDataError(f"the iterator ended after {read:,} batches; give {ITERABLE}, or set train.steps")
            if read == before and not resumed:
                raise BatchError(f"has no batches in epoch {epoch + 1}")
            epoch, state = epoch + 1, None

    def _open(self, epoch: int, state: object) -> Iterator[object]:
        # Hugging Face's streams load a state at each start with its epoch, also inside of a torch loader.
        for source in (self._source, *(getattr(self._source, name, None) for name in ("dataset", "sampler"))):
            if callable(set_epoch := getattr(source, "set_epoch", None)):
                set_epoch(epoch)
        if state is None:
            return iter(self._source)
        self._loaded = True
        if (methods := _state_methods(self._source)) is not None:
            methods[1](_decoded(state))
            return iter(self._source)
        iterator = iter(self._source)
        if (methods := _state_methods(iterator)) is None:
            raise BatchError("has no state, and had one in the checkpoint")
        methods[1](_decoded(state))
        return iterator

    def _state(self, iterator: Iterator[object]) -> object:
        methods = _state_methods(self._source) or _state_methods(iterator)
        return None if methods is None else _encoded(methods[0]())


def _with_checksums(batches: Iterator[tuple[object, Record]]) -> Read:
    for batch, record in batches:
        columns = to_columns(batch)
        num_rows(columns)
        yield columns, {**record, "crc32": checksum(columns)}


def _state_methods(source: object) -> tuple[Callable[[], object], Callable[[object], None]] | None:
    # The getter and the setter of a state.
    for names in _STATES:
        get, put = (getattr(source, name, None) for name in names)
        if callable(get) and callable(put):
            return get, put
    return None


def _encoded(state: object) -> object:
    # A copy, in JSON; with torch's and NumPy's arrays, such as a generator's state.
    def other(value: object) -> object:
        if isinstance(value, bytes):
            return {_BYTES: base64.b64encode(value).decode()}
        library = type(value).__module__.partition(".")[0]
        if library in ("torch", "numpy") and hasattr(value, "dtype"):
            array = np.asarray(value)
            return {_ARRAY: [library, str(array.dtype), array.shape, base64.b64encode(array.tobytes()).decode()]}
        raise TypeError

    try:
        return json.loads(json.dumps(state, default=other))
    except (TypeError, ValueError):
        raise BatchError("its state cannot be saved: it has more than JSON, bytes and arrays") from None


def _decoded(state: object) -> object:
    def other(value: dict[str, Any]) -> object:
        if _BYTES in value:
            return base64.b64decode(value[_BYTES])
        if _ARRAY in value:
            library, dtype, shape, data = value[_ARRAY]
            array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
            return sys.modules["torch"].from_numpy(array) if library == "torch" else array
        return value

    return json.loads(json.dumps(state), object_hook=other)


@dataclass(kw_only=True, eq=False)
class StreamBatches(Batches):
    """Batches of S streams: stream s yields rows `[s * B / S, (s + 1) * B / S)` of each."""

    kind = "streams"

    sources: Sequence[Iterable[object]]

    def __post_init__(self) -> None:
        self._streams = [Stream(source, once=self.once) for source in self.sources]

    @cached_property
    def _peeked(self) -> tuple[Layout, int]:
        process, processes = (jax.process_index(), jax.process_count()) if is_multiprocess() else (0, 1)
        stream = process * len(self._streams) // processes  # most likely one that this process reads
        with self._reading(0, stream):
            first = self._streams[stream].peek()
            return rows_layout(first), num_rows(first) * len(self._streams)

    @property
    def global_batch_size(self) -> int:
        """S times the rows of a stream's first batch."""
        return self._peeked[1]

    @property
    def layout(self) -> Layout:
        """Columns of a first batch."""
        return self._peeked[0]

    @property
    def description(self) -> dict[str, object]:
        """With the number of streams."""
        return {**super().description, "streams": len(self._streams)}

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """See `Batches`."""
        self.left_out = 0
        if not (self.once or self.with_weights):
            for stream, source in enumerate(self.sources):
                if rest := _rest(source):
                    raise BatchError(f"{self._name(stream)}: its last batch {short_batch(rest)}")
        batches = ahead(self._read(rows, position, count))
        if not (self.once and len(self._streams) > 1 and is_multiprocess()):
            yield from batches
            return
        # Processes read other streams, which may end at other steps.
        ended = self._zeros(len(rows)), replace(position, streams=[None] * len(self._streams))
        for batch in chain(batches, repeat(None)):
            there = all_gather_json(batch is not None)
            if not (any(there) if self.with_weights else all(there)):
                self.left_out += len(rows) * sum(1 for _ in chain([batch] if batch else [], batches))
                return
            yield batch or ended

    def _read(self, rows: Sequence[int], position: Position, count: int | None) -> Iterator[tuple[Columns, Position]]:
        size = self.global_batch_size // len(self._streams)
        records = position.streams or [None] * len(self._streams)
        places: dict[int, list[int]] = {}  # by stream
        for place, row in enumerate(rows):
            places.setdefault(row // size, []).append(place)
        readers = {}
        for stream in places:
            with self._reading(position.step, stream):
                report = partial(self._report, stream)
                readers[stream] = self._streams[stream].read(position.step, records[stream], report)
        for step, after in self._steps(position, count):
            parts: dict[int, Columns] = {}
            latest: list[Record | None] = [None] * len(self._streams)
            for stream, reader in readers.items():
                with self._reading(step, stream):
                    if (batch := next(reader, None)) is not None:
                        parts[stream], latest[stream] = batch
            if not parts:
                return
            if self.once and not self.with_weights:
                found = [num_rows(part) for part in parts.values()]
                if found != [size] * len(readers):
                    self.left_out += sum(found)
                    continue
            columns = self._zeros(len(rows))
            for stream, part in parts.items():
                with self._reading(step, stream):
                    whole = self._whole(part, size)
                for name, array in take(whole, [rows[place] % size for place in places[stream]]).items():
                    columns[name][places[stream]] = array
            yield columns, replace(after, streams=latest)

    def _zeros(self, rows: int) -> Columns:
        return {name: np.zeros((rows, *spec.shape[1:]), spec.dtype) for name, spec in self.shapes.items()}

    def _report(self, stream: int, line: str) -> None:
        self.report(f"{self._name(stream)}: {line}")

    def _reading(self, step: int, stream: int = 0) -> AbstractContextManager[None]:
        return reading(f"{self._name(stream)}, step {step + 1}")

    def _name(self, stream: int) -> str:
        return self.name if len(self._streams) == 1 else f"{self.name}[{stream}]"


def _rest(loader: object) -> int:
    # Number of rows of the last batch of a torch loader, if it is short.
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if getattr(loader, "drop_last", True) or not isinstance(size, int) or not isinstance(sampler, Sized):
        return 0
    return len(sampler) % size


def ahead(items: Iterator[T], count: int = 2) -> Iterator[T]:
    """Yields items, and reads `count` ahead in a thread."""
    end: Any = object()
    pool = ThreadPoolExecutor(1)
    try:
        pending = deque(pool.submit(next, items, end) for _ in range(count))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
