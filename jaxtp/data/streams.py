"""Streams of batches, which a run can resume.

The record of a stream has its epoch, its state before the last batch, and the checksum of this
batch. To resume, the stream loads the state and reads the batch again. If the checksum differs, the
state is incomplete: Hugging Face's states, for example, lack the content of shuffle buffers. Then
the stream is read again from its beginning, like a stream without a state.
"""

import base64
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
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
    to_columns,
    too_short,
)
from jaxtp.distributed.agreement import all_gather_json, is_multiprocess

ITERABLE = (
    "an object whose iter() starts from the beginning, such as a DataLoader, or a function without "
    "parameters that yields batches"
)
_ARRAY = "jaxtp.array"


class Stream:
    """An iterable of batches, which repeats unless it is read `once` or is an iterator."""

    def __init__(self, source: Iterable[object], name: str, *, once: bool = False):
        self.source = source
        self.name = name
        self._once = once
        self._opened: Iterator[tuple[object, Record]] | None = None  # at the first batch
        self._first: Record = {}  # of the first batch, once it is read

    def peek(self) -> Columns:
        """Returns the first batch, which the next `read` from the beginning yields again."""
        batches = self._passes(0, None)
        first, self._first = next(batches)
        self._opened = chain([(first, self._first)], batches)
        return to_columns(first)

    def read(self, step: int, record: Record) -> Iterator[tuple[Columns, Record]]:
        """Returns the batches from a step on, each with the record after it.

        Raises:
          BatchError: the order of the batches differs from the record, unless the record is empty.
        """
        if not self._first:
            self.peek()
        start = self._first["state"]
        state = record.get("state")
        why = "it has no state"
        if step and None not in (start, state):
            batches = _with_checksums(self._passes(record["epoch"], state, step - 1))
            if _reads_last(batches, record):
                return batches
            why = "its state omits something (a shuffle buffer?)"
        again = self._opened
        self._opened = None
        if again is None:
            if isinstance(self.source, Iterator) and start is None:
                raise BatchError(f"is an iterator, which can be read only once; give {ITERABLE}")
            again = self._passes(0, start)
        batches = _with_checksums(again)
        if step:
            print(f"{self.name}: {why}, so its first {step:,} batches are read again")
            deque(islice(again, step - 1), maxlen=0)
            if not _reads_last(batches, record):
                raise BatchError(
                    f"its batch {step} is not the checkpoint's: its order or the size of its "
                    "batches changed. Seed its shuffle, or use a loader with state_dict and "
                    "load_state_dict, such as torchdata's StatefulDataLoader"
                )
        return batches

    def _passes(self, epoch: int, state: object, read: int = 0) -> Iterator[tuple[object, Record]]:
        # Yields each batch with the epoch and the state before it; `read` is the number of batches
        # before the first one.
        while True:
            resumed = state is not None
            before = read
            iterator, get_state = self._open(epoch, state)
            state = get_state()
            for batch in iterator:
                read += 1
                yield batch, {"epoch": epoch, "state": state}
                state = get_state()
            if read == before and not resumed:
                raise BatchError(f"has no batches in epoch {epoch + 1}")
            if self._once:
                return
            if isinstance(self.source, Iterator):
                raise EndOfDataError(
                    f"the iterator ended after {read:,} batches; give {ITERABLE}, or set "
                    "train.steps"
                )
            epoch = epoch + 1
            state = None

    def _open(self, epoch: int, state: object) -> tuple[Iterator[object], Callable[[], object]]:
        # Returns batches, and a function that returns the state of their source. Sets the epoch
        # first, also inside of a torch loader, because Hugging Face's streams load a state for an
        # epoch.
        dataset = getattr(self.source, "dataset", None)
        sampler = getattr(self.source, "sampler", None)
        for source in (self.source, dataset, sampler):
            set_epoch = getattr(source, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        owner = self.source if _state_methods(self.source) else iter(self.source)
        methods = _state_methods(owner)
        if methods is None:
            return iter(owner), lambda: None
        get, put = methods
        if state is not None:
            self._opened = None
            put(_decoded(state))
        return iter(owner), lambda: _encoded(get())


def _with_checksums(batches: Iterator[tuple[object, Record]]) -> Iterator[tuple[Columns, Record]]:
    for batch, record in batches:
        columns = to_columns(batch)
        count_rows(columns)
        yield columns, {**record, "crc32": checksum(columns)}


def _reads_last(batches: Iterator[tuple[Columns, Record]], record: Record) -> bool:
    # Reads a batch, and returns whether it is the record's.
    last = next(batches, None)
    return last is not None and record.get("crc32") in (None, last[1]["crc32"])


def _state_methods(source: object) -> tuple[Callable[[], object], Callable[[object], None]] | None:
    # Returns the methods that get and set a state, if there are any.
    for getter, setter in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        get = getattr(source, getter, None)
        put = getattr(source, setter, None)
        if callable(get) and callable(put):
            return get, put
    return None


def _encoded(state: object) -> object:
    # Returns a copy of a state as JSON. It may have bytes, and arrays of torch and NumPy, such as
    # the state of a generator.
    def other(value: object) -> object:
        library = type(value).__module__.partition(".")[0]
        if isinstance(value, bytes):
            array = np.frombuffer(value, np.uint8)
        elif library in ("torch", "numpy") and hasattr(value, "dtype"):
            array = np.asarray(value)
        else:
            raise TypeError
        return {
            _ARRAY: [
                library,
                str(array.dtype),
                array.shape,
                base64.b64encode(array.tobytes()).decode(),
            ]
        }

    try:
        return json.loads(json.dumps(state, default=other))
    except (TypeError, ValueError):
        raise BatchError(
            "its state cannot be saved: it has more than JSON, bytes and arrays"
        ) from None


def _decoded(state: object) -> object:
    def other(value: dict[str, Any]) -> object:
        if _ARRAY not in value:
            return value
        library, dtype, shape, data = value[_ARRAY]
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        if library == "torch":
            return sys.modules["torch"].from_numpy(array)
        return array if library == "numpy" else array.tobytes()

    return json.loads(json.dumps(state), object_hook=other)


class StreamBatches(Batches):
    """Batches of S streams: stream s yields the rows `[s * B / S, (s + 1) * B / S)` of each batch.

    Args:
      once: whether `read` ends with the streams, for evaluation.
    """

    def __init__(self, name: str, sources: Mapping[str, Iterable[object]], *, once: bool = False):
        self._streams = [
            Stream(source, stream_name, once=once) for stream_name, source in sources.items()
        ]
        self._once = once
        number = len(sources)
        # Peeks into a stream that this process probably reads.
        index = 0
        if is_multiprocess():
            index = jax.process_index() * number // jax.process_count()
        stream = self._streams[index]
        with reading(stream.name, 0):
            first = stream.peek()
            super().__init__(
                name, first, count_rows(first) * number, {"kind": "streams", "streams": number}
            )

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """Overrides `Batches.read`: in an evaluation, all processes end at the same step."""
        batches = super().read(rows, position, count)
        if not (self._once and len(self._streams) > 1 and is_multiprocess()):
            yield from batches
            return
        # The processes read different streams, which may end at different steps.
        ended = self._zeros(len(rows)), replace(position, streams=[None] * len(self._streams))
        enough = any if self.with_weights else all
        for batch in chain(batches, repeat(None)):
            if not enough(all_gather_json(batch is not None)):
                return
            yield batch or ended

    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        batches = self._batches(rows, position)
        return lambda _: next(batches, None)

    def _batches(self, rows: Sequence[int], position: Position) -> Iterator[Read]:
        size = self.global_batch_size // len(self._streams)
        # For each stream, the row in it for each place in the batch
        places: dict[int, dict[int, int]] = defaultdict(dict)
        for place, row in enumerate(rows):
            places[row // size][place] = row % size
        readers = {}
        for index in places:
            stream = self._streams[index]
            record = position.streams and position.streams[index]
            with reading(stream.name, position.step):
                if not (self._once or self.with_weights):
                    num_rows = _rows_of_short_batch(stream.source)
                    if num_rows:
                        raise BatchError(f"its last batch {too_short(num_rows)}")
                readers[index] = stream.read(position.step, record or {})
        for step in count_from(position.step):
            batches: dict[int, Columns] = {}
            records: list[Record | None] = [None] * len(self._streams)
            for index, reader in readers.items():
                with reading(self._streams[index].name, step):
                    batch = next(reader, None)
                if batch is not None:
                    batches[index], records[index] = batch
            if not batches:
                return
            is_whole = list(map(count_rows, batches.values())) == [size] * len(readers)
            if self._once and not (self.with_weights or is_whole):
                continue
            joined = self._zeros(len(rows))
            for index, columns in batches.items():
                with reading(self._streams[index].name, step):
                    self._put(joined, columns, size, places[index])
            yield joined, records


def _rows_of_short_batch(loader: object) -> int:
    # Returns the number of rows of a torch loader's last batch if it is short, otherwise 0.
    size = getattr(loader, "batch_size", None)
    sampler = getattr(loader, "sampler", None)
    is_cut = not getattr(loader, "drop_last", True)
    if is_cut and isinstance(size, int) and isinstance(sampler, Sized):
        return len(sampler) % size
    return 0
