"""Maps parameters, layers and experts to file tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtp.checkpoint.logical import Variable
from jaxtp.config.reading import truncate
from jaxtp.hf.families.family import EXPERT, LAYER, Family, Layout, Tensor
from jaxtp.hf.model_folder import HFError
from jaxtp.hf.safetensors import DTYPES, StoredTensor
from jaxtp.layers.parameter import logical_shape
from jaxtp.models.config import BLOCKS, ModelConfig

HEAD, TABLE = "head.kernel", "embedding.embedding"
_EXPERT = re.compile(r"(?<=\.experts\.)\d{1,9}(?=\.)")
"""The number of an expert in a tensor's name."""
_LISTED = 3


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
    """Shape of the whole tensor in the file."""
    first: int = 0
    """Start of the part along the last dim in jaxtp's order."""
    expert: int | None = None
    """Index of the expert; None if the tensor holds all experts, or the parameter has none."""

    @property
    def target(self) -> tuple[str, int | None]:
        """The parameter and the layer index."""
        return self.ours, self.index


Parameters = Mapping[str, Variable]
"""By dotted path, abstract or real."""


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
    layers = {stack: numbers for stack, numbers, _ in config.kinds()}
    for path, variable in parameters.items():
        stack, general = split_path(path)
        if not (tensors := [tensor for tensor in family.tensors if tensor.ours == general]):
            raise HFError(f"a {family.model_type} has no {general}")
        for index, layer in enumerate(layers[stack]) if stack else [(None, "")]:
            tensor = _choose(tensors, str(layer), layout, stored or {})
            experts: Iterable[int | None] = range(logical_shape(variable)[1]) if EXPERT in tensor.theirs else (None,)
            first, width = _offset_and_width(tensor, path, parameters, family)
            inside = (stack is not None) + (EXPERT in tensor.theirs)
            shape = (*logical_shape(variable)[inside:-1], width)
            shape = (*shape[:-2], *shape[:-3:-1]) if tensor.transposed else shape
            for expert in experts:
                theirs = tensor.theirs.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
                yield TensorPart(path, theirs, index, tensor.transposed, shape, first, expert)


def split_path(path: str) -> tuple[str | None, str]:
    """Splits a path into its stack of blocks (or None) and its path in a family's table."""
    match = re.match(rf"({BLOCKS}(?:\.\d+)?)\.(.*)", path)
    return (None, path) if match is None else (match[1], f"{BLOCKS}.{match[2]}")


def _offset_and_width(tensor: Tensor, path: str, parameters: Parameters, family: Family) -> tuple[int, int]:
    stack, general = split_path(path)
    parts = [part.ours for part in family.tensors if part.theirs == tensor.theirs]
    paths = [part if stack is None else part.replace(BLOCKS, stack, 1) for part in parts]
    widths = [logical_shape(parameters[part])[-1] for part in paths]
    before = parts.index(general)
    return sum(widths[:before]), sum(widths)


def _choose(tensors: Sequence[Tensor], layer: str, layout: Layout, stored: Mapping[str, str]) -> Tensor:
    names = {tensor.theirs.replace(LAYER, layer): tensor for tensor in tensors}
    present = [name for name in names if name in stored]
    if len(present) > 1:
        both = " and ".join(truncate(stored[name], 200) for name in present)
        raise HFError(f"{both} are the same parameter; remove one of them")
    return names[present[0]] if present else next(tensor for tensor in tensors if tensor.layout in (None, layout))


def group_by_tensor(parts: Iterable[TensorPart]) -> dict[str, list[TensorPart]]:
    """Returns the parts of each tensor, in order."""
    tensors: dict[str, list[TensorPart]] = {}
    for place in parts:
        tensors.setdefault(place.theirs, []).append(place)
    return {name: sorted(parts, key=lambda part: part.first) for name, parts in tensors.items()}


def name_of(ours: str, family: Family) -> str:
    """Returns the file name of a parameter that every family has once."""
    return next(tensor.theirs for tensor in family.tensors if tensor.ours == ours)


def full_names(stored: Mapping[str, StoredTensor], family: Family) -> Mapping[str, StoredTensor]:
    """Adds a family's prefix to names in a file that lacks it."""
    if name_of(TABLE, family) in stored or name_of(TABLE, family).removeprefix(family.prefix) not in stored:
        return stored
    head = name_of(HEAD, family)
    return {name if name == head else family.prefix + name: tensor for name, tensor in stored.items()}


def _check_counts(stored: Mapping[str, StoredTensor], config: ModelConfig, family: Family) -> None:
    """Refuses a wrong number of layers or separate experts before anything is allocated; shapes show stacked ones."""
    before = next(tensor.theirs.partition(LAYER)[0] for tensor in family.tensors if LAYER in tensor.theirs)
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
            raise HFError(f"{name} = {count}, and the file has tensors of {len(numbers)} {what}{last}")


def dtypes(stored: Mapping[str, StoredTensor], family: Family) -> set[str]:
    """Returns the tensors' dtypes, as spelled in the format."""
    return {tensor.dtype for name, tensor in full_names(stored, family).items() if not _is_ignored(name, family)}


def match_tensors(
    tensors: Mapping[str, StoredTensor], parameters: Parameters, config: ModelConfig, family: Family
) -> tuple[Mapping[str, StoredTensor], dict[str, list[TensorPart]]]:
    """Returns a file's tensors by full name, and the parts of each that a model needs.

    Raises `HFError` for wrong names, shapes or dtypes; the file may also hold a tied head.
    """
    stored = full_names(tensors, family)
    _check_counts(stored, config, family)
    by_general = {_EXPERT.sub(EXPERT, name): name for name in reversed(list(stored))}
    layout: Layout = "separate" if any(EXPERT in name for name in by_general) else "stacked"
    needed = group_by_tensor(tensor_parts(parameters, config, family, layout, by_general))
    tied = config.tie_embeddings
    head, table = (name_of(ours, family) for ours in (HEAD, TABLE))
    known = needed.keys() | ({head} if tied else set())
    both = {name: (stored[name], part) for name, (part, *_) in needed.items() if name in stored}
    wrong = {
        "missing": [name for name in needed if name not in stored],
        "unexpected": [name for name in stored if name not in known and not _is_ignored(name, family)],
        "wrong shape": [
            f"{name} is {dims(tensor.shape)}, not {dims(part.shape)}"
            for name, (tensor, part) in both.items()
            if tensor.shape != part.shape
        ],
        "not float32, bfloat16 or float16": [
            f"{name} is {tensor.dtype}" for name, (tensor, _) in both.items() if tensor.dtype not in DTYPES
        ],
    }
    problems = []
    for what, items in wrong.items():
        more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
        if items:
            problems.append(f"{what}: {', '.join(truncate(item, 200) for item in items[:_LISTED])}{more}")
    if tied and head in stored and table in stored:
        a, b = stored[head], stored[table]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"tie_word_embeddings is true, and {head} is {a.dtype} {dims(a.shape)}, unlike {table}")
    if problems:
        raise HFError("; ".join(problems))
    return stored, needed


def _is_ignored(name: str, family: Family) -> bool:
    return re.sub(r"\.\d+\.", f".{LAYER}.", name) in family.ignored_tensors


def dims(shape: tuple[int, ...]) -> str:
    """Formats a shape: `2x3`."""
    return "x".join(map(str, shape)) or "a scalar"
