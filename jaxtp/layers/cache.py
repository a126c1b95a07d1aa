"""Keys and values of the tokens that were read, so that a decoder reads each token once.

A token's slot is its position in its own row, whatever the other rows hold: prompts of unequal length are padded on the
right. A query sees the slots up to its own position, which is all the masking that there is: what padding left in the
slots after a row's last token is not seen, and is overwritten by the token that comes there. Rotary positions and the
slots to write follow from the rows' lengths alone, so any row can go on by any number of tokens. (With padding on the
left each row would have an offset of its own, and rows that went on by unequal numbers of tokens would get gaps.)
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtp.collectives import axis_size, batch_spec, constrain, device_view
from jaxtp.mesh import BATCH, TP

LAYER_SPEC = batch_spec(None, TP, None)
"""Of the keys or values of one layer, `[B, S, K, H]`."""

STACK_SPEC = P(None, BATCH, None, TP, None)
"""Of those of all layers, `[L, B, S, K, H]`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What a decoder remembers of its rows.

    S is the number of slots: no row can be longer. K is the number of kv heads, or tp if that is more: the devices that
    share a head have a copy each, as its column layer gives it to them.
    """

    keys: Array
    """`[L, B, S, K, H]` in the compute dtype, rotated to their positions; split by `STACK_SPEC`."""

    values: Array
    """As `keys`."""

    lengths: Array
    """`[B]` int32: tokens that each row has."""

    def positions(self, num_tokens: int) -> Array:
        """`[B, T]`: of the next tokens of each row."""
        return self.lengths[:, None] + jnp.arange(num_tokens)

    def extended(self, keys: Array, values: Array, counts_B: Array) -> "KVCache":
        """The cache with the keys and values `[L, B, T, K, H]` of T more tokens, of which `counts_B` are no padding.

        What has no slot left is dropped.
        """
        positions = self.positions(keys.shape[2])
        write = device_view(
            jax.vmap(insert, in_axes=(0, 0, None)),
            "cache",
            in_specs=(STACK_SPEC, STACK_SPEC, batch_spec(None)),
            out_specs=STACK_SPEC,
        )
        return replace(
            self,
            keys=write(self.keys, keys, positions),
            values=write(self.values, values, positions),
            lengths=constrain(self.lengths + counts_B, batch_spec()),
        )


def empty_cache(
    num_layers: int, batch_size: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> KVCache:
    """A cache of rows without tokens; call it under `jax.jit`, where it is initialised sharded over the mesh in context."""
    shape = (num_layers, batch_size, num_slots, max(num_kv_heads, axis_size(TP)), head_dim)
    keys, values = (constrain(jnp.zeros(shape, dtype), STACK_SPEC) for _ in range(2))
    return KVCache(keys, values, constrain(jnp.zeros(batch_size, jnp.int32), batch_spec()))


def insert(cache: Array, new: Array, positions: Array) -> Array:
    """Puts keys or values of T tokens, `[b, T, K, H]`, into their slots of `[b, S, K, H]`; drops what has none."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, positions].set(new, mode="drop")


def visible(positions: Array, num_slots: int, window: int | None = None) -> Array:
    """`[b, 1, T, S]`: whether the query at a position sees a slot: of all up to its own, or of the last `window`."""
    distance = positions[..., None] - jnp.arange(num_slots)
    seen = distance >= 0
    return (seen if window is None else seen & (distance < window))[:, None]
