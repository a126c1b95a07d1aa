"""Remat policies: the residuals that a block saves for its backward pass, and their cost.

Saved per layer and device (b = local sequences, s = sequence length, D = d_model, t = tp; in
parentheses under sequence parallelism), and traffic over tp, forward and backward, in units of
(t-1)/t * b * s * D, with all-reduces, under sequence parallelism, and in a ring:

    policy         saves                                                 all-reduce  sequence  ring
    none           every activation                                               8         8    10
    save_dots      results of projections, tp reductions and kernels              8        10    10
    save_gathered  inputs of column layers, outputs of row layers: 4bsD           8         8    10
    save_reduced   block input, outputs of row layers: 2bsD (2bsD/t)              8        10    10
    full           block input: bsD (bsD/t)                                      10        11    11
    offload        like `full`, in host memory                                   10        11    11

`save_dots` is Megatron's choice under sequence parallelism (arXiv 2205.05198). In a ring
(`layers/overlap.py`) `save_gathered` saves only a shard of column layers' inputs, 4bsD/t in all.
The shard goes around again for outputs that were not saved; with `none` and `save_dots` for weight
gradients.

No policy saves gathered weights; every policy saves routers' choices and sines of positions.
`save_dots` saves results of blockwise and fused attention kernels and of Gated DeltaNet with its
states, and recomputes cudnn and xla.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxtp.collectives import (
    ATTENDED,
    GATHERED,
    KEPT,
    PROJECTED,
    REDUCED,
    SHARED,
)
from jaxtp.layers.kernels.delta_rule import CARRIED
from jaxtp.mesh import STORAGE

RematPolicy = Literal["none", "save_dots", "save_gathered", "save_reduced", "full", "offload"]

BLOCK_INPUT = "block_input"
_SAVED_NAMES: dict[RematPolicy, tuple[str, ...]] = {
    "save_dots": (PROJECTED, REDUCED, ATTENDED, CARRIED, KEPT),
    "save_gathered": (GATHERED, REDUCED, KEPT),
    "save_reduced": (REDUCED, KEPT),
    "full": (KEPT,),
}
# Primitives whose results are copies of their operands, in another form
_VIEWS = {
    "pvary",
    "pcast",
    "reshape",
    "transpose",
    "convert_element_type",
    "squeeze",
    "broadcast_in_dim",
    "layout_constraint",
    "optimization_barrier",
}
# Primitive of `load_weight` and `load_dequantised` for frozen weights; for others autodiff
# replaces it
_FROZEN = "custom_vjp_call"


def policy(name: RematPolicy) -> Callable[..., Any]:
    """Returns the `jax.checkpoint` policy of a name."""
    if name == "offload":
        return _offload()
    if name == "none":
        return _save_all
    return jax.checkpoint_policies.save_only_these_names(*_SAVED_NAMES[name])


def _save_all(primitive: Any, *_: Any, **params: Any) -> bool:
    # If only the gather were refused, autodiff would save the cast or reshape after it, which is as
    # large, so views are refused too. So is _FROZEN, whose result is a gathered weight: autodiff
    # keeps it if the weight has no gradient.
    if primitive.name == "name":
        return bool(params["name"] == SHARED)
    return primitive.name not in _VIEWS | {_FROZEN} and not _is_weight_gather(primitive, params)


def _is_weight_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Returns whether a jaxpr primitive is the gather of `load_weight` or of `SHARED`.

    Remat policies never save this gather.
    """
    over_storage = set(params.get("axis_name", ())) <= set(STORAGE)
    return primitive.name == "all_gather" and (
        over_storage or params["axis_index_groups"] is not None
    )


def _offload() -> Callable[..., Any]:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[KEPT],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
