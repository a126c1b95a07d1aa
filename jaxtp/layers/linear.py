"""Linear layers split over tp by columns (output features) or rows (input features).

A column and a row layer cost one reduction in the forward and one in the backward pass
(Megatron-LM, arXiv 1909.08053):

    [X W1_0 | X W1_1]   each device holds a block of columns of W1 and of the result
    sum_i Y_i W2_i      each device holds the matching rows of W2 and computes one summand

`x_BTD` has shape `[B, T, D]`, with more dims allowed between B and D.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    GATHERED,
    PROJECTED,
    REDUCED,
    Quantised,
    average_gradient,
    axis_index,
    axis_size,
    batch_spec,
    check_divides,
    device_view,
    enter_float8,
    enter_parallel,
    leave_parallel,
    sequence_first,
)
from jaxtp.layers.float8 import BlockScaled, Kernel, Operand, multiply, tokens_in_float8
from jaxtp.layers.lora import Lora, LoraConfig, Target
from jaxtp.layers.mxfp8 import mx_problem
from jaxtp.layers.overlap import Overlap, gather_matmul, is_ring, matmul_scatter
from jaxtp.layers.parameter import (
    ExactDim,
    Matmul,
    PaddedDim,
    Precision,
    Weights,
    check_sizes,
    parameter,
    params_and_specs,
)
from jaxtp.layers.sequence_parallel import SequenceParallel, sequence_dim
from jaxtp.mesh import CONTEXT, SEQUENCE, STORAGE, TOKENS, TP

COLUMN = "column_parallel_linear"
ROW = "row_parallel_linear"
_GRANULE = 16  # features: tensor cores multiply float8 in multiples of it
_FRAGMENT = 64  # columns: XLA's fused products read several kernels in multiples of it


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Settings that the parallel layers of a model share."""

    sequence_parallel: SequenceParallel = False
    """Activations between layers are split over tp along the sequence. By default a layer takes
    whole sequences; `ModelConfig` decides by the length."""

    joined: bool = False
    """Inputs of column layers come gathered, and outputs of row layers are summands, one for each
    device of a tp group; both `[B, T, tp * D]`, split over tp. For layers that share these
    collectives."""

    # Whether projections overlap their products with communication (`layers/overlap.py`)
    overlap: Overlap = "none"
    # Whether the backward pass computes column layers again: a ring keeps what passes
    recomputed: bool = False
    fused: bool = False  # and it does not read the result of an MLP, which is then one ring
    lora: LoraConfig = LoraConfig()
    precision: Precision = Precision()


default_kernel_init = nnx.initializers.normal(stddev=0.02)


def fixed_in_part(bias: Array, period: int, count: int) -> Array:
    """Stops the gradient of feature i unless `i % period < count`."""
    return jnp.where(jnp.arange(bias.size) % period < count, bias, jax.lax.stop_gradient(bias))


class ColumnParallelLinear(nnx.Module):
    """Projects one input to one or several outputs, split by columns over tp.

    Output i is `y_i = x @ kernels[i] + biases[i]`.

    The input's gradient is reduced over tp; with sequence parallelism the input is gathered. All
    outputs share both. Kernels are gathered over fsdp and cp. See `enter_parallel` and
    `load_weight` in the table of `collectives.py`.

    Args:
      in_features: D.
      features: F of each output; a `PaddedDim` if tp may pad it.
      targets: names of the outputs, which `context.lora` matches to add adapters.

    Shapes: `[B, ..., D] -> [B, ..., F]`, split over tp; a tuple if `features` is a sequence.
    Devices that share a head (`PaddedDim.shared_by`) each output it. Kernels `[D, F]` are stored as
    `P(STORAGE, TP)`, biases as `P(TP)`.
    """

    matmul: Matmul = "compute"
    early: bool = False  # as in `WeightLayout`
    fixed_bias: tuple[int, int, int] | None = None
    """(output, period, count): the output whose bias is `fixed_in_part`."""

    def __init__(
        self,
        in_features: int,
        features: int | PaddedDim | Sequence[int | PaddedDim],
        context: LayerContext = LayerContext(),
        *,
        use_bias: bool = False,
        targets: Sequence[Target] = (),
        rngs: nnx.Rngs,
    ):
        outputs = tuple(features) if isinstance(features, Sequence) else (features,)
        self.single = not isinstance(features, Sequence)
        self.features = tuple(
            _as_dim("ColumnParallelLinear", each, in_features=in_features) for each in outputs
        )
        self.in_features = in_features
        self.joined = context.joined
        self.recomputed = context.recomputed
        self.sequence_parallel = context.sequence_parallel
        self.overlap = context.overlap
        self.precision = context.precision
        dtype = context.precision.param
        kernels = (
            (f, default_kernel_init(rngs.params(), (in_features, f.size), dtype))
            for f in self.features
        )
        self.kernels = nnx.List(
            parameter("kernel", k, P(STORAGE, TP), padding=((-1, f),)) for f, k in kernels
        )
        biases = ((f, jnp.zeros(f.size, dtype)) for f in self.features if use_bias)
        self.biases = nnx.List(parameter("bias", b, P(TP), padding=((-1, f),)) for f, b in biases)
        self.adapted = tuple(context.lora.adapted(*targets))
        dims = ((ExactDim((in_features,)), self.features[i]) for i in self.adapted)
        self.loras = nnx.List(
            Lora(each, context.lora, (P(STORAGE), P(None, TP)), rngs=rngs) for each in dims
        )

    def __call__(self, x_BTD: Array) -> Array | tuple[Array, ...]:
        """Projects `[B, ..., D]` to `[B, ..., F]`."""
        sequence, inside, outside = activation_specs(self.sequence_parallel, x_BTD.shape)
        weights, specs = params_and_specs(self)
        project = partial(self.project, sequence)
        in_specs = (inside if self.joined else outside, specs)
        outputs = device_view(project, COLUMN, in_specs, out_specs=(inside,) * len(self.features))(
            x_BTD, weights
        )
        return outputs[0] if self.single else outputs

    def project(self, sequence: int | None, x: Array, weights: Weights) -> tuple[Array, ...]:
        """Returns a device's columns; `sequence` as in `enter_matmul`."""
        kernels = list[Kernel]()
        tp = axis_size(TP)
        for f, shard in zip(
            self.features, (weights[f"kernels.{i}"] for i in range(len(self.features))), strict=True
        ):
            gather = 1, f.num_shards(tp, shard.shape[1])
            kernels.append(
                _load_kernel(self, shard, 0, *STORAGE, early=self.early, tp_gather=gather)
            )
        adapters = (weights[f"loras.{at}.a"] for at in range(len(self.loras)))
        kernels += [self.precision.load(a, 0, used_by_all_tp=True) for a in adapters]
        x = x.astype(self.precision.compute)
        tokens: Operand = tokens_in_float8(x) if self.matmul == "float8" else x
        enter = partial(enter_matmul, overlap=self.overlap, keep=self.recomputed)
        products = (_multiply_each if self.joined else enter)(tokens, kernels, sequence)
        outputs = list(products[: len(self.features)])
        inner = products[len(self.features) :]
        # Whole gradients are quantised, not summands of devices that share a head.
        if self.matmul != "compute":
            shared = (f.shared_by(axis_size(TP)) for f in self.features)
            outputs = [average_gradient(y, group) for y, group in zip(outputs, shared, strict=True)]
        for i, f in enumerate(self.features if self.biases else ()):
            bias = self._load(weights[f"biases.{i}"], None, f)
            if self.fixed_bias is not None and self.fixed_bias[0] == i:
                bias = fixed_in_part(bias, *self.fixed_bias[1:])
            outputs[i] += bias
        for at, (i, lora) in enumerate(zip(self.adapted, self.loras, strict=True)):
            small = checkpoint_name(inner[at], PROJECTED)  # [B/(dp*fsdp), T/cp, rank]
            outputs[i] += lora.scale * (
                small @ self._load(weights[f"loras.{at}.b"], None, self.features[i])
            )
        # Each output is [B/(dp*fsdp), T/cp, F/tp].
        return tuple(checkpoint_name(y, PROJECTED) for y in outputs)

    def merged(self, weights: Weights) -> Array:
        """Returns a device's columns of the first kernel with its adapter, inside `device_view`."""
        kernel = self._load(weights["kernels.0"], 0, self.features[0])
        for lora in self.loras:
            a = self.precision.load(weights["loras.0.a"], 0, used_by_all_tp=True)
            kernel += lora.scale * (a @ self._load(weights["loras.0.b"], None, self.features[0]))
        return kernel

    def _load(self, shard: Array, fsdp_dim: int | None, features: PaddedDim) -> Array:
        gather = shard.ndim - 1, features.num_shards(axis_size(TP), shard.shape[-1])
        return self.precision.load(shard, fsdp_dim, tp_gather=gather)


class RowParallelLinear(nnx.Module):
    """Projects features split over tp and sums over tp: `[B, ..., F] -> [B, ..., D]`.

    `use_bias` adds a bias once, after the reduction; sequence parallelism reduce-scatters the
    result along the sequence. The kernel `[F, D]` is stored as `P(TP, STORAGE)`, the bias `[D]` as
    `P(STORAGE)`.
    """

    matmul: Matmul = "compute"

    def __init__(
        self,
        in_features: int | PaddedDim,
        features: int,
        context: LayerContext = LayerContext(),
        *,
        use_bias: bool = False,
        target: Target | None = None,
        rngs: nnx.Rngs,
    ):
        self.in_features = _as_dim("RowParallelLinear", in_features, out_features=features)
        self.features = features
        self.sequence_parallel = context.sequence_parallel
        self.overlap = context.overlap
        self.joined = context.joined
        self.precision = context.precision
        dtype = context.precision.param
        kernel = default_kernel_init(rngs.params(), (self.in_features.size, features), dtype)
        self.kernel = parameter("kernel", kernel, P(TP, STORAGE), padding=((-2, self.in_features),))
        self.bias = parameter("bias", jnp.zeros(features, dtype), P(STORAGE)) if use_bias else None
        dims = (self.in_features, ExactDim((features,)))
        adapted = target and context.lora.adapted(target)
        self.loras = nnx.List(
            [Lora(dims, context.lora, (P(TP), P(None, STORAGE)), rngs=rngs)] if adapted else []
        )

    def __call__(self, x_BTF: Array) -> Array:
        """Projects `[B, ..., F]` to `[B, ..., D]`."""
        sequence, inside, outside = activation_specs(self.sequence_parallel, x_BTF.shape)
        check_divides(ROW, (*x_BTF.shape[:-1], self.features), outside)
        outside = inside if self.joined else outside
        weights, specs = params_and_specs(self)
        return device_view(
            partial(self._project, sequence), ROW, (inside, specs), out_specs=outside
        )(x_BTF, weights)

    def _project(self, sequence: int | None, x: Array, weights: Weights) -> Array:
        x = x.astype(self.precision.compute)
        # The input is [B/(dp*fsdp), T/cp, F/tp].
        inputs: list[Operand] = [tokens_in_float8(x, TP) if self.matmul == "float8" else x]
        # The kernel is [F/tp, D].
        kernels = [_load_kernel(self, weights["kernel"], 1, TP, early=axis_size(TP) == 1)]
        for at, lora in enumerate(self.loras):
            a = weights[f"loras.{at}.a"]
            b = weights[f"loras.{at}.b"]
            # The product is [B/(dp*fsdp), T/cp, rank], a summand.
            inner = lora.scale * (x @ self.precision.load(a, None))
            inputs.append(checkpoint_name(inner, PROJECTED))
            kernels.append(self.precision.load(b, 1, used_by_all_tp=True))
        leave = _sum_of_products if self.joined else partial(leave_matmul, overlap=self.overlap)
        y = leave(inputs, kernels, sequence)
        if self.bias is not None:
            bias = self.precision.load(
                weights["bias"], 0, used_by_all_tp=self.joined or sequence is not None
            )
            y += jnp.where(axis_index(TP) == 0, bias, 0) if self.joined else bias
        return y


def _load_kernel(
    layer: ColumnParallelLinear | RowParallelLinear,
    shard: Array,
    fsdp_dim: int,
    *axes: str,
    **layout: Any,
) -> Kernel:
    """Loads a kernel for the products of its layer.

    The mesh axes `axes` split its input features.
    """
    if layer.matmul == "float8":
        return layer.precision.load_float8(shard, fsdp_dim, *axes, **layout)
    kernel = layer.precision.load(shard, fsdp_dim, **layout)
    return BlockScaled(kernel) if layer.matmul == "mxfp8" else kernel


def matmul_obstacle(layer: ColumnParallelLinear | RowParallelLinear) -> str | None:
    """Returns why `Precision.matmul` does not apply to a layer of such sizes, or None."""
    least = layer.precision.matmul_least
    granule = 1 if least == 1 else _GRANULE
    outputs = (
        layer.features
        if isinstance(layer, ColumnParallelLinear)
        else (ExactDim((layer.features,)),)
    )
    inputs = (
        layer.in_features
        if isinstance(layer, RowParallelLinear)
        else ExactDim((layer.in_features,))
    )
    if odd := [each.size for each in (inputs, *outputs) if each.size % granule]:
        return f"{odd[0]} features are no multiple of {granule}"
    few = min(inputs.size, sum(each.size for each in outputs))
    return f"{few:,} features are below matmul_least={least:,}" if few < least else None


def mx_obstacle(layer: ColumnParallelLinear | RowParallelLinear, tp: int) -> str | None:
    """Returns why MXFP8 does not divide a device's part of such a layer into blocks, or None."""
    if isinstance(layer, RowParallelLinear):
        return mx_problem(layer.in_features.local(tp), layer.features)
    return next(
        filter(None, (mx_problem(layer.in_features, each.local(tp)) for each in layer.features)),
        None,
    )


def enter_matmul(
    x: Operand,
    kernels: Sequence[Kernel],
    sequence: int | None,
    overlap: Overlap,
    *,
    keep: bool = False,
) -> tuple[Array, ...]:
    """Multiplies an activation of the whole tp group by this device's columns `[D, F_i/tp]`.

    `sequence` is the dim of `x` that is split over tp, if any; `keep` as in `gather_matmul`.
    """
    if is_ring(overlap, axis_size(TP), split=sequence is not None):
        return gather_matmul(
            keep, jax.tree.map(lambda each: checkpoint_name(each, GATHERED), x), tuple(kernels)
        )
    # The gathered input is [b, T, D].
    x = enter_float8(x, sequence) if isinstance(x, Quantised) else enter_parallel(x, sequence)
    return _multiply_each(x, kernels, sequence)  # each [b, T, F_i/tp]


def _multiply_each(
    x: Operand, kernels: Sequence[Kernel], sequence: int | None
) -> tuple[Array, ...]:
    x = sequence_first(x, sequence)
    plain = apart = x.astype(x.dtype)  # once for all adapters
    odd = [isinstance(w, Array) and w.shape[-1] % _FRAGMENT > 0 for w in kernels]
    if len({*odd}) == 2 and plain.size < plain.shape[-1] ** 2:
        # XLA joins products of few tokens, and would copy all kernels into one if the columns of
        # one fill no fragment.
        apart = jax.lax.optimization_barrier(plain)
    inputs = (apart if each else plain for each in odd)
    products = (
        multiply(x if isinstance(w, Quantised) else y, w, TP)
        for w, y in zip(kernels, inputs, strict=True)
    )
    return tuple(sequence_first(y, sequence) for y in products)


def _sum_of_products(
    inputs: Sequence[Operand], kernels: Sequence[Kernel], sequence: int | None
) -> Array:
    pairs = zip(sequence_first(inputs, sequence), kernels, strict=True)
    return sequence_first(reduce(operator.add, (multiply(*pair) for pair in pairs)), sequence)


def leave_matmul(
    inputs: Sequence[Operand], kernels: Sequence[Kernel], sequence: int | None, overlap: Overlap
) -> Array:
    """Returns the sum of `inputs[i] @ kernels[i]` over i and tp; see `enter_matmul`."""
    if is_ring(overlap, axis_size(TP), split=sequence is not None):
        return checkpoint_name(matmul_scatter(tuple(inputs), tuple(kernels)), REDUCED)
    # The result is [b, T, D], or [b, T/tp, D].
    return leave_parallel(_sum_of_products(inputs, kernels, sequence), sequence)


def _as_dim(layer: str, features: int | PaddedDim, **others: int) -> PaddedDim:
    check_sizes(
        layer, features=features.size if isinstance(features, PaddedDim) else features, **others
    )
    return features if isinstance(features, PaddedDim) else ExactDim((features,))


def activation_specs(setting: SequenceParallel, shape: tuple[int, ...]) -> tuple[int | None, P, P]:
    """Returns `sequence_dim`, and the specs between the two layers (features over tp) and outside.

    `[B, D]` has B tokens and no sequence.
    """
    if len(shape) == 2:
        return None, P(TOKENS, TP), P(TOKENS, None)
    sequence = sequence_dim(setting, shape)
    tokens: tuple[Any, ...] = (CONTEXT, *(None,) * (len(shape) - 3))
    outside = tokens if sequence is None else (SEQUENCE, *tokens[1:])
    return sequence, batch_spec(*tokens, TP), batch_spec(*outside, None)
