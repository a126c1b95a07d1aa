"""Calls of Pallas kernels, which Triton compiles for NVIDIA GPUs and tests interpret."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jaxtp.mesh import current_platform

MIN_SIZE = 16
"""Narrowest product that Triton computes."""


def padded_size(size: int) -> int:
    """Returns the size of a dim after padding: Triton multiplies powers of two."""
    return max(MIN_SIZE, pl.next_power_of_2(size))


def run_programs(
    program: Callable[..., None],
    operands: Sequence[Array],
    results: Sequence[tuple[tuple[int, ...], DTypeLike]],
    *,
    grid: tuple[int, ...],
    options: triton.CompilerParams,
    name: str,
    **specs: Any,
) -> list[Array]:
    """Runs a program for each index of the grid; off CUDA in Pallas' interpreter, for tests.

    Args:
      program: a function of references that calls a jitted kernel. Inside shard_map the interpreter
        evaluates operations one by one, and shard_map refuses operations between a varying array
        and a kernel constant; jit keeps the kernel whole.
      operands: arrays that vary over the same mesh axes.
      results: shapes and dtypes.
      options: Triton's options.
      specs: `in_specs` and `out_specs` of `pallas_call`.
    """
    manual_axes = jax.typeof(operands[0]).manual_axis_type
    result = partial(jax.ShapeDtypeStruct, manual_axis_type=manual_axes)
    call = pl.pallas_call(
        program,
        grid=grid,
        out_shape=[result(shape, dtype) for shape, dtype in results],
        compiler_params=options,
        interpret=current_platform() != "cuda",
        name=name,
        **specs,
    )
    arrays: list[Array] = call(*operands)
    return arrays
