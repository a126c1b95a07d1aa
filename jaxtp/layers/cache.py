"""Keys and values of the tokens that were read, so that a decoder reads each token once.

A token's slot is its position in its own row, whatever the other rows hold: prompts of unequal length are padded on the
right. A query sees the tokens up to its own position, which is all the masking that there is: what padding left in the
slots after a row's last token is not seen, and is overwritten by the token that comes there. New tokens are attended to
beside the slots, so that a layer reads the cache as it was, and nothing is written but their own slots. Rotary
positions and the slots to write follow from the rows' lengths alone, so any row can go on by any number of tokens.
(With padding on the left each row would have an offset of its own, and rows that went on by unequal numbers of tokens
would get gaps.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import batch_spec, constrain, device_view
from jaxtp.mesh import CONTEXT, TP

LAYER_SPEC = batch_spec(TP, CONTEXT, None)
"""The split of the memory of one layer, `[B, K, S, H]`: a matrix for each head, which products take as it is. (Along cp
there is one device: `models/decoder.py`.)"""

STACK_SPEC = P(None, *LAYER_SPEC)
"""The split of the memory of stacked layers, `[L, B, K, S, H]`."""

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
    """Keys and values `[L, B, K, S, H]` in the compute dtype, rotated to their positions; split by `STACK_SPEC`."""

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
    """Returns `[b, K, S, H]` with what there is of T tokens, `[b, K, T, H]`, in their slots, if they have any."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, :, positions].set(new.swapaxes(1, 2), mode="drop")


def visible(positions: Array, num_slots: int, window: int | None = None) -> tuple[Array, Array]:
    """Returns whether a new token sees a slot, `[b, T, S]`, and another new token, `[b, T, T]`.

    It sees the slots that were written before the new tokens of its row, and these up to itself; of all of them the
    last `window`.
    """
    slots = jnp.arange(num_slots)
    written = slots < positions[:, :1, None]
    distances = positions[..., None] - slots, positions[..., None] - positions[:, None]
    old, new = ((far >= 0) if window is None else (far >= 0) & (far < window) for far in distances)
    return written & old, new
