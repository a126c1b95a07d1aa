"""Loads a folder in Hugging Face format onto a mesh: each device's part comes straight from the bytes of the files."""

import dataclasses
import difflib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxtp.checkpoint.logical import filled, logical_spec, named_variables, padded
from jaxtp.checkpoint.safetensors import Block, SafetensorsError, StoredTensor
from jaxtp.config import ConfigError
from jaxtp.hf.attributes import family_of, model_config
from jaxtp.hf.folder import CONFIG, Folder, HFError, open_folder
from jaxtp.hf.names import (
    HEAD,
    TABLE,
    Place,
    as_stored,
    by_tensor,
    check_experts,
    check_layers,
    check_tensors,
    dtypes,
    full_names,
    name_of,
    places,
)
from jaxtp.layers.parameter import Precision, logical_shape, padding_of, spec_of
from jaxtp.mesh import current_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig, architecture, checked
from jaxtp.models.decoder import Decoder, abstract_decoder

Progress = Callable[[int, int], None]
"""Called with the number of bytes read so far, and that of all bytes."""

_TILE = 64
"""Rows, and columns, of a tile."""
_ALIGNMENT = 64
"""Alignment in bytes of XLA's arrays on CPUs."""
_EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}
"""The exponent's bits, which are all set in a number that is not finite."""


def load_hf(
    path: str | Path,
    *,
    precision: Precision | None = None,
    progress: Progress | None = None,
    ignore_config: Collection[str] = (),
    **overrides: Any,
) -> Decoder:
    """Returns a model from a folder in Hugging Face format, on the mesh in context, or on one device without one.

    Each parameter is initialised sharded, and each byte of the files is read once, in blocks: beside the model, memory
    holds one tensor of the files at most, or what all experts of a layer have of one kernel. The result is called on
    ids `[B, T]` and gives logits `[B, T, V]`.

    Args:
      path: the folder: config.json and safetensors, in one file or in several with an index.
      precision: the dtypes; by default parameters as they are stored (float16 as float32), and all else float32.
      progress: called as bytes are read.
      ignore_config: attributes of config.json that are not understood and are known to say nothing of what the model
        computes.
      **overrides: fields of `ModelConfig` that are no architecture, such as `remat="none"`.

    Raises:
      HFError: what is there cannot be read, is not understood, or does not fit the mesh.
    """
    folder = open_folder(Path(path))
    config = import_config(folder, precision, overrides, ignore_config)
    mesh = None if current_mesh() is None else jax.sharding.get_mesh()
    return load_folder(folder, config, mesh, progress)


def import_config(
    folder: Folder, precision: Precision | None, overrides: Mapping[str, Any], ignore_config: Collection[str] = ()
) -> ModelConfig:
    """Returns the configuration with which the model in a folder will be loaded.

    Raises:
      HFError: an override of the architecture, or as `load_hf`.
    """
    config = model_config(folder.attributes, str(folder.path / CONFIG), ignore_config)
    unknown = [name for name in overrides if not hasattr(config, name)]
    if unknown:
        close = difflib.get_close_matches(unknown[0], [field.name for field in dataclasses.fields(config)], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise HFError(f"{', '.join(unknown)}: no field of ModelConfig{hint}")
    if "lora" in overrides:
        raise HFError("lora: load the model, then give it adapters: jaxtp.add_adapters(model, LoraConfig(rank=8))")
    fixed = [name for name in overrides if name in architecture(config)]
    if fixed:
        raise HFError(f"{', '.join(fixed)}: what the model is follows from {folder.path / CONFIG}; leave it out")
    if precision is None:
        stored = dtypes(folder.tensors, family_of(folder.attributes, str(folder.path / CONFIG)))
        precision = Precision(param="bfloat16" if stored == {"BF16"} else "float32")
    return dataclasses.replace(config, precision=precision, **overrides)


def load_folder(folder: Folder, config: ModelConfig, mesh: Mesh | None, progress: Progress | None = None) -> Decoder:
    """Loads a model as `load_hf` does, with the configuration that `import_config` gives.

    Raises:
      HFError: the model does not fit the mesh, or its tensors are not those of the configuration.
    """
    try:
        checked(config, mesh_sizes(mesh), fixed=True)
        family = family_of(folder.attributes, str(folder.path / CONFIG))
        stored = full_names(folder.tensors, family)
        check_layers(stored, config.num_layers, family)
        graph, abstract = abstract_decoder(config)
        check_experts(stored, config, family)
        needed = by_tensor(places(named_variables(abstract), config, family, as_stored(stored)))
        check_tensors(stored, needed, family, config.tie_embeddings)
        copies = {name_of(TABLE, family): stored.get(name_of(HEAD, family))} if config.tie_embeddings else {}
        total = sum(stored[name].num_bytes for name in needed)
        arrays = _read(_Source(stored, copies, progress, total), needed, abstract, mesh)
    except (ConfigError, HFError, SafetensorsError) as error:
        named = str(error).startswith(str(folder.path))
        raise HFError(str(error) if named else f"{folder.path}: {error}") from None
    model: Decoder = nnx.merge(graph, filled(abstract, arrays))
    return model


@dataclass
class _Source:
    """The files, and how far they have been read."""

    tensors: Mapping[str, StoredTensor]
    copies: Mapping[str, StoredTensor | None]
    """A tensor that, where it is there too, must be the same as that of a name: a head that is tied."""
    progress: Progress | None
    total: int
    """Bytes to read."""
    done: int = 0

    def blocks(self, name: str, first: int, last: int) -> Iterator[tuple[int, Block]]:
        """Yields the rows of a tensor in blocks, each of them checked.

        Raises:
          HFError: an element is not finite, or a tied head is not the embedding.
        """
        tensor, copy = self.tensors[name], self.copies.get(name)
        copied = None if copy is None else iter(copy.blocks(first, last))
        for row, block in tensor.blocks(first, last):
            check_finite(tensor, row, block)
            if copy is not None and copied is not None and not np.array_equal(next(copied)[1], block):
                raise HFError(
                    f"tie_word_embeddings is true, and {copy.name} is not {tensor.name}; one of them is wrong"
                )
            self._note(block.nbytes)
            yield row, block

    def _note(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _read(
    source: _Source, needed: Mapping[str, list[Place]], abstract: nnx.State, mesh: Mesh | None
) -> dict[str, Array]:
    """Returns all parameters by path, padded and split as the model declares."""
    variables = named_variables(abstract)
    left = Counter(place.target for found in needed.values() for place in found)
    stacked = {ours: variables[ours] for ours, index in left if index is not None}
    arrays = _zeros(
        {ours: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for ours, v in stacked.items()},
        {ours: _sharding(mesh, spec_of(v)) for ours, v in stacked.items()},
    )
    parts: dict[tuple[str, int | None], _Part] = {}
    for name, found in needed.items():
        for ours, index in (place.target for place in found):
            if (ours, index) not in parts:
                parts[ours, index] = _Part(variables[ours], mesh, stacked=index is not None)
        _fill(source, name, [(place, parts[place.target]) for place in found])
        for ours, index in (place.target for place in found):
            left[ours, index] -= 1
            if left[ours, index]:  # tensors of other experts are to come
                continue
            placed = parts.pop((ours, index)).placed()
            if index is None:
                arrays[ours] = placed
                continue
            # Waiting for each, or layers would pile up in memory until their turn comes.
            arrays[ours] = jax.block_until_ready(_with_layer(arrays[ours], placed, np.int32(index)))
    return arrays


def _sharding(mesh: Mesh | None, declared: PartitionSpec) -> Sharding:
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, declared)


def _zeros(shapes: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, Sharding]) -> dict[str, Array]:
    """Returns zeros by name, all of them from one program: it is compiled once, whatever the number of stacks."""
    zeros = jax.jit(lambda: {n: jnp.zeros(s.shape, s.dtype) for n, s in shapes.items()}, out_shardings=dict(shardings))
    arrays: dict[str, Array] = zeros()
    return arrays


@partial(jax.jit, donate_argnums=0)
def _with_layer(stacked: Array, layer: Array, index: Array) -> Array:
    """Writes a layer into the stack in place: the memory of the stack is that of the result."""
    return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, 0)


_Bounds = tuple[tuple[int, int], ...]
"""Begin and end in each dim."""


class _Part:
    """A parameter, or one of its layers, on its way from tensors of a file to the devices.

    Args:
      variable: the parameter.
      mesh: where it is to be.
      stacked: it is one of the layers of the parameter.
    """

    def __init__(self, variable: nnx.Variable[Any], mesh: Mesh | None, *, stacked: bool):
        own = slice(1 if stacked else 0, None)  # layers are not split
        self.padding = padding_of(variable)
        self.shape, self.padded = logical_shape(variable)[own], tuple(variable.shape)[own]
        self.stored = _sharding(mesh, PartitionSpec(*tuple(spec_of(variable))[own]))
        self.sharding = _sharding(mesh, PartitionSpec(*tuple(logical_spec(variable, mesh_sizes(mesh)))[own]))
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        self.bounds = {device: _bounds(index, self.shape) for device, index in indices.items()}
        dtype = np.dtype(variable.dtype)
        self.blocks = {where: _aligned_zeros(tuple(b - a for a, b in where), dtype) for where in self.bounds.values()}

    def shares(self, place: Place) -> Iterator[tuple[Block, _Bounds]]:
        """Yields what of each device's block is in a tensor of the file, and where in the tensor it is."""
        for where, block in self.blocks.items():
            if place.expert is None:
                yield block, _in_file(place, where)
            elif 0 <= place.expert - where[0][0] < len(block):
                yield block[place.expert - where[0][0]], _in_file(place, where[1:])

    def take(self, place: Place, row: int, rows: Block) -> None:
        """Copies what rows of the file's tensor, from `row` on, and each device's block have in common."""
        for block, ((start, stop), *columns) in self.shares(place):
            low, high = max(row, start), min(row + len(rows), stop)
            if low >= high:
                continue
            source = rows[(slice(low - row, high - row), *(slice(*bounds) for bounds in columns))]
            at = (slice(low - start, high - start), *(slice(end - begin) for begin, end in columns))
            if place.transposed:
                _copy_transposed(block[_turned(at)], source)
            else:
                block[at] = source

    def placed(self) -> Array:
        """Returns the array, each device's block on its device, with the padding of the mesh."""
        placed = [jax.device_put(self.blocks[where], device) for device, where in self.bounds.items()]
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)
        return array if self.shape == self.padded else padded(array, self.padding, self.stored)


def _fill(source: _Source, name: str, parts: Sequence[tuple[Place, _Part]]) -> None:
    """Reads a tensor of a file, each row once, and deals it out to its parts."""
    needed = [rows for place, part in parts for _, (rows, *_) in part.shares(place) if rows[0] < rows[1]]
    first, last = min((a for a, _ in needed), default=0), max((b for _, b in needed), default=0)
    for row, rows in source.blocks(name, first, last):
        for place, part in parts:
            part.take(place, row, rows)


def _in_file(place: Place, where: _Bounds) -> _Bounds:
    """Returns where a block of a parameter is in the file's tensor."""
    begin, end = where[-1]
    found = (*where[:-1], (begin + place.first, end + place.first))
    return _turned(found) if place.transposed else found


def _turned(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what there is for each dim with the last two the other way round."""
    return (*dims[:-2], *dims[:-3:-1])


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    """Returns where a device's part begins and ends in each dim."""
    whole = (slice(None),) * len(shape)
    return tuple((dim.indices(size)[0], dim.indices(size)[1]) for dim, size in zip(index or whole, shape, strict=True))


def _copy_transposed(target: Block, source: Block) -> None:
    """Copies in tiles that stay in a core's cache, which takes a third of the time."""
    if source.ndim > 2:
        for one, other in zip(target, source, strict=True):
            _copy_transposed(one, other)
        return
    for row in range(0, source.shape[0], _TILE):
        for column in range(0, source.shape[1], _TILE):
            tile = source[row : row + _TILE, column : column + _TILE]
            target[column : column + _TILE, row : row + _TILE] = tile.T


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> Block:
    """Returns zeros that a CPU device takes as they are, without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + num_bytes].view(dtype).reshape(shape)


def check_finite(tensor: StoredTensor, row: int, block: Block) -> None:
    """Checks rows of a tensor.

    Raises:
      HFError: an element is not finite.
    """
    unsigned, mask = _EXPONENTS[tensor.dtype]
    if ((block.view(unsigned) & mask) == mask).any():
        raise HFError(f"{tensor.file}: {tensor.name} has elements that are not finite, from row {row} on")
