"""A residual branch of a block, and what its settings know of themselves.

A new kind of layer is a `Branch` and a `BranchConfig` in one file: whatever asks what a model computes, moves, holds or
can be shrunk to walks over them.

Over cp a branch is refused unless it says that it works there (`over_cp`): one in which positions see others would look
for them among the device's own. A `PositionwiseBranch` says so, for it transforms each position alone.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx
from jax import Array

from jaxtp.hints import Problem
from jaxtp.layers.cache import NewTokens
from jaxtp.layers.context import Sequences
from jaxtp.layers.costs import Cost, Share

Memory = tuple[Array, ...]
"""Arrays `[B, K, S, H]` that a branch remembers of the tokens of each row: a slot for each position, K over tp."""


class Branch(nnx.Module):
    """A layer whose output a block adds to the residual stream. Shapes: `[B, T, D] -> [B, T, D]`."""

    over_cp: ClassVar[bool] = False
    """Whether it also works where each sequence is divided over cp: a layer in which a position sees others has to find
    them on other devices (`Sequences.attend`). A model with a branch that does not say so is refused there."""

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Transforms `[B, T, D]`; sequences say which tokens see others, and where these are (`layers/context.py`).

        One that routes tokens to experts returns its `Routing` too (`layers/balance.py`).
        """
        raise NotImplementedError

    def memory(self, num_rows: int, num_slots: int) -> Memory:
        """Returns an empty memory for rows of up to `num_slots` tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no memory and extend, so nothing is generated with it")

    def extend(self, x_BTD: Array, memory: Memory, new: NewTokens) -> tuple[Array, Memory]:
        """Transforms tokens that come after those of a memory (`layers/cache.py`).

        Args:
          x_BTD: the new tokens.
          memory: what there is of all tokens before them.
          new: the places of the new tokens.

        Returns:
          The result `[B, T, D]`, and the memory with the new tokens in it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no memory and extend, so nothing is generated with it")

    def costs(self, share: Share, *, read: bool) -> Iterator[Cost]:
        """Yields what the branch costs (`layers/costs.py`).

        Args:
          share: of the device.
          read: the backward pass reads its result, as it does unless the branch is the last of a block.
        """
        raise NotImplementedError


Padded = tuple[str, int, int]
"""A size's name, what it is, and what it is padded to."""


class PositionwiseBranch(Branch):
    """A branch that transforms each position alone, so that it has nothing to remember, or to fetch over cp."""

    over_cp = True

    def memory(self, num_rows: int, num_slots: int) -> Memory:
        """Returns nothing."""
        return ()

    def extend(self, x_BTD: Array, memory: Memory, new: NewTokens) -> tuple[Array, Memory]:
        """Transforms new tokens."""
        return self(x_BTD), ()


@dataclass(frozen=True)
class Small:
    """The sizes of a check on virtual CPU devices."""

    tps: frozenset[int]
    """Every tp of the check."""

    shards: int
    """A number that every fsdp of the check divides."""

    length: int
    """Tokens in a sequence of the check."""

    before: int
    """Tokens in a sequence of the run."""

    def positions(self, count: int) -> int:
        """Returns a number of positions, shrunk as much as the sequence is."""
        return max(1, count * self.length // self.before)

    def size(self, value: int, least: int) -> int:
        """Returns the smallest size from `least` on that every tp divides, or pads, as it does `value`."""
        return like(value, math.lcm(*self.tps), least)


class BranchConfig:
    """Settings of a branch; several are combined by inheritance, so that each method goes on with `super()`."""

    def problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Yields why the branch cannot run on a mesh of those sizes."""
        yield from ()

    def context_problems(self, share: Share) -> Iterator[Problem]:
        """Yields why the branch cannot run on sequences that are divided over cp."""
        yield from ()

    def adapter_problems(self, targets: Collection[str]) -> Iterator[Problem]:
        """Yields why the branch cannot have adapters of those projections."""
        yield from ()

    def zigzag(self, share: Share) -> bool:
        """Returns whether devices along cp have even work only if they hold tokens in the order zigzag."""
        return False

    def padding(self, tp: int) -> Iterator[Padded]:
        """Yields the sizes that tp devices may have to pad."""
        yield from ()

    def smaller(self, small: Small) -> dict[str, Any]:
        """Returns the settings to change so that the branch is small and keeps what can go wrong on a mesh."""
        return {}


def like(value: int, modulus: int, least: int) -> int:
    """Returns the smallest number from `least` on with the same remainder as `value`."""
    return least + (value - least) % modulus
