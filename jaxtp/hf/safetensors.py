"""Reads and writes safetensors files, which are not trusted.

See https://huggingface.co/docs/safetensors, whose library checks the header against the file size.

Tensors are read in blocks of rows into one buffer. The library maps files, which takes as much
memory as the file and crashes if it is cut off while it is read, or reads a whole tensor for each
of its slices. Tensors are written one at a time; the library needs all of a file in memory.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from jaxtp.config.entry import UserError
from jaxtp.config.files import sync_file
from jaxtp.config.reading import MAX_JSON, open_regular, parse_json, truncate
from jaxtp.layers.parameter import DType

Block = NDArray[Any]
Shape = tuple[int, ...]

FORMATS: Mapping[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Supported dtypes of weights, and their names in the format."""
DTYPES = {name: np.dtype(jnp.dtype(dtype)) for dtype, name in FORMATS.items()}
_NUMPY = DTYPES | {"F8_E4M3": np.dtype(jnp.float8_e4m3fn), "U8": np.dtype(np.uint8)}
_SCALE = "_scale_inv"
_UNUSED_SCALES = ("activation_scale", "input_scale")
"""Endings of the names of scales, of weights after their own name."""
_MX_BLOCKS = "_blocks"
_MX_SCALES = "_scales"
_MX_BYTES = 16
"""Endings of the names of MXFP4 tensors, and the bytes of a block, each with two numbers."""
_LENGTH = 8
_ALIGNMENT = 8
_MAX_DIMS = 8
# Approximate bytes per read
_BLOCK = 2**24


class HFError(UserError):
    """A folder cannot be imported, or a model cannot be exported."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `dtype` as the format names it, `offset` of the first byte."""

    file: Path
    name: str
    dtype: str
    shape: Shape
    offset: int

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of its data."""
        return bytes_of(self.dtype, self.shape)

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Block]]:
        """Yields rows `[first, last)` in blocks, after their first index.

        All blocks share one buffer: a block is valid until the next one. Raises `HFError` if the
        file is cut off.
        """
        rows = self.shape[0]
        last = rows if last is None else last
        row_bytes = self.num_bytes // rows
        step = min(max(1, _BLOCK // row_bytes), max(1, last - first))
        buffer = np.empty((step, *self.shape[1:]), _NUMPY[self.dtype])
        for row in range(first, last, step):
            block = buffer[: min(step, last - row)]
            self._read_into(block.reshape(-1).view(np.uint8), row * row_bytes)
            yield row, block

    def data(self) -> Block:
        """Returns the bytes of a tensor of any dtype; raises as `blocks`."""
        data = np.empty(self.num_bytes, np.uint8)
        self._read_into(data, 0)
        return data

    def _read_into(self, data: NDArray[np.uint8], offset: int) -> None:
        with self.file.open("rb") as file:
            file.seek(self.offset + offset)
            if file.readinto(data.data) < data.size:
                raise HFError(
                    f"{self.file}: ends within the tensor {truncate(self.name)}; it changed while "
                    "it was read"
                )

    def is_about(self, value: float) -> bool:
        """Returns whether this is a scalar of this value, to two digits; raises as `blocks`."""
        formats = DTYPES | {"F64": np.dtype(np.float64)}
        if self.dtype not in formats or math.prod(self.shape) != 1:
            return False
        return math.isclose(self.data().view(formats[self.dtype])[0], value, rel_tol=0.02)

    def read(self) -> Block:
        """Returns a whole tensor; raises as `blocks`."""
        whole = np.empty(self.shape, DTYPES[self.dtype])
        for row, block in self.blocks():
            whole[row : row + len(block)] = block
        return whole


StoredTensors = Mapping[str, StoredTensor]
"""Tensors by name."""


@dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """A float8 matrix, or one for each expert, times the scales of its blocks; reads as float32."""

    stored: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Block]]:
        """Yields rows as `StoredTensor.blocks`; each block has its own buffer."""
        scale = replace(self.scale, shape=self.scale.shape or (1,)).read().astype(np.float32)
        height, width = self.block
        if scale.shape[-1] > 1:
            scale = scale.repeat(width, axis=-1)[..., : self.shape[-1]]
        for row, block in self.stored.blocks(first, last):
            rows = np.arange(row, row + len(block)) // (height if block.ndim == 2 else 1)
            factor = scale[rows] if scale.size > 1 else scale
            if factor.ndim == 3 and factor.shape[1] > 1:
                factor = factor.repeat(height, axis=1)[:, : self.shape[1]]
            # Infinite numbers are refused where they are used.
            with np.errstate(over="ignore"):
                scaled = block.astype(np.float32) * factor
            yield row, scaled

    def data(self) -> Block:
        """Returns the scaled matrix."""
        return self.read()


class MXFP4Tensor(ScaledTensor):
    """Blocks of 32 FP4 numbers, each with a scale, which read as bfloat16.

    See OCP Microscaling Formats.
    """

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Block]]:
        """Yields rows as `ScaledTensor.blocks`."""
        for row, block in self.stored.blocks(first, last):
            _, scales = next(self.scale.blocks(row, row + len(block)))
            # [experts, outputs, blocks, bytes], two numbers each
            pairs = _mxfp4_pairs()[scales[..., None], block]
            yield row, pairs.view(DTYPES["BF16"]).reshape(-1, *self.shape[1:])


@cache
def _mxfp4_pairs() -> NDArray[np.uint32]:
    """Returns the two bfloat16 numbers `[scale, byte]`; the low four bits have the first."""
    byte = np.arange(256, dtype=np.uint8)
    scales = byte.view(jnp.float8_e8m0fnu).astype(np.float32)
    codes = np.stack([byte & 15, byte >> 4], axis=-1)
    numbers = codes.view(jnp.float4_e2m1fn).astype(np.float32)
    with np.errstate(over="ignore"):
        pairs = (scales[:, None, None] * numbers).astype(DTYPES["BF16"])
    return pairs.view(np.uint32)[..., 0]


@dataclass(frozen=True)
class TableWithNewRows(StoredTensor):
    """A table whose rows of new tokens are the mean of the rows before them; reads as float32.

    The mean is the same on every mesh, since each process computes it of all rows, in float64.
    """

    stored: StoredTensor
    new: range
    """The rows of new tokens, which the file may have, as spare rows, or not."""

    @classmethod
    def of(cls, stored: StoredTensor, new: range, num_rows: int) -> "TableWithNewRows":
        """Returns a table of `num_rows`."""
        changes = {"dtype": "F32", "shape": (num_rows, *stored.shape[1:])}
        return cls(**{**vars(stored), **changes}, stored=stored, new=new)

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Block]]:
        """Yields rows as `StoredTensor.blocks`; each block has its own buffer."""
        last = self.shape[0] if last is None else last
        end = self.stored.shape[0]
        for row, stored in self.stored.blocks(first, min(last, end)):
            block = stored.astype(np.float32)
            block[max(self.new.start - row, 0) : max(self.new.stop - row, 0)] = self._mean
            yield row, block
        if last > end:
            begin = max(first, end)
            yield begin, np.tile(self._mean, (last - begin, *[1] * (len(self.shape) - 1)))

    @cached_property
    def _mean(self) -> Block:
        total = np.zeros(self.shape[1:])
        for _, block in self.stored.blocks(0, self.new.start):
            total += block.sum(axis=0, dtype=np.float64)
        return (total / self.new.start).astype(np.float32)


@dataclass(frozen=True)
class Constant(StoredTensor):
    """A scalar that is in no file."""

    value: float

    def data(self) -> Block:
        """Returns the scalar."""
        return np.array(self.value, DTYPES[self.dtype])


def with_scales(tensors: StoredTensors, block: tuple[int, int]) -> dict[str, StoredTensor]:
    """Combines float8 matrices with the scales of their blocks, and MXFP4 tensors.

    `block` is the shape of the blocks; a matrix may have one scale instead.
    """
    scaled: dict[str, StoredTensor] = {}
    mxfp4 = {
        name.removesuffix(_MX_BLOCKS) + _MX_SCALES: name
        for name in tensors
        if name.endswith(_MX_BLOCKS)
    }
    for name, stored in tensors.items():
        scale = tensors.get(name + _SCALE)
        if scale is not None and stored.dtype == "F8_E4M3" and len(stored.shape) in (2, 3):
            *experts, height, width = stored.shape
            grid = (*experts, math.ceil(height / block[0]), math.ceil(width / block[1]))
            if scale.dtype not in DTYPES or scale.shape not in (grid, (*experts, 1, 1), (), (1,)):
                raise HFError(
                    f"{scale.file}: {truncate(scale.name)} is {scale.dtype} {scale.shape}, not one "
                    f"scale or {grid}"
                )
            as_float32 = {**vars(stored), "dtype": "F32"}
            scaled[name] = ScaledTensor(**as_float32, stored=stored, scale=scale, block=block)
        elif not (name.endswith((_SCALE, *_UNUSED_SCALES)) or name in mxfp4):
            scaled[name] = stored
    for scales, blocks in mxfp4.items():
        scaled[blocks] = _mxfp4_tensor(tensors[blocks], tensors.get(scales))
    return scaled


def _mxfp4_tensor(stored: StoredTensor, scale: StoredTensor | None) -> MXFP4Tensor:
    grid = stored.shape[:-1]
    scale_form = "missing" if scale is None else f"{scale.dtype} {scale.shape}"
    has_blocks = stored.dtype == "U8" and stored.shape[3:] == (_MX_BYTES,)
    if scale is None or not has_blocks or (scale.dtype, scale.shape) != ("U8", grid):
        raise HFError(
            f"{stored.file}: {truncate(stored.name)} is {stored.dtype} {stored.shape}, and its "
            f"scales are {scale_form}; MXFP4 has U8 [experts, outputs, blocks, {_MX_BYTES}] and U8 "
            "[experts, outputs, blocks]"
        )
    experts, outputs, blocks = grid
    changes = {"dtype": "BF16", "shape": (experts, outputs, 2 * _MX_BYTES * blocks)}
    block = (1, 2 * _MX_BYTES)
    return MXFP4Tensor(**{**vars(stored), **changes}, stored=stored, scale=scale, block=block)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns a file's tensors by name, in data order.

    Refuses a header that is damaged or does not fit the data.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > MAX_JSON:
                raise SafetensorError(f"a header of {length:,} bytes")
            header = file.read(length)
        with safe_open(path, "numpy") as opened:
            # There are no gaps between the data.
            offset = _LENGTH + length
            for name in opened.offset_keys():
                view = opened.get_slice(name)
                shape = tuple(view.get_shape())
                if len(shape) > _MAX_DIMS:
                    raise SafetensorError(f"a shape of {len(shape):,} dims for {name}")
                tensors[name] = StoredTensor(path, name, view.get_dtype(), shape, offset)
                offset += tensors[name].num_bytes
        # The library takes the last of two tensors with one name.
        parse_json(header, f"{path}: its header")
    except ValueError as error:
        raise HFError(str(error)) from None
    except (OSError, MemoryError) as error:
        problem = getattr(error, "strerror", None) or error
        raise HFError(f"{path}: {problem}") from None
    except SafetensorError as error:
        raise HFError(
            f"{path}: {size:,} bytes, which are cut off, damaged, or not safetensors: "
            f"{truncate(error, 300)}"
        ) from None
    return tensors


def bytes_of(dtype: str, shape: Shape) -> int:
    """Returns the bytes of a tensor; `dtype` as the format names it."""
    # BOOL is the only dtype without its bits in its name.
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (8 if bits is None else int(bits[0])) // 8


Header = Mapping[str, tuple[str, Shape]]
"""The format's dtype name and the shape of each tensor, in the order of their data."""


def write_file(path: Path, tensors: Header, tensor_of: Callable[[str], Block]) -> None:
    """Writes a file, one tensor at a time as `tensor_of` returns it, and flushes it to disk."""
    # transformers requires it.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin = end
        end += bytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH, "little") + text)
        for name in tensors:
            file.write(np.ascontiguousarray(tensor_of(name)).reshape(-1).view(np.uint8).data)
        sync_file(file)
