"""Grouped products against a loop over groups in float64; Pallas' kernels interpreted on the CPU, in small blocks."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from support import TOLERANCE, assert_close, sweep, sweep_of

import jaxtp
from jaxtp.collectives import device_view
from jaxtp.layers.kernels import grouped_kernels
from jaxtp.layers.kernels.grouped import grouped_matmul, is_dense, pick_method, unsupported
from jaxtp.layers.kernels.grouped_kernels import Blocks, gradient_blocks, product_blocks

METHODS = ("pallas", "xla")
ROWS, GROUPS = 37, 4
SIZES = {
    "all rows, an empty group": (5, 0, 21, 11),
    "rows beyond the groups": (8, 9, 0, 3),
    "all rows in one group": (0, 0, ROWS, 0),
    "no rows in any": (0, 0, 0, 0),
    "whole tiles": (8, 16, 8, 0),
}


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
    rng = np.random.default_rng(0)
    shapes = (rows, widths[0]), (groups, *widths), (rows, widths[1])
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@partial(jax.jit, static_argnames=("method",))
def found(method, x, w, dy, sizes):
    y, backward = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, method), x, w)
    dx, dw = backward(dy)
    return {"output": y, "rows": dx, "kernels": dw}


def expected(x, w, dy, sizes):
    x, w, dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for group, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(begin, end)
        y[rows], dx[rows], dw[group] = x[rows] @ w[group], dy[rows] @ w[group].T, x[rows].T @ dy[rows]
    return {"output": y, "rows": dx, "kernels": dw}


@pytest.mark.parametrize("kind", sweep([*SIZES], "all rows, an empty group", "rows beyond the groups"))
@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients(method, kind):
    sizes = SIZES[kind]
    arrays, sizes = draw(), np.array(sizes)
    with in_blocks():
        assert_close(found(method, *arrays, sizes), expected(*arrays, sizes), TOLERANCE)


@pytest.mark.wide
@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=40)
def test_any_sizes_and_widths(sizes, width, columns):
    arrays, sizes = draw((width, columns), groups=3), np.array(sizes)
    with in_blocks():
        for method in METHODS:
            assert_close(found(method, *arrays, sizes), expected(*arrays, sizes), TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_rows_beyond_the_groups_may_hold_anything(method):
    """They are left over from a selection, and have no meaning."""
    x, w, dy = draw()
    sizes = np.array(SIZES["rows beyond the groups"])
    beyond = np.s_[sizes.sum() :]
    with in_blocks():
        result = found(method, x.at[beyond].set(jnp.nan), w, dy.at[beyond].set(jnp.nan), sizes)
    assert_close(result, expected(x, w, dy, sizes), TOLERANCE)
    for name in ("output", "rows"):
        assert not np.asarray(result[name])[beyond].any()


@pytest.mark.parametrize("method", METHODS)
def test_one_group(method):
    arrays, sizes = draw(groups=1), np.array([30])
    with in_blocks():
        assert_close(found(method, *arrays, sizes), expected(*arrays, sizes), TOLERANCE)


@pytest.mark.parametrize(
    ("method", "dtype"), sweep_of([METHODS, ["bfloat16", "float16"]], ("xla", "bfloat16")), ids=str
)
def test_sixteen_bits_are_summed_in_float32(method, dtype):
    """Of a long sum in 16 bits not much would be left."""
    arrays, sizes = draw((600, 3), groups=2, dtype=dtype, rows=500), np.array([450, 20])
    with in_blocks(32, 16, 32):
        result = found(method, *arrays, sizes)
    assert {x.dtype.name for x in result.values()} == {dtype}
    assert_close(result, expected(*arrays, sizes), float(jnp.finfo(dtype).eps))


@pytest.mark.wide
def test_the_blocks_of_a_gpu():
    """Those that are really taken, with widths that they do not divide."""
    arrays, sizes = draw((200, 136), groups=2, rows=300), np.array([129, 150])
    assert_close(found("pallas", *arrays, sizes), expected(*arrays, sizes), TOLERANCE)


@pytest.mark.parametrize("dtype", grouped_kernels.DTYPES)
@pytest.mark.parametrize("width", sweep([1, 24, 96, 176, 768, 1408, 7168], 24, 176, 768))
def test_blocks_are_such_as_triton_takes(width, dtype):
    for blocks in (product_blocks(4096, 128, width, 1000, dtype), gradient_blocks(width, 1000, dtype)):
        assert all(size >= 16 and size & (size - 1) == 0 for size in (blocks.rows, blocks.columns, blocks.summed))
    columns = product_blocks(4096, 128, width, 1000, dtype).columns
    assert columns == 16 or -width % columns <= width / 8


def test_no_tile_is_lost_and_none_twice():
    """Tiles of all groups, and of what is beyond them, hold each row once; there are programs for all."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.multinomial(rng.integers(ROWS + 1), [1 / GROUPS] * GROUPS)
        owner = np.repeat(np.arange(GROUPS + 1), [*sizes, ROWS - sizes.sum()])
        group, begin, end = map(np.asarray, grouped_kernels._tiles(jnp.array(sizes, jnp.int32), ROWS, 4))
        seen = [(row, g) for g, b, e in zip(group, begin, end, strict=True) for row in range(b, min(b + 4, e))]
        assert sorted(seen) == list(enumerate(owner))


@pytest.mark.parametrize("method", METHODS)
def test_on_a_mesh_in_a_scan_with_remat(method):
    """Groups are split over fsdp, each with sizes of its own; over tp, kernels are split and the sums are partial."""
    x, w, dy = draw((12, 12), groups=2, rows=2 * ROWS)
    sizes = np.array([[20, 8], [0, ROWS]])

    def layers(x, w, sizes):
        layer = jax.checkpoint(lambda x: grouped_matmul(x, w, sizes[0], method))
        return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0]

    rows, whole = PartitionSpec("fsdp"), PartitionSpec()
    view = device_view(layers, "groups", (rows, whole, rows), rows)

    @jax.jit
    def program(x, w, dy):
        y, backward = jax.vjp(lambda x, w: view(x, w, sizes), x, w)
        return {"output": y, **dict(zip(("rows", "kernels"), backward(dy), strict=True))}

    with in_blocks(), jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=2, devices=jax.devices()[:4])):
        result = program(x, w, dy)
    right = {"output": [], "rows": [], "kernels": 0}
    for rows_of_one, grad, own in zip(np.split(x, 2), np.split(dy, 2), sizes, strict=True):
        first = expected(rows_of_one, w, grad, own)
        second = expected(first["output"], w, grad, own)
        back = expected(rows_of_one, w, second["rows"], own)
        right["output"].append(second["output"])
        right["rows"].append(back["rows"])
        right["kernels"] += back["kernels"] + second["kernels"]
    right = {name: x if name == "kernels" else np.concatenate(x) for name, x in right.items()}
    assert_close(result, right, TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_kernels_that_are_split_over_tp(method):
    """Their columns are, then their rows, as those of an expert: the partial sums are added by who calls."""
    x, w, dy = draw((12, 16))
    sizes = np.array([5, 0, 21, 3])
    columns, equal = PartitionSpec(None, None, "tp"), PartitionSpec()
    view = device_view(
        lambda x, w, sizes: grouped_matmul(x, w, sizes, method),
        "groups",
        (equal, columns, equal),
        PartitionSpec(None, "tp"),
    )

    @jax.jit
    def program(x, w, dy):
        y, backward = jax.vjp(lambda x, w: view(x, w, sizes), x, w)
        return {"output": y, **dict(zip(("rows", "kernels"), backward(dy), strict=True))}

    with in_blocks(), jax.set_mesh(jaxtp.make_mesh(tp=2, devices=jax.devices()[:2])):
        assert_close(program(x, w, dy), expected(x, w, dy, sizes), TOLERANCE)


@pytest.mark.parametrize(
    ("asked", "platform", "method", "why"),
    [
        ("auto", "cuda", "pallas", "its own expert alone"),
        ("auto", "cpu", "xla", "pallas runs only on cuda, not on cpu"),
        ("auto", "tpu", "xla", "pallas runs only on cuda, not on tpu"),
        ("auto", None, "pallas", "its own expert alone"),
        ("xla", "cuda", "xla", "as configured"),
        ("pallas", "cpu", "pallas", "as configured"),
    ],
)
def test_the_method_that_is_taken(asked, platform, method, why):
    found, said = pick_method(asked, platform)
    assert found == method
    assert why in said


def test_a_method_that_cannot_run_is_refused():
    assert list(unsupported("pallas", "rocm")) == ["model.grouped=pallas: it runs on cuda, not on rocm; use auto (xla)"]
    for asked, platform in (("pallas", "cuda"), ("pallas", None), ("xla", "cuda"), ("auto", "cpu")):
        assert not list(unsupported(asked, platform))


def test_what_is_computed_for_all_groups():
    """As XLA's compiler counts it here; for an NVIDIA GPU see tests/tools/estimate/test_target.py."""
    assert [is_dense("xla", platform) for platform in ("cuda", "rocm", "cpu", "tpu")] == [True, True, True, False]
    assert not is_dense("pallas", "cuda")
    shapes = (256, 32), (8, 32, 16), (8,)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, ("f4", "f4", "i4"), strict=True)]
    cost = jax.jit(partial(grouped_matmul, method="xla")).lower(*arrays).compile().cost_analysis()
    assert cost["flops"] > 8 * 2 * 256 * 32 * 16


@pytest.mark.parametrize(
    ("x", "w", "sizes", "message"),
    [
        ((3, 4), (2, 5, 6), "int32", r"rows \(3, 4\) and sizes \(2,\) do not match kernels \(2, 5, 6\)"),
        ((3, 4), (4, 6), "int32", r"kernels \(4, 6\) and sizes \(2,\) are not \[M, K\], \[E, K, N\] and \[E\]"),
        ((3, 4), (2, 4, 6), "float32", r"are float32, float32, float32: .* the last are integers"),
    ],
)
def test_what_does_not_belong_together(x, w, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.ones(x), jnp.ones(w), jnp.ones(2, sizes), "xla")


def test_a_dtype_that_the_kernels_do_not_take():
    with pytest.raises(ValueError, match=r"int32 and int32: grouped kernels take one of bfloat16, float16, float32"):
        grouped_matmul(jnp.ones((3, 4), "int32"), jnp.ones((2, 4, 6), "int32"), jnp.ones(2, "int32"), "pallas")
