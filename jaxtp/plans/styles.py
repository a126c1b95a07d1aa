"""Layouts of activations over tp, and the styles of a plan.

Names and arguments follow `torch.distributed.tensor`, whose styles convert between DTensors and
local tensors. Here arrays are global, and a layout says how tp splits a module's arguments or
results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shard:
    """tp splits dim `dim`; negative dims count from the end."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every device of a tp group has the whole array.

    As a style, it replicates parameters on every device, also over fsdp, and the code runs
    unchanged.
    """


Layout = Shard | Replicate

Layouts = Layout | None | tuple[Layout | None, ...]
"""Layouts of one argument or of several; None leaves an argument unchanged."""


@dataclass(frozen=True)
class Colwise:
    """Splits a linear map by output features, or an embedding by features.

    Args:
      input_layouts: `Replicate()`, or `Shard(dim)`, which is gathered (`Shard(1)` is the sequence).
      output_layouts: None leaves the features split, without communication: the last dim of
        `nnx.Linear`, or the heads of an `nnx.LinearGeneral` with features `(heads, head_dim)`.
        `Replicate()` gathers them.
    """

    input_layouts: Layout = Replicate()
    output_layouts: Layout | None = None


@dataclass(frozen=True)
class Rowwise:
    """Splits a linear map by input features or an embedding by vocabulary; sums partial results.

    Args:
      input_layouts: None expects features split as in the result of `Colwise` (ids are whole).
        `Replicate()` slices the input and all-gathers its gradient.
      output_layouts: `Replicate()` (all-reduce) or `Shard(dim)` (reduce-scatter); `Shard(1)` is the
        sequence.
    """

    input_layouts: Layout | None = None
    output_layouts: Layout = Replicate()


@dataclass(frozen=True)
class SequenceParallel:
    """Runs a norm or dropout on tokens split over tp along `sequence_dim`.

    Parameters are replicated over tp.

    `output_layouts=Replicate()` gathers the result once for all layers that read it; None leaves it
    split.
    """

    sequence_dim: int = 1
    output_layouts: Layout | None = None


@dataclass(frozen=True)
class PrepareInput:
    """Changes the layout of a module's arguments from `input_*` to `desired_input_*`.

    `Replicate()` gathers an argument once, and reduces its gradient once, for all column layers
    that read it (q, k and v; gate and up). Otherwise each layer gathers and reduces by itself.

    `input_layouts` has a layout for each positional argument, or for the first.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Layout] | None = field(default=None, hash=False)
    desired_input_kwarg_layouts: Mapping[str, Layout] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class PrepareOutput:
    """Changes the layout of a module's results, or of the only result, after the call.

    `Replicate()` is shared by column layers as in `PrepareInput`.
    """

    output_layouts: Layouts = None
    desired_output_layouts: Layouts = None


@dataclass(frozen=True)
class PrepareInputOutput(PrepareInput, PrepareOutput):
    """Combines `PrepareInput` and `PrepareOutput`; use keyword arguments."""


@dataclass(frozen=True)
class ContextParallel(PrepareInputOutput):
    """Splits sequences over cp in a module and its submodules; layouts as in `PrepareInputOutput`.

    The first argument is ids `[B, T]` or an activation `[B, T, ...]`. Position-wise layers (linear
    maps, norms, embeddings) run on `T / cp` tokens per device in any style. Code that mixes
    positions (attention) runs on global arrays that the compiler gathers. `nnx.Conv` gets whole
    sequences; give them to `jax.lax` convolutions too, because the compiler computes wrong
    gradients for split sequences. With cp=1 it changes nothing.
    """


Style = (
    Colwise
    | Rowwise
    | SequenceParallel
    | PrepareInput
    | PrepareOutput
    | PrepareInputOutput
    | ContextParallel
    | Replicate
)
"""Values of a plan."""
