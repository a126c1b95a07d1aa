"""The styles of a plan: what `parallelize` does to a module.

The names and arguments are those of `torch.distributed.tensor.parallel`. There they convert between DTensors and local
tensors; here arrays are global outside, and a layout says how the array lies along tp when it enters and leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtp.parallel.layouts import Layout, Replicate

Layouts = Layout | None | tuple[Layout | None, ...]
"""Layouts of one argument or of several; None leaves an argument as it is."""


@dataclass(frozen=True)
class Colwise:
    """Splits a linear map by its output features, an embedding by its features.

    Args:
      input_layouts: how the input arrives: `Replicate()`, or `Shard(dim)`, which is gathered (`Shard(1)` is the
        sequence).
      output_layouts: how the output leaves: None for split by its features, which costs nothing (the last dim of
        `nnx.Linear`; the heads of an `nnx.LinearGeneral` with features `(heads, head_dim)`); `Replicate()` gathers it.
    """

    input_layouts: Layout = Replicate()
    output_layouts: Layout | None = None


@dataclass(frozen=True)
class Rowwise:
    """Splits a linear map by its input features, an embedding by its vocabulary; the partial results are summed.

    Args:
      input_layouts: how the input arrives: None for split by its features, as `Colwise` leaves it (an embedding's ids
        are whole). `Replicate()` cuts it, which makes its gradient an all-gather.
      output_layouts: `Replicate()` (all-reduce), or `Shard(dim)` (reduce-scatter): `Shard(1)` is the sequence.
    """

    input_layouts: Layout | None = None
    output_layouts: Layout = Replicate()


@dataclass(frozen=True)
class SequenceParallel:
    """Runs a module on tokens split over tp: norms, dropout. Its parameters are whole along tp.

    Args:
      sequence_dim: of the first argument and of the result.
      output_layouts: None leaves the result split so; `Replicate()` gathers it once for all who read it
        (see `PrepareInput`).
    """

    sequence_dim: int = 1
    output_layouts: Layout | None = None


@dataclass(frozen=True)
class PrepareInput:
    """Changes the layout of a module's arguments before it is called.

    An argument made `Replicate()` is gathered once for all column layers that read it, and its gradient is reduced
    once; without, each column layer would do both for itself (q, k and v; gate and up).

    Args:
      input_layouts: of each positional argument as it arrives, or of the first one.
      desired_input_layouts: what it becomes.
      input_kwarg_layouts: of keyword arguments.
      desired_input_kwarg_layouts: likewise.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Layout] | None = None
    desired_input_kwarg_layouts: Mapping[str, Layout] | None = None

    def __hash__(self) -> int:
        """Hashes the values; mappings count by their items."""
        kwargs = (self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {})
        return hash((self.input_layouts, self.desired_input_layouts, *(frozenset(k.items()) for k in kwargs)))


@dataclass(frozen=True)
class PrepareOutput:
    """Changes the layout of a module's results after it was called.

    Args:
      output_layouts: of each result, or of the only one, as the module gives it.
      desired_output_layouts: what it becomes; `Replicate()` is shared by column layers as in `PrepareInput`.
    """

    output_layouts: Layouts = None
    desired_output_layouts: Layouts = None


@dataclass(frozen=True)
class PrepareInputOutput(PrepareInput, PrepareOutput):
    """Does both for one module; by keyword."""

    __hash__ = PrepareInput.__hash__


@dataclass(frozen=True)
class ContextParallel(PrepareInputOutput):
    """Divides sequences over cp in a module and in all modules in it; the other arguments are those of preparing.

    The first argument is ids `[B, T]` or an activation `[B, T, ...]`. What works on one position at a time (linear
    maps, norms, embeddings) runs on `T / cp` tokens of each device, whatever style it has; layouts go on to
    say how what is left lies along tp. What mixes positions, such as products of attention, is written on global
    arrays, and the compiler gathers what it needs; `nnx.Conv` gets whole sequences, and so should `jax.lax`'s
    convolutions, of which the compiler makes wrong gradients. With one device along cp it changes nothing, so that a
    plan may always have it: `{"": ContextParallel()}`.
    """

    __hash__ = PrepareInput.__hash__


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
"""Styles that a plan may give a module."""
