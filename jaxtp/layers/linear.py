"""Linear layers split over tp: by columns (output features) or by rows (input features).

A column layer followed by a row layer needs one reduction in the forward pass, and one in the backward pass:

    [X W1_0 | X W1_1]   each device holds a block of columns of W1, and of the result
    sum_i Y_i W2_i      each device holds the matching block of rows of W2, and a summand of the result

Shapes below: `x_BTD [B, T, D]`, any number of dims between B and D. Megatron-LM, arXiv 1909.08053, section 3.
"""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import axis_size, batch_spec, check_divides, device_view, enter_parallel, leave_parallel
from jaxtp.layers.lora import Lora, LoraConfig
from jaxtp.layers.parameter import check_sizes, parameter
from jaxtp.layers.precision import Precision
from jaxtp.layers.sequence import SequenceParallel, sequence_dim
from jaxtp.mesh import FSDP, TP

PROJECTED = "projected"
"""`checkpoint_name` of what the backward pass reads of products with weights: the outputs of a column layer, its
adapters' parts included, and `x @ A` of every adapter."""

default_kernel_init = nnx.initializers.normal(stddev=0.02)


class ColumnParallelLinear(nnx.Module):
    """One or several projections of one input, each split by columns over tp.

    `y_i = x @ kernels[i] + biases[i]`. Several outputs share one gather of the input and one reduction of its
    gradient, which separate layers would pay for each.

    Args:
      in_features: D.
      features: F, or one F for each output.
      use_bias: adds a bias to every output.
      unit: columns that a device holds whole, such as the head dim. Where tp would cut an output finer than
        that (kv heads fewer than tp), the devices that share a unit gather it before use, and the output has
        one unit on each device: `[B, T, max(F, tp * unit)]`.
      sequence_parallel: the input arrives split over tp along the sequence, and is gathered; see `layers.sequence`.
      lora: adapters of the outputs whose index is in `adapted`.
      adapted: which those are.
      precision: the dtypes.
      kernel_init: initialiser of every kernel.
      rngs: source of the `params` key.

    Shapes: `[B, ..., D] -> [B, ..., F]` split over tp in the last dim; a tuple if `features` is a sequence.
    Kernels `[D, F]` are stored split by `P("fsdp", "tp")`, biases `[F]` by `P("tp")`.
    """

    def __init__(
        self,
        in_features: int,
        features: int | Sequence[int],
        *,
        use_bias: bool = False,
        unit: int = 1,
        sequence_parallel: SequenceParallel = False,
        lora: LoraConfig = LoraConfig(),
        adapted: Sequence[int] = (),
        precision: Precision = Precision(),
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        self.features = tuple(features) if isinstance(features, Sequence) else (features,)
        self.single = not isinstance(features, Sequence)
        for size in self.features:
            check_sizes("ColumnParallelLinear", in_features=in_features, features=size)
        self.unit = unit
        self.sequence_parallel = sequence_parallel
        self.precision = precision
        self.kernels = nnx.List(
            parameter("kernel", kernel_init(rngs.params(), (in_features, f), precision.param), P(FSDP, TP))
            for f in self.features
        )
        self.biases = nnx.List(
            parameter("bias", jnp.zeros(f, precision.param), P(TP)) for f in self.features if use_bias
        )
        self.adapted = tuple(adapted)
        self.loras = nnx.List(
            Lora((in_features, self.features[i]), lora, (P(FSDP), P(None, TP)), precision=precision, rngs=rngs)
            for i in self.adapted
        )

    def __call__(self, x_BTD: Array) -> Array | tuple[Array, ...]:
        """Projects `[B, ..., D]`; see the class for shapes."""
        sequence = sequence_dim(self.sequence_parallel, x_BTD.shape)
        split, whole = _activation_specs(x_BTD.ndim, sequence)
        kernel_specs, bias_specs = (P(FSDP, TP),) * len(self.kernels), (P(TP),) * len(self.biases)
        lora_specs = (P(FSDP), P(None, TP)) * len(self.loras)
        project = device_view(
            partial(self._project, sequence),
            "column_parallel_linear",
            in_specs=(whole, *kernel_specs, *bias_specs, *lora_specs),
            out_specs=(split,) * len(self.kernels),
        )
        adapters = (array for lora in self.loras for array in lora.arrays())
        outputs = project(x_BTD, *(k[...] for k in self.kernels), *(b[...] for b in self.biases), *adapters)
        return outputs[0] if self.single else outputs

    def _project(self, sequence: int | None, x: Array, *weights: Array) -> tuple[Array, ...]:
        x = enter_parallel(x.astype(self.precision.compute), sequence)  # [B/(dp*fsdp), T, D]
        count = len(self.features)
        kernels, biases = weights[:count], weights[count : count + len(self.biases)]
        adapters = weights[count + len(self.biases) :]
        outputs = [x @ self._load(kernel, 0, f) for kernel, f in zip(kernels, self.features, strict=True)]
        if biases:
            loaded = (self._load(bias, None, f) for bias, f in zip(biases, self.features, strict=True))
            outputs = [y + bias for y, bias in zip(outputs, loaded, strict=True)]
        for i, lora, a, b in zip(self.adapted, self.loras, adapters[::2], adapters[1::2], strict=True):
            inner = checkpoint_name(x @ self.precision.load(a, 0, used_by_all_tp=True), PROJECTED)
            outputs[i] += lora.scale * (inner @ self._load(b, None, self.features[i]))  # inner [B/(dp*fsdp), T, rank]
        return tuple(checkpoint_name(y, PROJECTED) for y in outputs)  # each [B/(dp*fsdp), T, F/tp]

    def _load(self, shard: Array, fsdp_dim: int | None, features: int) -> Array:
        group = max(1, self.unit * axis_size(TP) // features)
        return self.precision.load(shard, fsdp_dim, tp_dim=shard.ndim - 1, tp_group=group)


class RowParallelLinear(nnx.Module):
    """A projection split by rows over tp: takes what a column layer leaves on each device, and sums.

    Args:
      in_features: F.
      features: D.
      use_bias: adds a bias, once, after the reduction.
      sequence_parallel: the result leaves split over tp along the sequence (reduce-scatter, not all-reduce).
      lora: an adapter, if it has a rank.
      precision: the dtypes.
      kernel_init: initialiser of the kernel.
      rngs: source of the `params` key.

    Shapes: `[B, ..., F]`, split over tp in the last dim, `-> [B, ..., D]`.
    The kernel `[F, D]` is stored split by `P("tp", "fsdp")`, the bias `[D]` by `P("fsdp")`.
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        use_bias: bool = False,
        sequence_parallel: SequenceParallel = False,
        lora: LoraConfig = LoraConfig(),
        precision: Precision = Precision(),
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        check_sizes("RowParallelLinear", in_features=in_features, features=features)
        self.sequence_parallel = sequence_parallel
        self.precision = precision
        kernel = kernel_init(rngs.params(), (in_features, features), precision.param)
        self.kernel = parameter("kernel", kernel, P(TP, FSDP))
        self.bias = parameter("bias", jnp.zeros(features, precision.param), P(FSDP)) if use_bias else None
        adapter = partial(Lora, (in_features, features), lora, (P(TP), P(None, FSDP)), precision=precision, rngs=rngs)
        self.loras = nnx.List([adapter()] if lora.rank else [])

    def __call__(self, x_BTF: Array) -> Array:
        """Projects `[B, ..., F]` to `[B, ..., D]`."""
        sequence = sequence_dim(self.sequence_parallel, x_BTF.shape)
        split, whole = _activation_specs(x_BTF.ndim, sequence)
        check_divides("row_parallel_linear", (*x_BTF.shape[:-1], self.kernel.shape[-1]), whole)
        biases = () if self.bias is None else (self.bias[...],)
        adapters = tuple(array for lora in self.loras for array in lora.arrays())
        project = device_view(
            partial(self._project, sequence),
            "row_parallel_linear",
            in_specs=(split, P(TP, FSDP), *(P(TP), P(None, FSDP))[: len(adapters)], *(P(FSDP),) * len(biases)),
            out_specs=whole,
        )
        return project(x_BTF, self.kernel[...], *adapters, *biases)

    def _project(self, sequence: int | None, x: Array, kernel: Array, *rest: Array) -> Array:
        x = x.astype(self.precision.compute)
        y = x @ self.precision.load(kernel, 1)  # [B/(dp*fsdp), T, F/tp] @ [F/tp, D], a summand of the result
        adapters, biases = rest[: 2 * len(self.loras)], rest[2 * len(self.loras) :]
        for lora, a, b in zip(self.loras, adapters[::2], adapters[1::2], strict=True):
            inner = checkpoint_name(x @ self.precision.load(a, None), PROJECTED)  # [B/(dp*fsdp), T, rank], a summand
            y += lora.scale * (inner @ self.precision.load(b, 1, used_by_all_tp=True))
        y = leave_parallel(y, sequence)
        for bias in biases:
            y += self.precision.load(bias, 0, used_by_all_tp=sequence is not None)
        return y


def _activation_specs(ndim: int, sequence: int | None) -> tuple[P, P]:
    """Specs of an activation between the two layers (features over tp) and outside them."""
    middle = (None,) * (ndim - 2)
    outside: list[str | None] = [None] * (ndim - 1)
    if sequence is not None:
        outside[sequence - 1] = TP
    return batch_spec(*middle, TP), batch_spec(*outside)
