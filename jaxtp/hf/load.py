"""Loads a Hugging Face folder onto a mesh; reads each device's shard directly."""

import dataclasses
import difflib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxtp.checkpoint.logical import (
    Variable,
    logical_spec,
    named_variables,
    pad_array,
    replace_arrays,
    select_paths,
)
from jaxtp.config.entry import say
from jaxtp.hf.config_json import dtype_of, family_of, model_config
from jaxtp.hf.model_folder import CONFIG, Folder, HFError, open_folder, prefix_errors
from jaxtp.hf.safetensors import Block, StoredTensor
from jaxtp.hf.tensor_map import HEAD, TABLE, Columns, TensorPart, match_tensors, name_of, split_path
from jaxtp.hf.wrapper import require_prediction_heads
from jaxtp.layers.parameter import Precision, logical_shape, padding_of, spec_of
from jaxtp.mesh import all_devices, current_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig, architecture, validate_model
from jaxtp.models.decoder import Decoder, abstract_decoder

Progress = Callable[[int, int], None]  # Called with the bytes read or written so far, and in total

_TILE = 64
_ALIGNMENT = 64  # Alignment in bytes that XLA needs to use a CPU array without a copy
_EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
"""Unsigned dtype and exponent mask; a number is not finite if all exponent bits are set."""


def load_hf(
    path: str | Path,
    *,
    precision: Precision | None = None,
    progress: Progress | None = None,
    ignore_config: Collection[str] = (),
    **overrides: object,
) -> Decoder:
    """Loads a model from a Hugging Face folder, onto the mesh in context or one device.

    Each byte is read once. Besides the model, host memory holds at most one tensor, or one layer's
    kernel of all experts.

    Args:
      path: folder with config.json and safetensors, in one file or several with an index.
      precision: by default float32, but parameters bfloat16 if all are stored so.
      ignore_config: see `read_config`.
      **overrides: `ModelConfig` fields outside the architecture, e.g. `remat="none"`.

    Raises:
      HFError: the folder is unreadable, unsupported, or does not fit the mesh.
    """
    folder = open_folder(Path(path))
    config = import_config(folder, precision, overrides, ignore_config)
    return load_folder(
        folder, config, None if current_mesh() is None else jax.sharding.get_mesh(), progress
    )


def import_config(
    folder: Folder,
    precision: Precision | None,
    overrides: Mapping[str, Any],
    ignore_config: Collection[str] = (),
) -> ModelConfig:
    """Returns a folder's model configuration; raises as `load_hf`."""
    config = model_config(folder.attributes, str(folder.path / CONFIG), ignore_config)
    if unknown := [name for name in overrides if not hasattr(config, name)]:
        close = difflib.get_close_matches(unknown[0], vars(config), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise HFError(f"{', '.join(unknown)}: no field of ModelConfig{hint}")
    if "lora" in overrides:
        raise HFError(
            "lora: load the model, then give it adapters: jaxtp.add_adapters(model, "
            "LoraConfig(rank=8))"
        )
    if fixed := [name for name in overrides if name in architecture(config)]:
        raise HFError(
            f"{', '.join(fixed)}: {folder.path / CONFIG} determines the architecture; leave it out"
        )
    if precision is None:
        precision = Precision(param="bfloat16" if dtype_of(folder) == "bfloat16" else "float32")
    return dataclasses.replace(config, precision=precision, **overrides)


def print_notes(folder: Folder) -> None:
    """Prints an open folder's notes on stderr, in the first process only."""
    if jax.process_index() == 0:
        for note in folder.notes:
            say(f"{folder.path}: {note}")


def load_folder(
    folder: Folder, config: ModelConfig, mesh: Mesh | None, progress: Progress | None = None
) -> Decoder:
    """Loads a model with the configuration of `import_config`; raises as `load_hf`."""
    print_notes(folder)
    return nnx.merge(*load_state(folder, config, mesh, progress=progress))


def load_state(
    folder: Folder,
    config: ModelConfig,
    mesh: Mesh | None,
    *,
    progress: Progress | None = None,
    only: Callable[[str], bool] = lambda path: True,
) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Returns the graph of `load_folder`'s model, and its variables that are to be loaded.

    `only` chooses them by their dotted path.
    """
    with prefix_errors(folder.path):
        validate_model(config, mesh_sizes(mesh), fixed=True)
        family = family_of(folder.attributes, str(folder.path / CONFIG))
        require_prediction_heads(folder, family, config.num_layers)
        graph, abstract = abstract_decoder(config)
        stored, needed = match_tensors(folder.tensors, named_variables(abstract), config, family)
        copies = (
            {name_of(TABLE, family): stored.get(name_of(HEAD, family))}
            if config.tie_embeddings
            else {}
        )
        chosen = {
            name: [part for part in parts if only(part.ours)] for name, parts in needed.items()
        }
        chosen = {name: parts for name, parts in chosen.items() if parts}
        abstract = select_paths(abstract, only)
        return graph, load_tensors(stored, chosen, abstract, mesh, copies=copies, progress=progress)


def _checked_blocks(
    tensor: StoredTensor, copy: StoredTensor | None, first: int, last: int
) -> Iterator[tuple[int, Block]]:
    """Yields rows in blocks.

    Refuses non-finite values, and a `copy` (a tied head) with other values.
    """
    unsigned, mask = _EXPONENTS[tensor.dtype]
    copied = None if copy is None else copy.blocks(first, last)
    for row, block in tensor.blocks(first, last):
        if ((block.view(unsigned) & mask) == mask).any():
            raise HFError(
                f"{tensor.file}: {tensor.name} has elements that are not finite, from row {row} on"
            )
        if copy is not None and copied is not None and not np.array_equal(next(copied)[1], block):
            names = f"{copy.name} and {tensor.name}"
            raise HFError(
                f"tie_word_embeddings is true, but {names} differ in value; the setting or a "
                "tensor is wrong"
            )
        yield row, block


def load_tensors(
    tensors: Mapping[str, StoredTensor],
    needed: Mapping[str, list[TensorPart]],
    abstract: nnx.State,
    mesh: Mesh | None,
    *,
    copies: Mapping[str, StoredTensor | None] | None = None,
    progress: Progress | None = None,
) -> nnx.State:
    """Reads the `needed` parts of tensors into an abstract state; layers without a tensor are zero.

    `copies` maps a tensor's name to a tensor that must be equal: a tied head.
    """
    done = 0
    total = sum(tensors[name].num_bytes for name in needed)
    variables = named_variables(abstract)
    remaining = Counter(part.target for parts in needed.values() for part in parts)
    stacked = {
        ours: variable for ours, variable in variables.items() if split_path(ours)[0] is not None
    }
    shapes = {ours: (tuple(v.shape), v.dtype) for ours, v in stacked.items()}
    shardings = {ours: _sharding(mesh, spec_of(v)) for ours, v in stacked.items()}
    # One program, compiled once for all stacks.
    zeros = jax.jit(
        lambda: {ours: jnp.zeros(*shape) for ours, shape in shapes.items()}, out_shardings=shardings
    )
    arrays: dict[str, Array] = zeros()
    buffers_of: dict[tuple[str, int | None], _Buffers] = {}
    for name, parts in needed.items():
        for ours, index in (part.target for part in parts):
            if (ours, index) not in buffers_of:
                buffers_of[ours, index] = _Buffers(variables[ours], mesh, stacked=index is not None)
        filled = [(part, buffers_of[part.target]) for part in parts]
        bounds = [
            rows
            for part, buffers in filled
            for _, (rows, *_), _ in buffers.slices(part)
            if rows[0] < rows[1]
        ]
        first = min((a for a, _ in bounds), default=0)
        last = max((b for _, b in bounds), default=0)
        for row, block in _checked_blocks(tensors[name], (copies or {}).get(name), first, last):
            for part, buffers in filled:
                buffers.fill(part, row, block)
            done += block.nbytes
            if progress is not None:
                progress(done, total)
        for ours, index in (part.target for part in parts):
            remaining[ours, index] -= 1
            if remaining[ours, index]:  # other experts of this kernel follow
                continue
            placed = buffers_of.pop((ours, index)).placed()
            if index is None:
                arrays[ours] = placed
                continue
            # Wait for each layer; otherwise queued layers pile up in memory.
            arrays[ours] = jax.block_until_ready(_with_layer(arrays[ours], placed, np.int32(index)))
    return replace_arrays(abstract, arrays)


def _sharding(mesh: Mesh | None, declared: PartitionSpec) -> Sharding:
    return SingleDeviceSharding(all_devices()[0]) if mesh is None else NamedSharding(mesh, declared)


_with_layer = jax.jit(partial(jax.lax.dynamic_update_index_in_dim, axis=0), donate_argnums=0)
_Bounds = tuple[tuple[int, int], ...]  # Start and end in each dim


class _Buffers:
    """Host buffers for the shards of a parameter, or of one of its layers."""

    def __init__(self, variable: Variable, mesh: Mesh | None, *, stacked: bool):
        dims = slice(1 if stacked else 0, None)  # the layer dim is not split
        self.padding = padding_of(variable)
        self.shape = logical_shape(variable)[dims]
        self.padded = tuple(variable.shape)[dims]
        self.padded_sharding = _sharding(mesh, PartitionSpec(*tuple(spec_of(variable))[dims]))
        self.sharding = _sharding(
            mesh, PartitionSpec(*tuple(logical_spec(variable, mesh_sizes(mesh)))[dims])
        )
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        self.bounds = {device: _bounds(index, self.shape) for device, index in indices.items()}
        dtype = np.dtype(variable.dtype)
        self.blocks = {
            where: _aligned_zeros(tuple(b - a for a, b in where), dtype)
            for where in self.bounds.values()
        }

    def slices(self, part: TensorPart) -> Iterator[tuple[Block, _Bounds, Columns | None]]:
        """Yields each device's part of a tensor, its bounds in the file, and columns.

        The part has the dim order of the file. The columns are indices in the file if they are not
        consecutive, else None.
        """
        for where, block in self.blocks.items():
            if part.expert is not None:
                expert = part.expert - where[0][0]
                where = where[1:]
                if not 0 <= expert < len(block):
                    continue
                block = block[expert]
            if part.head is not None:  # its numbers on this device
                size = part.shape[0]
                start = where[0][0] - part.head * part.shape[0]
                low = max(0, start)
                high = min(size, start + len(block))
                yield block[low - start : max(low, high) - start], ((low, high),), None
                continue
            if not where:  # a number
                yield block.reshape(1), ((0, 1),), None
                continue
            begin, end = where[-1]
            before = where[:-1]
            if part.inner:
                before = (*before[:-1], (before[-1][0] + part.inner, before[-1][1] + part.inner))
            columns = None
            bounds = (begin + part.first, end + part.first)
            if part.columns is not None:
                columns = part.columns[begin:end]
                bounds = (
                    int(columns.min(initial=part.columns.max())),
                    int(columns.max(initial=-1)) + 1,
                )
            where = (*before, bounds)
            if part.transposed:
                block = block.swapaxes(-2, -1)
                where = (*before[:-1], bounds, before[-1])
            if part.experts_last:
                block = np.moveaxis(block, 0, -1)
                where = (*where[1:], where[0])
            yield block, where, columns

    def fill(self, part: TensorPart, row: int, rows: Block) -> None:
        for block, ((start, stop), *others), columns in self.slices(part):
            low = max(row, start)
            high = min(row + len(rows), stop)
            if low >= high:
                continue
            source = rows[(slice(low - row, high - row), *(slice(*bounds) for bounds in others))]
            output_dim = block.ndim - 1 - part.transposed - part.experts_last
            if columns is None:
                _copy(block[low - start : high - start], source)
            elif output_dim:
                _copy(
                    block[low - start : high - start],
                    source.take(columns - others[output_dim - 1][0], output_dim),
                )
            else:
                inside = np.flatnonzero((low <= columns) & (columns < high))
                for run in np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1):
                    _copy(block[run[0] : run[-1] + 1], source[columns[run] - low])

    def placed(self) -> Array:
        placed = [
            jax.device_put(self.blocks[where], device) for device, where in self.bounds.items()
        ]
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)
        return (
            array
            if self.shape == self.padded
            else pad_array(array, self.padding, self.padded_sharding)
        )


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    whole = (slice(None),) * len(shape)
    return tuple(
        (dim.indices(size)[0], dim.indices(size)[1])
        for dim, size in zip(index or whole, shape, strict=True)
    )


def _copy(target: Block, source: Block) -> None:
    """Copies in tiles that fit a core's cache: 3x faster if the target is transposed."""
    if target.flags.c_contiguous or source.ndim == 1:
        target[...] = source
        return
    for row in range(0, source.shape[-2], _TILE):
        for column in range(0, source.shape[-1], _TILE):
            tile = (..., slice(row, row + _TILE), slice(column, column + _TILE))
            target[tile] = source[tile]


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> Block:
    """Returns zeros that a CPU device uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + num_bytes].view(dtype).reshape(shape)
