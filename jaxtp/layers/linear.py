"""Linear layers split over tp by columns (output features) or rows (input features).

A column and a row layer cost one reduction in the forward and one in the backward pass
(Megatron-LM, arXiv 1909.08053):

    [X W1_0 | X W1_1]   each device holds a block of columns of W1 and of the result
    sum_i Y_i W2_i      each device holds the matching rows of W2 and computes one summand

`x_BTD` has shape `[B, T, D]`, with more dims allowed between B and D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    PROJECTED,
    average_gradient,
    axis_index,
    axis_size,
    check_divides,
    device_view,
)
from jaxtp.config.schema import short_repr
from jaxtp.layers.float8 import tokens_in_float8
from jaxtp.layers.lora import Lora, LoraConfig, Target
from jaxtp.layers.overlap import Overlap, Ring
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
from jaxtp.layers.products import Operand
from jaxtp.layers.transport import SequenceParallel, Transport, activation_specs
from jaxtp.mesh import STORAGE, TP

COLUMN = "column_parallel_linear"
ROW = "row_parallel_linear"
# Tensor cores multiply float8 in multiples of this number of features
_GRANULE = 16


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Settings that the parallel layers of a model share."""

    __repr__ = short_repr

    sequence_parallel: SequenceParallel = False
    """Activations between layers are split over tp along the sequence. By default a layer takes
    whole sequences; `ModelConfig` decides by the length."""

    # Whether projections overlap their products with communication (`layers/overlap.py`)
    overlap: Overlap = "none"
    lora: LoraConfig = LoraConfig()
    precision: Precision = Precision()

    # The rest says when the layers of a block communicate: it depends on the block and its remat
    # policy, not on settings of a layer.

    # The caller gathers the input of several layers and reduces their outputs (see `Transport`).
    caller_communicates: bool = False
    # Remat runs the forward pass again just before the backward pass. A ring may keep the parts
    # that it receives in that second run, because they live for one block only.
    recomputed: bool = False
    # Gradients of column layers are reduced as in `WeightLayout.reduce_in_layer`.
    reduce_in_layer: bool = False

    def transport(self, matmul: Matmul) -> Transport:
        """Returns how a layer, multiplied in `matmul`, brings activations to its tp group."""
        if self.overlap == "ring" and matmul == "compute" and not self.caller_communicates:
            return Ring(keep=self.recomputed)
        return Transport(caller_communicates=self.caller_communicates)


@dataclass(frozen=True)
class FixedBias:
    """A bias whose feature i is trained only if `i % period < num_trained`."""

    period: int
    num_trained: int
    output: int = 0
    """The output of a column layer that has this bias."""

    def stop_gradient(self, bias: Array) -> Array:
        """Stops the gradient of features that are not trained."""
        if self.num_trained >= self.period:
            return bias
        is_trained = jnp.arange(bias.size) % self.period < self.num_trained
        return jnp.where(is_trained, bias, jax.lax.stop_gradient(bias))


default_kernel_init = nnx.initializers.normal(stddev=0.02)


class ColumnParallelLinear(nnx.Module):
    """Projects one input to one or several outputs, split by columns over tp.

    Output i is `y_i = x @ kernels[i] + biases[i]`.

    The input's gradient is reduced over tp; with sequence parallelism the input is gathered. All
    outputs share both. Kernels are gathered over fsdp and cp. See `enter_parallel` and
    `load_weight` in the table of `collectives.py`.

    Args:
      in_features: D.
      features: F of each output; a `PaddedDim` if tp may pad it.
      use_bias: whether outputs have biases; a `FixedBias` says which is trained in part.
      targets: names of the outputs, which `context.lora` matches to add adapters.

    Shapes: `[B, ..., D] -> [B, ..., F]`, split over tp; a tuple if `features` is a sequence.
    Devices that share a head (`PaddedDim.shared_by`) each output it. Kernels `[D, F]` are stored as
    `P(STORAGE, TP)`, biases as `P(TP)`.
    """

    def __init__(
        self,
        in_features: int,
        features: int | PaddedDim | Sequence[int | PaddedDim],
        context: LayerContext = LayerContext(),
        *,
        use_bias: bool | FixedBias = False,
        targets: Sequence[Target] = (),
        rngs: nnx.Rngs,
    ):
        self.single = not isinstance(features, Sequence)
        outputs = features if isinstance(features, Sequence) else (features,)
        as_dim = partial(_as_dim, "ColumnParallelLinear", in_features=in_features)
        self.features = tuple(map(as_dim, outputs))
        self.in_features = in_features
        self.reduce_in_layer = context.reduce_in_layer
        self.sequence_parallel = context.sequence_parallel
        self.precision = context.precision
        self.matmul = _matmul_of(self)
        self.transport = context.transport(self.matmul)
        self.fixed_bias = use_bias if isinstance(use_bias, FixedBias) else None
        dtype = context.precision.param
        kernels = []
        biases = []
        for dim in self.features:
            kernel = default_kernel_init(rngs.params(), (in_features, dim.size), dtype)
            padding = ((-1, dim),)
            kernels.append(parameter("kernel", kernel, P(STORAGE, TP), padding=padding))
            if use_bias:
                bias = jnp.zeros(dim.size, dtype)
                biases.append(parameter("bias", bias, P(TP), padding=padding))
        self.kernels = nnx.List(kernels)
        self.biases = nnx.List(biases)
        self.adapted = tuple(context.lora.adapted(*targets))
        self.loras: nnx.List[Lora] = nnx.List([])
        specs = (P(STORAGE), P(None, TP))
        for i in self.adapted:
            dims = (ExactDim((in_features,)), self.features[i])
            self.loras.append(Lora(dims, context.lora, specs, rngs=rngs))

    def __call__(self, x_BTD: Array) -> Array | tuple[Array, ...]:
        """Projects `[B, ..., D]` to `[B, ..., F]`."""
        split_dim, inside, outside = activation_specs(self.sequence_parallel, x_BTD.shape)
        weights, weight_specs = params_and_specs(self)
        run = device_view(
            partial(self.project, split_dim),
            COLUMN,
            # A gathered input is a part of a global `[B, T, tp * D]`: see `Transport`.
            in_specs=(inside if self.transport.caller_communicates else outside, weight_specs),
            out_specs=inside,
        )
        outputs = run(x_BTD, weights)
        return outputs[0] if self.single else outputs

    def project(self, split_dim: int | None, x: Array, weights: Weights) -> tuple[Array, ...]:
        """Returns a device's columns, each `[B/(dp*fsdp), T/cp, F/tp]`.

        `split_dim` is the dim of `x` that tp splits outside of the layer, if any: `x` is then
        `[B/(dp*fsdp), T/(cp*tp), D]`, else `[B/(dp*fsdp), T/cp, D]`. Kernels are stored as
        `[D/(fsdp*cp), F/tp]`.
        """
        kernels = self._load_kernels(weights)
        # `x @ A` of every adapter shares the gather of `x`, so A is one more kernel.
        adapters = self._load_adapters(weights)
        tokens = _as_operand(x.astype(self.precision.compute), self.matmul)
        products = self.transport.enter(tokens, [*kernels, *adapters], split_dim)
        count = len(kernels)
        outputs = self._average_shared(products[:count])
        if self.joined:
            widths = [dim.local(axis_size(TP)) for dim in self.features]
            outputs = jnp.split(outputs[0], np.cumsum(widths[:-1]), axis=-1)
        outputs = self._add_biases(outputs, weights)
        outputs = self._add_adapters(outputs, products[count:], weights)
        return tuple(checkpoint_name(y, PROJECTED) for y in outputs)

    @property
    def joined(self) -> bool:
        """Whether one kernel has the columns of all outputs on each device, side by side."""
        return len(self.kernels) < len(self.features)

    def merged(self, weights: Weights) -> Array:
        """Returns a device's columns of the first kernel with its adapter, inside `device_view`."""
        kernel = self._load(weights["kernels.0"], 0, self.features[0])
        adapters = self._load_adapters(weights)
        merged, *_ = self._add_adapters([kernel], adapters, weights)
        return merged

    def _load_kernels(self, weights: Weights) -> list[Operand]:
        if self.joined:
            return [self.precision.load(weights["kernels.0"], 0)]
        kernels = []
        for i, dim in enumerate(self.features):
            shard = weights[f"kernels.{i}"]
            kernel = self.precision.load_kernel(
                self.matmul,
                shard,
                storage_dim=0,
                input_axes=STORAGE,
                reduce_in_layer=self.reduce_in_layer,
                tp_gather=_tp_gather(shard, dim),
            )
            kernels.append(kernel)
        return kernels

    def _load_adapters(self, weights: Weights) -> list[Array]:
        shards = [weights[f"loras.{at}.a"] for at in range(len(self.loras))]
        return [self.precision.load(shard, 0, used_by_all_tp=True) for shard in shards]

    def _average_shared(self, outputs: Sequence[Array]) -> list[Array]:
        if self.matmul == "compute":
            return list(outputs)
        # The gradient of `y` is quantised, so devices that share a head first need all of it.
        groups = [dim.shared_by(axis_size(TP)) for dim in self.features]
        return list(map(average_gradient, outputs, groups))

    def _add_biases(self, outputs: list[Array], weights: Weights) -> list[Array]:
        for i in range(len(self.biases)):
            bias = self._load(weights[f"biases.{i}"], None, self.features[i])
            if self.fixed_bias is not None and self.fixed_bias.output == i:
                bias = self.fixed_bias.stop_gradient(bias)
            outputs[i] += bias
        return outputs

    def _add_adapters(
        self, outputs: list[Array], inner: Sequence[Array], weights: Weights
    ) -> list[Array]:
        for at, (i, lora) in enumerate(zip(self.adapted, self.loras, strict=True)):
            b = self._load(weights[f"loras.{at}.b"], None, self.features[i])
            # `inner` is [B/(dp*fsdp), T/cp, rank].
            outputs[i] = lora.add(outputs[i], inner[at], b)
        return outputs

    def _load(self, shard: Array, storage_dim: int | None, dim: PaddedDim) -> Array:
        return self.precision.load(shard, storage_dim, tp_gather=_tp_gather(shard, dim))


def _tp_gather(shard: Array, features: PaddedDim) -> tuple[int, int]:
    """Returns `WeightLayout.tp_gather` for the last dim of a shard."""
    num_shards = features.num_shards(axis_size(TP), shard.shape[-1])
    return len(shard.shape) - 1, num_shards


class RowParallelLinear(nnx.Module):
    """Projects features split over tp and sums over tp: `[B, ..., F] -> [B, ..., D]`.

    `use_bias` adds a bias once, after the reduction; sequence parallelism reduce-scatters the
    result along the sequence. The kernel `[F, D]` is stored as `P(TP, STORAGE)`, the bias `[D]` as
    `P(STORAGE)`.
    """

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
        self.precision = context.precision
        self.matmul = _matmul_of(self)
        self.transport = context.transport(self.matmul)
        dtype = context.precision.param
        kernel = default_kernel_init(rngs.params(), (self.in_features.size, features), dtype)
        padding = ((-2, self.in_features),)
        self.kernel = parameter("kernel", kernel, P(TP, STORAGE), padding=padding)
        bias = None
        if use_bias:
            bias = parameter("bias", jnp.zeros(features, dtype), P(STORAGE))
        self.bias = bias
        self.loras: nnx.List[Lora] = nnx.List([])
        if target and context.lora.adapted(target):
            dims = (self.in_features, ExactDim((features,)))
            specs = (P(TP), P(None, STORAGE))
            self.loras.append(Lora(dims, context.lora, specs, rngs=rngs))

    def __call__(self, x_BTF: Array) -> Array:
        """Projects `[B, ..., F]` to `[B, ..., D]`."""
        split_dim, inside, outside = activation_specs(self.sequence_parallel, x_BTF.shape)
        check_divides(ROW, (*x_BTF.shape[:-1], self.features), outside)
        weights, weight_specs = params_and_specs(self)
        run = device_view(
            partial(self._project, split_dim),
            ROW,
            in_specs=(inside, weight_specs),
            out_specs=inside if self.transport.caller_communicates else outside,
        )
        return run(x_BTF, weights)

    def _project(self, split_dim: int | None, x: Array, weights: Weights) -> Array:
        # The input is [B/(dp*fsdp), T/cp, F/tp]; the kernel is stored as [F/tp, D/(fsdp*cp)] and
        # loaded as [F/tp, D].
        x = x.astype(self.precision.compute)
        load = self.precision.load
        inputs = [_as_operand(x, self.matmul, TP)]
        # In row layers without tp XLA would move the reduction of the gradient, and copy it
        # (`WeightLayout.reduce_in_layer`).
        reduce_in_layer = axis_size(TP) == 1
        kernel = weights["kernel"]
        loaded = self.precision.load_kernel(
            self.matmul, kernel, storage_dim=1, input_axes=(TP,), reduce_in_layer=reduce_in_layer
        )
        kernels = [loaded]
        for at, lora in enumerate(self.loras):
            # A summand [B/(dp*fsdp), T/cp, rank]: the reduction sums it times B.
            inner = x @ load(weights[f"loras.{at}.a"], None)
            inputs.append(lora.scaled(inner))
            kernels.append(load(weights[f"loras.{at}.b"], 1, used_by_all_tp=True))
        y = self.transport.leave(inputs, kernels, split_dim)
        if self.bias is not None:
            y += self._load_bias(weights["bias"], split_dim)
        return y

    def _load_bias(self, shard: Array, split_dim: int | None) -> Array:
        is_summand = self.transport.caller_communicates
        bias = self.precision.load(shard, 0, used_by_all_tp=is_summand or split_dim is not None)
        # The caller sums the outputs of all devices: one of them adds the bias.
        return jnp.where(axis_index(TP) == 0, bias, 0) if is_summand else bias


def matmul_obstacle(layer: ColumnParallelLinear | RowParallelLinear) -> str | None:
    """Returns why `Precision.matmul` does not apply to a layer of such sizes, or None."""
    if isinstance(layer, ColumnParallelLinear):
        inputs = layer.in_features
        outputs = [dim.size for dim in layer.features]
    else:
        inputs = layer.in_features.size
        outputs = [layer.features]
    min_features = layer.precision.matmul_least
    for size in (inputs, *outputs):
        if min_features > 1 and size % _GRANULE:
            return f"{size} features are no multiple of {_GRANULE}"
    smaller_side = min(inputs, sum(outputs))
    if smaller_side < min_features:
        return f"{smaller_side:,} features are below matmul_least={min_features:,}"
    return None


def _matmul_of(layer: ColumnParallelLinear | RowParallelLinear) -> Matmul:
    return "compute" if matmul_obstacle(layer) else layer.precision.matmul


def _as_operand(x: Array, matmul: Matmul, *feature_axes: str) -> Operand:
    """Returns an activation as an operand of a layer.

    Mesh axes split its features: in float8 their devices share the scales.
    """
    return tokens_in_float8(x, *feature_axes) if matmul == "float8" else x


def _as_dim(layer: str, features: int | PaddedDim, **sizes: int) -> PaddedDim:
    if isinstance(features, PaddedDim):
        check_sizes(layer, features=features.size, **sizes)
        return features
    check_sizes(layer, features=features, **sizes)
    return ExactDim((features,))
