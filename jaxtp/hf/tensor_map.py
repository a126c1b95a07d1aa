"""Maps parameters, layers and experts to file tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtp.checkpoint.logical import Variable
from jaxtp.config.reading import truncate
from jaxtp.hf.families.family import EXPERT, LAYER, Family, Layout, Tensor
from jaxtp.hf.families.family import HEAD as EACH_HEAD
from jaxtp.hf.model_folder import HFError
from jaxtp.hf.safetensors import DTYPES, Constant, ScaledTensor, StoredTensor
from jaxtp.hf.wrapper import HEAD as HEAD
from jaxtp.hf.wrapper import TABLE as TABLE
from jaxtp.hf.wrapper import full_names as full_names
from jaxtp.hf.wrapper import name_of as name_of
from jaxtp.layers.parameter import DType, logical_shape
from jaxtp.models.config import BLOCKS, BlockConfig, ModelConfig

_EXPERT = re.compile(r"(?<=\.experts\.)\d{1,9}(?=\.)")  # The number of an expert in a tensor's name
_GENERAL = re.compile(r"\.\d+\.")
_LISTED = 3
_MOST_COLUMNS = 2**24


Columns = NDArray[np.int64]
_SHARED_KEY = "blocks.attention.latent_down.kernel"
_ROTATED = re.compile(
    r"blocks\.attention\.(qkv\.(kernels|biases)\.[01]|qk_norms\.[01]\.(scale|bias)|query_up\.kernels\.0"
    r"|latent_down\.kernel)"
)
"""Parameters whose columns are dims of rotated heads."""


@dataclass(frozen=True)
class TensorPart:
    """A parameter, layer or expert in a file: a tensor, or part of a fused tensor."""

    ours: str
    theirs: str
    index: int | None
    """Index in the stack of layers; None for a parameter that is not stacked."""
    transposed: bool
    """The last two dims are swapped in the file."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in the file, before dims are split or joined as in `stored`."""
    first: int = 0
    """Start of the part along the last dim in jaxtp's order."""
    expert: int | None = None
    """Index of the expert; None if the tensor holds all experts, or the parameter has none."""
    columns: Columns | None = field(default=None, compare=False)
    """Indices of the part's columns in the tensor's output dim, in jaxtp's order; None:
    consecutive, from `first`."""
    stored: tuple[int, ...] | None = None
    """Shape in the file, if it splits a dim into heads, or joins the dims of experts and ranks."""
    head: int | None = None
    """Number of the only head in the tensor; None if it holds all heads, or the parameter has
    none."""
    float32: bool | None = False
    """Float32 in the file, whatever the dtype of the others; None: in some files."""
    inner: int = 0
    """Start of the part along the second to last dim in jaxtp's order."""
    experts_last: bool = False
    """The dim of experts comes last in the file, not first."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor in the file."""
        return self.shape if self.stored is None else self.stored

    @property
    def ordered_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, with dims in jaxtp's order."""
        shape = (self.shape[-1], *self.shape[:-1]) if self.experts_last else self.shape
        return (*shape[:-2], *shape[:-3:-1]) if self.transposed else shape

    @property
    def target(self) -> tuple[str, int | None]:
        """The parameter and the layer index."""
        return self.ours, self.index


Parameters = Mapping[str, Variable]  # By dotted path, abstract or real


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
    layers = {stack: (numbers, block) for stack, numbers, block in config.kinds()}
    for path, variable in parameters.items():
        stack, general = split_path(path)
        numbers, block = layers[stack] if stack else ((), config.block())
        if not (tensors := alternatives(general, family, block)):
            raise HFError(f"a {family.model_type} has no {general}")
        places: dict[Tensor, Place] = {}
        for index, layer in enumerate(numbers) if stack else [(None, "")]:
            tensor = _choose(tensors, str(layer), layout, stored or {})
            experts: Iterable[int | None] = (
                range(logical_shape(variable)[1]) if EXPERT in tensor.theirs else (None,)
            )
            inside = (stack is not None) + (EXPERT in tensor.theirs)
            if tensor not in places:
                fused = (part.ours for part in family.tensors if part.theirs == tensor.theirs)
                names = [name.replace(BLOCKS, stack or "") for name in fused]
                names = [name for name in names if name in parameters]
                widths = [(logical_shape(parameters[name])[inside:] or (1,))[-1] for name in names]
                places[tensor] = place(tensor, names.index(path), widths, family, block)
            first, width, columns = places[tensor]
            shape = (*logical_shape(variable)[inside:-1], width)
            shape = (*shape[:-2], *shape[:-3:-1]) if tensor.transposed else shape
            rows = width // block.head_dim if tensor.by_head else 1
            split = (
                (*shape[:-1], rows, shape[-1] // rows)
                if tensor.by_head or tensor.unit_dim
                else None
            )
            each: Iterable[int | None] = (None,)
            if EACH_HEAD in tensor.theirs:
                each = range(width // block.head_dim)
                shape = (block.head_dim,)
            for expert, head in ((expert, head) for expert in experts for head in each):
                theirs = tensor.theirs.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
                theirs = theirs.replace(EACH_HEAD, str(head))
                part = TensorPart(path, theirs, index, tensor.transposed, shape, first, expert)
                yield replace(
                    part, columns=columns, stored=split, head=head, float32=tensor.float32
                )


def alternatives(general: str, family: Family, block: BlockConfig) -> list[Tensor]:
    """Returns the tensors that may hold a parameter of a block."""
    named = (tensor for tensor in family.tensors if tensor.ours == general)
    return [
        tensor for tensor in named if tensor.unless is None or not getattr(block, tensor.unless)
    ]


def split_path(path: str) -> tuple[str | None, str]:
    """Splits a path into its stack of blocks (or None) and its path in a family's table."""
    match = re.match(rf"({BLOCKS}(?:\.\d+)?)\.(.*)", path)
    return (None, path) if match is None else (match[1], f"{BLOCKS}.{match[2]}")


class Place(NamedTuple):
    """Where a part is in the output dim of its tensor; see `TensorPart`."""

    first: int
    width: int
    """The whole dim."""
    columns: Columns | None


def place(
    tensor: Tensor, part: int, widths: Sequence[int], family: Family, block: BlockConfig
) -> Place:
    """Returns the place of a part with a kernel's or bias's output dim.

    `widths` are of all parts of its tensor.
    """
    first = sum(widths[:part])
    width = sum(widths)
    own = widths[part]
    rotates = family.interleaved_rope and _ROTATED.fullmatch(tensor.ours) is not None
    if not rotates and tensor.chunks is None:
        return Place(first, width, None)
    if own > _MOST_COLUMNS:  # config.json is not trusted
        raise HFError(
            f"{truncate(tensor.theirs)} has {own:,} output dims; at most {_MOST_COLUMNS:,} are "
            "supported"
        )
    columns = np.arange(own)
    if rotates:
        heads = columns.reshape(-1, own if tensor.ours == _SHARED_KEY else block.head_dim)
        first_dims = int(block.head_dim * block.rotary_fraction)
        rotated = heads[:, -block.rope_head_dim :] if block.kv_rank else heads[:, :first_dims]
        rotated[:] = np.concatenate([rotated[:, ::2], rotated[:, 1::2]], axis=1)
    if tensor.chunks is not None:
        chunks = getattr(block, tensor.chunks)
        chunk, size = np.divmod(columns, own // chunks)
        return Place(first, width, (chunk * width + first) // chunks + size)
    return Place(first, width, first + columns)


def _choose(
    tensors: Sequence[Tensor], layer: str, layout: Layout, stored: Mapping[str, str]
) -> Tensor:
    names = {tensor.theirs.replace(LAYER, layer): tensor for tensor in tensors}
    present = [name for name in names if name in stored]
    if len(present) > 1:
        both = " and ".join(truncate(stored[name], 200) for name in present)
        raise HFError(f"{both} are the same parameter; remove one of them")
    return (
        names[present[0]]
        if present
        else next(tensor for tensor in tensors if tensor.layout in (None, layout))
    )


def group_by_tensor(parts: Iterable[TensorPart]) -> dict[str, list[TensorPart]]:
    """Returns the parts of each tensor, in order."""
    tensors: dict[str, list[TensorPart]] = {}
    for place in parts:
        tensors.setdefault(place.theirs, []).append(place)
    return {name: sorted(parts, key=lambda part: part.first) for name, parts in tensors.items()}


def _check_counts(stored: Mapping[str, StoredTensor], config: ModelConfig, family: Family) -> None:
    """Refuses a wrong number of layers or experts before anything is allocated.

    Experts are counted if they are separate; shapes show stacked ones.
    """
    before = next(
        tensor.theirs.partition(LAYER)[0] for tensor in family.tensors if LAYER in tensor.theirs
    )
    numbered = re.compile(rf"{re.escape(before)}(\d{{1,9}})\.")
    layers = {int(match[1]) for name in stored if (match := numbered.match(name))}
    experts = {int(match[0]) for name in stored if (match := _EXPERT.search(name))}
    attribute = next((each.name for each in family.attributes if "num_experts" in each.fields), "")
    for name, count, what, numbers in (
        ("num_hidden_layers", config.num_layers, "layers", layers),
        (attribute, config.most_experts if experts else 0, "experts", experts),
    ):
        if count and (count != max(numbers, default=-1) + 1 or count > len(stored)):
            last = f", up to number {max(numbers)}" if numbers else ""
            raise HFError(
                f"{name} = {count}, and the file has tensors of {len(numbers)} {what}{last}"
            )


def general_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns one name for each name with `EXPERT` in place of the expert number."""
    return {_EXPERT.sub(EXPERT, name): name for name in reversed(list(stored))}


def dtypes(stored: Mapping[str, StoredTensor], family: Family) -> set[str]:
    """Returns the tensors' dtypes, as spelled in the format.

    float8 with scales counts as bfloat16.
    """
    general = {tensor.theirs for tensor in family.tensors if tensor.float32 is not False}
    return {
        "BF16" if isinstance(tensor, ScaledTensor) else tensor.dtype
        for name, tensor in full_names(stored, family).items()
        if not _is_ignored(name, family) and _GENERAL.sub(f".{LAYER}.", name) not in general
    }


def match_tensors(
    tensors: Mapping[str, StoredTensor], parameters: Parameters, config: ModelConfig, family: Family
) -> tuple[Mapping[str, StoredTensor], dict[str, list[TensorPart]]]:
    """Returns a file's tensors by full name, and the parts of each that a model needs.

    Raises `HFError` for wrong names, shapes or dtypes; the file may also hold a tied head.
    """
    stored = full_names(tensors, family, config.num_layers)
    _check_counts(stored, config, family)
    by_general = general_names(stored)
    layout: Layout = "separate" if any(EXPERT in name for name in by_general) else "stacked"
    needed = group_by_tensor(tensor_parts(parameters, config, family, layout, by_general))
    tied = config.tie_embeddings
    head, table = (name_of(ours, family) for ours in (HEAD, TABLE))
    known = needed.keys() | ({head} if tied else set())
    both = {name: (stored[name], part) for name, (part, *_) in needed.items() if name in stored}
    wrong = {
        "missing": [name for name in needed if name not in stored],
        "unexpected": [
            name
            for name, tensor in stored.items()
            if name not in known and 0 not in tensor.shape and not _is_ignored(name, family)
        ],
        "wrong shape": [
            f"{name} is {dims(tensor.shape)}, not {dims(part.stored_shape)}"
            for name, (tensor, part) in both.items()
            if tensor.shape != part.stored_shape
        ],
        "not supported": list(_wrong_constants(stored, family)),
        "not float32, bfloat16 or float16": [
            f"{name} is {tensor.dtype}"
            for name, (tensor, _) in both.items()
            if tensor.dtype not in DTYPES
        ],
    }
    problems = []
    for what, items in wrong.items():
        more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
        if items:
            problems.append(
                f"{what}: {', '.join(truncate(item, 200) for item in items[:_LISTED])}{more}"
            )
    if tied and head in stored and table in stored:
        a = stored[head]
        b = stored[table]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(
                f"tie_word_embeddings is true, and {head} is {a.dtype} {dims(a.shape)}, "
                f"unlike {table}"
            )
    if problems:
        raise HFError("; ".join(problems))
    return {
        **stored,
        **{name: replace(tensor, shape=part.shape) for name, (tensor, part) in both.items()},
    }, needed


def _is_ignored(name: str, family: Family) -> bool:
    return _GENERAL.sub(f".{LAYER}.", name) in (*family.ignored_tensors, *family.constants)


def constants(family: Family, num_layers: int, dtype: DType) -> dict[str, Constant]:
    """Returns the tensors of an export that have one supported value."""
    values = {
        name.replace(LAYER, str(i)): value
        for name, value in family.constants.items()
        for i in range(num_layers)
    }
    return {name: Constant.of(name, value, dtype) for name, value in values.items()}


def _wrong_constants(stored: Mapping[str, StoredTensor], family: Family) -> Iterator[str]:
    for name, tensor in stored.items():
        value = family.constants.get(_GENERAL.sub(f".{LAYER}.", name))
        if value is not None and not tensor.is_about(value):
            yield f"{name}, which should be the number {value}"


def dims(shape: tuple[int, ...]) -> str:
    """Formats a shape: `2x3`."""
    return "x".join(map(str, shape)) or "a scalar"
