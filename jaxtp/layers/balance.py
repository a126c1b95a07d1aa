"""Load balance of experts: router statistics, auxiliary losses and the selection bias.

The auxiliary loss is per sequence (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), over its n tokens
without padding:

    balance = sum_e f_e P_e
    f_e = E / (k n) * (times e is chosen)
    P_e = mean of the e-th score over the sum of all scores

The loss is 1 for a uniform choice. The mean over labels does not depend on how a batch is divided.
Layers are averaged.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, batch_spec, device_view
from jaxtp.layers.loss import IGNORE
from jaxtp.mesh import BATCH, SEQUENCE

BALANCE = "expert_balance"


class SelectionBias(nnx.Variable[Any]):
    """A bias of each expert's score, for selection only; updates move it against the load.

    It is not an `nnx.Param`, so no optimizer sees it; checkpoints save all state that is not
    frozen.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Router statistics, summed over the tokens of each sequence on a device, without padding.

    S is the number of devices that divide a sequence. Stacked layers are a dim before B.
    """

    times_chosen: Array  # `[B, S, E]` float32: tokens that chose each expert
    probabilities: Array  # `[B, S, E]` float32: scores over the sum of all scores
    # `[B, S]` float32: squared log of the sum of the logits' exponentials
    squared_normaliser: Array
    entropy: Array  # `[B, S]` float32: entropy of these normalised scores in nats
    # `[B, S]` float32: this device's rows, one for each token and expert, whose sum counts
    computed: Array
    experts: Array | None = None  # `[B, T, k]` int32: the router's choice; only if recorded
    margin: Array | None = None
    """`[B, T]` float32: lowest chosen score minus the highest score that was not chosen, or the
    same of groups if that is less; only if recorded."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Balance:
    """Additive statistics of all layers with experts."""

    balance_loss: Array  # sum over valid labels of their sequence's loss
    router_z_loss: Array  # the same for mean squared log-normalisers
    # For each kind of block `[layers, E]`: tokens that chose each expert
    times_chosen: tuple[Array, ...]
    entropy: Array  # entropies of all tokens in all layers
    dropped: Array  # choices that no expert computed; not 0 means a bug

    def scalars(self, count: Array) -> dict[str, Array]:
        """Returns the metrics of a whole batch with `count` valid labels."""
        choices = sum(jnp.sum(times) for times in self.times_chosen)
        layers = itertools.chain.from_iterable(self.times_chosen)  # [E] each
        loads = [times / jnp.maximum(jnp.mean(times), 1) for times in layers]
        max_loads = jnp.stack([jnp.max(load) for load in loads])
        is_unused = jnp.concatenate([load == 0 for load in loads])
        return {
            "balance_loss": self.balance_loss / count,
            "router_z_loss": self.router_z_loss / count,
            "experts/max_load": jnp.mean(max_loads),
            "experts/unused": jnp.mean(is_unused.astype(jnp.float32)),
            "experts/entropy": self.entropy / jnp.maximum(choices, 1),
            "experts/dropped": self.dropped,
        }


def balance(
    routings: Sequence[Routing], labels_BT: Array, experts_per_token: Sequence[int]
) -> Balance:
    """Returns the balance of all layers.

    There are one `Routing` and one number of experts per token for each kind of block. Labels are
    whole rows.
    """

    def total(routings: list[Routing], labels: Array) -> Balance:
        # Sums are `[layers, b, ...]`, of this device's tokens.
        local = jax.tree.map(lambda sums: jnp.sum(sums, axis=2), routings)
        local = _all_reduce_flat(local, SEQUENCE)
        counted = jnp.sum(labels != IGNORE, axis=1, dtype=jnp.float32)  # [b]
        losses = []  # [layers, b] each
        squared = []
        entropies = []
        dropped = []
        for routing, k in zip(local, experts_per_token, strict=True):
            choices = jnp.sum(routing.times_chosen, axis=-1)  # [layers, b], k for each token
            tokens = jnp.maximum(choices / k, 1)
            num_experts = routing.times_chosen.shape[-1]
            frequency = num_experts / (k * tokens[..., None]) * routing.times_chosen
            products = frequency * routing.probabilities / tokens[..., None]
            losses.append(jnp.sum(products, axis=-1))
            squared.append(routing.squared_normaliser / tokens)
            entropies.append(k * jnp.sum(routing.entropy))  # k per token, like `choices`
            dropped.append(jnp.sum(choices - routing.computed))
        balance_losses = jnp.mean(jnp.concatenate(losses), axis=0)  # [b]
        balance_loss = jnp.sum(counted * balance_losses)
        z_losses = jnp.mean(jnp.concatenate(squared), axis=0)
        sums = Balance(
            balance_loss=balance_loss,
            router_z_loss=jnp.sum(counted * z_losses),
            times_chosen=tuple(jnp.sum(routing.times_chosen, axis=1) for routing in local),
            entropy=jnp.sum(jnp.stack(entropies)),
            dropped=jnp.sum(jnp.stack(dropped)),
        )
        return _all_reduce_flat(sums, BATCH)

    statistics = [replace(routing, experts=None, margin=None) for routing in routings]
    by_layer = P(None, *batch_spec(SEQUENCE))
    in_specs = (by_layer, batch_spec(None))
    return device_view(total, BALANCE, in_specs, out_specs=P())(statistics, labels_BT)


def updated_selection_bias(bias: Array, times_chosen: Array, rate: float) -> Array:
    """Returns biases `[layers, E]`, raised below the mean load and lowered above.

    See Wang et al., arXiv 2408.15664.
    """
    # Compared as integers: with a rounded mean, an expert with exactly the mean load would move.
    total = jnp.sum(times_chosen, axis=-1, keepdims=True)
    direction = jnp.sign(total - times_chosen.shape[-1] * times_chosen)
    return bias + rate * direction.astype(bias.dtype)


def _all_reduce_flat(tree: object, axes: tuple[str, ...]) -> Any:
    """All-reduces a tree as one flat array, with one collective."""
    flat, as_tree = ravel_pytree(tree)
    return as_tree(all_reduce(flat, *axes))
