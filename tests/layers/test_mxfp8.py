"""Products in MXFP8: their error, their gradients, the same numbers on every mesh, and what is
refused.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from jax.sharding import PartitionSpec as P
from support import assert_close, relative_error, sizes_of, swept, use_mesh

from jaxtp.analysis.census import equations
from jaxtp.collectives import (
    WeightDtypes,
    WeightLayout,
    device_view,
    enter_parallel,
    leave_parallel,
    load_weight,
)
from jaxtp.config.schema import ConfigError
from jaxtp.layers.mxfp8 import mx_matmul, mx_problem
from jaxtp.layers.sequence_parallel import SEQUENCE_DIM
from jaxtp.mesh import (
    BATCH,
    CONTEXT,
    SEQUENCE,
    STORAGE,
    TP,
    abstract_mesh,
    as_current,
    mesh_shape,
)

M = 12
K = 64
N = 96
INPUTS = {
    "random": lambda r, shape: r.standard_normal(shape),
    "heavy-tailed": lambda r, shape: r.standard_t(1.5, shape),
    "outlier channels": lambda r, shape: (
        r.standard_normal(shape) * np.where(r.random(shape[-1]) < 0.05, 100.0, 1.0)
    ),
    "many magnitudes": lambda r, shape: (
        r.standard_normal(shape) * np.exp2(r.integers(-40, 40, (*shape[:-1], 1)))
    ),
}


def blocked(x):
    """Elements of the blocks along the last dim times their scales, and the bound of their
    errors, in float64.
    """
    blocks = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.where(most, most, 1) / 448)))
    rounded = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return rounded.reshape(x.shape), np.maximum(np.abs(blocks) / 16, scale / 1024).reshape(x.shape)


def test_elements_are_those_of_the_format():
    """Seen through a product with the identity, which has no error."""
    r = np.random.default_rng(0)
    x = np.concatenate([draw(r, (M, K)) for draw in INPUTS.values()]).astype(np.float32)
    x[0] = 0
    x[1, :32] = 448
    x[2, :32] = np.nextafter(np.float32(448), 500)
    x[3, 0] = np.inf
    x[4, 0] = np.nan
    y = np.asarray(jax.jit(mx_matmul)(x, np.eye(K, dtype=np.float32)))
    assert not np.isfinite(y[3:5]).any()
    finite = np.delete(np.arange(len(x)), [3, 4])
    np.testing.assert_array_equal(y[finite], blocked(x[finite])[0])


DTYPES = {
    "random": "float32",
    "outlier channels": "bfloat16",
    "heavy-tailed": "float32",
    "many magnitudes": "bfloat16",
}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_the_errors_of_products_are_bounded(name, dtype):
    r = np.random.default_rng(1)
    given = (jnp.asarray(INPUTS[name](r, shape), dtype) for shape in ((3, M, K), (K, N), (3, M, N)))
    found = jax.jit(lambda x, w, grad: (x, w, grad, *with_gradients(mx_matmul, x, w, grad)))(*given)
    assert {each.dtype for each in found} == {jnp.dtype(dtype)}
    x, w, grad, y, dx, dw = (np.float64(each) for each in found)
    for result, a, b in ((y, x, w.T), (dx, grad, w)):
        a_8, a_error = blocked(a)
        b_8, b_error = blocked(b)
        exact = a @ b.T
        bound = np.abs(a) @ b_error.T + a_error @ np.abs(b).T + a_error @ b_error.T
        rounding = allowed(result, np.abs(a) @ np.abs(b).T, dtype)
        assert (np.abs(result - a_8 @ b_8.T) <= rounding).all(), "not the product of the blocks"
        assert (np.abs(result - exact) <= bound + rounding).all()
        assert (
            bound <= 0.13 * np.linalg.norm(a, axis=-1)[..., None] * np.linalg.norm(b, axis=-1)
        ).all()
        assert 0.01 < relative_error(result, exact) < 0.05
    exact, size = (
        np.einsum("btk,btn->kn", *each) for each in ((x, grad), (np.abs(x), np.abs(grad)))
    )
    assert (np.abs(dw - exact) <= allowed(dw, size, dtype)).all()


def allowed(result, size, dtype):
    """Error of a sum in float32 of terms with magnitudes of `size`, rounded once."""
    return jnp.finfo(dtype).eps * np.abs(result) + 100 * jnp.finfo("float32").eps * size


def with_gradients(function, *arguments):
    *inputs, grad = arguments
    y, backward = jax.vjp(function, *inputs)
    return y, *backward(grad)


def mlp(sequence):
    """A column and a row layer with remat: output and gradients."""
    r = np.random.default_rng(2)
    x, up, down, grad = (
        r.standard_normal(shape).astype("f4")
        for shape in ((4, 8, K), (K, 256), (256, K), (4, 8, K))
    )
    dtypes = WeightDtypes(*[jnp.dtype("float32")] * 3)

    def body(x, up, down):
        inner = mx_matmul(
            enter_parallel(x, sequence), load_weight(up, dtypes, WeightLayout(fsdp_dim=0))
        )
        return leave_parallel(
            mx_matmul(jnp.tanh(inner), load_weight(down, dtypes, WeightLayout(fsdp_dim=1))),
            sequence,
        )

    tokens = P(BATCH, SEQUENCE if sequence else CONTEXT)
    layer = device_view(
        jax.checkpoint(body), "mlp", (tokens, P(STORAGE, TP), P(TP, STORAGE)), tokens
    )

    results = jax.jit(lambda *given: with_gradients(layer, *given))(x, up, down, grad)
    return dict(zip(("y", "x", "up", "down"), results, strict=True))


MESHES = [(1, 2, 2, 2), (1, 1, 1, 8), (2, 2, 1, 2), (1, 4, 1, 2)]
CASES = [(mesh, (SEQUENCE_DIM, None)[i % 2]) for i, mesh in enumerate(MESHES)]


@swept("case", CASES, CASES[0])
def test_every_mesh_gives_the_numbers_of_one_device(case):
    mesh, sequence = case
    expected = mlp(None)
    with use_mesh(**sizes_of(mesh)):
        assert_close(mlp(sequence), expected, tolerance=1e-6)


def products(which, primitive):
    """Number of products in a scalar and its gradients by `which` of x and w."""
    loss = jax.value_and_grad(lambda x, w: mx_matmul(x, w).sum(), which)
    jaxpr = jax.make_jaxpr(loss)(jnp.ones((M, K)), jnp.ones((K, N)))
    return sum(each.primitive.name == primitive for each, *_ in equations(jaxpr.jaxpr))


def on(kind):
    """An absent GPU, for tracing."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return as_current(abstract_mesh(mesh_shape()).update(abstract_device=device))


def test_only_needed_products_are_computed_by_kernels_on_blackwell():
    assert [products(which, "dot_general") for which in (0, 1, (0, 1))] == [2, 2, 3]
    with on("NVIDIA B200"):
        assert [products(which, "scaled_matmul_wrapper") for which in (0, 1, (0, 1))] == [2, 1, 2]
        assert [products(which, "dot_general") for which in (0, 1, (0, 1))] == [0, 1, 1]


def test_sizes_libraries_and_other_gpus_are_checked(monkeypatch):
    for kind, named in (("NVIDIA H100 80GB HBM3", "cuda 9.0"), ("AMD Instinct MI300X", "rocm")):
        with (
            on(kind),
            pytest.raises(ConfigError, match=f"{named} would multiply in 16 bits.*cuda 10.0"),
        ):
            products(0, "")
    with pytest.raises(ConfigError, match=r"40 input features.*nearest: 32 or 64"):
        mx_matmul(jnp.ones((M, 40)), jnp.ones((40, N)))
    assert "16 output features" in mx_problem(K, 16)
    for cudnn, is_old in (((9, 9, 0), True), ((9, 10, 0), False), (None, False)):
        monkeypatch.setattr("jaxtp.layers.mxfp8.installed_cudnn", lambda cudnn=cudnn: cudnn)
        assert ("needs cuDNN 9.10" in (mx_problem(K, N, "cuda 10.0") or "")) == is_old
        assert bool(mx_problem(K, N, "cuda")) == is_old
