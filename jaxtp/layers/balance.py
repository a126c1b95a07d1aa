"""The balance of experts: what a router's choices come to, the losses that even them out, and the bias that does.

The auxiliary loss is that of a sequence (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), not of a batch. Over the n
tokens of a sequence, padding left out, with the share of choices f and the mean score P of each of E experts:

    balance = sum_e f_e P_e,   f_e = E / (k n) * (times that e is chosen),   P_e = mean of the softmax's e-th output

It is 1 where all experts are chosen alike. A product of two means of a batch would depend on which sequences a device,
or a micro-batch, has; this does not. Each label counts its sequence's loss, as it does its own cross-entropy, so that
the mean over a batch is the same however the batch is divided. Layers have the mean over all layers with experts.

A device sums over its own tokens of each sequence while it runs the layers. Sums over the devices that divide a
sequence are made once, for all layers, and totals of the batch too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, batch_spec, device_view
from jaxtp.layers.costs import FLOAT32, Cost, Share, sums_over
from jaxtp.layers.loss import IGNORE
from jaxtp.mesh import BATCH, SEQUENCE

BALANCE = "expert_balance"


class SelectionBias(nnx.Variable[Any]):
    """A bias of each expert's score for choosing alone, moved once per update against the load; it has no gradient.

    It is no parameter but a variable of a kind of its own, so that no optimizer sees it. Checkpoints therefore hold all
    of a state that is not frozen, not all parameters.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Sums of what a router did with the tokens of each sequence that a device has, padding left out.

    S is the number of devices that divide a sequence, each of which has one entry; stacked layers are a dim before B.
    """

    times_chosen: Array
    """`[B, S, E]` float32: tokens that chose each expert."""

    scores: Array
    """`[B, S, E]` float32: of each expert's softmax."""

    squared_normaliser: Array
    """`[B, S]` float32: squared log of the softmax's normaliser."""

    entropy: Array
    """`[B, S]` float32: entropy of the softmax in nats."""

    computed: Array
    """`[B, S]` float32: rows that experts computed, each a token's for one of its experts."""

    experts: Array | None = None
    """`[B, T, k]` int32: the experts that each token would choose; only if it is recorded."""

    margin: Array | None = None
    """`[B, T]` float32: how much more the last chosen score is than the first that was not; only if recorded."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Balance:
    """The balance of all layers with experts, over a batch or a part of one: sums, which add up."""

    balance_loss: Array
    """Auxiliary losses: for each label that counts, that of its sequence."""

    router_z_loss: Array
    """Mean squared log-normalisers: for each label that counts, that of its sequence."""

    times_chosen: tuple[Array, ...]
    """For each kind of block `[layers, E]`: tokens that chose each expert."""

    entropy: Array
    """Entropies of all tokens in all layers."""

    dropped: Array
    """Choices that no expert computed: 0, or a mistake."""

    def scalars(self, count: Array) -> dict[str, Array]:
        """Returns what is logged of a whole batch, by name; `count` is the number of its labels that count."""
        layers = [times for kind in self.times_chosen for times in kind]  # each [E]
        choices = sum(jnp.sum(times) for times in self.times_chosen)
        loads = [times / jnp.maximum(jnp.mean(times), 1) for times in layers]
        return {
            "balance_loss": self.balance_loss / count,
            "router_z_loss": self.router_z_loss / count,
            "experts/max_load": jnp.mean(jnp.stack([jnp.max(load) for load in loads])),
            "experts/unused": jnp.mean(jnp.concatenate([load == 0 for load in loads]).astype(jnp.float32)),
            "experts/entropy": self.entropy / jnp.maximum(choices, 1),
            "experts/dropped": self.dropped,
        }


def no_balance(kinds: Sequence[tuple[int, int]]) -> Balance:
    """Returns the balance of no tokens, for kinds of blocks of so many layers and experts."""
    zero = jnp.zeros((), jnp.float32)
    return Balance(zero, zero, tuple(jnp.zeros(kind, jnp.float32) for kind in kinds), zero, zero)


def balance(routings: Sequence[Routing], labels_BT: Array, experts_per_token: Sequence[int]) -> Balance:
    """Returns the balance of all layers.

    Args:
      routings: of each kind of block, stacked over its layers.
      labels_BT: whole rows, of which those that are not -100 count.
      experts_per_token: k, of each kind of block.
    """
    by_layer = P(None, *batch_spec(SEQUENCE))

    def total(routings: list[Routing], labels: Array) -> Balance:
        own = jax.tree.map(lambda sums: jnp.sum(sums, axis=2), routings)  # [layers, b, ...], of this device's tokens
        own = _in_one(lambda sums: all_reduce(sums, *SEQUENCE), own)
        counted = jnp.sum(labels != IGNORE, axis=1, dtype=jnp.float32)  # [b]
        auxiliary, squared, entropies, dropped = [], [], [], []
        for routing, k in zip(own, experts_per_token, strict=True):
            choices = jnp.sum(routing.times_chosen, axis=-1)  # [layers, b], k for each token
            tokens = jnp.maximum(choices / k, 1)
            num_experts = routing.times_chosen.shape[-1]
            chosen = num_experts / (k * tokens[..., None]) * routing.times_chosen
            auxiliary.append(jnp.sum(chosen * routing.scores / tokens[..., None], axis=-1))
            squared.append(routing.squared_normaliser / tokens)
            entropies.append(k * jnp.sum(routing.entropy))  # as choices are counted
            dropped.append(jnp.sum(choices - routing.computed))
        sums = Balance(
            balance_loss=jnp.sum(counted * jnp.mean(jnp.concatenate(auxiliary), axis=0)),
            router_z_loss=jnp.sum(counted * jnp.mean(jnp.concatenate(squared), axis=0)),
            times_chosen=tuple(jnp.sum(routing.times_chosen, axis=1) for routing in own),
            entropy=jnp.sum(jnp.stack(entropies)),
            dropped=jnp.sum(jnp.stack(dropped)),
        )
        result: Balance = _in_one(lambda sums: all_reduce(sums, *BATCH), sums)
        return result

    measured = [replace(routing, experts=None, margin=None) for routing in routings]
    view = device_view(
        total,
        BALANCE,
        in_specs=(jax.tree.map(lambda _: by_layer, measured), batch_spec(None)),
        out_specs=P(),
    )
    result: Balance = view(measured, labels_BT)
    return result


def balance_costs(share: Share, num_experts: Sequence[int]) -> Iterator[Cost]:
    """Yields what it costs to sum up the balance in training, for the number of experts of each layer that has any."""
    if num_experts and share.training:
        of_rows = sum(2 * experts + 3 for experts in num_experts) * share.rows
        yield sums_over(BALANCE, SEQUENCE, share.sizes, FLOAT32 * of_rows)
        yield sums_over(BALANCE, BATCH, share.sizes, FLOAT32 * (sum(num_experts) + 4))


def moved_bias(bias: Array, times_chosen: Array, rate: float) -> Array:
    """Returns the selection biases `[layers, E]` after an update: those of experts with less than the mean load rise.

    Wang et al., arXiv 2408.15664.
    """
    # Compared as whole numbers: a mean is rounded, and an expert that has just the mean load would move.
    total = jnp.sum(times_chosen, axis=-1, keepdims=True)
    return bias + rate * jnp.sign(total - times_chosen.shape[-1] * times_chosen).astype(bias.dtype)


def _in_one(reduce: Callable[[Array], Array], tree: Any) -> Any:
    """Returns a tree of arrays reduced as one array, which is one collective."""
    flat, as_tree = ravel_pytree(tree)
    return as_tree(reduce(flat))
