"""Remat policies: what a block's forward pass keeps for its backward pass, and what that costs.

Per layer, kept on each device (b = sequences on it, s = sequence, D = d_model, F = d_ff, t = tp; float sizes), and sent
over tp, forward and backward, in units of (t-1)/t * b * s * D:

| policy          | keeps                                                    | all-reduce | sequence-parallel | ring |
|-----------------|----------------------------------------------------------|-----------:|------------------:|-----:|
| `none`          | every activation                                         |          8 |                 8 |   10 |
| `save_dots`     | results of projections, reductions over tp and kernels   |          8 |                10 |   10 |
| `save_gathered` | inputs of column layers, outputs of row layers: 4bsD     |          8 |                 8 |   12 |
| `save_reduced`  | the block's input, outputs of row layers: 2bsD (2bsD/t)  |          8 |                10 |   12 |
| `full`          | the block's input: bsD (bsD/t)                           |         10 |                11 |   13 |
| `offload`       | as `full`, in the host's memory                          |         10 |                11 |   13 |

`save_dots` under sequence parallelism is Megatron's choice: keep the shard, gather it again (arXiv 2205.05198).

In a ring (`layers/rings.py`) the gathered input of a column layer never exists: what is named and kept is this device's
part of it, so `save_gathered` keeps 4bsD/t. Each backward pass lets it go around again for the weights' gradients, and
where the layer's outputs are not kept it goes around for those too.

Weights gathered over fsdp are never kept, under any policy: their shards are, and the backward pass gathers again.
Refusing the gather alone is not enough, because the cast or reshape that follows it would be kept in its place; so
those are refused too, which costs nothing to recompute. So is the call that loads a frozen weight: with nothing to
differentiate it is one primitive, whose result is the gathered weight.

A kernel of attention (`layers/kernels.py`) that holds no scores is then run once; xla's scores are made again.

The experts that a router has chosen are kept under every policy, a few integers for each token.

Of a projection with an adapter, `x @ W + s * (x @ A) @ B`, `save_dots` keeps the sum and `x @ A`, not its summands.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxtp.collectives import ATTENDED, CHOSEN, GATHERED, PROJECTED, REDUCED, is_tp_reduction, is_weight_gather
from jaxtp.entry import UserError

RematPolicy = Literal["none", "save_dots", "save_gathered", "save_reduced", "full", "offload"]

BLOCK_INPUT = "block_input"
_VIEWS = {"name", "pvary", "pcast", "reshape", "transpose", "convert_element_type", "squeeze", "broadcast_in_dim"}

_FROZEN = "custom_vjp_call"
"""The primitive that loads a weight of which no gradient is asked; else its rules take its place."""


class RematError(UserError):
    """A policy that this platform cannot carry out."""


def policy(name: RematPolicy) -> Callable[..., Any]:
    """Returns the `jax.checkpoint` policy of that name: whether to keep the result of a primitive.

    Raises:
      RematError: `offload` on devices that cannot address the host's pinned memory.
    """
    if name == "offload":
        return _offload()
    return {
        "none": _keep_all,
        "save_dots": _keep_dots,
        "save_gathered": _keep_gathered,
        "save_reduced": _keep_reduced,
        "full": _keep_chosen,
    }[name]


def _keep_all(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name not in _VIEWS | {_FROZEN} and not is_weight_gather(primitive, params)


def _keep_dots(primitive: Any, *_: Any, **params: Any) -> bool:
    return _is_named(primitive, params, PROJECTED, REDUCED, ATTENDED, CHOSEN) or is_tp_reduction(primitive, params)


def _keep_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    return _is_named(primitive, params, GATHERED, REDUCED, CHOSEN)


def _keep_reduced(primitive: Any, *_: Any, **params: Any) -> bool:
    return _is_named(primitive, params, REDUCED, CHOSEN) or is_tp_reduction(primitive, params)


def _keep_chosen(primitive: Any, *_: Any, **params: Any) -> bool:
    return _is_named(primitive, params, CHOSEN)


def _is_named(primitive: Any, params: dict[str, Any], *names: str) -> bool:
    return primitive.name == "name" and params["name"] in names


def _offload() -> Callable[..., Any]:
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if "pinned_host" not in kinds:
        raise RematError(
            f"model.remat=offload needs pinned host memory, and {jax.devices()[0].device_kind} devices address "
            f"{', '.join(kinds)}; use full"
        )
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[CHOSEN],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
