"""Between a layer and its tp group: activations are split, gathered, multiplied and reduced.

Sequence parallelism splits tokens over tp between parallel layers: column layers all-gather their
input, and row layers reduce-scatter their output (Korthikanti et al., arXiv 2205.05198). Without
it every device of the group has all tokens, and row layers all-reduce. See `enter_parallel` and
`leave_parallel` in the table of `collectives.py`.

In the methods, `split_dim` is the dim of activations that tp splits outside of the layers, if
any; b is `B/(dp*fsdp)`, and T is a device's part of the sequence over cp.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    axis_size,
    batch_spec,
    enter_parallel,
    leave_parallel,
    swap_sequence,
    vary_like,
)
from jaxtp.layers.float8 import Quantised, enter_float8
from jaxtp.layers.products import Operand, product_with_gradient
from jaxtp.mesh import (
    CONTEXT,
    SEQUENCE,
    STORAGE,
    TOKENS,
    TP,
    current_mesh,
    current_platform,
    mesh_sizes,
    parts,
)

SEQUENCE_DIM = 1

SequenceParallel = bool | None
"""On, off, or None: on if tp > 1 divides the sequence of the input, hence off when a single token
is decoded."""

# Columns that a tile of XLA's fused products has
_TILE = 64


def sequence_dim(setting: SequenceParallel, shape: tuple[int, ...]) -> int | None:
    """Returns the dim of `[B, T, ...]` that is split over tp between layers, or None."""
    split = is_split(setting, shape[SEQUENCE_DIM], mesh_sizes(current_mesh()))
    return SEQUENCE_DIM if split else None


def is_split(setting: SequenceParallel, length: int, sizes: Mapping[str, int]) -> bool:
    """Returns whether sequence parallelism splits sequences of `length` tokens."""
    if setting is None:
        return sizes[TP] > 1 and length % parts(sizes, SEQUENCE) == 0
    return setting


def activation_spec(split_dim: int | None, *dims: None) -> P:
    """Returns the spec of `[B, T, ..., D]` between layers, with the `split_dim` of its layers.

    `dims` has an entry for each dim between T and D.
    """
    return batch_spec(CONTEXT if split_dim is None else SEQUENCE, *dims, None)


def activation_specs(setting: SequenceParallel, shape: tuple[int, ...]) -> tuple[int | None, P, P]:
    """Returns `split_dim`, and the specs between the two layers (features over tp) and outside.

    `[B, D]` has B tokens and no sequence.
    """
    if len(shape) == 2:
        return None, P(TOKENS, TP), P(TOKENS, None)
    split_dim = sequence_dim(setting, shape)
    unsplit = (None,) * (len(shape) - 3)
    return split_dim, batch_spec(CONTEXT, *unsplit, TP), activation_spec(split_dim, *unsplit)


@dataclass(frozen=True)
class Transport:
    """All-gathers before the products, and reduce-scatters or all-reduces after them.

    `Ring` (`overlap.py`) overlaps both with the products.
    """

    caller_communicates: bool = False
    """The layers only multiply: inputs of column layers come gathered, and outputs of row layers
    are summands. The caller gathers for several layers, and reduces the sum of their outputs: a
    parallel block, a mixture of experts with shared ones, or latent attention. As a global array,
    an activation between the caller and its layers is `[B, T, tp * D]`, split over tp: one array
    `[B, T, D]` of each device."""

    def is_ring(self, tp: int, *, split: bool) -> bool:
        """Returns whether rings run on tp devices; `split`: tp splits the sequence."""
        return False

    def enter(
        self, x: Operand, kernels: Sequence[Operand], split_dim: int | None
    ) -> tuple[Array, ...]:
        """Multiplies an activation by this device's columns of each kernel.

        The activation is `[b, T/tp, D]` or `[b, T, D]`, a result `[b, T, F_i/tp]`.
        """
        if not self.caller_communicates:
            if isinstance(x, Quantised):
                x = enter_float8(x, split_dim)
            else:
                x = enter_parallel(x, split_dim)
        # Undoes the second swap of `enter_parallel`, so that XLA has neither.
        x = swap_sequence(x, split_dim)
        # Dequantised once; the products of all adapters read it.
        plain = x.astype(x.dtype)
        inputs = _inputs_of_separate_products(plain, kernels)
        products = []
        for kernel, plain_input in zip(kernels, inputs, strict=True):
            operand = x if isinstance(kernel, Quantised) else plain_input
            y = multiply(operand, kernel, TP)
            products.append(swap_sequence(y, split_dim))
        return tuple(products)

    def leave(
        self, inputs: Sequence[Operand], kernels: Sequence[Operand], split_dim: int | None
    ) -> Array:
        """Returns the sum of `inputs[i] @ kernels[i]` over i and tp.

        Kernels are this device's rows. Inputs are `[b, T, F_i/tp]`, the result `[b, T/tp, D]` or
        `[b, T, D]`.
        """
        pairs = zip(swap_sequence(inputs, split_dim), kernels, strict=True)
        products = (multiply(x, w) for x, w in pairs)
        summand = swap_sequence(reduce(operator.add, products), split_dim)
        return summand if self.caller_communicates else leave_parallel(summand, split_dim)


def multiply(x: Operand, w: Operand, *output_axes: str) -> Array:
    """Returns `x @ w`, in the dtype of the kernel.

    Mesh axes split the output features: in float8 their devices share the scales of the gradient.
    """
    if isinstance(x, Quantised) and isinstance(w, Quantised):
        return product_with_gradient(x, w, output_axes)
    x = x.astype(w.dtype)
    # Dequantises a kernel in 8 bits, whose dtype is the compute dtype.
    w = w.astype(w.dtype)
    # Without tp the gradient of a kernel is computed first, so that its reduction over the storage
    # starts early. With tp XLA orders the gradients: the product for the kernel hides the reduction
    # of the gradient of `x`.
    if axis_size(TP) == 1 and axis_size(*STORAGE) > 1:
        return product_with_gradient(vary_like(x, w), vary_like(w, x), output_axes)
    if current_platform() != "cpu" or x.size < w.size:
        return x @ w
    # XLA for CPUs would fold a transposition into the product for the gradient of `w`, and has no
    # fast kernel for that. The barrier makes it copy `w` instead, which does not pay off for few
    # tokens. With no collectives along axes of one device, steps on CPUs became 4 to 13% faster.
    return lax.dot_general(x, lax.optimization_barrier(w.T), (((x.ndim - 1,), (1,)), ((), ())))


def _inputs_of_separate_products(x: Array, kernels: Sequence[Operand]) -> list[Array]:
    """Returns `x` for each kernel, such that XLA merges only products whose columns fill tiles.

    XLA merges products of one input into one kernel if they have few tokens, as in decoding. If the
    columns of some of them fill no tile of 64, it concatenates copies of all weights instead of
    reading each in its place. So these products get an input of their own. Qwen3.5 27B copied six
    kernels of each Gated DeltaNet layer for each token (aa673834:scripts/decode_on_h100.py).
    """
    fills_no_tile = [isinstance(w, Array) and w.shape[-1] % _TILE > 0 for w in kernels]
    few_tokens = x.size < x.shape[-1] ** 2
    if all(fills_no_tile) or not any(fills_no_tile) or not few_tokens:
        return [x] * len(kernels)
    separate = lax.optimization_barrier(x)
    return [separate if apart else x for apart in fills_no_tile]
