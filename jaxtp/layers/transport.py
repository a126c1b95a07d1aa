"""How the activations of a column and a row layer travel between the devices of a tp group.

A column layer brings its input to the whole group and multiplies, a row layer multiplies and sums
over the group. A layer chooses one of three ways when it is constructed:

    Gather   all-gathers before the products and reduce-scatters after them; without sequence
             parallelism it all-reduces.
    Ring     under sequence parallelism multiplies each part of the sequence while another part
             moves (`overlap.py`).
    Joined   only multiplies: the caller has gathered the input for several layers, and reduces the
             sum of their outputs. It is a parallel block, a mixture of experts with shared ones, or
             latent attention.

In the methods, `sequence_dim` is the dim of activations that tp splits outside of the layers, if
any; b is `B/(dp*fsdp)`, and T is a device's part of the sequence over cp.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtp.collectives import GATHERED, REDUCED, axis_size, enter_parallel, leave_parallel
from jaxtp.compiler_hints import inputs_of_separate_products, swap_sequence
from jaxtp.layers.float8 import Quantised, enter_float8
from jaxtp.layers.overlap import gather_matmul, matmul_scatter
from jaxtp.layers.products import Operand, multiply
from jaxtp.mesh import TP


@dataclass(frozen=True)
class Gather:
    """All-gathers before the products, and reduce-scatters or all-reduces after them."""

    joined: ClassVar[bool] = False
    """Whether the layers communicate nothing: inputs of column layers come gathered, and outputs of
    row layers are summands. As a global array, an activation between the caller and its layers is
    `[B, T, tp * D]`, split over tp: one array `[B, T, D]` of each device."""

    def is_ring(self, tp: int, *, split: bool) -> bool:
        """Returns whether rings run on tp devices; `split`: tp splits the sequence."""
        return False

    def enter(
        self, x: Operand, kernels: Sequence[Operand], sequence_dim: int | None
    ) -> tuple[Array, ...]:
        """Multiplies an activation by this device's columns of each kernel.

        The activation is `[b, T/tp, D]` or `[b, T, D]`, a result `[b, T, F_i/tp]`.
        """
        gathered = self._gather(x, sequence_dim)
        return _multiply_each(gathered, kernels, sequence_dim)

    def leave(
        self, inputs: Sequence[Operand], kernels: Sequence[Operand], sequence_dim: int | None
    ) -> Array:
        """Returns the sum of `inputs[i] @ kernels[i]` over i and tp.

        Kernels are this device's rows. Inputs are `[b, T, F_i/tp]`, the result `[b, T/tp, D]` or
        `[b, T, D]`.
        """
        pairs = zip(swap_sequence(inputs, sequence_dim), kernels, strict=True)
        products = (multiply(x, w) for x, w in pairs)
        summand = swap_sequence(reduce(operator.add, products), sequence_dim)
        return self._reduce(summand, sequence_dim)

    def _gather(self, x: Operand, sequence_dim: int | None) -> Operand:
        if isinstance(x, Quantised):
            return enter_float8(x, sequence_dim)
        return enter_parallel(x, sequence_dim)

    def _reduce(self, summand: Array, sequence_dim: int | None) -> Array:
        return leave_parallel(summand, sequence_dim)


@dataclass(frozen=True)
class Joined(Gather):
    """Only multiplies; the caller communicates for several layers."""

    joined = True

    def _gather(self, x: Operand, sequence_dim: int | None) -> Operand:
        return x

    def _reduce(self, summand: Array, sequence_dim: int | None) -> Array:
        return summand


@dataclass(frozen=True)
class Ring(Gather):
    """Overlaps products with communication under sequence parallelism, else as `Gather`."""

    keep: bool = False
    """As in `gather_matmul`; see `LayerContext.recomputed`."""

    def is_ring(self, tp: int, *, split: bool) -> bool:
        """See `Gather`."""
        return split and tp > 1

    def enter(
        self, x: Operand, kernels: Sequence[Operand], sequence_dim: int | None
    ) -> tuple[Array, ...]:
        """See `Gather`."""
        if not self.is_ring(axis_size(TP), split=sequence_dim is not None):
            return super().enter(x, kernels, sequence_dim)
        shard = jax.tree.map(lambda array: checkpoint_name(array, GATHERED), x)
        return gather_matmul(self.keep, shard, tuple(kernels))

    def leave(
        self, inputs: Sequence[Operand], kernels: Sequence[Operand], sequence_dim: int | None
    ) -> Array:
        """See `Gather`."""
        if not self.is_ring(axis_size(TP), split=sequence_dim is not None):
            return super().leave(inputs, kernels, sequence_dim)
        reduced = matmul_scatter(tuple(inputs), tuple(kernels))
        return checkpoint_name(reduced, REDUCED)


def _multiply_each(
    x: Operand, kernels: Sequence[Operand], sequence_dim: int | None
) -> tuple[Array, ...]:
    x = swap_sequence(x, sequence_dim)
    # Dequantised once; the products of all adapters read it.
    plain = x.astype(x.dtype)
    inputs = inputs_of_separate_products(plain, kernels)
    products = []
    for kernel, plain_input in zip(kernels, inputs, strict=True):
        operand = x if isinstance(kernel, Quantised) else plain_input
        y = multiply(operand, kernel, TP)
        products.append(swap_sequence(y, sequence_dim))
    return tuple(products)
