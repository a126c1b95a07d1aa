"""Maps parameters, layers and experts to file tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtp.checkpoint.logical import Variable
from jaxtp.config.reading import truncate
from jaxtp.hf.families.family import EXPERT, LAYER, Family, Layout, Tensor
from jaxtp.hf.families.family import HEAD as EACH_HEAD
from jaxtp.hf.model_folder import HFError, join_names
from jaxtp.hf.safetensors import (
    DTYPES,
    FORMATS,
    Constant,
    ScaledTensor,
    Shape,
    StoredTensor,
    StoredTensors,
    TableWithNewRows,
)
from jaxtp.hf.wrapper import HEAD as HEAD
from jaxtp.hf.wrapper import TABLE as TABLE
from jaxtp.hf.wrapper import full_names as full_names
from jaxtp.hf.wrapper import layer_pattern
from jaxtp.hf.wrapper import name_of as name_of
from jaxtp.layers.parameter import DType, logical_shape
from jaxtp.models.block import BlockConfig
from jaxtp.models.config import BLOCKS, ModelConfig

# The number of an expert in a tensor's name
_EXPERT = re.compile(r"(?<=\.experts\.)\d{1,9}(?=\.)")
_NUMBER = re.compile(r"\.\d+\.")
_MAX_LISTED = 3
_MAX_COLUMNS = 2**24

Columns = NDArray[np.int64]
_TABLES = (TABLE, HEAD, "head.bias")
"""Paths of the parameters with a row for each token."""
# By dotted path, abstract or real
Parameters = Mapping[str, Variable]
_SHARED_KEY = "blocks.attention.latent_down.kernel"
_ROTATED = re.compile(
    r"blocks\.attention\.(qkv\.(kernels|biases)\.[01]|qk_norms\.[01]\.(scale|bias)|query_up\.kernels\.0"
    r"|latent_down\.kernel)"
)
"""Parameters whose columns are dims of rotated heads."""


@dataclass(frozen=True)
class TensorPart:
    """A parameter, layer or expert in a file: a tensor, or part of a fused tensor."""

    path: str
    """The parameter's dotted path."""
    name: str
    """The tensor's name in the file."""
    index: int | None
    """Index in the stack of layers; None for a parameter that is not stacked."""
    transposed: bool
    """The last two dims are swapped in the file."""
    shape: Shape
    """Shape of the whole tensor in the file, before dims are split or joined as in `stored`."""
    first: int = 0
    """Start of the part along the last dim in jaxtp's order; below 0 if other tensors hold what
    comes before."""
    expert: int | None = None
    """Index of the expert; None if the tensor holds all experts, or the parameter has none."""
    columns: Columns | None = field(default=None, compare=False)
    """Indices of the part's columns in the tensor's output dim, in jaxtp's order; None:
    consecutive, from `first`."""
    stored: Shape | None = None
    """Shape in the file, if it splits a dim into heads, or joins the dims of experts and ranks."""
    float32: bool | None = False
    """Whether it is float32 in a file with another dtype; None: in some files."""
    inner: int = 0
    """Start of the part along the second to last dim in jaxtp's order."""
    experts_last: bool = False
    """The dim of experts comes last in the file, not first."""
    either_way: bool = False
    """The file may also have it with the last two dims swapped."""

    @property
    def stored_shape(self) -> Shape:
        """Shape of the whole tensor in the file."""
        return self.shape if self.stored is None else self.stored

    @property
    def ordered_shape(self) -> Shape:
        """Shape of the whole tensor, with dims in jaxtp's order."""
        shape = (self.shape[-1], *self.shape[:-1]) if self.experts_last else self.shape
        return _swap_last_dims(shape) if self.transposed else shape

    @property
    def target(self) -> tuple[str, int | None]:
        """The parameter and the layer index."""
        return self.path, self.index


TensorParts = Mapping[str, Sequence[TensorPart]]
"""The parts of each tensor, by its name."""


def tensor_parts(
    parameters: Parameters,
    config: ModelConfig,
    family: Family,
    layout: Layout = "separate",
    stored: Mapping[str, str] | None = None,
) -> Iterator[TensorPart]:
    """Yields every parameter's tensors; raises `HFError` if the family has no name for a parameter.

    Args:
      layout: chooses between alternative tensors of a parameter, if `stored` has none of them.
      stored: names in a file, keyed by the name with `EXPERT` in place of the expert number.
    """
    stacks = {stack: (numbers, block) for stack, numbers, block in config.kinds()}
    for path in parameters:
        stack, general = split_path(path)
        if stack is None:
            layers: Iterable[tuple[int | None, str]] = [(None, "")]
            block = config.block()
        else:
            numbers, block = stacks[stack]
            layers = enumerate(map(str, numbers))
        tensors = alternatives(general, family, block)
        if not tensors:
            raise HFError(f"a {family.model_type} has no {general}")
        # The layers share one array of columns.
        places: dict[Tensor, Place] = {}
        for index, layer in layers:
            tensor = _choose(tensors, layer, layout, stored or {})
            if tensor not in places:
                places[tensor] = _place(path, tensor, parameters, family, block)
            shape = logical_shape(parameters[path])
            in_layer = replace(tensor, name=tensor.name.replace(LAYER, layer))
            yield from _parts_of_layer(in_layer, path, index, shape, places[tensor], block)


def _count_stacked_dims(path: str, tensor: Tensor) -> int:
    """Counts a parameter's dims of layers and experts that are separate in the file."""
    return (split_path(path)[0] is not None) + (EXPERT in tensor.name)


def _parts_of_layer(
    tensor: Tensor,
    path: str,
    index: int | None,
    logical: Shape,
    place: "Place",
    block: BlockConfig,
) -> Iterator[TensorPart]:
    """Yields the parts of a parameter in one layer: one, or one for each expert or head."""
    shape = (*logical[_count_stacked_dims(path, tensor) : -1], place.width)
    if tensor.transposed:
        shape = _swap_last_dims(shape)
    stored = None
    if tensor.by_head or tensor.unit_dim:
        rows = place.width // block.head_dim if tensor.by_head else 1
        stored = (*shape[:-1], rows, shape[-1] // rows)
    if tensor.around:
        stored = (1, 1, *shape, 1)
    experts: Iterable[int | None] = [None]
    if EXPERT in tensor.name:
        # The parameter is [L, E, ...].
        experts = range(logical[1])
    heads = range(1)
    if EACH_HEAD in tensor.name:
        heads = range(place.width // block.head_dim)
        shape = (block.head_dim,)
    for expert, head in product(experts, heads):
        yield TensorPart(
            path,
            tensor.name.format(expert=expert, head=head),
            index,
            tensor.transposed,
            shape,
            place.first - head * block.head_dim,
            expert,
            place.columns,
            stored,
            tensor.float32,
            either_way=tensor.either_way,
        )


def _swap_last_dims(shape: Shape) -> Shape:
    return (*shape[:-2], *shape[:-3:-1])


def alternatives(general: str, family: Family, block: BlockConfig) -> list[Tensor]:
    """Returns the tensors that may hold a parameter of a block."""
    tensors = []
    for tensor in family.tensors:
        if tensor.path == general and not (tensor.unless and getattr(block, tensor.unless)):
            tensors.append(tensor)
    return tensors


def split_path(path: str) -> tuple[str | None, str]:
    """Splits a path into its stack of blocks (or None) and its path in a family's table."""
    match = re.match(rf"({BLOCKS}(?:\.\d+)?)\.(.*)", path)
    return (None, path) if match is None else (match[1], f"{BLOCKS}.{match[2]}")


class Place(NamedTuple):
    """Where a part is in the output dim of its tensor; see `TensorPart`."""

    first: int
    width: int
    """Size of the whole dim."""
    columns: Columns | None


def _place(
    path: str, tensor: Tensor, parameters: Parameters, family: Family, block: BlockConfig
) -> Place:
    """Returns where a parameter lies in its tensor, which joins several along the output dim."""
    stack, _ = split_path(path)
    stacked_dims = _count_stacked_dims(path, tensor)
    width = 0
    for part in family.tensors:
        part_path = part.path.replace(BLOCKS, stack or "")
        if part.name == tensor.name and part_path in parameters:
            shape = logical_shape(parameters[part_path])
            part_width = shape[-1] if len(shape) > stacked_dims else 1
            if part_path == path:
                first = width
                own_width = part_width
            width += part_width
    rotates = family.rotated != "halves" and _ROTATED.fullmatch(tensor.path) is not None
    if not rotates and tensor.chunks is None:
        return Place(first, width, None)
    # config.json is not trusted.
    if own_width > _MAX_COLUMNS:
        raise HFError(
            f"{truncate(tensor.name)} has {own_width:,} output dims; at most {_MAX_COLUMNS:,} are "
            "supported"
        )
    columns = np.arange(own_width)
    if rotates:
        head_dim = own_width if tensor.path == _SHARED_KEY else block.head_dim
        _reorder(columns, head_dim, block, pairs=family.rotated == "pairs")
    if tensor.chunks is None:
        return Place(first, width, first + columns)
    num_chunks = getattr(block, tensor.chunks)
    chunk, offset = np.divmod(columns, own_width // num_chunks)
    return Place(first, width, (chunk * width + first) // num_chunks + offset)


def _reorder(columns: Columns, head_dim: int, block: BlockConfig, *, pairs: bool) -> None:
    """Reorders each head's rotated columns in place: `pairs` become halves; halves are exchanged.

    A rotation by a negative angle is one by the positive angle of exchanged halves.
    """
    heads = columns.reshape(-1, head_dim)
    if block.kv_rank:
        rotated = heads[:, -block.rope_head_dim :]
    else:
        rotated = heads[:, : int(block.head_dim * block.rotary_fraction)]
    halves = [rotated[:, ::2], rotated[:, 1::2]]
    if not pairs:
        halves = np.split(rotated, 2, axis=1)[::-1]
    rotated[:] = np.concatenate(halves, axis=1)


def _choose(
    tensors: Sequence[Tensor], layer: str, layout: Layout, stored: Mapping[str, str]
) -> Tensor:
    names = {tensor.name.replace(LAYER, layer): tensor for tensor in tensors}
    present = [name for name in names if name in stored]
    if len(present) > 1:
        duplicates = " and ".join(truncate(stored[name], 200) for name in present)
        raise HFError(f"{duplicates} are the same parameter; remove one of them")
    if present:
        return names[present[0]]
    return next(tensor for tensor in tensors if tensor.layout in (None, layout))


def group_by_tensor(parts: Iterable[TensorPart]) -> TensorParts:
    """Returns the parts of each tensor, in order."""
    tensors: dict[str, list[TensorPart]] = {}
    for part in parts:
        tensors.setdefault(part.name, []).append(part)
    for group in tensors.values():
        group.sort(key=lambda part: part.first)
    return tensors


def as_stored(stored: StoredTensor | None, parts: Sequence[TensorPart]) -> Sequence[TensorPart]:
    """Returns the parts of a tensor with the order of dims and the dtype of a file.

    Raises `HFError` if the shape does not tell the order.
    """
    if stored is None:
        return parts
    changes: dict[str, Any] = {}
    if parts[0].float32 is None:
        changes["float32"] = stored.dtype == FORMATS["float32"]
    swapped = _swap_last_dims(parts[0].shape)
    if parts[0].either_way and stored.shape == swapped:
        if swapped[-1] == swapped[-2]:
            raise HFError(
                f"{truncate(stored.name)} is {dims(swapped)}: with as many input as output "
                "features its shape does not tell which of both comes first"
            )
        changes |= {"shape": swapped, "transposed": not parts[0].transposed}
    return [replace(part, **changes) for part in parts]


def _check_counts(stored: StoredTensors, config: ModelConfig, family: Family) -> None:
    """Refuses a wrong number of layers or experts before anything is allocated.

    Experts are counted if they are separate; shapes show stacked ones.
    """
    layers = {int(match[1]) for match in filter(None, map(layer_pattern(family).match, stored))}
    _check_count("num_hidden_layers", config.num_layers, "layers", layers, len(stored))
    matches = filter(None, map(_EXPERT.search, stored))
    experts = {int(match[0]) for match in matches}
    if experts and config.most_experts:
        attribute = next(item for item in family.attributes if "num_experts" in item.fields)
        _check_count(attribute.name, config.most_experts, "experts", experts, len(stored))


def _check_count(
    attribute: str, count: int, kind: str, numbers: Set[int], num_tensors: int
) -> None:
    if count == max(numbers, default=-1) + 1 and count <= num_tensors:
        return
    last = f", up to number {max(numbers)}" if numbers else ""
    raise HFError(f"{attribute} = {count}, and the file has tensors of {len(numbers)} {kind}{last}")


def layout_of(names: Iterable[str]) -> Layout:
    """Returns the layout of experts that the names of tensors show."""
    return "separate" if any(map(_EXPERT.search, names)) else "stacked"


def general_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns one name for each name with `EXPERT` in place of the expert number."""
    return {_EXPERT.sub(EXPERT, name): name for name in reversed(list(stored))}


def dtypes(stored: StoredTensors, family: Family) -> set[str]:
    """Returns the tensors' dtypes, as spelled in the format.

    float8 with scales counts as bfloat16.
    """
    float32 = {tensor.name for tensor in family.tensors if tensor.float32 is not False}
    dtypes_in_file = set[str]()
    for name, tensor in full_names(stored, family).items():
        if not _is_ignored(name, family) and _of_any_layer(name) not in float32:
            dtypes_in_file.add("BF16" if isinstance(tensor, ScaledTensor) else tensor.dtype)
    return dtypes_in_file


def match_tensors(
    tensors: StoredTensors,
    parameters: Parameters,
    config: ModelConfig,
    family: Family,
    num_ids: int,
    new_ids: range,
) -> tuple[StoredTensors, TensorParts]:
    """Returns a file's tensors by full name, and the parts of each that a model needs.

    The tables of a file for `num_ids` get rows for the model's, and those of `new_ids` are new.
    Raises `HFError` for wrong names, shapes or dtypes; the file may also hold a tied head.
    """
    stored = dict(full_names(tensors, family, config.num_layers))
    tables = {tensor.name for tensor in family.tensors if tensor.path in _TABLES}
    for name in tables & stored.keys() if new_ids else ():
        if stored[name].shape[:1] == (num_ids,) and stored[name].dtype in DTYPES:
            stored[name] = TableWithNewRows.of(stored[name], new_ids, config.vocab_size)
    _check_counts(stored, config, family)
    by_general = general_names(stored)
    parts = tensor_parts(parameters, config, family, layout_of(stored), by_general)
    needed = {
        name: as_stored(stored.get(name), group) for name, group in group_by_tensor(parts).items()
    }
    problems = list(_mismatches(stored, needed, config, family))
    if problems:
        raise HFError("; ".join(problems))
    reshaped = {name: replace(stored[name], shape=parts[0].shape) for name, parts in needed.items()}
    return {**stored, **reshaped}, needed


def _mismatches(
    stored: StoredTensors,
    needed: Mapping[str, Sequence[TensorPart]],
    config: ModelConfig,
    family: Family,
) -> Iterator[str]:
    head = name_of(HEAD, family)
    if config.tie_embeddings and head in stored:
        # A copy of the table.
        needed = {**needed, head: needed[name_of(TABLE, family)]}
    missing = []
    wrong_shapes = []
    wrong_dtypes = []
    for name, (part, *_) in needed.items():
        tensor = stored.get(name)
        if tensor is None:
            missing.append(name)
            continue
        if tensor.shape != part.stored_shape:
            wrong_shapes.append(f"{name} is {dims(tensor.shape)}, not {dims(part.stored_shape)}")
        if tensor.dtype not in DTYPES:
            wrong_dtypes.append(f"{name} is {tensor.dtype}")
    unexpected = [
        name
        for name, tensor in stored.items()
        if name not in needed and 0 not in tensor.shape and not _is_ignored(name, family)
    ]
    names_by_problem = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong shape": wrong_shapes,
        "not supported": list(_wrong_constants(stored, family)),
        "not float32, bfloat16 or float16": wrong_dtypes,
    }
    for problem, names in names_by_problem.items():
        if names:
            yield f"{problem}: {join_names(names, _MAX_LISTED)}"


def _of_any_layer(name: str) -> str:
    return _NUMBER.sub(f".{LAYER}.", name)


def _is_ignored(name: str, family: Family) -> bool:
    return _of_any_layer(name) in (*family.ignored_tensors, *family.constants)


def constants(family: Family, num_layers: int, dtype: DType) -> dict[str, Constant]:
    """Returns the tensors of an export that have one supported value."""
    tensors = {}
    for (general, value), layer in product(family.constants.items(), range(num_layers)):
        name = general.replace(LAYER, str(layer))
        tensors[name] = Constant(Path(), name, FORMATS[dtype], (), 0, value)
    return tensors


def _wrong_constants(stored: StoredTensors, family: Family) -> Iterator[str]:
    for name, tensor in stored.items():
        value = family.constants.get(_of_any_layer(name))
        if value is not None and not tensor.is_about(value):
            yield f"{name}, which should be the number {value}"


def dims(shape: Shape) -> str:
    """Formats a shape: `2x3`."""
    return "x".join(map(str, shape)) or "a scalar"
