"""What a block's forward pass keeps for its backward pass.

Weights gathered over fsdp are never kept, under any policy: their shards are, and the backward pass gathers
again. Refusing the gather alone is not enough, because the cast or reshape that follows it would be kept in its
place; so those are refused too, which costs nothing to recompute.
"""

from collections.abc import Callable
from typing import Any, Literal

from jaxtp.collectives import is_weight_gather

RematPolicy = Literal["none", "full"]

_VIEWS = {
    "name",
    "pvary",
    "pcast",
    "reshape",
    "transpose",
    "convert_element_type",
    "squeeze",
    "broadcast_in_dim",
}


def policy(name: RematPolicy) -> Callable[..., bool]:
    """The `jax.checkpoint` policy of that name: whether to keep the result of a primitive."""
    return {"none": _keep_all, "full": _keep_nothing}[name]


def _keep_all(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name not in _VIEWS and not is_weight_gather(primitive, params)


def _keep_nothing(*_: Any, **__: Any) -> bool:
    return False
