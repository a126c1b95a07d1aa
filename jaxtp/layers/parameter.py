"""Parameters of layers: a value, the `PartitionSpec` that stores it, its dtypes and its loading.

A dim that tp does not divide is padded when its parameter is created (`PaddedDim`), so a model runs
on any tp. `checkpoint/logical.py` and `train/sharded_optimizer.py` remove the padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxtp.collectives import (
    WeightDtypes,
    WeightLayout,
    all_reduce,
    axis_size,
    check_divides,
    device_view,
    load_weight,
)
from jaxtp.config.hints import by_dotted_path
from jaxtp.config.schema import Count, Settings
from jaxtp.layers.float8 import load_float8
from jaxtp.layers.forms import MXFP4, Form, form_of, load_dequantised
from jaxtp.layers.products import Operand
from jaxtp.mesh import TOKENS, TP, axes_of, current_mesh

# A layer's parameters by the path of the attribute that holds them, such as `kernels.0`
Weights = dict[str, Array]

Variable = nnx.Variable[Any]

GRADIENTS = "gradients"
"""Name in profiles of the sum of all micro-batches' gradients over devices
(`sum_over_replicas`)."""

DType = Literal["float32", "bfloat16", "float16"]
Matmul = Literal["compute", "float8"]


@dataclass(frozen=True)
class Precision(Settings):
    """The dtypes of a layer; norms and softmax are always computed in float32.

    Training refuses float16: without loss scaling, gradients below 6e-8 would vanish.
    """

    param: DType = "float32"
    """Dtype of stored parameters and optimizer state; adafactor's moments are always float32. With
    adapters it is the dtype of the frozen weights only, by default as in their files."""

    compute: DType = "float32"
    """Dtype of activations and matrix products; weights are cast to it before they are gathered."""

    reduce: DType = "float32"
    """Dtype in which weight gradients are summed over devices, and over micro-batches if param is
    not wider."""

    logits: DType = "float32"
    """Dtype of the head's output; the softmax over it is float32, its gradient in `compute`."""

    matmul: Matmul = "compute"
    """Dtype of products in the projections of blocks, forward and for the gradients of inputs.
    float8 is E4M3 with a scale for each token and output feature: half of the bytes that fsdp
    gathers, and sequence parallelism in the forward pass. Gradients of weights, head, routers,
    norms, adapters and experts stay in the compute dtype."""

    matmul_least: Count = 2048
    """Minimum number of input features, and of output features in total, for matmul to apply to a
    layer. Each must be a multiple of 16; with 1 layers may have any size."""

    def sum_dtype(self, param: DTypeLike) -> jnp.dtype:
        """Returns the dtype in which gradients accumulate over micro-batches."""
        return jnp.promote_types(param, self.reduce)

    def load(
        self,
        shard: Array | Form,
        storage_dim: int | None,
        *,
        accumulate: DType | None = None,
        **layout: Any,
    ) -> Array:
        """Loads a weight; gradients of its uses accumulate in `accumulate`."""
        dtypes = WeightDtypes(self.compute, self.reduce, accumulate or self.compute)
        weight_layout = WeightLayout(storage_dim=storage_dim, **layout)
        if isinstance(shard, Form):
            return load_dequantised(shard, dtypes, weight_layout)
        return load_weight(shard, dtypes, weight_layout)

    def load_kernel(
        self,
        matmul: Matmul,
        shard: Array | Form,
        storage_dim: int,
        input_axes: tuple[str, ...],
        **layout: Any,
    ) -> Operand:
        """Loads a kernel as an operand of a layer; mesh axes split its input features."""
        if matmul == "compute":
            return self.load(shard, storage_dim, **layout)
        dtypes = WeightDtypes(self.compute, self.reduce, self.compute)
        weight_layout = WeightLayout(storage_dim=storage_dim, **layout)
        assert not isinstance(shard, MXFP4), "`models/config.py` refuses it"
        return load_float8(shard, dtypes, weight_layout, input_axes)


@dataclass(frozen=True)
class PaddedDim:
    """A dim that tp splits into equal parts, padded with zeros.

    Padding stays zero, as its gradients are zero: padded heads output zero, the softmax masks
    padded ids.
    """

    factors: tuple[int, ...]
    """The dim as a product, such as heads times their width; the parts are of the first factor."""

    @property
    def size(self) -> int:
        """Size without padding."""
        return math.prod(self.factors)

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns the padded factors on tp devices."""
        return (-(-self.factors[0] // tp) * tp, *self.factors[1:])

    def padded(self, tp: int) -> int:
        """Returns the padded size on tp devices."""
        return math.prod(self.stored(tp))

    def shared_by(self, tp: int) -> int:
        """Returns how many neighbours along tp all-gather each other's parts."""
        return 1

    def local(self, tp: int) -> int:
        """Returns the size of a device's part, after that gather."""
        return self.padded(tp) * self.shared_by(tp) // tp

    def in_blocks(self, size: int) -> PaddedDim:
        """Returns the dim of blocks of `size` features; tp pads whole blocks, or nothing."""
        *outer, width = self.factors
        if width % size:
            return ExactDim((self.size // size,))
        return replace(self, factors=(*outer, width // size))

    def num_shards(self, tp: int, size: int) -> int:
        """Returns how many shards of this size make a device's part."""
        return self.local(tp) // size


class ExactDim(PaddedDim):
    """A dim that tp must divide."""

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns the factors unchanged."""
        return self.factors


class FrozenParam(Variable):
    """A parameter that training with adapters does not change.

    It is not an `nnx.Param`, so `nnx.value_and_grad` and `nnx.Optimizer(model, ..., wrt=nnx.Param)`
    skip it.
    """


# Filter of all parameters, trained or not
PARAMETERS = (nnx.Param, FrozenParam)

Padding = tuple[tuple[int, PaddedDim], ...]
"""The dims of an array that are padded, counted from the last one: -1, -2, ..."""


def parameter(
    name: str,
    value: Array,
    spec: PartitionSpec,
    *,
    kind: type[Variable] = nnx.Param,
    padding: Padding = (),
) -> Any:
    """Returns a parameter, sharded by `spec` over the mesh in context.

    `value` has no padding; `name` is for errors.
    """
    value = pad(value, padding, axis_size(TP))
    # JAX would silently replicate.
    check_divides(name, value.shape, spec)
    # The spec has one entry per dim: `spec_of` counts them.
    unsplit = (None,) * (value.ndim - len(spec))
    metadata: dict[str, Any] = {
        "out_sharding": PartitionSpec(*spec, *unsplit),
        "eager_sharding": current_mesh() is not None,
        _LOADED: True,
    }
    padded = tuple((dim, split) for dim, split in padding if not isinstance(split, ExactDim))
    if padded:
        metadata["padding"] = padded
    return kind(value, **metadata)


# Metadata of a parameter that a layer reads inside a `device_view`, by `load_weight`
_LOADED = "loaded"


def padding_of(variable: Variable) -> Padding:
    """Returns a variable's padded dims."""
    return tuple(variable.get_metadata().get("padding", ()))


def logical_shape(variable: Variable) -> tuple[int, ...]:
    """Returns the shape without padding, equal on every mesh."""
    # Not `shape`, which copies the value's tree.
    shape = list(variable.get_raw_value().shape)
    for dim, split in padding_of(variable):
        shape[dim] = split.size
    return tuple(shape)


def pad(array: Any, padding: Padding, tp: int) -> Any:
    """Pads a JAX or NumPy array with zeros, as stored on tp devices."""
    for dim, split in padding:
        array = _resize(array, dim, split.factors, split.stored(tp))
    return array


def unpad(array: Any, padding: Padding, tp: int) -> Any:
    """Removes the padding of tp devices from a JAX or NumPy array."""
    for dim, split in padding:
        array = _resize(array, dim, split.stored(tp), split.factors)
    return array


def _resize(array: Any, dim: int, factors: tuple[int, ...], resized: tuple[int, ...]) -> Any:
    """Pads or cuts each factor of a dim, which is counted from the last dim."""
    if factors == resized:
        return array
    axis = array.ndim + dim
    before = array.shape[:axis]
    after = array.shape[axis + 1 :]
    old_shape = (*before, *factors, *after)
    new_shape = (*before, *resized, *after)
    factored = array.reshape(old_shape)
    if math.prod(resized) > math.prod(factors):
        library = np if isinstance(array, np.ndarray) else jnp
        growth = [(0, new - old) for old, new in zip(old_shape, new_shape, strict=True)]
        factored = library.pad(factored, growth)
    else:
        factored = factored[tuple(map(slice, new_shape))]
    return factored.reshape(*before, math.prod(resized), *after)


def params_and_specs(*modules: nnx.Module) -> tuple[Weights, dict[str, PartitionSpec]]:
    """Returns modules' parameters and specs by name, for `device_view`.

    The shard and the spec of a kernel in a form of fewer bits are such a `Form` each.
    """
    parameters = chain.from_iterable(
        nnx.to_flat_state(nnx.state(module, PARAMETERS)) for module in modules
    )
    weights: Weights = {}
    specs: dict[str, PartitionSpec] = {}
    for name, variable in by_dotted_path(parameters).items():
        weights[name] = jnp.asarray(variable[...])
        specs[name] = spec_of(variable)
    for name in list(weights):
        kernel, _, field = name.rpartition(".")
        if kernel and field == "bits":
            form = form_of(weights[f"{kernel}.scale"])
            for arrays in (weights, specs):
                arrays[kernel] = form(arrays.pop(name), arrays.pop(f"{kernel}.scale"))  # type: ignore[arg-type, assignment]
    return weights, specs


def own_params_and_specs(module: nnx.Module) -> tuple[Weights, dict[str, PartitionSpec]]:
    """Like `params_and_specs`, without the parameters of other modules in this one."""
    weights, specs = params_and_specs(module)
    for name in list(weights):
        if "." in name:
            del weights[name], specs[name]
    return weights, specs


def spec_of(variable: Variable) -> PartitionSpec:
    """Returns a variable's spec, P() if undeclared, without a stack's dim after unstacking."""
    declared = tuple(variable.get_metadata().get("out_sharding") or ())
    num_stack_dims = max(0, len(declared) - len(variable.get_raw_value().shape))
    return PartitionSpec(*declared[num_stack_dims:])


def check_sizes(layer: str, **sizes: object) -> None:
    """Raises a ValueError unless sizes are integers from 1 on."""
    bad = []
    for name, size in sizes.items():
        if not isinstance(size, Integral) or size < 1:
            bad.append(f"{name}={size!r}")
    if bad:
        raise ValueError(f"{layer}: {', '.join(bad)}: should be a whole number, 1 or more")


# By default every layer all-reduces its gradients over the axes that replicate a weight, in each
# micro-batch. With accumulation a training step marks weights as varying over these axes (dp, and
# fsdp and cp if they do not split the weight), so that `load_weight` omits this sum, and sums once
# after the last micro-batch. Each micro-batch still reduce-scatters over the axes that split a
# weight, and sums the gradients of norms over tp.


def mark_unreduced(params: nnx.State) -> nnx.State:
    """Returns params marked as varying over the `TOKENS` axes that replicate them; no data moves.

    As global arrays, params and gradients then have all replicas concatenated along the last dim.
    """

    def mark(param: Variable) -> Variable:
        axes = _replica_axes(param)
        if not axes:
            return param
        spec = spec_of(param)
        *leading, last = spec
        side_by_side = PartitionSpec(*leading, (*axes_of(last), *axes))
        view = device_view(lambda shard: shard, GRADIENTS, (spec,), side_by_side)
        return param.copy(view(param[...]), out_sharding=side_by_side)

    return jax.tree.map(mark, params, is_leaf=is_variable)


def sum_over_replicas(grads: nnx.State, params: nnx.State, dtype: DTypeLike) -> nnx.State:
    """All-reduces, in `dtype`, accumulated gradients of params that `mark_unreduced` marked."""

    def total(param: Variable, grad: Variable) -> Variable:
        axes = _replica_axes(param)
        if not axes:
            return grad

        def add(shard: Array) -> Array:
            return all_reduce(shard.astype(dtype), *axes).astype(shard.dtype)

        view = device_view(add, GRADIENTS, (spec_of(grad),), spec_of(param))
        return param.copy(view(grad[...]))

    return jax.tree.map(total, params, grads, is_leaf=is_variable)


def _replica_axes(param: Variable) -> tuple[str, ...]:
    # Flax layers see global arrays; only variables of `parameter` are loaded in a `device_view`.
    if not param.get_metadata().get(_LOADED):
        return ()
    split = set(chain.from_iterable(map(axes_of, spec_of(param))))
    return tuple(axis for axis in TOKENS if axis not in split and axis_size(axis) > 1)


def is_variable(leaf: object) -> bool:
    """Returns whether a node of a pytree is a variable: an `is_leaf`."""
    return isinstance(leaf, nnx.Variable)
