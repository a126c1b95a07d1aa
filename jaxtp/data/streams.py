"""One stream of batches, which a run can resume.

A stream's record is its epoch, its state before the last batch, and that batch's checksum. Resuming loads the state,
reads the batch again and compares. So a state that omits something, as Hugging Face's omits the content of shuffle
buffers, is found out, and the stream is read again from its beginning, as one without a state is.
"""

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np

from jaxtp.config.entry import UserError
from jaxtp.data.columns import BatchError, Columns, checksum, num_rows, to_columns

Record: TypeAlias = dict[str, Any]
"""JSON: `epoch`, `state` (None without one), `crc32`."""

_STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
_BYTES, _ARRAY = "jaxtp.bytes", "jaxtp.array"


class EndOfDataError(UserError):
    """An iterator ended before the run."""


class Stream:
    """An iterable of batches; endless, unless `once` or a one-shot iterator."""

    def __init__(self, source: Iterable[object], *, once: bool = False):
        self.one_shot, self._source, self._once = isinstance(source, Iterator), source, once
        self._opened: Iterator[tuple[Columns, Record]] | None = None
        self._first: tuple[Columns, Record] | None = None
        self._loaded = False

    def peek(self) -> Columns:
        """Returns the first batch; a later `read` from the beginning yields it without another read.

        Raises:
          BatchError: the stream is empty.
        """
        if self._first is None:
            opened = self._passes(0, None)
            first = next(opened, None)
            if first is None:
                raise BatchError("has no batches")
            self._first, self._opened = first, chain([first], opened)
        return self._first[0]

    def read(
        self, step: int = 0, record: Record | None = None, report: Callable[[str], None] = print
    ) -> Iterator[tuple[Columns, Record]]:
        """Yields batches from a step, and the record after each.

        Raises:
          BatchError: the order is not the record's.
        """
        if not step:
            return self._from_beginning()
        record = record or {}
        state, crc32 = record.get("state"), record.get("crc32")
        if state is not None:
            self._opened = None
            batches = self._passes(record["epoch"], state, step - 1)
            last = next(batches, None)
            if last is not None and last[1]["crc32"] == crc32:
                return batches
            report(f"its state does not hold all of its position (a shuffle buffer?): reads {step:,} batches again")
        else:
            report(f"it has no state: reads {step:,} batches again")
        batches = self._from_beginning()
        last = next(islice(batches, step - 1, None), None)
        if crc32 is not None and (last is None or last[1]["crc32"] != crc32):
            raise BatchError(
                f"its batch {step} is not the checkpoint's: the order changed. Seed its shuffle, or use a loader with "
                "a state (state_dict and load_state_dict), as torchdata's StatefulDataLoader"
            )
        return batches

    def _from_beginning(self) -> Iterator[tuple[Columns, Record]]:
        self.peek()
        opened, self._opened = self._opened, None
        if opened is not None and not self._loaded:
            return opened
        assert self._first is not None
        state = self._first[1]["state"]
        if self.one_shot and state is None:
            raise BatchError("is an iterator, which can be read only once; give an object whose iter() begins anew")
        return self._passes(0, state)

    def _passes(self, epoch: int, state: object, read: int = 0) -> Iterator[tuple[Columns, Record]]:
        # `read`: number of batches before.
        while True:
            resumed, count = state is not None, 0
            iterator = self._open(epoch, state)
            state = self._state(iterator)
            for batch in iterator:
                count += 1
                columns = to_columns(batch)
                num_rows(columns)
                yield columns, {"epoch": epoch, "state": state, "crc32": checksum(columns)}
                state = self._state(iterator)
            read += count
            if self._once:
                return
            if self.one_shot:
                raise EndOfDataError(
                    f"the iterator ended after {read:,} batches. Give an object whose iter() begins anew, such as "
                    "a DataLoader or a function without parameters that yields batches, or set fewer train.steps"
                )
            if not count and not resumed:
                raise BatchError("has no batches")
            epoch, state = epoch + 1, None

    def _open(self, epoch: int, state: object) -> Iterator[object]:
        # Also what a torch loader reads: Hugging Face's loads a state at the start of each epoch with its number.
        for source in (self._source, *(getattr(self._source, name, None) for name in ("dataset", "sampler"))):
            if callable(set_epoch := getattr(source, "set_epoch", None)):
                set_epoch(epoch)
        methods = _state_methods(self._source)
        if state is not None and methods is not None:
            methods[1](_decoded(state))
            self._loaded = True
        iterator = iter(self._source)
        if state is not None and methods is None:
            methods = _state_methods(iterator)
            if methods is None:
                raise BatchError("has no state now, and had one in the checkpoint")
            methods[1](_decoded(state))
            self._loaded = True
        return iterator

    def _state(self, iterator: Iterator[object]) -> object:
        methods = _state_methods(self._source) or _state_methods(iterator)
        return None if methods is None else _encoded(methods[0]())


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
        if type(value).__module__.partition(".")[0] in ("torch", "numpy") and hasattr(value, "dtype"):
            array = np.asarray(value)
            data = base64.b64encode(array.tobytes()).decode()
            return {_ARRAY: [type(value).__module__.partition(".")[0], str(array.dtype), array.shape, data]}
        raise TypeError

    try:
        return json.loads(json.dumps(state, default=other))
    except (TypeError, ValueError):
        raise BatchError("its state cannot be saved: it is not JSON with bytes and arrays") from None


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
