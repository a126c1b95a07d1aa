"""Base classes of residual branches and of their settings.

A new layer defines its parameters, with their specs, and `__call__`; all other members have
defaults. A model creates it as `(d_model, config, context, *, rngs)` in `ModelConfig.branches`
(`models/config.py`); `tests/toy_layer.py` is an example with a collective of its own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx
from jax import Array

from jaxtp.config.hints import Problem
from jaxtp.layers.cache import NewTokens
from jaxtp.layers.context import Sequences
from jaxtp.layers.lora import Target
from jaxtp.layers.sequence_parallel import LocalShape

KVCache = tuple[Array, ...]
"""Cached arrays of a branch: `[B, K, S, H]` with a slot S for each position, or states. tp splits
the second dim."""


class Branch(nnx.Module):
    """A layer whose output is added to the residual stream, `[B, T, D] -> [B, T, D]`.

    With sequence parallelism T is split over tp (`activation_spec(sequence_dim(...))`); a column
    layer gathers it.
    """

    joined = False
    """Whether its layers are constructed with `Schedule.joined`: the block gathers its input and
    reduces its output."""

    over_cp: ClassVar[bool] = False
    """Whether the branch supports sequences split over cp, with positions on other devices
    (`Sequences.attend`). A mesh with cp refuses models with other branches."""

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Transforms `[B, T, D]`; a branch that routes tokens also returns its `Routing`."""
        raise NotImplementedError

    def init_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """Returns an empty cache for rows of up to `num_slots` tokens."""
        raise NotImplementedError(
            f"{type(self).__name__} has no init_cache and decode, so it cannot generate"
        )

    def decode(self, x_BTD: Array, cache: KVCache, new: NewTokens) -> tuple[Array, KVCache]:
        """Transforms new tokens `[B, T, D]` and appends them to `cache`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no init_cache and decode, so it cannot generate"
        )


# Name, size, padded size
Padded = tuple[str, int, int]


class PositionwiseBranch(Branch):
    """A branch that transforms each position alone, without cache or communication over cp."""

    over_cp = True

    def init_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """See `Branch`."""
        return ()

    def decode(self, x_BTD: Array, cache: KVCache, new: NewTokens) -> tuple[Array, KVCache]:
        """See `Branch`."""
        y: Any = self(x_BTD)
        if isinstance(y, tuple):
            # The routing is not needed.
            y, _ = y
        return y, ()


@dataclass(frozen=True)
class ShrinkSpec:
    """Sizes of a check on virtual CPU devices."""

    # Every tp of the check
    tps: frozenset[int]
    # A multiple of every fsdp of the check, and of `block`
    shards: int
    # Tokens in a sequence of the check
    length: int
    # Tokens in a sequence of the run
    before: int
    # Divides the features of every projection on a device
    block: int = 1

    def positions(self, count: int) -> int:
        """Scales a number of positions like the sequence length."""
        return max(1, count * self.length // self.before)

    def size(self, value: int, minimum: int) -> int:
        """Returns the smallest size >= `minimum` that every tp divides, or pads, like `value`."""
        return smallest_congruent(value, math.lcm(*self.tps) * self.block, minimum)

    def width(self, value: int, minimum: int) -> int:
        """Returns the smallest width >= `minimum` with the same part of a block, or `value`."""
        return min(value, smallest_congruent(value, self.block, minimum))


class BranchConfig:
    """Settings of a branch; a block inherits several, so every method calls `super()`."""

    def problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Yields why the branch cannot run on this mesh."""
        yield from ()

    def context_problems(self, shape: LocalShape) -> Iterator[Problem]:
        """Yields why the branch cannot run over cp."""
        yield from ()

    def adapter_kernels(self) -> Iterator[tuple[Target, str]]:
        """Yields each projection that can have adapters, with its kernel's path in the block."""
        yield from ()

    def zigzag(self, shape: LocalShape) -> bool:
        """Returns whether only zigzag order gives devices equal work."""
        return False

    def padding(self, tp: int) -> Iterator[Padded]:
        """Yields the sizes that tp may pad."""
        yield from ()

    def shrink(self, small: ShrinkSpec) -> dict[str, Any]:
        """Returns settings of a small branch, split and padded like this one on a mesh."""
        return {}


def smallest_congruent(value: int, modulus: int, minimum: int) -> int:
    """Returns the smallest number >= `minimum` that is congruent to `value` modulo `modulus`."""
    return minimum + (value - minimum) % modulus
