"""Linear layers split over tp: by columns (output features) or by rows (input features).

A column layer followed by a row layer needs one reduction in the forward pass, and one in the backward pass:

    [X W1_0 | X W1_1]   each device holds a block of columns of W1, and of the result
    sum_i Y_i W2_i      each device holds the matching block of rows of W2, and a summand of the result

Shapes below: `x_BTD [B, T, D]`, any number of dims between B and D. Megatron-LM, arXiv 1909.08053, section 3.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    PROJECTED,
    axis_size,
    batch_spec,
    check_divides,
    device_view,
)
from jaxtp.layers.activations import SequenceParallel, sequence_dim
from jaxtp.layers.costs import (
    GATHERS_AGAIN,
    PROJECTIONS_AGAIN,
    SUMS_AGAIN,
    Cost,
    Kept,
    Product,
    Share,
    Weight,
    Working,
    enter,
    itemsize,
    leave,
    ring,
)
from jaxtp.layers.lora import Lora, LoraConfig
from jaxtp.layers.parameter import Precision, Split, Unpadded, Weights, check_sizes, own, parameter
from jaxtp.layers.rings import Overlap, enter_matmul, is_ring, leave_matmul
from jaxtp.mesh import CONTEXT, SEQUENCE, STORAGE, TOKENS, TP

COLUMN, ROW = "column_parallel_linear", "row_parallel_linear"

default_kernel_init = nnx.initializers.normal(stddev=0.02)


class ColumnParallelLinear(nnx.Module):
    """One or several projections of one input, each split by columns over tp.

    `y_i = x @ kernels[i] + biases[i]`. Several outputs share one gather of the input and one reduction of its
    gradient, which separate layers would pay for each.

    Args:
      in_features: D.
      features: F, or one F for each output; a `Split` where padding over tp is expected in the output.
      use_bias: adds a bias to every output.
      fixed_biases: indices of outputs whose bias has no gradient.
      unit: columns that a device holds whole, such as the head dim. Where tp would cut an output finer than
        that (kv heads fewer than tp), the devices that share a unit gather it before use, and the output has
        one unit on each device: `[B, T, max(F, tp * unit)]`.
      sequence_parallel: the input arrives split over tp along the sequence, and is gathered; see `layers.activations`.
      overlap: whether it is gathered while it is multiplied, where it is split; see `layers.rings`.
      lora: adapters of the outputs whose index is in `adapted`.
      adapted: which those are.
      precision: the dtypes.
      kernel_init: initialiser of every kernel.
      rngs: source of the `params` key.

    Shapes: `[B, ..., D] -> [B, ..., F]` split over tp in the last dim; a tuple if `features` is a sequence.
    Kernels `[D, F]` are stored split by `P(STORAGE, TP)`, biases `[F]` by `P(TP)`.
    """

    def __init__(
        self,
        in_features: int,
        features: int | Split | Sequence[int | Split],
        *,
        use_bias: bool = False,
        fixed_biases: Sequence[int] = (),
        unit: int = 1,
        sequence_parallel: SequenceParallel = False,
        overlap: Overlap = "none",
        lora: LoraConfig = LoraConfig(),
        adapted: Sequence[int] = (),
        precision: Precision = Precision(),
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        outputs = tuple(features) if isinstance(features, Sequence) else (features,)
        self.single = not isinstance(features, Sequence)
        self.features = tuple(_split("ColumnParallelLinear", each, in_features=in_features) for each in outputs)
        self.in_features = in_features
        self.unit = unit
        self.fixed_biases = tuple(fixed_biases)
        self.sequence_parallel, self.overlap = sequence_parallel, overlap
        self.precision = precision
        kernels = ((f, kernel_init(rngs.params(), (in_features, f.size), precision.param)) for f in self.features)
        self.kernels = nnx.List(parameter("kernel", k, P(STORAGE, TP), padding=((-1, f),)) for f, k in kernels)
        biases = ((f, jnp.zeros(f.size, precision.param)) for f in self.features if use_bias)
        self.biases = nnx.List(parameter("bias", b, P(TP), padding=((-1, f),)) for f, b in biases)
        self.adapted = tuple(adapted)
        specs = P(STORAGE), P(None, TP)
        self.loras = nnx.List(
            Lora((in_features, self.features[i]), lora, specs, precision=precision, rngs=rngs) for i in self.adapted
        )

    def __call__(self, x_BTD: Array) -> Array | tuple[Array, ...]:
        """Projects `[B, ..., D]`; see the class for shapes."""
        sequence = sequence_dim(self.sequence_parallel, x_BTD.shape)
        split, whole = _activation_specs(x_BTD.ndim, sequence)
        weights, specs = own(self)
        project = device_view(
            partial(self._project, sequence), COLUMN, in_specs=(whole, specs), out_specs=(split,) * len(self.features)
        )
        outputs = project(x_BTD, weights)
        return outputs[0] if self.single else outputs

    def _project(self, sequence: int | None, x: Array, weights: Weights) -> tuple[Array, ...]:
        kernels = [self._load(weights[f"kernels.{i}"], 0, f) for i, f in enumerate(self.features)]
        adapters = (weights[f"loras.{at}.a"] for at in range(len(self.loras)))
        kernels += [self.precision.load(a, 0, used_by_all_tp=True) for a in adapters]
        products = enter_matmul(x.astype(self.precision.compute), kernels, sequence, self.overlap)
        outputs, inner = list(products[: len(self.features)]), products[len(self.features) :]
        if self.biases:
            shards = {i: weights[f"biases.{i}"] for i in range(len(self.features))}
            shards |= {i: jax.lax.stop_gradient(shards[i]) for i in self.fixed_biases}
            loaded = (self._load(shards[i], None, f) for i, f in enumerate(self.features))
            outputs = [y + bias for y, bias in zip(outputs, loaded, strict=True)]
        for at, (i, lora) in enumerate(zip(self.adapted, self.loras, strict=True)):
            small = checkpoint_name(inner[at], PROJECTED)  # [B/(dp*fsdp), T/cp, rank]
            outputs[i] += lora.scale * (small @ self._load(weights[f"loras.{at}.b"], None, self.features[i]))
        return tuple(checkpoint_name(y, PROJECTED) for y in outputs)  # each [B/(dp*fsdp), T/cp, F/tp]

    def _load(self, shard: Array, fsdp_dim: int | None, features: Split) -> Array:
        group = self._sharing(features, axis_size(TP))
        return self.precision.load(shard, fsdp_dim, tp_dim=shard.ndim - 1, tp_group=group)

    def _sharing(self, features: Split, tp: int) -> int:
        """Returns the number of devices that share a unit of an output, each gathering the others' parts of it."""
        return max(1, self.unit * tp // features.padded(tp))

    def costs(self, share: Share, name: str) -> Iterator[Cost]:
        """Yields what it costs to project; `name` says what, for reports."""
        tokens, compute = share.tokens, itemsize(self.precision.compute)
        again = share.remat in PROJECTIONS_AGAIN
        local = [max(f.padded(share.tp) // share.tp, self.unit) for f in self.features]
        for i, f in enumerate(self.features):
            over_tp: dict[str, Any] = {"split": f, "group": self._sharing(f, share.tp), "precision": self.precision}
            yield Weight(module=COLUMN, size=self.in_features * f.size, **over_tp)
            if self.biases:
                fixed = i in self.fixed_biases
                yield Weight(module=COLUMN, size=f.size, fsdp=False, again=again, fixed=fixed, **over_tp)
        hidden = tokens * self.in_features * compute
        split = share.is_split(self.sequence_parallel)
        if is_ring(self.overlap, share.tp, split=split):
            times = share.passes(again, 1 + (not share.frozen or bool(self.adapted)))
            parts, entered = share.tp, hidden // share.tp
            yield ring(COLUMN, share, hidden, times)
        else:
            parts, entered = 1, hidden
            yield from enter(COLUMN, share, hidden, split=split, again=share.remat in GATHERS_AGAIN)
        passes = parts * share.passes(again, share.gradients)
        yield Product.of(name, (tokens // parts, self.in_features, sum(local)), compute, passes)
        yield Working(3 * hidden)
        yield Kept(
            {"none": entered, "save_gathered": entered, "save_dots": tokens * sum(local) * compute}.get(share.remat, 0)
        )
        for i, lora in zip(self.adapted, self.loras, strict=True):
            f = self.features[i]
            shared: dict[str, Any] = {"module": COLUMN, "precision": self.precision}
            a = Weight(size=self.in_features * lora.rank, tp=False, used_by_all_tp=True, **shared)
            b = Weight(size=lora.rank * f.size, split=f, fsdp=False, group=self._sharing(f, share.tp), **shared)
            yield from lora.costs(share, (self.in_features, local[i]), a, b, again=again)


class RowParallelLinear(nnx.Module):
    """A projection split by rows over tp: takes what a column layer leaves on each device, and sums.

    Args:
      in_features: F; a `Split` where the input is padded.
      features: D.
      use_bias: adds a bias, once, after the reduction.
      sequence_parallel: the result leaves split over tp along the sequence (reduce-scatter, not all-reduce).
      overlap: whether it is summed while it is multiplied, where it is split; see `layers.rings`.
      lora: an adapter, if it has a rank.
      precision: the dtypes.
      kernel_init: initialiser of the kernel.
      rngs: source of the `params` key.

    Shapes: `[B, ..., F]`, split over tp in the last dim, `-> [B, ..., D]`.
    The kernel `[F, D]` is stored split by `P(TP, STORAGE)`, the bias `[D]` by `P(STORAGE)`.
    """

    def __init__(
        self,
        in_features: int | Split,
        features: int,
        *,
        use_bias: bool = False,
        sequence_parallel: SequenceParallel = False,
        overlap: Overlap = "none",
        lora: LoraConfig = LoraConfig(),
        precision: Precision = Precision(),
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        self.in_features, self.features = _split("RowParallelLinear", in_features, out_features=features), features
        self.sequence_parallel, self.overlap = sequence_parallel, overlap
        self.precision = precision
        kernel = kernel_init(rngs.params(), (self.in_features.size, features), precision.param)
        self.kernel = parameter("kernel", kernel, P(TP, STORAGE), padding=((-2, self.in_features),))
        self.bias = parameter("bias", jnp.zeros(features, precision.param), P(STORAGE)) if use_bias else None
        specs = P(TP), P(None, STORAGE)
        adapter = partial(Lora, (self.in_features, features), lora, specs, precision=precision, rngs=rngs)
        self.loras = nnx.List([adapter()] if lora.rank else [])

    def __call__(self, x_BTF: Array) -> Array:
        """Projects `[B, ..., F]` to `[B, ..., D]`."""
        sequence = sequence_dim(self.sequence_parallel, x_BTF.shape)
        split, whole = _activation_specs(x_BTF.ndim, sequence)
        check_divides(ROW, (*x_BTF.shape[:-1], self.features), whole)
        weights, specs = own(self)
        project = device_view(partial(self._project, sequence), ROW, in_specs=(split, specs), out_specs=whole)
        return project(x_BTF, weights)

    def _project(self, sequence: int | None, x: Array, weights: Weights) -> Array:
        x = x.astype(self.precision.compute)
        inputs, kernels = [x], [self.precision.load(weights["kernel"], 1)]  # [B/(dp*fsdp), T/cp, F/tp], [F/tp, D]
        for at, lora in enumerate(self.loras):
            a, b = weights[f"loras.{at}.a"], weights[f"loras.{at}.b"]
            inner = lora.scale * (x @ self.precision.load(a, None))  # [B/(dp*fsdp), T/cp, rank], a summand
            inputs.append(checkpoint_name(inner, PROJECTED))
            kernels.append(self.precision.load(b, 1, used_by_all_tp=True))
        y = leave_matmul(inputs, kernels, sequence, self.overlap)
        if self.bias is not None:
            y += self.precision.load(weights["bias"], 0, used_by_all_tp=sequence is not None)
        return y

    def costs(self, share: Share, name: str, *, read: bool) -> Iterator[Cost]:
        """Yields what it costs to project.

        Args:
          share: of the device.
          name: what is projected, for reports.
          read: the backward pass reads the result, as of every row layer but a block's last.
        """
        compute, split = itemsize(self.precision.compute), share.is_split(self.sequence_parallel)
        again = read and share.remat in SUMS_AGAIN
        rows = self.in_features
        local = rows.padded(share.tp) // share.tp
        shared: dict[str, Any] = {"module": ROW, "precision": self.precision}
        yield Weight(size=rows.size * self.features, split=rows, transposed=True, **shared)
        if self.bias is not None:
            again_loaded = read and share.remat != "none"
            yield Weight(size=self.features, tp=False, used_by_all_tp=split, again=again_loaded, **shared)
        parts, size = 1, share.tokens * self.features * compute
        if is_ring(self.overlap, share.tp, split=split):
            parts = share.tp
            yield ring(ROW, share, size, share.passes(again, 1))
        else:
            yield from leave(ROW, share, size, split=split, again=again)
        shape = (share.tokens // parts, local, self.features)
        yield Product.of(name, shape, compute, parts * share.passes(again, share.gradients))
        if read and share.remat in ("save_dots", "save_gathered", "save_reduced"):
            yield Kept(share.between(self.sequence_parallel) * self.features * compute)
        for lora in self.loras:
            a = Weight(size=rows.size * lora.rank, split=rows, fsdp=False, **shared)
            b = Weight(size=lora.rank * self.features, tp=False, used_by_all_tp=True, **shared)
            yield from lora.costs(share, (local, self.features), a, b, again=again)


def _split(layer: str, features: int | Split, **others: int) -> Split:
    """Returns the features that tp divides, those of an int as they are."""
    check_sizes(layer, features=features.size if isinstance(features, Split) else features, **others)
    return features if isinstance(features, Split) else Unpadded((features,))


def _activation_specs(ndim: int, sequence: int | None) -> tuple[P, P]:
    """Specs of an activation between the two layers (features over tp) and outside them; `[B, D]` is of B tokens."""
    if ndim == 2:
        return P(TOKENS, TP), P(TOKENS, None)
    tokens: tuple[Any, ...] = (CONTEXT, *(None,) * (ndim - 3))
    outside = tokens if sequence is None else (SEQUENCE, *tokens[1:])
    return batch_spec(*tokens, TP), batch_spec(*outside, None)
