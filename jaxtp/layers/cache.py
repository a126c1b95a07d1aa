"""KV cache: a token's slot is its position in its row.

New tokens come as rows (each sequence continues a row of the cache) or packed (tokens of several
rows in one sequence). A layer writes them, then attends to the slots up to each query's position,
which hides stale slots. A recurrent layer has no slots but a state for each row, which begins again
at position 0; it reads one row in a sequence of packed tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from jaxtp.collectives import batch_spec
from jaxtp.mesh import CONTEXT, TP

LAYER_SPEC = batch_spec(TP, CONTEXT, None)
"""The spec of one layer's keys or values, `[B, K, S, H]`: a matrix per head, so that products need
no transpose."""

DROPPED = 2**30  # Position of a token that no row has

KVCaches = tuple[Mapping[str, tuple[Array, ...]], ...]
"""Caches by layer and branch: keys and values `[B, K, S, H]` in the compute dtype, keys rotated, S
slots a row. K is the number of kv heads, or tp if that is more: devices that share a head each
store it. Arrays without S slots are states, which all tokens of a row changed in turn."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewTokens:
    """The slots of new tokens `[B, T]` in a cache."""

    positions: Array
    """Position of each token in its row, `[B, T]` int32; tokens at `DROPPED` leave a cache as it
    is."""

    rows: Array | None = None
    """Packed: row of each token among its device's rows, `[B, T]` int32, one run per row; -1 for
    padding, at the end. None: each sequence is the row of the same index."""

    continued: bool = field(default=False, metadata={"static": True})
    """Packed: the first row of a sequence may have tokens before these. All others begin at
    position 0."""

    def write(self, cache: Array, new: Array) -> Array:
        """Writes new tokens `[b, T, K, H]` to a device's cache `[b, K, S, H]`."""
        rows = self.rows
        if rows is None:
            rows = jnp.arange(cache.shape[0])[:, None]
        # A negative index would count from the end.
        rows = jnp.where(rows < 0, cache.shape[0], rows)
        positions = self.positions
        if new.shape[:2] == (1, 1):
            # XLA would turn one token into a dynamic-update-slice and fuse it with each product
            # that reads the cache, which copies the whole cache. A second token, which is dropped,
            # avoids this.
            beyond = cache.shape[2]
            rows = jnp.concatenate([rows, jnp.full_like(rows, beyond)])
            positions = jnp.concatenate([positions, jnp.full_like(positions, beyond)])
            new = jnp.concatenate([new, new])
        # Only these slots are written, so XLA updates a donated cache in place.
        return cache.at[rows, :, positions].set(new, mode="drop")

    def is_kept(self) -> Array:
        """Returns which tokens are of a row, `[B, T]`."""
        return self.positions < DROPPED if self.rows is None else self.rows >= 0

    def before(self, cache: Array) -> Array:
        """Returns the earlier tokens of each sequence's first row, `[b, S, K, H]`.

        They are right-aligned; see `segments`.
        """
        first = self.first(cache).swapaxes(1, 2)
        num_earlier = self.positions[:, 0]
        return jax.vmap(lambda x, count: jnp.roll(x, -count, axis=0))(first, num_earlier)

    def first(self, cache: Array) -> Array:
        """Returns the cache of each sequence's first row, or of any row if the first begins.

        It is `[b, ...]`.
        """
        if self.rows is None:
            return cache
        return jnp.take(cache, self.rows[:, 0], axis=0, mode="clip")

    def replace(self, cache: Array, new: Array) -> Array:
        """Returns the cache with `new`, `[b, ...]`, in place of the result of `first`."""
        if self.rows is None:
            return new
        # A sequence without tokens replaces nothing; a negative index would count from the end.
        row = jnp.where(self.rows[:, 0] < 0, len(cache), self.rows[:, 0])
        return cache.at[row].set(new, mode="drop")

    def segments(self, num_slots: int) -> Array:
        """Returns the segments of packed tokens `[b, T]`, or with earlier tokens `[b, S + T]`."""
        assert self.rows is not None
        segments = self.rows + 1
        if not self.continued:
            return segments
        slots = jnp.arange(num_slots)
        is_filled = slots >= num_slots - self.positions[:, :1]
        earlier = jnp.where(is_filled, segments[:, :1], 0)
        return jnp.concatenate([earlier, segments], axis=1)


def visible(positions: Array, num_slots: int, window: int | None = None) -> Array:
    """Returns whether a token sees a slot, `[b, T, S]`.

    It sees the last `window` slots up to its position.
    """
    distance = positions[..., None] - jnp.arange(num_slots)
    is_visible = distance >= 0
    if window is not None:
        is_visible &= distance < window
    return is_visible
