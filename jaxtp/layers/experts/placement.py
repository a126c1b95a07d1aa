"""Which experts a device holds, and which tokens it multiplies with them.

Kernels are stacked, `[E, D, F]`, and split over tp:

    experts over tp   if tp divides E: a device has E/tp whole experts and computes the rows that
                      chose them.
    experts inside    otherwise: a device has F/tp of every expert, padded, and computes its part
                      of every row.

The storage (fsdp and cp) splits E too, if it divides a device's experts: then gathering kernels
only concatenates. Otherwise it splits D. If the tokens take fewer bytes than kernels split by E,
each device gathers tokens instead of kernels, multiplies them with the experts that it stores, and
reduce-scatters the outputs.

All tokens may choose one device's experts, so rows are computed in parts of 1.5 times the average,
and at least 8192.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import axis_index
from jaxtp.layers.experts.experts_config import ExpertsConfig
from jaxtp.layers.parameter import ExactDim, PaddedDim, Variable, parameter
from jaxtp.mesh import STORAGE, TP

SPARE = 1.5  # rows of a part, relative to a device's average
# Computing this many rows is cheaper than a loop test, which stalls the GPU
FEW_ROWS = 8192


class Placement(NamedTuple):
    """A device's part of a mixture in one step."""

    shards: int
    """Devices along the storage whose tokens the device gathers; 1 if it gathers kernels instead,
    and has only its own tokens."""

    experts: int  # experts that the device multiplies with
    width: int  # hidden features of each expert on the device
    rows: int  # rows on average
    part_rows: int  # rows computed at a time


def place(
    config: ExpertsConfig,
    tokens: int,
    tp: int,
    shards: int,
    *,
    token_bytes: int,
    kernel_bytes: float,
) -> Placement:
    """Returns a device's part; each of `shards` tp groups has `tokens` tokens.

    `token_bytes` is the size of an element of a token, and `kernel_bytes` the bytes that a
    training step moves for each element of a kernel.
    """
    over_tp = config.over_tp(tp)
    # Bytes of a tp group for each of the D features of the model: tp devices hold all kernels
    # together, and each of them all tokens.
    moved_kernels = config.num_experts * len(config.projections()) * config.d_ff * kernel_bytes
    # Tokens move in, out, in again, and with both gradients.
    moved_tokens = 5 * token_bytes * tokens * shards * tp
    if not config.stored_by_expert(tp, shards) or moved_tokens >= moved_kernels:
        shards = 1
    devices = shards
    width = PaddedDim((config.d_ff,)).local(tp)
    if over_tp:
        devices *= tp
        width = config.d_ff
    choices = shards * tokens * config.experts_per_token
    rows_of_part = max(FEW_ROWS, math.ceil(SPARE * choices / devices))
    return Placement(
        shards=shards,
        experts=config.num_experts // devices,
        width=width,
        rows=choices // devices,
        part_rows=min(choices, rows_of_part),
    )


@dataclass(frozen=True)
class StackedDims:
    """The dims of stacked arrays, by the letters of `ExpertsConfig.projections`."""

    sizes: Mapping[str, PaddedDim]
    axes: Mapping[str, tuple[str, ...]]  # mesh axes that split each dim

    @classmethod
    def of(cls, d_model: int, config: ExpertsConfig, tp: int, shards: int) -> "StackedDims":
        """Returns the dims of a layer; `shards` devices are along the storage."""
        over_tp = config.over_tp(tp)
        axes = dict[str, tuple[str, ...]](E=(), D=(), F=())
        axes["E" if over_tp else "F"] += (TP,)
        axes[storage_letter(config, tp, shards)] += STORAGE
        features = ExactDim if over_tp else PaddedDim
        sizes = {
            "E": ExactDim((config.num_experts,)),
            "D": ExactDim((d_model,)),
            "F": features((config.d_ff,)),
        }
        return cls(sizes, axes)

    def shape(self, dims: str) -> tuple[int, ...]:
        """Returns the shape without padding."""
        return tuple(self.sizes[dim].size for dim in dims)

    def parameter(self, name: str, dims: str, value: Array) -> Variable:
        """Returns a parameter of these dims."""
        padding = tuple((i - len(dims), self.sizes[dim]) for i, dim in enumerate(dims))
        return parameter(name, value, self.spec(dims), padding=padding)

    def spec(self, dims: str) -> P:
        """Returns the spec; dims without a size, such as an adapter's rank, are not split."""
        return P(*(self.axes.get(dim) or None for dim in dims))


def storage_letter(config: ExpertsConfig, tp: int, shards: int) -> str:
    """Returns the letter of the dim that the storage splits."""
    return "E" if config.stored_by_expert(tp, shards) else "D"


def on_first_device(x: Array) -> Array:
    """Returns `x` on the first device of each tp group, and 0 on the others."""
    return jnp.where(axis_index(TP) == 0, x, 0)
