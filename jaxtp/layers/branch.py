"""Base classes of residual branches and of their settings.

A new layer defines its parameters, with their specs, and `__call__`; all other members have
defaults. A model creates it as `(d_model, config, context, *, rngs)` in `ModelConfig.branches`
(`models/config.py`); `tests/toy_layer.py` is an example with a collective of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from flax import nnx
from jax import Array

from jaxtp.config.hints import Problem
from jaxtp.config.schema import Settings
from jaxtp.layers.cache import NewTokens
from jaxtp.layers.context import Sequences
from jaxtp.layers.lora import Target

KVCache = tuple[Array, ...]
"""Cached arrays of a branch: `[B, K, S, H]` with a slot S for each position, or states. tp splits
the second dim."""


class Branch(nnx.Module):
    """A layer whose output is added to the residual stream, `[B, T, D] -> [B, T, D]`.

    With sequence parallelism T is split over tp (`activation_spec(sequence_dim(...))`); a column
    layer gathers it.
    """

    caller_communicates = False
    """Whether its layers have `LayerContext.caller_communicates`: the block gathers its input and
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


class BranchConfig(Settings):
    """Settings of a branch of your own, with what models and tools ask about them; all optional.

    A block inherits it: `class Block(ConvolutionConfig, BlockConfig)`. jaxtp's layers have none of
    these methods: `models/block.py`, `models/block_rules.py` and `tools/check` know their settings.
    """

    def problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Yields why the branch cannot run on this mesh, naming the settings."""
        yield from ()

    def adapter_kernels(self) -> Iterator[tuple[Target, str]]:
        """Yields each projection that can have adapters, with its kernel's path in the block."""
        yield from ()

    def padding(self, tp: int) -> Iterator[Padded]:
        """Yields the name, the size and the padded size of each dim that tp may pad."""
        yield from ()

    def shrink(self, small: Any) -> dict[str, Any]:
        """Returns the settings that `jaxtp check` makes smaller.

        `small` is a `ShrinkSpec` (`tools/check/small_model.py`): `small.size(value, minimum)` is a
        small size that tp divides, or not, like `value`.
        """
        return {}
