"""Loads a folder in Hugging Face format onto a mesh: each device's part comes straight from the bytes of the files."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
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

from jaxtp.checkpoint.logical import filled, named_variables, spec
from jaxtp.checkpoint.safetensors import Block, SafetensorsError, StoredTensor
from jaxtp.config import ConfigError
from jaxtp.hf.attributes import family_of, model_config
from jaxtp.hf.folder import CONFIG, Folder, HFError, open_folder
from jaxtp.hf.names import HEAD, TABLE, Place, check_layers, check_tensors, dtypes, places
from jaxtp.layers.parameter import Precision
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
    holds one tensor of the files at most. The result is called on ids `[B, T]` and gives logits `[B, T, V]`.

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
        check_layers(folder.tensors, config.num_layers)
        graph, abstract = abstract_decoder(config)
        family = family_of(folder.attributes, str(folder.path / CONFIG))
        needed = list(places(named_variables(abstract), family))
        check_tensors(folder.tensors, needed, family, config.tie_embeddings)
        total = sum(folder.tensors[place.theirs].num_bytes for place in needed)
        arrays = _read(_Source(folder, config.tie_embeddings, progress, total), needed, abstract, mesh)
    except (ConfigError, HFError, SafetensorsError) as error:
        named = str(error).startswith(str(folder.path))
        raise HFError(str(error) if named else f"{folder.path}: {error}") from None
    model: Decoder = nnx.merge(graph, filled(abstract, arrays))
    return model


@dataclass
class _Source:
    """The files, and how far they have been read."""

    folder: Folder
    tied: bool
    progress: Progress | None
    total: int
    """Bytes to read."""
    done: int = 0

    def blocks(self, name: str, first: int, last: int) -> Iterator[tuple[int, Block]]:
        """Yields the rows of a tensor in blocks, each of them checked.

        Raises:
          HFError: an element is not finite, or a tied head is not the embedding.
        """
        tensor = self.folder.tensors[name]
        head = self.folder.tensors.get(HEAD) if self.tied and name == TABLE else None
        heads = iter(head.blocks(first, last)) if head is not None else None
        for row, block in tensor.blocks(first, last):
            _check_finite(tensor, row, block)
            if heads is not None and not np.array_equal(next(heads)[1], block):
                raise HFError(f"tie_word_embeddings is true, and {HEAD} is not {TABLE}; one of them is wrong")
            self._note(block.nbytes)
            yield row, block

    def _note(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _read(source: _Source, needed: list[Place], abstract: nnx.State, mesh: Mesh | None) -> dict[str, Array]:
    """Returns all parameters by path, padded and split as the model declares."""
    arrays: dict[str, Array] = {}
    variables = named_variables(abstract)
    for place in needed:
        variable = variables[place.ours]
        shape, declared = tuple(variable.shape), spec(variable)
        if place.layer is None:
            arrays[place.ours] = _place(source, place, shape, _sharding(mesh, declared), variable.dtype)
            continue
        if place.layer == 0:
            arrays[place.ours] = _zeros(shape, jnp.dtype(variable.dtype), _sharding(mesh, declared))
        one = PartitionSpec(*declared[1:])  # layers are not split
        layer = _place(source, place, shape[1:], _sharding(mesh, one), variable.dtype)
        stacked = _with_layer(arrays[place.ours], layer, np.int32(place.layer))
        arrays[place.ours] = jax.block_until_ready(
            stacked
        )  # or layers would pile up in memory, each waiting for its turn
    return arrays


def _sharding(mesh: Mesh | None, declared: PartitionSpec) -> Sharding:
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, declared)


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> Array:
    zeros: Array = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)
    return zeros


@partial(jax.jit, donate_argnums=0)
def _with_layer(stacked: Array, layer: Array, index: Array) -> Array:
    """Writes a layer into the stack in place: the memory of the stack is that of the result."""
    return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, 0)


def _place(source: _Source, place: Place, shape: tuple[int, ...], sharding: Sharding, dtype: Any) -> Array:
    """Returns one tensor of a file on its devices: it is read once, and each block dealt out to the devices' parts.

    Args:
      source: the files.
      place: the tensor's name, and its place in the model.
      shape: shape of the array, padding included.
      sharding: sharding of the array.
      dtype: dtype of the array.
    """
    indices = sharding.addressable_devices_indices_map(shape)
    bounds = {device: _bounds(index, shape) for device, index in indices.items()}
    parts = {where: _aligned_zeros(tuple(b - a for a, b in where), np.dtype(dtype)) for where in set(bounds.values())}
    dim = 1 if place.transposed else 0  # of ours that is the rows of theirs
    rows = place.shape[0]
    first, last = min(where[dim][0] for where in parts), min(rows, max(where[dim][1] for where in parts))
    for row, block in source.blocks(place.theirs, first, max(first, last)):
        for where, part in parts.items():
            _deal(block, row, part, where, place.transposed)
    placed = [jax.device_put(parts[where], device) for device, where in bounds.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns where a device's part begins and ends in each dim."""
    whole = (slice(None),) * len(shape)
    return tuple((dim.indices(size)[0], dim.indices(size)[1]) for dim, size in zip(index or whole, shape, strict=True))


def _deal(block: Block, row: int, part: Block, where: tuple[tuple[int, int], ...], transposed: bool) -> None:
    """Copies what a block of rows and a part of the array have in common."""
    start, stop = where[1 if transposed else 0]
    low, high = max(row, start), min(row + len(block), stop)
    if low >= high:
        return
    mine, target = block[low - row : high - row], slice(low - start, high - start)
    if transposed:
        _copy_transposed(part[:, target], mine[:, slice(*where[0])])
    elif part.ndim > 1:
        part[target] = mine[:, slice(*where[1])]
    else:
        part[target] = mine


def _copy_transposed(target: Block, source: Block) -> None:
    """Copies in tiles that stay in a core's cache, which takes a third of the time."""
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


def _check_finite(tensor: StoredTensor, row: int, block: Block) -> None:
    unsigned, mask = _EXPONENTS[tensor.dtype]
    if ((block.view(unsigned) & mask) == mask).any():
        raise HFError(f"{tensor.file}: {tensor.name} has elements that are not finite, from row {row} on")
