"""Reads and writes safetensors files: the header's length in 8 bytes, the header in JSON, the data.

Files are untrusted: the header is checked against the file size before reading data. Tensors are read in blocks of
rows; the `safetensors` library reads whole tensors and has no bfloat16 in NumPy. The format:
https://huggingface.co/docs/safetensors.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtp.config.files import sync_file
from jaxtp.config.reading import MAX_JSON, open_regular, parse_json, shown

Block = NDArray[Any]

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
"""Supported dtypes of weights."""

_ITEM_BYTES = {
    **{name: dtype.itemsize for name, dtype in DTYPES.items()},
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1},
    **{"I16": 2, "U16": 2, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8},
}
_LENGTH = 8
_ALIGNMENT = 8
_MAX_DIMS = 8
_METADATA = "__metadata__"
_BLOCK = 2**24
"""Bytes to read at a time, about."""


class SafetensorsError(ValueError):
    """A file violates the format."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    name: str
    dtype: str
    """As the format spells it: F32, BF16, F16, ..."""
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""
    num_bytes: int

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Block]]:
        """Yields rows `[first, last)` in blocks, each with the index of its first row.

        All blocks share one buffer, so a block is valid until the next.

        Raises:
          SafetensorsError: the file ends before the tensor does.
        """
        rows = self.shape[0]
        last = rows if last is None else last
        row_bytes = self.num_bytes // rows
        step = min(max(1, _BLOCK // row_bytes), max(1, last - first))
        buffer = np.empty((step, *self.shape[1:]), DTYPES[self.dtype])
        with self.file.open("rb", buffering=0) as file:
            for row in range(first, last, step):
                block = buffer[: min(step, last - row)]
                self._read(file.fileno(), block, self.offset + row * row_bytes)
                yield row, block

    def read(self) -> Block:
        """Returns a whole tensor; raises as `blocks`."""
        whole = np.empty(self.shape, DTYPES[self.dtype])
        for row, block in self.blocks():
            whole[row : row + len(block)] = block
        return whole

    def _read(self, file: int, block: Block, offset: int) -> None:
        view = memoryview(block.reshape(-1).view(np.uint8).data)
        while view:
            count = os.preadv(file, [view], offset)
            if not count:
                raise SafetensorsError(
                    f"{self.file}: ends within the tensor {shown(self.name)}; it was changed while it was read"
                )
            view, offset = view[count:], offset + count


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns a file's tensors by name, in data order.

    Raises:
      SafetensorsError: the file is not regular, or its header is damaged or does not fit the data.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(_LENGTH), size)
            header = file.read(length)
    except OSError as error:
        raise SafetensorsError(f"{path}: {error.strerror}") from None
    start = _LENGTH + length
    try:
        entries = parse_json(header, f"{path}: its header")
    except ValueError as error:
        raise SafetensorsError(str(error)) from None
    entries.pop(_METADATA, None)
    tensors = [_entry(path, name, value, start) for name, value in entries.items()]
    return _without_gaps(path, tensors, start, size)


Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (as the format spells it) and shape of each tensor, in the order of their data."""


def write_file(path: Path, layout: Layout, tensor_of: Callable[[str], Block]) -> None:
    """Writes a file, one tensor at a time, and flushes it to disk.

    Args:
      tensor_of: returns the array of a name, in its dtype and shape.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}  # transformers requires it
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in layout:
            file.write(np.ascontiguousarray(tensor_of(name)).reshape(-1).view(np.uint8).data)
        sync_file(file)


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < _LENGTH:
        raise SafetensorsError(f"{path}: {size} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_JSON, size - _LENGTH):
        raise SafetensorsError(
            f"{path}: a header of {length:,} bytes in a file of {size:,}; the file is cut off, or not safetensors"
        )
    return int(length)


def _entry(path: Path, name: str, value: Any, start: int) -> StoredTensor:
    where = f"{path}: {shown(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise SafetensorsError(f"{where}: should have dtype, shape and data_offsets, and has {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (_is_sizes(shape) and len(shape) <= _MAX_DIMS):
        raise SafetensorsError(f"{where}: the shape {shown(shape)} is not a list of sizes")
    if not (_is_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise SafetensorsError(f"{where}: data_offsets {shown(offsets)} are not a begin and an end")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise SafetensorsError(f"{where}: unknown dtype {shown(dtype)}")
    begin, end = offsets
    if end - begin != (needed := math.prod(shape) * _ITEM_BYTES[dtype]):
        raise SafetensorsError(f"{where}: {end - begin:,} bytes for a {dtype} of shape {shape}, which takes {needed:,}")
    return StoredTensor(path, name, dtype, tuple(shape), start + begin, end - begin)


def _without_gaps(path: Path, tensors: list[StoredTensor], start: int, size: int) -> dict[str, StoredTensor]:
    """Returns the tensors in data order; raises unless they cover the file without gaps or overlaps."""
    for tensor in tensors:
        if (end := tensor.offset + tensor.num_bytes) > size:
            raise SafetensorsError(
                f"{path}: {shown(tensor.name)}: its data end at byte {end:,}, and the file has {size:,}; it is cut off"
            )
    position, before = start, "the header"
    ordered = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes))
    for tensor in ordered:
        if tensor.offset != position:
            wrong = "overlap" if tensor.offset < position else "leave a gap after"
            raise SafetensorsError(f"{path}: {shown(tensor.name)}: its data {wrong} those of {before}")
        position, before = tensor.offset + tensor.num_bytes, shown(tensor.name)
    if position != size:
        raise SafetensorsError(f"{path}: {size - position:,} bytes after the data of {before} belong to no tensor")
    return {tensor.name: tensor for tensor in ordered}


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
