"""Grouped matmul, for a mixture of experts: rows sorted by group, one kernel per group.

The first `sizes[0]` rows of `[M, D]` are multiplied by kernel 0 of `[E, D, F]`, the next `sizes[1]`
by kernel 1, and so on. Rows beyond all groups (most rows, if experts are split over devices) give 0
and get gradient 0.

    method    computes                                                              platforms
    xla       `jax.lax.ragged_dot`; except on TPUs, XLA multiplies all rows by      all
              all kernels, E times the work, and masks
    pallas    each row by its kernel (`layers/kernels/grouped_kernels.py`)          cuda

Sums are float32. The gradient is hand-written, so that pallas computes the backward pass too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtp.collectives import vary_alike

Method = Literal["pallas", "xla"]
Implementation = Literal["auto", Method]

_PALLAS_PLATFORM = "cuda"


def grouped_matmul(rows_MD: Array, kernels_EDF: Array, sizes_E: Array, method: Method) -> Array:
    """Returns each row multiplied by its group's kernel, `[M, F]`; 0 beyond the groups.

    `sizes_E` are the rows per group. Off CUDA, pallas runs in its interpreter, slowly, for tests.
    """
    arrays = vary_alike((rows_MD, kernels_EDF, sizes_E.astype(jnp.int32)))
    return _grouped(method, *arrays)


def is_dense(method: Method, platform: str | None) -> bool:
    """Returns whether all rows are multiplied by all kernels: E times the FLOPs of their own.

    On an NVIDIA GPU this takes `2 E M D` elements of temporary memory.
    """
    return method == "xla" and platform != "tpu"


def pick_method(requested: Implementation, platform: str | None) -> tuple[Method, str]:
    """Returns the method and the reason; `unsupported` checks a requested method.

    `platform` None means unknown.
    """
    if requested != "auto":
        return requested, "as configured"
    if _has_pallas(platform):
        return "pallas", "it multiplies each row with its own expert alone"
    return "xla", f"pallas runs only on {_PALLAS_PLATFORM}, not on {platform}"


def _has_pallas(platform: str | None) -> bool:
    return platform is None or platform.startswith(_PALLAS_PLATFORM)


def unsupported(requested: Implementation, platform: str | None) -> Iterator[str]:
    """Yields why the requested method cannot run."""
    if requested == "pallas" and not _has_pallas(platform):
        yield f"it runs on {_PALLAS_PLATFORM}, not on {platform}; use auto (xla)"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(method: Method, rows: Array, kernels: Array, sizes: Array) -> Array:
    return _product(method, rows, kernels, sizes, transposed=False)


def _backward(
    method: Method, residuals: tuple[Array, Array, Array], grad: Array
) -> tuple[Array, Array, None]:
    rows, kernels, sizes = residuals
    d_rows = _product(method, grad, kernels, sizes, transposed=True)
    if method == "pallas":
        d_kernels = _kernels().kernels_gradient(rows, grad, sizes)
    else:
        d_kernels = lax.ragged_dot_general(
            rows, grad, sizes, _SUM_OVER_ROWS, preferred_element_type=jnp.float32
        )
    return d_rows, d_kernels.astype(rows.dtype), None


_grouped.defvjp(
    lambda method, *arrays: (_product(method, *arrays, transposed=False), arrays), _backward
)


def _product(
    method: Method,
    rows: Array,
    kernels: Array,
    sizes: Array,
    *,
    transposed: bool,
) -> Array:
    if method == "pallas":
        return _kernels().product(rows, kernels, sizes, transposed=transposed)
    if transposed:
        kernels = kernels.swapaxes(1, 2)
    y = lax.ragged_dot(rows, kernels, sizes, preferred_element_type=jnp.float32)
    return y.astype(rows.dtype)


_SUM_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _kernels() -> Any:
    # Pallas takes a while to import.
    from jaxtp.layers.kernels import grouped_kernels

    return grouped_kernels
