"""Streams of batches, which a run can resume.

A record of a stream has its epoch, its state before the last batch, and that batch's checksum. To resume, the state is
loaded and the batch read again. If the checksum differs, the state omits something, as Hugging Face's omits the content
of shuffle buffers: then the stream is read again from its beginning, like one without a state.
"""

import base64
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from itertools import count as count_from
from typing import Any

import jax
import numpy as np

from jaxtp.data.batches import Batches, Position, Read, Record
from jaxtp.data.columns import (
    BatchError,
    Columns,
    EndOfDataError,
    checksum,
    count_rows,
    reading,
    short_batch,
    take,
    to_columns,
)
from jaxtp.distributed.agreement import all_gather_json, is_multiprocess

_STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
ITERABLE = (
    "an object whose iter() begins anew, such as a DataLoader, or a function without parameters that yields batches"
)
_BYTES, _ARRAY = "jaxtp.bytes", "jaxtp.array"


class Stream:
    """An iterable of batches; endless, unless `once` or an iterator."""

    def __init__(self, source: Iterable[object], name: str, *, once: bool = False):
        self.source, self.name, self._once = source, name, once
        self._opened: Iterator[tuple[object, Record]] | None = None  # at the beginning
        self._start: Record | None = None  # of the first batch, once it is read

    def peek(self) -> Columns:
        """Returns the first batch; the next `read` from the beginning yields it too."""
        batches = self._passes(0, None)
        first = next(batches)
        self._opened, self._start = chain([first], batches), first[1]
        return to_columns(first[0])

    def read(self, step: int, record: Record | None) -> Iterator[tuple[Columns, Record]]:
        """Returns batches from a step, and the record after each.

        Raises:
          BatchError: the order is not the record's.
        """
        record = record or {}
        if self._start is None:
            self.peek()  # its first state, to which a source that has loaded another one can return
        why = "it has no state"
        if step and (state := record.get("state")) is not None:
            batches = _with_checksums(self._passes(record["epoch"], state, step - 1))
            if _reads_last(batches, record):
                return batches
            why = "its state omits something (a shuffle buffer?)"
        again = self._from_beginning()
        batches = _with_checksums(again)
        if step:
            print(f"{self.name}: {why}, so its first {step:,} batches are read again")
            deque(islice(again, step - 1), maxlen=0)
            if not _reads_last(batches, record):
                raise BatchError(
                    f"its batch {step} is not the checkpoint's: its order or the size of its batches changed. Seed its "
                    "shuffle, or use a loader with state_dict and load_state_dict, such as torchdata's "
                    "StatefulDataLoader"
                )
        return batches

    def _from_beginning(self) -> Iterator[tuple[object, Record]]:
        opened, self._opened = self._opened, None
        if opened is not None:
            return opened
        assert self._start is not None
        if isinstance(self.source, Iterator) and self._start["state"] is None:
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
            if read == before and not resumed:
                raise BatchError(f"has no batches in epoch {epoch + 1}")
            if self._once:
                return
            if isinstance(self.source, Iterator):
                raise EndOfDataError(f"the iterator ended after {read:,} batches; give {ITERABLE}, or set train.steps")
            epoch, state = epoch + 1, None

    def _open(self, epoch: int, state: object) -> Iterator[object]:
        # Hugging Face's streams load a state at each start with its epoch, also inside of a torch loader.
        for source in (self.source, *(getattr(self.source, name, None) for name in ("dataset", "sampler"))):
            if callable(set_epoch := getattr(source, "set_epoch", None)):
                set_epoch(epoch)
        if state is None:
            return iter(self.source)
        self._opened = None
        of_source = _state_methods(self.source)
        if of_source is not None:
            of_source[1](_decoded(state))
            return iter(self.source)
        iterator = iter(self.source)
        if (methods := _state_methods(iterator)) is None:
            raise BatchError("has no state, and had one in the checkpoint")
        methods[1](_decoded(state))
        return iterator

    def _state(self, iterator: Iterator[object]) -> object:
        methods = _state_methods(self.source) or _state_methods(iterator)
        return None if methods is None else _encoded(methods[0]())


def _with_checksums(batches: Iterator[tuple[object, Record]]) -> Iterator[tuple[Columns, Record]]:
    for batch, record in batches:
        columns = to_columns(batch)
        count_rows(columns)
        yield columns, {**record, "crc32": checksum(columns)}


def _reads_last(batches: Iterator[tuple[Columns, Record]], record: Record) -> bool:
    # Reads a batch; returns whether it is the record's.
    last = next(batches, None)
    return last is not None and record.get("crc32") in (None, last[1]["crc32"])


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

    sources: Mapping[str, Iterable[object]]
    """By name."""
    once: bool = False
    """Whether `read` ends with the streams, for evaluation."""

    def __post_init__(self) -> None:
        self._streams = [Stream(source, name, once=self.once) for name, source in self.sources.items()]

    @property
    def description(self) -> dict[str, object]:
        """With the number of streams."""
        return {**super().description, "streams": len(self._streams)}

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """See `Batches`."""
        batches = super().read(rows, position, count)
        if not (self.once and len(self._streams) > 1 and is_multiprocess()):
            yield from batches
            return
        # Processes read other streams, which may end at other steps.
        ended = self._zeros(len(rows)), replace(position, streams=[None] * len(self._streams))
        enough = any if self.with_weights else all
        for batch in chain(batches, repeat(None)):
            if not enough(all_gather_json(batch is not None)):
                return
            yield batch or ended

    def _peek(self) -> tuple[Columns, int]:
        process, processes = (jax.process_index(), jax.process_count()) if is_multiprocess() else (0, 1)
        stream = process * len(self._streams) // processes  # most likely one that this process reads
        with self._reading(0, stream):
            first = self._streams[stream].peek()
            return first, count_rows(first) * len(self._streams)

    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        batches = self._batches(rows, position)
        return lambda _: next(batches, None)

    def _batches(self, rows: Sequence[int], position: Position) -> Iterator[Read]:
        size = self.global_batch_size // len(self._streams)
        records = position.streams or [None] * len(self._streams)
        places: dict[int, list[int]] = defaultdict(list)  # by stream
        for place, row in enumerate(rows):
            places[row // size].append(place)
        readers = {}
        for stream in places:
            with self._reading(position.step, stream):
                source = self._streams[stream]
                if not (self.once or self.with_weights) and (rest := _rest(source.source)):
                    raise BatchError(f"its last batch {short_batch(rest)}")
                readers[stream] = source.read(position.step, records[stream])
        for step in count_from(position.step):
            found = {}
            latest: list[Record | None] = [None] * len(self._streams)
            for stream, reader in readers.items():
                with self._reading(step, stream):
                    if (batch := next(reader, None)) is not None:
                        found[stream], latest[stream] = batch
            if not found:
                return
            is_whole = [count_rows(columns) for columns in found.values()] == [size] * len(readers)
            if self.once and not (self.with_weights or is_whole):
                continue
            parts = []
            for stream, columns in found.items():
                with self._reading(step, stream):
                    local = [rows[place] % size for place in places[stream]]
                    parts.append((places[stream], take(self._whole(columns, size), local)))
            yield self._placed(len(rows), parts), latest

    def _reading(self, step: int, stream: int = 0) -> AbstractContextManager[None]:
        return reading(f"{self._streams[stream].name}, step {step + 1}")


def _rest(loader: object) -> int:
    # Number of rows of the last batch of a torch loader, if it is short.
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if getattr(loader, "drop_last", True) or not isinstance(size, int) or not isinstance(sampler, Sized):
        return 0
    return len(sampler) % size
