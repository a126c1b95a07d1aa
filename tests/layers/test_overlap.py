"""Rings give what a gather before the product, and a scatter after it, give: outputs and
gradients.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_close, swept, use_mesh

from jaxtp.analysis.census import count_collectives
from jaxtp.layers.overlap import Ring, gather_matmul
from jaxtp.layers.transport import SEQUENCE_DIM, Transport
from jaxtp.mesh import mesh_sizes

D = 6
FEATURES = (16, 8)
PART = 3
SPLIT = P(None, "tp")


def arrays(tp):
    shapes = {
        "x": (2, PART * tp, D),
        "in 0": (D, FEATURES[0]),
        "in 1": (D, FEATURES[1]),
        "out 0": (FEATURES[0], D),
        "out 1": (FEATURES[1], D),
    }
    return {
        name: jax.random.normal(jax.random.key(i), s) for i, (name, s) in enumerate(shapes.items())
    }


def pair(overlap):
    """A column layer of two projections and a row layer that sums two products, on a device's
    parts.
    """

    def body(given):
        transport = {"none": Transport(), "ring": Ring()}[overlap]
        a, b = transport.enter(given["x"], [given["in 0"], given["in 1"]], SEQUENCE_DIM)
        return transport.leave(
            [jnp.tanh(a), jnp.sin(b)], [given["out 0"], given["out 1"]], SEQUENCE_DIM
        )

    specs = {name: P("tp") if name.startswith("out") else SPLIT for name in arrays(1)}
    return jax.shard_map(body, in_specs=(specs,), out_specs=SPLIT)


def run(overlap, given):
    """Output and gradients."""

    def scalar(given):
        y = pair(overlap)(given)
        return (y * jax.random.normal(jax.random.key(9), y.shape)).sum(), y

    grads, y = jax.jit(jax.grad(scalar, has_aux=True))(given)
    return {"y": y, **grads}


def moved(function, *args):
    counted = count_collectives(
        jax.make_jaxpr(function)(*args), mesh_sizes(jax.sharding.get_mesh())
    )
    return {
        kind: sum(n * c.bytes_sent for c, n in counted.items() if c.kind == kind)
        for kind in {c.kind for c in counted}
    }


@swept("tp", [2, 4], 4)
def test_rings_give_the_outputs_and_gradients_of_gathers(tp):
    with use_mesh(tp=tp):
        assert_close(run("ring", arrays(tp)), run("none", arrays(tp)), tolerance=1e-6)


@pytest.mark.wide
def test_only_permutes_of_parts_move_and_none_for_weights_without_a_gradient():
    """Forward a ring each; backward one for the row layer, and for the column layer one by
    input, one by weights.
    """
    tp = 4
    given = arrays(tp)
    unit = (tp - 1) / tp * given["x"].nbytes
    every = jax.grad(lambda given: pair("ring")(given).sum())
    frozen = jax.grad(lambda x: pair("ring")({**given, "x": x}).sum())
    with use_mesh(tp=tp):
        assert moved(pair("ring"), given) == {"permute": 2 * unit}
        assert moved(every, given) == {"permute": 5 * unit}
        assert moved(frozen, given["x"]) == {"permute": 4 * unit}
        whole, of_x = jax.jit(lambda given: (every(given), frozen(given["x"])))(given)
    assert_close({"x": of_x}, {"x": whole["x"]}, tolerance=1e-6)


def test_an_unused_output_of_a_ring_has_no_gradient():
    given = arrays(4)
    kernels = (given["in 0"], given["in 1"])

    def first(x, kernels, ring):
        project = (
            partial(gather_matmul, False)
            if ring
            else partial(Transport().enter, split_dim=SEQUENCE_DIM)
        )
        ys = jax.shard_map(
            project, in_specs=(SPLIT, (SPLIT, SPLIT)), out_specs=(P(None, None, "tp"),) * 2
        )(x, kernels)
        return (ys[0] ** 2).sum()

    with use_mesh(tp=4):
        found, expected = (
            jax.jit(jax.grad(first, (0, 1)), static_argnums=2)(given["x"], kernels, r)
            for r in (True, False)
        )
    named = lambda grads: dict(zip(("x", "in 0", "in 1"), jax.tree.leaves(grads), strict=True))
    assert_close(named(found), named(expected), tolerance=1e-6)
    assert not named(found)["in 1"].any()


@pytest.mark.parametrize("keep", [False, True])
def test_the_gradient_of_a_weight_is_rounded_once(keep):
    """In bfloat16 256 + 1 is 256; three times 1 is not lost."""
    tp = 4
    x = jnp.ones((1, tp, 1), "bfloat16").at[0, 0].set(256)

    def total(kernel):
        ys = jax.shard_map(
            lambda x, w: gather_matmul(keep, x, (w,))[0],
            in_specs=(SPLIT, SPLIT),
            out_specs=P(None, None, "tp"),
        )
        return ys(x, kernel).astype("float32").sum()

    with use_mesh(tp=tp):
        grad = jax.jit(jax.grad(total))(jnp.ones((1, tp), "bfloat16"))
    assert grad.dtype == jnp.bfloat16
    assert grad.tolist() == [[260.0] * tp]
