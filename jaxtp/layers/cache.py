"""Keys and values of the tokens that were read, so that a decoder reads each token once.

A token's slot is its position in its own row, whatever the other rows hold: prompts of unequal length are padded on the
right. A query sees the slots up to its own position, which is all the masking that there is: what padding left in the
slots after a row's last token is not seen, and is overwritten by the token that comes there. Rotary positions and the
slots to write follow from the rows' lengths alone, so any row can go on by any number of tokens. (With padding on the
left each row would have an offset of its own, and rows that went on by unequal numbers of tokens would get gaps.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import batch_spec, constrain, device_view
from jaxtp.mesh import BATCH, TP

LAYER_SPEC = batch_spec(None, TP, None)
"""The split of the memory of one layer, `[B, S, K, H]`."""

STACK_SPEC = P(None, BATCH, None, TP, None)
"""The split of the memory of stacked layers, `[L, B, S, K, H]`."""

Memories = Mapping[str, Mapping[str, tuple[Array, ...]]]
"""Arrays by kind of block and branch."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The memory of a decoder: keys and values of the tokens of its rows.

    S is the number of slots: no row can be longer. K is the number of kv heads, or tp if that is more: the devices that
    share a head have a copy each, as its column layer gives it to them.
    """

    memories: Memories
    """Keys and values `[L, B, S, K, H]` in the compute dtype, rotated to their positions; split by `STACK_SPEC`."""

    lengths: Array
    """`[B]` int32: number of tokens of each row."""

    def positions(self, num_tokens: int) -> Array:
        """Returns the positions `[B, T]` of the next tokens of each row."""
        return self.lengths[:, None] + jnp.arange(num_tokens)

    def extended(self, new: Memories, positions_BT: Array, counts_B: Array) -> "Cache":
        """Returns the cache with what there is of T more tokens, of which `counts_B` are no padding.

        What has no slot left is dropped.
        """
        write = device_view(
            jax.vmap(insert, in_axes=(0, 0, None)),
            "cache",
            in_specs=(STACK_SPEC, STACK_SPEC, batch_spec(None)),
            out_specs=STACK_SPEC,
        )
        written = jax.tree.map(lambda old, added: write(old, added, positions_BT), self.memories, new)
        return replace(self, memories=written, lengths=constrain(self.lengths + counts_B, batch_spec()))


def insert(cache: Array, new: Array, positions: Array) -> Array:
    """Returns `[b, S, K, H]` with what there is of T tokens, `[b, T, K, H]`, in their slots, if they have any."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, positions].set(new, mode="drop")


def visible(positions: Array, num_slots: int, window: int | None = None) -> Array:
    """Returns `[b, 1, T, S]`: whether a query sees a slot, of all up to its own position or of the last `window`."""
    distance = positions[..., None] - jnp.arange(num_slots)
    seen = distance >= 0
    return (seen if window is None else seen & (distance < window))[:, None]
