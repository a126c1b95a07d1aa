"""Grouped products as fused Pallas kernels for NVIDIA GPUs, compiled by Triton.

Rows stay where they are, without padding.

    kernel      one program per                  sums over         writes
    product     column block of a tile of rows   the rows' width   outputs, or the rows' gradients
    gradient    block of a group's kernel        rows of a group   the kernels' gradients

A tile is a block of rows of one group. The number of tiles is known only at run time, so there are
`M / block + E + 1` programs, the maximum; surplus tiles write nothing. Rows beyond all groups form
another group, which writes 0.

Precision and determinism: see `fused_attention.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jaxtp.layers.kernels.programs import MIN_SIZE, run_programs


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a program, powers of two >= 16 on a GPU, and Triton's options."""

    rows: int  # rows of the output: of a tile, or of a group's kernel
    columns: int  # columns of the output
    summed: int  # elements of a sum that are multiplied at a time
    warps: int  # groups of 32 threads that share a program
    stages: int = 3  # pipeline depth: the current block and the prefetched blocks


def product_blocks(
    num_rows: int,
    groups: int,
    columns: int,
    summed: int,
    dtype: DTypeLike,
) -> Blocks:
    """Returns the blocks of products.

    Small groups get small tiles, because the last tile of a group is half empty on average.
    """
    rows = 128 if num_rows >= 512 * groups else 64
    depth = _fitting(summed, _depth(dtype))
    return Blocks(rows, _fitting(columns, 128), depth, warps=rows // 16)


def gradient_blocks(rows: int, columns: int, dtype: DTypeLike) -> Blocks:
    """Returns the blocks of kernel gradients, `[rows, columns]` per group."""
    return Blocks(_fitting(rows, 128), _fitting(columns, 128), _depth(dtype), warps=8)


def _depth(dtype: DTypeLike) -> int:
    return 128 // jnp.dtype(dtype).itemsize


def _fitting(width: int, max_size: int) -> int:
    """Returns the size of the largest block that leaves at most 1/8 empty, or the smallest."""
    block = max_size
    while block > MIN_SIZE and -width % block > width // 8:
        block //= 2
    return block


def product(
    rows_MD: Array,
    kernels_EDF: Array,
    sizes_E: Array,
    *,
    transposed: bool = False,
) -> Array:
    """Returns each row multiplied by its group's kernel, `[M, F]`; 0 beyond the groups.

    Kernels are `[E, F, D]` if `transposed`.
    """
    num_rows, summed = rows_MD.shape
    columns = kernels_EDF.shape[1 if transposed else 2]
    blocks = product_blocks(num_rows, len(sizes_E), columns, summed, rows_MD.dtype)
    group, first_row, end = _tiles(sizes_E, num_rows, blocks.rows)
    return _run(
        partial(_product_kernel, blocks, transposed),
        blocks,
        # Neighbours share rows, which stay in the cache.
        (pl.cdiv(columns, blocks.columns), len(group)),
        (group, first_row, end, rows_MD, kernels_EDF),
        (num_rows, columns),
        "transposed_product" if transposed else "product",
    )


def kernels_gradient(rows_MD: Array, grad_MF: Array, sizes_E: Array) -> Array:
    """Returns `rows.T @ grad` of each group, `[E, D, F]`."""
    groups = len(sizes_E)
    num_rows, width = rows_MD.shape
    columns = grad_MF.shape[1]
    blocks = gradient_blocks(width, columns, rows_MD.dtype)
    begins, ends = _ranges(sizes_E, num_rows)
    return _run(
        partial(_gradient_kernel, blocks),
        blocks,
        (pl.cdiv(columns, blocks.columns), pl.cdiv(width, blocks.rows), groups),
        (begins[:-1], ends[:-1], rows_MD, grad_MF),
        (groups, width, columns),
        "kernels_gradient",
    )


def _ranges(sizes: Array, num_rows: int) -> tuple[Array, Array]:
    """Returns each group's first row and end, `[E + 1]`; the rows beyond form another group."""
    ends = jnp.minimum(jnp.cumsum(sizes), num_rows)
    ends = jnp.pad(ends, (0, 1), constant_values=num_rows)
    return jnp.pad(ends[:-1], (1, 0)), ends


def _tiles(sizes: Array, num_rows: int, size: int) -> tuple[Array, Array, Array]:
    """Returns each tile's group, first row, and the group's end; both are M for surplus tiles."""
    begins, ends = _ranges(sizes, num_rows)
    counts = (ends - begins + size - 1) // size  # tiles of each group
    last_tiles = jnp.cumsum(counts)
    tile = jnp.arange(num_rows // size + len(ends))
    earlier_groups = jnp.sum(tile[:, None] >= last_tiles, axis=1, dtype=jnp.int32)
    group = jnp.minimum(earlier_groups, len(sizes))
    begin = begins[group]
    first_tiles = last_tiles - counts
    first_row = begin + (tile - first_tiles[group]) * size
    return group, jnp.minimum(first_row, num_rows), ends[group]


def _run(
    kernel: Callable[..., None],
    blocks: Blocks,
    grid: tuple[int, ...],
    inputs: tuple[Array, ...],
    shape: tuple[int, ...],
    name: str,
) -> Array:
    def program(*refs: object) -> None:
        index = tuple(map(pl.program_id, range(len(grid))))
        jax.jit(kernel)(index, *refs)

    (result,) = run_programs(
        program,
        inputs,
        [(shape, inputs[-1].dtype)],
        grid=grid,
        options=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        name=f"grouped_{name}",
    )
    return result


@dataclass(frozen=True)
class _Span:
    """`size` elements of a dim from `begin`; elements from `end` on are masked."""

    begin: Array
    size: int
    end: Array | None = None  # None: no element is masked

    @property
    def slice(self) -> Any:
        return pl.ds(self.begin, self.size)


def _block(index: Array, size: int, width: int) -> _Span:
    return _Span(index * size, size, jnp.int32(width) if width % size else None)


def _mask(rows: _Span, columns: _Span) -> Array | None:
    """Returns which elements of a block exist; None if all do."""
    shape = (rows.size, columns.size)
    mask = None
    for dim, span in enumerate((rows, columns)):
        if span.end is not None:
            exists = lax.broadcasted_iota(jnp.int32, shape, dim) < span.end - span.begin
            mask = exists if mask is None else mask & exists
    return mask


def _load(ref: Any, *place: Any) -> Array:
    *index, rows, columns = place
    mask = _mask(rows, columns)
    source = ref.at[(*index, rows.slice, columns.slice)]
    return triton.load(source, mask=mask, other=None if mask is None else 0)


def _store(ref: Any, block: Array, *place: Any) -> None:
    *index, rows, columns = place
    target = ref.at[(*index, rows.slice, columns.slice)]
    triton.store(target, block.astype(ref.dtype), mask=_mask(rows, columns))


def _product_kernel(
    blocks: Blocks, transposed: bool, program: tuple[Array, Array], *refs: Any
) -> None:
    group_ref, begin_ref, end_ref, x_ref, w_ref, y_ref = refs
    column, tile = program
    group = group_ref[tile]
    begin = begin_ref[tile]
    end = end_ref[tile]
    summed = x_ref.shape[1]
    rows = _Span(begin, blocks.rows, end)
    columns = _block(column, blocks.columns, y_ref.shape[1])

    def visit(i: Array, y: Array) -> Array:
        inner = _block(i, blocks.summed, summed)
        x = _load(x_ref, rows, inner)
        spans = (columns, inner) if transposed else (inner, columns)
        w = _load(w_ref, group, *spans)
        return y + triton.dot(x, w, trans_b=transposed)

    has_rows = (group < w_ref.shape[0]) & (begin < end)
    visits = has_rows.astype(jnp.int32) * pl.cdiv(summed, blocks.summed)
    y = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    y = lax.fori_loop(0, visits, visit, y)
    _store(y_ref, y, rows, columns)


def _gradient_kernel(blocks: Blocks, program: tuple[Array, Array, Array], *refs: Any) -> None:
    begin_ref, end_ref, x_ref, dy_ref, dw_ref = refs
    column, row, group = program
    begin = begin_ref[group]
    end = end_ref[group]
    rows = _block(row, blocks.rows, x_ref.shape[1])
    columns = _block(column, blocks.columns, dy_ref.shape[1])

    def visit(i: Array, dw: Array) -> Array:
        inner = _Span(begin + i * blocks.summed, blocks.summed, end)
        x = _load(x_ref, inner, rows)
        dy = _load(dy_ref, inner, columns)
        return dw + triton.dot(x, dy, trans_a=True)

    dw = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    visits = lax.div(end - begin + blocks.summed - 1, blocks.summed)
    dw = lax.fori_loop(0, visits, visit, dw)
    _store(dw_ref, dw, group, rows, columns)
