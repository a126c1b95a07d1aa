"""Parameters as a layer declares and loads them: a value, the `PartitionSpec` it is stored by, and the dtypes.

A layer's body in `device_view` gets its weights by name: `own` gives a module's parameters and their specs.

Weights are gathered in the compute dtype, and their gradients are summed over devices in the reduction dtype
(`Precision`, `collectives.load_weight`). What several uses of a weight add up in float32, as the chunks of the loss do,
is cast once, at the end. The sum over dp runs on the part that the reduce-scatter over fsdp has left.

A dim that tp does not divide is padded when its parameter is created, so that a model runs on any tp: a `Split` beside
the layer says how the dim is cut. Padded heads give zero, padded ids are masked in the softmax; `checkpoint/logical.py`
and `train/optimizer_state.py` take padding off again.
"""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxtp.collectives import axis_size, check_divides, load_weight
from jaxtp.mesh import TP, current_mesh

Weights = dict[str, Array]
"""A layer's parameters by the path of the attribute that holds them, such as `kernels.0`."""

GRADIENTS = "gradients"
"""Name of the module that sums the gradients of all micro-batches over devices (`layers/gradients.py`)."""

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a layer. Norms and softmax are computed in float32 whatever is set here.

    Training refuses float16: gradients below 6e-8 would vanish in it without loss scaling, which there is not.
    """

    param: DType = "float32"
    """Dtype in which parameters and optimizer state are stored, but for adafactor's moments, which are float32."""

    compute: DType = "float32"
    """Dtype of activations and matrix products; weights are cast to it before they are gathered."""

    reduce: DType = "float32"
    """Dtype in which weight gradients are summed over devices, and over micro-batches if param is not wider."""

    logits: DType = "float32"
    """Dtype of the head's output; the softmax over it is float32."""

    def sum_dtype(self, param: DTypeLike) -> jnp.dtype:
        """Dtype in which the gradients of a parameter of some dtype are added up over micro-batches."""
        return jnp.promote_types(param, self.reduce)

    def load(self, shard: Array, fsdp_dim: int | None, **kwargs: bool | int | str | None) -> Array:
        """`collectives.load_weight` with these dtypes."""
        return load_weight(shard, fsdp_dim, compute=self.compute, reduce=self.reduce, **kwargs)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Split:
    """The division of a dim over tp: into parts of equal size, for which it is padded with zeros where they are not.

    Padding stays zero: what it is multiplied with is zero, and so are its gradients. Checkpoints, exports and counts
    have none of it.
    """

    factors: tuple[int, ...]
    """The dim as a product, such as heads times their width; the parts are of the first factor."""

    @property
    def size(self) -> int:
        """Size of the dim without padding."""
        return math.prod(self.factors)

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns the factors over tp devices, each at least as large."""
        return (-(-self.factors[0] // tp) * tp, *self.factors[1:])

    def padded(self, tp: int) -> int:
        """Returns the size of the dim over tp devices."""
        return math.prod(self.stored(tp))


class Unpadded(Split):
    """A dim that tp has to divide as it is."""

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns the factors as they are."""
        return self.factors


Padding = tuple[tuple[int, Split], ...]
"""The dims of an array that are padded, counted from the last one: -1, -2, ..."""


def parameter(
    name: str,
    value: Array,
    spec: PartitionSpec,
    *,
    kind: type[nnx.Variable[Any]] = nnx.Param,
    padding: Padding = (),
) -> Any:
    """Returns a parameter that is initialised sharded by `spec` over the mesh in context; whole if there is none.

    Args:
      name: what it is, for errors.
      value: its initial value, without padding.
      spec: the axes of each dim.
      kind: of variable.
      padding: how dims are padded.

    Raises:
      ValueError: a dim cannot be divided over its mesh axes (JAX would replicate it without a word).
    """
    value = pad(value, padding, axis_size(TP))
    check_divides(name, value.shape, spec)
    spec = PartitionSpec(*spec, *(None,) * (value.ndim - len(spec)))  # an entry for each dim: `own` counts them
    padded = tuple((dim, split) for dim, split in padding if not isinstance(split, Unpadded))
    metadata: dict[str, Any] = {"padding": padded} if padded else {}
    return kind(value, out_sharding=spec, eager_sharding=current_mesh() is not None, **metadata)


def padding_of(variable: nnx.Variable[Any]) -> Padding:
    """Returns how the dims of a variable are padded."""
    return tuple(variable.get_metadata().get("padding", ()))


def logical_shape(variable: nnx.Variable[Any]) -> tuple[int, ...]:
    """Returns the shape of a variable without padding, which does not depend on the mesh."""
    shape = list(variable.shape)
    for dim, split in padding_of(variable):
        shape[dim] = split.size
    return tuple(shape)


def pad(array: Any, padding: Padding, tp: int) -> Any:
    """Returns an array of JAX or NumPy with zeros where tp devices pad it."""
    for dim, split in padding:
        stored = split.stored(tp)
        if stored != split.factors:
            axis = array.ndim + dim
            widths = [(0, 0)] * axis + [(0, more - less) for less, more in zip(split.factors, stored, strict=True)]
            factored = array.reshape(*array.shape[:axis], *split.factors, *array.shape[axis + 1 :])
            library = np if isinstance(array, np.ndarray) else jnp
            zeros = library.pad(factored, widths + [(0, 0)] * (-dim - 1))
            array = zeros.reshape(*array.shape[:axis], split.padded(tp), *array.shape[axis + 1 :])
    return array


def cut(array: Any, padding: Padding, tp: int) -> Any:
    """Returns an array of JAX or NumPy without what tp devices pad it with."""
    for dim, split in padding:
        stored = split.stored(tp)
        if stored != split.factors:
            axis = array.ndim + dim
            factored = array.reshape(*array.shape[:axis], *stored, *array.shape[axis + 1 :])
            kept = factored[(slice(None),) * axis + tuple(slice(size) for size in split.factors)]
            array = kept.reshape(*array.shape[:axis], split.size, *array.shape[axis + 1 :])
    return array


def own(*modules: nnx.Module) -> tuple[Weights, dict[str, PartitionSpec]]:
    """Returns the parameters of modules by name, and the specs that they are stored by."""
    weights: Weights = {}
    specs: dict[str, PartitionSpec] = {}
    for module in modules:
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            name = ".".join(map(str, path))
            weights[name] = jnp.asarray(variable[...])
            specs[name] = spec_of(variable)
    return weights, specs


def spec_of(variable: nnx.Variable[Any]) -> PartitionSpec:
    """Returns how a variable is split (not at all if it declares nothing); of one out of a stack, as there."""
    declared = tuple(variable.get_metadata().get("out_sharding") or ())
    return PartitionSpec(*declared[max(0, len(declared) - len(variable.shape)) :])


def check_sizes(layer: str, **sizes: Any) -> None:
    """Checks the sizes that a layer is built with.

    Raises:
      ValueError: one is no whole number, or below 1.
    """
    bad = [f"{name}={size!r}" for name, size in sizes.items() if not isinstance(size, Integral) or size < 1]
    if bad:
        raise ValueError(f"{layer}: {', '.join(bad)}: should be a whole number, 1 or more")
