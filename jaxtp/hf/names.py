"""Which tensor of a file is which parameter, or which layer of one."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxtp.checkpoint.safetensors import DTYPES, StoredTensor
from jaxtp.hf.folder import HFError
from jaxtp.layers.parameter import logical_shape
from jaxtp.models.families.family import LAYER, Family
from jaxtp.reading import shown

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_LISTED = 3


@dataclass(frozen=True)
class Place:
    """A tensor of a file that a model needs."""

    ours: str
    """Dotted path of the parameter."""
    theirs: str
    layer: int | None
    """Which of the stacked layers it is; None for a parameter of which there is one."""
    transposed: bool
    shape: tuple[int, ...]
    """In the file."""


Parameters = Mapping[str, nnx.Variable[Any]]
"""By dotted path, abstract or real."""


def places(parameters: Parameters, family: Family) -> Iterator[Place]:
    """Every tensor of a model, by parameter.

    Raises:
      HFError: the family has no name for a parameter.
    """
    tensors = {tensor.ours: tensor for tensor in family.tensors}
    for path, variable in parameters.items():
        if path not in tensors:
            raise HFError(f"a {family.model_type} has no {path}")
        tensor, shape = tensors[path], logical_shape(variable)
        stacked = LAYER in tensor.theirs
        one = shape[1:] if stacked else shape
        theirs = one[::-1] if tensor.transposed else one
        for layer in range(shape[0]) if stacked else (None,):
            name = tensor.theirs if layer is None else tensor.theirs.replace(LAYER, str(layer))
            yield Place(path, name, layer, tensor.transposed, theirs)


def check_layers(stored: Mapping[str, StoredTensor], num_layers: int) -> None:
    """Checks the number of layers, before anything is made for each.

    Raises:
      HFError: it is not that of the tensors.
    """
    layers = {int(match[1]) for name in stored if (match := re.match(r"model\.layers\.(\d{1,9})\.", name))}
    if num_layers != max(layers, default=-1) + 1 or num_layers > len(stored):
        raise HFError(
            f"num_hidden_layers = {num_layers}, and the tensors are those of {len(layers)} layers"
            + (f", the last of them {max(layers)}" if layers else "")
        )


def dtypes(stored: Mapping[str, StoredTensor], family: Family) -> set[str]:
    """In which a model's tensors are stored, as the format spells them."""
    return {tensor.dtype for name, tensor in stored.items() if not _is_ignored(name, family)}


def check_tensors(stored: Mapping[str, StoredTensor], needed: list[Place], family: Family, tied: bool) -> None:
    """Checks that a file's tensors are those that a model needs, in shape and dtype too, and no others.

    Args:
      stored: the file's.
      needed: the model's.
      family: says what else may be there.
      tied: a head may be there as well; that it is the embedding is checked when it is read.

    Raises:
      HFError: naming what is missing, left over, or otherwise than needed.
    """
    problems = [
        _listed("missing", [place.theirs for place in needed if place.theirs not in stored]),
        _listed("left over", _left_over(stored, needed, family, tied)),
        _listed("of another shape", list(_misshapen(stored, needed))),
        _listed("not of float32, bfloat16 or float16", list(_mistyped(stored, needed))),
        _tied_head(stored) if tied else "",
    ]
    if any(problems):
        raise HFError("; ".join(filter(None, problems)))


def _left_over(stored: Mapping[str, StoredTensor], needed: list[Place], family: Family, tied: bool) -> list[str]:
    known = {place.theirs for place in needed} | ({HEAD} if tied else set())
    return [name for name in stored if name not in known and not _is_ignored(name, family)]


def _is_ignored(name: str, family: Family) -> bool:
    return re.sub(r"\.\d+\.", f".{LAYER}.", name) in family.ignored


def _tied_head(stored: Mapping[str, StoredTensor]) -> str:
    """Why a head that is stored cannot be the embedding, if its header says so."""
    head, table = stored.get(HEAD), stored.get(TABLE)
    if head is None or table is None or (head.shape, head.dtype) == (table.shape, table.dtype):
        return ""
    return f"tie_word_embeddings is true, and {HEAD} is {head.dtype} {_dims(head.shape)}, not as {TABLE}"


def _misshapen(stored: Mapping[str, StoredTensor], needed: list[Place]) -> Iterator[str]:
    for place in needed:
        found = stored.get(place.theirs)
        if found is not None and found.shape != place.shape:
            yield f"{place.theirs} is {_dims(found.shape)}, not {_dims(place.shape)}"


def _mistyped(stored: Mapping[str, StoredTensor], needed: list[Place]) -> Iterator[str]:
    for place in needed:
        found = stored.get(place.theirs)
        if found is not None and found.dtype not in DTYPES:
            yield f"{place.theirs} is {found.dtype}"


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _listed(what: str, items: list[str]) -> str:
    """`what: a, b, c and 4 more`, or nothing."""
    if not items:
        return ""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{what}: {', '.join(shown(item, 200) for item in items[:_LISTED])}{more}"
