"""Grouped products against a loop over groups in float64; Pallas' kernels interpreted on the
CPU, in small blocks.
"""

from functools import partial
from typing import get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from numpy.random import default_rng
from support import TOLERANCE, assert_close, swept, use_mesh
from tables import assert_errors, read_table

from jaxtp.collectives import device_view
from jaxtp.layers.kernels import grouped_kernels
from jaxtp.layers.kernels.grouped import grouped_matmul, is_dense, pick_method, unsupported
from jaxtp.layers.kernels.grouped_kernels import Blocks, gradient_blocks, product_blocks
from jaxtp.layers.parameter import DType

METHODS = ("pallas", "xla")
ROWS = 37
GROUPS = 4
SIZES = read_table(__file__, "groups")


def in_blocks(rows=8, columns=16, summed=4):
    """Blocks that no width of these tests is a multiple of, but the whole of some."""
    blocks = Blocks(rows, columns, summed, 4, 2)
    return mock.patch.multiple(
        grouped_kernels,
        product_blocks=mock.Mock(return_value=blocks),
        gradient_blocks=mock.Mock(return_value=blocks),
    )


def draw(widths=(10, 20), groups=GROUPS, dtype="float32", rows=ROWS):
    """Rows, kernels and the gradient of the output."""
    rng = default_rng(0)
    shapes = (rows, widths[0]), (groups, *widths), (rows, widths[1])
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@partial(jax.jit, static_argnames=("method",))
def found(method, x, w, dy, sizes):
    y, backward = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, method), x, w)
    dx, dw = backward(dy)
    return {"output": y, "rows": dx, "kernels": dw}


def expected(x, w, dy, sizes):
    x, w, dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    y = np.zeros_like(dy)
    dx = np.zeros_like(x)
    dw = np.zeros_like(w)
    ends = np.cumsum(sizes)
    for group, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(begin, end)
        y[rows] = x[rows] @ w[group]
        dx[rows] = dy[rows] @ w[group].T
        dw[group] = x[rows].T @ dy[rows]
    return {"output": y, "rows": dx, "kernels": dw}


@pytest.mark.parametrize("method", METHODS)
def test_products_and_gradients_equal_a_loop_over_groups(method):
    """Rows beyond the groups are left over from a selection: they may hold anything, and give
    zeros.
    """
    for kind, sizes in SIZES.items():
        sizes = np.array(sizes)
        x, w, dy = draw()
        beyond = np.s_[sizes.sum() :]
        with in_blocks():
            result = found(method, x.at[beyond].set(jnp.nan), w, dy.at[beyond].set(jnp.nan), sizes)
        assert_close(result, expected(x, w, dy, sizes), TOLERANCE)
        assert not any(np.asarray(result[name])[beyond].any() for name in ("output", "rows")), kind


@pytest.mark.wide  # each example is a program
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=8)
def test_any_sizes_and_widths(sizes, width, columns):
    arrays = draw((width, columns), groups=len(sizes))
    sizes = np.array(sizes)
    with in_blocks():
        for method in METHODS:
            assert_close(found(method, *arrays, sizes), expected(*arrays, sizes), TOLERANCE)


@swept("case", [("xla", "bfloat16"), ("pallas", "float16")], ("xla", "bfloat16"))
def test_sixteen_bits_are_summed_in_float32(case):
    """Of a long sum in 16 bits not much would be left."""
    method, dtype = case
    arrays = draw((600, 3), groups=2, dtype=dtype, rows=500)
    sizes = np.array([450, 20])
    with in_blocks(32, 16, 32):
        result = found(method, *arrays, sizes)
    assert {x.dtype.name for x in result.values()} == {dtype}
    assert_close(result, expected(*arrays, sizes), float(jnp.finfo(dtype).eps))


@pytest.mark.wide
def test_the_blocks_of_a_gpu():
    """Those that are really taken, with widths that they do not divide."""
    arrays = draw((200, 136), groups=2, rows=300)
    sizes = np.array([129, 150])
    assert_close(found("pallas", *arrays, sizes), expected(*arrays, sizes), TOLERANCE)


def test_blocks_are_such_as_triton_takes():
    for dtype in get_args(DType):
        for width in (1, 24, 96, 176, 768, 1408, 7168):
            product = product_blocks(4096, 128, width, 1000, dtype)
            for blocks in (product, gradient_blocks(width, 1000, dtype)):
                sizes = (blocks.rows, blocks.columns, blocks.summed)
                assert all(size >= 16 and size & (size - 1) == 0 for size in sizes), (dtype, width)
            assert product.columns == 16 or -width % product.columns <= width / 8, (dtype, width)


def test_kernels_on_a_mesh_in_a_scan_with_remat_give_what_xla_does():
    """Groups are split over fsdp, each with sizes of its own; over tp, all is equal."""
    x, w, dy = draw((12, 12), groups=2, rows=2 * ROWS)
    sizes = np.array([[20, 8], [0, ROWS]])
    rows = PartitionSpec("fsdp")
    whole = PartitionSpec()

    def layers(method, x, w, sizes):
        layer = jax.checkpoint(lambda x: grouped_matmul(x, w, sizes[0], method))
        return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0]

    @jax.jit
    def program(x, w, dy):
        results = []
        for method in METHODS:
            view = device_view(partial(layers, method), "groups", (rows, whole, rows), rows)
            y, backward = jax.vjp(lambda x, w, view=view: view(x, w, sizes), x, w)
            results.append(
                dict(zip(("output", "rows", "kernels"), (y, *backward(dy)), strict=True))
            )
        return results

    with in_blocks(), use_mesh(fsdp=2, tp=2, devices=jax.devices()[:4]):
        assert_close(*program(x, w, dy), TOLERANCE)


TABLE = read_table(__file__)


def test_auto_takes_the_kernels_where_they_run_and_they_are_refused_elsewhere():
    assert_errors(TABLE["picked"], lambda row: " ".join(pick_method(row["asked"], row["platform"])))
    (problem,) = unsupported("pallas", "rocm")
    assert not [word for word in ("cuda, not on rocm", "auto (xla)") if word not in problem]
    assert not [row for row in TABLE["allowed"] if [*unsupported(*row)]]


def test_xla_multiplies_each_row_with_every_group_but_on_tpus():
    """As XLA's compiler counts it here; for an NVIDIA GPU see
    tests/tools/estimate/test_target.py.
    """
    assert [is_dense("xla", platform) for platform in ("cuda", "rocm", "cpu", "tpu")] == [
        True,
        True,
        True,
        False,
    ]
    assert not is_dense("pallas", "cuda")
    shapes = (256, 32), (8, 32, 16), (8,)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ("f4", "f4", "i4"), strict=True)
    ]
    cost = jax.jit(partial(grouped_matmul, method="xla")).lower(*arrays).compile().cost_analysis()
    assert cost["flops"] > 8 * 2 * 256 * 32 * 16
