"""Products of rows with one kernel for each group of them, as a mixture of experts makes: rows are sorted by expert.

Rows are `[M, K]`, kernels `[E, K, N]`. The first `sizes[0]` rows are multiplied with the first kernel, the next
`sizes[1]` with the second, and so on; a group may have no rows. Those beyond all groups give
0, whatever they hold, and their gradient is 0: most of them, where experts are split over devices.

    method    what it computes                                                          runs on
    xla       `jax.lax.ragged_dot`; except on TPUs, XLA makes of it products of all     everything
              rows with all kernels, E times the work, and masks those of other groups
    pallas    each row with its kernel: `jaxtp/layers/grouped_kernels.py`               cuda

Three products make a step, each with a method's own form: `product` for the outputs, the same with transposed kernels
for the rows' gradient, and `kernels_gradient`. All sum in float32. The gradient is written by hand, so that a kernel
that multiplies each row once can stand in for XLA's product wherever that multiplies every row with every expert.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtp.collectives import vary_like

Method = Literal["pallas", "xla"]
Implementation = Literal["auto", Method]

_PALLAS_PLATFORM = "cuda"


def grouped_matmul(
    rows_MK: Array, kernels_EKN: Array, sizes_E: Array, method: Method, *, interpret: bool = False
) -> Array:
    """Returns each row multiplied with the kernel of its group, `[M, N]` in their dtype; 0 beyond the groups.

    Args:
      rows_MK: rows, sorted by group.
      kernels_EKN: a kernel for each group.
      sizes_E: integers, the number of rows in each group; at most M in all.
      method: what computes it.
      interpret: run the kernels of `pallas` on any device, slowly, as a test does.

    Raises:
      ValueError: rows and kernels do not belong together.
    """
    _check(rows_MK, kernels_EKN, sizes_E)
    arrays = rows_MK, kernels_EKN, sizes_E.astype(jnp.int32)
    return _grouped(method, interpret, *(vary_like(x, *arrays) for x in arrays))


def dense(method: Method, platform: str | None) -> bool:
    """Returns whether all rows are multiplied with all kernels: E times the FLOPs, forward and backward.

    It also lays the rows out once for each of them, in memory: on an NVIDIA GPU `2 E M K` elements of temporaries.
    """
    return method == "xla" and platform != "tpu"


def method_of(asked: Implementation, platform: str | None) -> tuple[Method, str]:
    """Returns the method, and why: that which is asked for, whether or not it can (`refused`); None is not known."""
    if asked != "auto":
        return asked, "as configured"
    if platform in (None, _PALLAS_PLATFORM):
        return "pallas", "it multiplies each row with its own expert alone"
    return "xla", f"pallas: it runs on {_PALLAS_PLATFORM}, not on {platform}"


def refused(asked: Implementation, platform: str | None) -> Iterator[str]:
    """Yields why the method that is asked for cannot do it, with those that can."""
    if asked == "pallas" and platform not in (None, _PALLAS_PLATFORM):
        yield f"model.grouped=pallas: it runs on {_PALLAS_PLATFORM}, not on {platform}; use auto (xla)"


def _check(rows: Array, kernels: Array, sizes: Array) -> None:
    if rows.ndim != 2 or kernels.ndim != 3 or sizes.ndim != 1:
        raise ValueError(
            f"rows {rows.shape}, kernels {kernels.shape} and sizes {sizes.shape} are not [M, K], [E, K, N] and [E]"
        )
    if rows.shape[1] != kernels.shape[1] or kernels.shape[0] != sizes.shape[0]:
        raise ValueError(f"rows {rows.shape} and sizes {sizes.shape} do not belong to kernels {kernels.shape}")
    if rows.dtype != kernels.dtype or not jnp.issubdtype(sizes.dtype, jnp.integer):
        given = ", ".join(x.dtype.name for x in (rows, kernels, sizes))
        raise ValueError(f"rows, kernels and sizes are {given}: the first two have one dtype, the last are integers")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(method: Method, interpret: bool, rows: Array, kernels: Array, sizes: Array) -> Array:
    return _forward(method, interpret, rows, kernels, sizes)[0]


def _forward(
    method: Method, interpret: bool, rows: Array, kernels: Array, sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Returns the output, and what the backward pass reads: the inputs."""
    return _product(method, interpret, rows, kernels, sizes, transposed=False), (rows, kernels, sizes)


def _backward(
    method: Method, interpret: bool, kept: tuple[Array, Array, Array], grad: Array
) -> tuple[Array, Array, None]:
    """Returns the gradients of rows and kernels."""
    rows, kernels, sizes = kept
    of_rows = _product(method, interpret, grad, kernels, sizes, transposed=True)
    if method == "pallas":
        of_kernels = _kernels().kernels_gradient(rows, grad, sizes, interpret=interpret)
    else:
        of_kernels = _xla_kernels_gradient(rows, grad, sizes)
    return of_rows, of_kernels, None


_grouped.defvjp(_forward, _backward)


def _product(method: Method, interpret: bool, rows: Array, kernels: Array, sizes: Array, *, transposed: bool) -> Array:
    if method == "pallas":
        return _kernels().product(rows, kernels, sizes, transposed=transposed, interpret=interpret)
    kernels = kernels.swapaxes(1, 2) if transposed else kernels
    y = lax.ragged_dot(rows, kernels, sizes, preferred_element_type=jnp.float32)
    return y.astype(rows.dtype)


_SUM_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def _xla_kernels_gradient(rows: Array, grad: Array, sizes: Array) -> Array:
    y = lax.ragged_dot_general(rows, grad, sizes, _SUM_OVER_ROWS, preferred_element_type=jnp.float32)
    return y.astype(rows.dtype)


def _kernels() -> Any:
    from jaxtp.layers import grouped_kernels  # Pallas takes a while to import

    return grouped_kernels
