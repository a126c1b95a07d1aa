"""Loads a Hugging Face folder onto a mesh; reads each device's shard directly."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple

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
from jaxtp.config.schema import to_plain
from jaxtp.data.copies import local
from jaxtp.hf.config_json import dtype_of, family_of, model_config, vocabulary_size
from jaxtp.hf.model_folder import CONFIG, Folder, HFError, open_folder, prefix_errors
from jaxtp.hf.safetensors import Block, Shape, StoredTensor, StoredTensors
from jaxtp.hf.tensor_map import (
    HEAD,
    TABLE,
    Columns,
    Parameters,
    TensorPart,
    TensorParts,
    group_by_tensor,
    match_tensors,
    name_of,
    split_path,
)
from jaxtp.hf.wrapper import require_prediction_heads
from jaxtp.layers.parameter import Precision, logical_shape, padding_of, spec_of
from jaxtp.mesh import MeshLike, all_devices, as_current, as_mesh, current_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig, architecture, validate_model
from jaxtp.models.decoder import Decoder, abstract_decoder

Progress = Callable[[int, int], None]
"""A function that is called with the bytes read or written so far, and in total."""

# Width of the tiles that `_copy` copies; a tile of two arrays fits into a core's cache
_TILE = 64
# Alignment in bytes that XLA needs to use a CPU array without a copy
_ALIGNMENT = 64
_EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
"""Unsigned dtype and exponent mask; a number is not finite if all exponent bits are set."""


def load(
    path: str | Path,
    *,
    precision: Precision | None = None,
    progress: Progress | None = None,
    ignore_config: Collection[str] = (),
    mesh: MeshLike = None,
    **overrides: object,
) -> Decoder:
    """Loads a model from a Hugging Face folder.

    Each byte is read once. Besides the model, host memory holds at most one tensor, or one layer's
    kernel of all experts.

    Args:
      path: folder with config.json and safetensors, in one file or several with an index.
      precision: by default float32, but parameters bfloat16 if all are stored so.
      ignore_config: see `read_config`.
      mesh: by default the mesh in context, or one device if there is none; also sizes,
        `{"fsdp": 2, "tp": 4}` or `"fsdp=2,tp=4"`.
      **overrides: `ModelConfig` fields outside the architecture, e.g. `remat="none"`.

    Raises:
      HFError: the folder is unreadable, unsupported, or does not fit the mesh.
    """
    folder = open_folder(local(path))
    config = import_config(folder, precision, overrides, ignore_config)
    if mesh is None and current_mesh() is None:
        return load_folder(folder, config, None, progress)
    placed_on = as_mesh(mesh, "jaxtp.hf.load")
    with as_current(placed_on):
        return load_folder(folder, config, jax.sharding.get_mesh(), progress)


def import_config(
    folder: Folder,
    precision: Precision | None,
    overrides: Mapping[str, Any],
    ignore_config: Collection[str] = (),
) -> ModelConfig:
    """Returns a folder's model configuration; raises as `load`."""
    config = model_config(folder.attributes, str(folder.path / CONFIG), ignore_config)
    settings = sorted(to_plain(config).keys() - architecture(config).keys())
    unknown = [name for name in overrides if name not in settings]
    if unknown:
        raise HFError(
            f"{', '.join(unknown)}: jaxtp.hf.load takes {', '.join(settings)}. "
            f"{folder.path / CONFIG} determines the architecture, and jaxtp.add_adapters(model, "
            "LoraConfig(rank=8)) adds adapters to a loaded model"
        )
    if precision is None:
        precision = Precision(param="bfloat16" if dtype_of(folder) == "bfloat16" else "float32")
    return dataclasses.replace(config, precision=precision, **overrides)


def print_notes(path: Path, notes: Iterable[str]) -> None:
    """Prints an open folder's notes on stderr, in the first process only."""
    if jax.process_index() == 0:
        for note in notes:
            say(f"{path}: {note}")


def load_folder(
    folder: Folder, config: ModelConfig, mesh: Mesh | None, progress: Progress | None = None
) -> Decoder:
    """Loads a model with the configuration of `import_config`; raises as `load`."""
    print_notes(folder.path, folder.notes)
    return nnx.merge(*load_state(folder, config, mesh, progress=progress))


def load_state(
    folder: Folder,
    config: ModelConfig,
    mesh: Mesh | None,
    *,
    progress: Progress | None = None,
    only: Callable[[str], bool] = lambda path: True,
    new_ids: range | None = None,
    arrays: "Arrays | None" = None,
) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Returns the graph of `load_folder`'s model, and its variables that are to be loaded.

    Args:
      only: chooses the variables by their dotted path.
      arrays: receives the arrays, and returns the variables.
      new_ids: the ids of new tokens, whose rows become the mean of the rows before them; by default
        those that the model has, and the folder lacks.
    """
    with prefix_errors(folder.path):
        validate_model(config, mesh_sizes(mesh), fixed=True)
        family = family_of(folder.attributes, str(folder.path / CONFIG))
        require_prediction_heads(folder, family, config.num_layers)
        graph, abstract = abstract_decoder(config)
        num_ids = vocabulary_size(folder.attributes)
        stored, needed = match_tensors(
            folder.tensors,
            named_variables(abstract),
            config,
            family,
            num_ids,
            range(num_ids, config.vocab_size) if new_ids is None else new_ids,
        )
        copies = {}
        if config.tie_embeddings:
            copies[name_of(TABLE, family)] = stored.get(name_of(HEAD, family))
        needed_parts = chain.from_iterable(needed.values())
        chosen = group_by_tensor(part for part in needed_parts if only(part.path))
        abstract = select_paths(abstract, only)
        loaded = load_tensors(
            stored, chosen, abstract, mesh, copies=copies, progress=progress, arrays=arrays
        )
        return graph, loaded


def _checked_blocks(
    tensor: StoredTensor, copy: StoredTensor | None, first: int, last: int
) -> Iterator[tuple[int, Block]]:
    """Yields rows in blocks; raises for values that are not finite.

    Also raises if `copy`, a tied head, has other values.
    """
    unsigned, mask = _EXPONENTS[tensor.dtype]
    copied = iter(()) if copy is None else copy.blocks(first, last)
    for row, block in tensor.blocks(first, last):
        if ((block.view(unsigned) & mask) == mask).any():
            raise HFError(
                f"{tensor.file}: {tensor.name} has elements that are not finite, from row {row} on"
            )
        if copy is not None and not np.array_equal(next(copied)[1], block):
            raise HFError(
                f"tie_word_embeddings is true, but {copy.name} and {tensor.name} differ in value; "
                "the setting or a tensor is wrong"
            )
        yield row, block


def load_tensors(
    tensors: StoredTensors,
    needed: TensorParts,
    abstract: nnx.State,
    mesh: Mesh | None,
    *,
    copies: Mapping[str, StoredTensor | None] | None = None,
    progress: Progress | None = None,
    arrays: "Arrays | None" = None,
) -> nnx.State:
    """Reads the parts of tensors that a state needs; layers without a tensor are zero.

    `copies` maps a tensor's name to a tensor that must be equal: a tied head. `arrays` is by
    default of `abstract`.
    """
    total = sum(tensors[name].num_bytes for name in needed)
    num_bytes = 0
    arrays = arrays or Arrays(abstract, mesh)
    filling = _Filling(named_variables(abstract), needed, mesh)
    for name, parts in needed.items():
        buffers = [(part, filling.buffers(part)) for part in parts]
        first, last = _rows_to_read(buffers)
        for row, rows in _checked_blocks(tensors[name], (copies or {}).get(name), first, last):
            for part, buffer in buffers:
                buffer.fill(part, row, rows)
            num_bytes += rows.nbytes
            if progress is not None:
                progress(num_bytes, total)
        for part in parts:
            placed = filling.finish(part)
            if placed is not None:
                arrays.put(*part.target, placed)
    return arrays.state()


class Arrays:
    """The arrays of a state, which become complete layer by layer."""

    def __init__(self, abstract: nnx.State, mesh: Mesh | None):
        self._abstract = abstract
        stacked = {
            path: v
            for path, v in named_variables(abstract).items()
            if split_path(path)[0] is not None
        }
        shardings = {path: _sharding(mesh, spec_of(v)) for path, v in stacked.items()}
        # One program, compiled once for all stacks.
        zeros = jax.jit(
            lambda: {path: jnp.zeros(tuple(v.shape), v.dtype) for path, v in stacked.items()},
            out_shardings=shardings,
        )
        self._arrays: dict[str, Array] = zeros()

    def put(self, path: str, index: int | None, placed: Array) -> None:
        """Sets an array, or a layer of a stack."""
        if index is None:
            self._arrays[path] = placed
            return
        # Waits for each layer; otherwise queued layers would pile up in memory.
        self._arrays[path] = jax.block_until_ready(
            _with_layer(self._arrays[path], placed, np.int32(index))
        )

    def state(self) -> nnx.State:
        """Returns the state."""
        return replace_arrays(self._abstract, self._arrays)


class _Filling:
    """The buffers that are being filled."""

    def __init__(self, variables: Parameters, needed: TensorParts, mesh: Mesh | None):
        self._variables = variables
        self._mesh = mesh
        # Number of parts that each parameter, or each of its layers, still lacks
        self._missing = Counter(part.target for part in chain.from_iterable(needed.values()))
        self._buffers: dict[tuple[str, int | None], _Buffers] = {}

    def buffers(self, part: TensorPart) -> "_Buffers":
        """Returns the buffers that a part fills, for its parameter or layer."""
        path, index = part.target
        if part.target not in self._buffers:
            self._buffers[part.target] = _Buffers(
                self._variables[path], self._mesh, stacked=index is not None
            )
        return self._buffers[part.target]

    def finish(self, part: TensorPart) -> Array | None:
        """Moves the buffers of a part to the devices, unless other parts of them follow."""
        self._missing[part.target] -= 1
        if self._missing[part.target]:
            return None
        return self._buffers.pop(part.target).placed()


def _rows_to_read(buffers: Sequence[tuple[TensorPart, "_Buffers"]]) -> tuple[int, int]:
    """Returns the first row of a tensor that this process needs, and the end of the last."""
    rows: set[int] = set()
    for part, buffer in buffers:
        for _, bounds, _ in buffer.slices(part):
            start = max(bounds[0][0], 0)
            stop = min(bounds[0][1], part.shape[0])
            if start < stop:
                rows |= {start, stop}
    return min(rows, default=0), max(rows, default=0)


def _sharding(mesh: Mesh | None, declared: PartitionSpec) -> Sharding:
    return SingleDeviceSharding(all_devices()[0]) if mesh is None else NamedSharding(mesh, declared)


_with_layer = jax.jit(partial(jax.lax.dynamic_update_index_in_dim, axis=0), donate_argnums=0)
# Start and end in each dim
_Bounds = tuple[tuple[int, int], ...]


class _Slice(NamedTuple):
    """A device's part of a tensor."""

    block: Block
    """The device's buffer, with dims in the order of the file."""
    bounds: _Bounds
    """Where the part is in the file's tensor, or before and after it."""
    columns: Columns | None
    """Indices of its columns in the file; None if they are consecutive."""


class _Buffers:
    """Host buffers for the shards of a parameter, or of one of its layers."""

    def __init__(self, variable: Variable, mesh: Mesh | None, *, stacked: bool):
        # The layer dim is not split.
        dims = slice(1 if stacked else 0, None)
        self.padding = padding_of(variable)
        self.shape = logical_shape(variable)[dims]
        self.padded = tuple(variable.shape)[dims]
        self.padded_sharding = _sharding(mesh, PartitionSpec(*tuple(spec_of(variable))[dims]))
        self.sharding = _sharding(
            mesh, PartitionSpec(*tuple(logical_spec(variable, mesh_sizes(mesh)))[dims])
        )
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        self.bounds = {device: _bounds(index, self.shape) for device, index in indices.items()}
        # Devices with the same part share a buffer.
        self.blocks: dict[_Bounds, Block] = {}
        for bounds in self.bounds.values():
            shape = tuple(stop - start for start, stop in bounds)
            self.blocks[bounds] = _aligned_zeros(shape, np.dtype(variable.dtype))

    def slices(self, part: TensorPart) -> Iterator[_Slice]:
        """Yields each device's part of a tensor."""
        for bounds, block in self.blocks.items():
            if part.expert is not None:
                expert = part.expert - bounds[0][0]
                if not 0 <= expert < len(block):
                    continue
                bounds = bounds[1:]
                block = block[expert]
            if bounds:
                yield _slice_in_file(part, bounds, block)
            else:
                # A number in the file is `[1]`.
                yield _Slice(block.reshape(1), ((0, 1),), None)

    def fill(self, part: TensorPart, row: int, rows: Block) -> None:
        """Copies the elements in `rows`, which begin at `row` of a part's tensor."""
        for block, bounds, columns in self.slices(part):
            (start, stop), *inner_bounds = bounds
            low = max(row, start)
            high = min(row + len(rows), stop)
            if low >= high:
                continue
            inner = starmap(slice, inner_bounds)
            source = rows[(slice(low - row, high - row), *inner)]
            if columns is None:
                _copy(block[low - start : high - start], source)
                continue
            output_dim = block.ndim - 1 - part.transposed - part.experts_last
            if output_dim:
                local_columns = columns - inner_bounds[output_dim - 1][0]
                _copy(block[low - start : high - start], source.take(local_columns, output_dim))
                continue
            # The rows of the file are columns. Copy each run of consecutive columns at once.
            inside = np.flatnonzero((low <= columns) & (columns < high))
            for run in np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1):
                _copy(block[run[0] : run[-1] + 1], source[columns[run] - low])

    def placed(self) -> Array:
        """Returns the array of the buffers, on the devices and padded."""
        shards = [
            jax.device_put(self.blocks[bounds], device) for device, bounds in self.bounds.items()
        ]
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)
        if self.shape == self.padded:
            return array
        return pad_array(array, self.padding, self.padded_sharding)


def _slice_in_file(part: TensorPart, bounds: _Bounds, block: Block) -> _Slice:
    *outer, (begin, end) = bounds
    if part.inner:
        outer[-1] = (outer[-1][0] + part.inner, outer[-1][1] + part.inner)
    columns = None
    output = (begin + part.first, end + part.first)
    if part.columns is not None:
        columns = part.columns[begin:end]
        # A device without columns needs no rows: its minimum is above its maximum.
        output = (int(columns.min(initial=part.columns.max())), int(columns.max(initial=-1)) + 1)
    in_file = (*outer, output)
    if part.transposed:
        block = block.swapaxes(-2, -1)
        in_file = (*outer[:-1], output, outer[-1])
    if part.experts_last:
        block = np.moveaxis(block, 0, -1)
        in_file = (*in_file[1:], in_file[0])
    return _Slice(block, in_file, columns)


def _bounds(index: tuple[slice, ...] | None, shape: Shape) -> _Bounds:
    whole = (slice(None),) * len(shape)
    return tuple(dim.indices(size)[:2] for dim, size in zip(index or whole, shape, strict=True))


def _copy(target: Block, source: Block) -> None:
    """Copies in tiles that fit a core's cache: 3x faster if the target is transposed."""
    if target.flags.c_contiguous or source.ndim == 1:
        target[...] = source
        return
    for row in range(0, source.shape[-2], _TILE):
        for column in range(0, source.shape[-1], _TILE):
            tile = (..., slice(row, row + _TILE), slice(column, column + _TILE))
            target[tile] = source[tile]


def _aligned_zeros(shape: Shape, dtype: np.dtype) -> Block:
    """Returns zeros that a CPU device uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + num_bytes].view(dtype).reshape(shape)
