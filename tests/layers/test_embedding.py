"""The table of an embedding stays as fsdp divides it, where an exchange of activations moves
less.
"""

import accounts
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxtp
from jaxtp.analysis.census import count_collectives
from jaxtp.layers import LayerContext
from jaxtp.mesh import mesh_sizes

B = 8
T = 8
D = 32
LARGE = 510
SMALL = 6
"""Sizes of vocabularies: of the one an exchange moves less, of the other the table does."""
LOW = jaxtp.Precision(compute="bfloat16")


def layer(vocab_size, precision=LOW):
    return jaxtp.VocabParallelEmbedding(
        vocab_size,
        D,
        LayerContext(sequence_parallel=None, precision=precision),
        rngs=nnx.Rngs(0),
    )


def traced(vocab_size, mesh, precision=LOW):
    """The jaxpr of forward and backward pass."""
    ids = jnp.zeros((B, T), jnp.int32)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(nnx.eval_shape(lambda: layer(vocab_size, precision)))
        return jax.make_jaxpr(jax.grad(lambda state: nnx.merge(graph, state)(ids).sum()))(state)


def over_fsdp(vocab_size):
    mesh = jaxtp.make_mesh(dp=2, fsdp=2, tp=2)
    found = count_collectives(traced(vocab_size, mesh), mesh_sizes(mesh))
    return {(c.kind, c.dtype, c.shape): times for c, times in found.items() if c.axes == ("fsdp",)}


def test_activations_go_over_fsdp_where_the_table_is_large_and_the_table_where_it_is_small():
    """Activations after the sum over tp: half of the tokens, once each way; and the ids of the
    group.
    """
    assert over_fsdp(LARGE) == {
        ("all-gather", "int32", (4, T)): 1,
        ("all-to-all", "bfloat16", (4, T // 2, D // 2)): 1,
        ("all-to-all", "bfloat16", (2, T // 2, D)): 1,
    }
    assert over_fsdp(SMALL) == {
        ("all-gather", "bfloat16", (SMALL // 2, D)): 1,
        ("reduce-scatter", "float32", (SMALL // 2, D)): 1,
    }


def test_a_device_never_has_more_of_a_large_table_than_it_stores():
    equations = accounts.equations(traced(LARGE, jaxtp.make_mesh(fsdp=2, tp=2)).jaxpr)
    shapes = {v.aval.shape for equation in equations for v in equation.outvars}
    assert {shape for shape in shapes if LARGE // 2 in shape} == {(LARGE // 2, D // 2)}


@pytest.mark.parametrize(
    ("vocab_size", "reduce", "total"),
    [(2046, "float32", 1028), pytest.param(SMALL, "bfloat16", 1024, marks=pytest.mark.wide)],
)
def test_gradients_add_up_in_float32_and_are_summed_in_the_reduction_dtype(
    vocab_size, reduce, total
):
    """A token is 257 times on each device, which bfloat16 makes 256, and 514 times on those
    along fsdp: 512.
    """
    mesh = jaxtp.make_mesh(dp=2, fsdp=2, tp=2)
    precision = jaxtp.Precision(compute="bfloat16", reduce=reduce)
    ids = jnp.ones((B, 129), jnp.int32).at[::2, 0].set(0)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(layer(vocab_size, precision))
        loss = lambda state: nnx.merge(graph, state)(ids).astype("float32").sum()
        gradient = jax.jit(jax.grad(loss))(state)["embedding"][...]
    assert set(jnp.unique(gradient).tolist()) == {0.0, 4.0, total}
    over_dp = [
        c
        for c in count_collectives(traced(vocab_size, mesh, precision), mesh_sizes(mesh))
        if c.axes == ("dp",)
    ]
    assert [(c.kind, c.dtype, c.shape) for c in over_dp] == [
        ("all-reduce", reduce, (vocab_size // 2, D // 2))
    ]
