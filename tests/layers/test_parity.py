"""Every layer, on every mesh and on none, against the plain mathematics: output, input and weight gradients."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import reference
from flax import nnx
from support import MESHES, assert_close, by_name, random_weights, state_on_mesh, sweep, without_mesh

import jaxtp

B, T, D, F, V = 8, 5, 24, 40, 19
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 12}
ATTENTION = jaxtp.AttentionConfig(**HEADS, attention_bias=True, attention_out_bias=True)


@dataclass(frozen=True)
class Case:
    """A layer, what it is called with, and what it should compute from its weights by name."""

    build: Any
    call: Any
    reference: Any
    input_shape: tuple[int, ...] = (B, T, D)


LABELS = jnp.where(
    jax.random.bernoulli(jax.random.key(5), 0.2, (B, T)),
    -100,
    jax.random.randint(jax.random.key(6), (B, T), 0, V),
)
LARGE_V = 203
SEQUENCE_PARALLEL = jaxtp.LayerContext(sequence_parallel=None)
LARGE_IDS = jax.random.randint(jax.random.key(8), (B, 8), 0, LARGE_V).at[:, ::3].set(7)  # often the same
IDS = jax.random.randint(jax.random.key(7), (B, T), 0, V)


def loss_and_count(head, x):
    total, count = jaxtp.vocab_parallel_cross_entropy(x, head.kernel[...], LABELS, jaxtp.HeadConfig(V, chunk_size=2))
    return jnp.stack([total, count])


def biased_loss(head, x):
    config = jaxtp.HeadConfig(V, chunk_size=2, scale=0.7)
    logits = jaxtp.vocab_parallel_logits(x, head.kernel[...], config, head.bias[...])
    total, _ = jaxtp.vocab_parallel_cross_entropy(x, head.kernel[...], LABELS, config, head.bias[...])
    return logits + total


def embed_and_scale(layer, x):
    """An embedding has no float input; the scale makes the shared machinery apply."""
    return layer(IDS) * x


CASES = {
    "column": Case(
        lambda rngs: jaxtp.ColumnParallelLinear(D, F, use_bias=True, rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: x @ w["kernels.0"] + w["biases.0"],
    ),
    "column_2d": Case(
        lambda rngs: jaxtp.ColumnParallelLinear(D, F, rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: x @ w["kernels.0"],
        input_shape=(B, D),
    ),
    "column_2d_sequence": Case(
        lambda rngs: jaxtp.ColumnParallelLinear(D, F, SEQUENCE_PARALLEL, rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: x @ w["kernels.0"],
        input_shape=(B, D),
    ),
    "column_several": Case(
        lambda rngs: jaxtp.ColumnParallelLinear(D, (F, 8, 16), use_bias=True, rngs=rngs),
        lambda layer, x: jnp.concatenate(layer(x), axis=-1),
        lambda w, x: jnp.concatenate([x @ w[f"kernels.{i}"] + w[f"biases.{i}"] for i in range(3)], axis=-1),
    ),
    "row": Case(
        lambda rngs: jaxtp.RowParallelLinear(F, D, use_bias=True, rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: x @ w["kernel"] + w["bias"],
        input_shape=(B, T, F),
    ),
    "norm": Case(
        lambda rngs: jaxtp.Norm(D, jaxtp.NormConfig(norm_eps=1e-3)),
        lambda layer, x: layer(x),
        lambda w, x: reference.rms_norm(x, w["scale"], 1e-3),
    ),
    "attention": Case(
        lambda rngs: jaxtp.CausalSelfAttention(D, ATTENTION, rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: reference.attention(x, reference.named(w, reference.ATTENTION), *HEADS.values(), 10_000.0),
    ),
    "swiglu": Case(
        lambda rngs: jaxtp.MLP(D, jaxtp.MLPConfig(d_ff=F, mlp_bias=True), rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: reference.swiglu(x, reference.named(w, reference.MLP)),
    ),
    "embedding": Case(
        lambda rngs: jaxtp.VocabParallelEmbedding(V, D, rngs=rngs),
        embed_and_scale,
        lambda w, x: w["embedding"][IDS] * x,
    ),
    "embedding_exchanged": Case(  # a large table and few tokens
        lambda rngs: jaxtp.VocabParallelEmbedding(LARGE_V, D, SEQUENCE_PARALLEL, scale=3.0, rngs=rngs),
        lambda layer, x: layer(LARGE_IDS) * x,
        lambda w, x: 3 * w["embedding"][LARGE_IDS] * x,
        input_shape=(B, 8, D),
    ),
    "logits": Case(
        lambda rngs: jaxtp.VocabParallelHead(V, D, rngs=rngs),
        lambda head, x: jaxtp.vocab_parallel_logits(x, head.kernel[...], jaxtp.HeadConfig(V)),
        lambda w, x: x @ w["kernel"].T,
    ),
    "loss": Case(
        lambda rngs: jaxtp.VocabParallelHead(V, D, rngs=rngs),
        loss_and_count,
        lambda w, x: jnp.stack(reference.cross_entropy(x @ w["kernel"].T, LABELS)),
    ),
    "biased loss": Case(
        lambda rngs: jaxtp.VocabParallelHead(V, D, use_bias=True, rngs=rngs),
        biased_loss,
        lambda w, x: (logits := 0.7 * (x @ w["kernel"].T + w["bias"])) + reference.cross_entropy(logits, LABELS)[0],
    ),
}


def run(function, weights, x):
    """Output, and the gradients of its inner product with a fixed random array."""

    def scalar(weights, x):
        y = function(weights, x)
        return jnp.sum(y * jax.random.normal(jax.random.key(3), y.shape)), y

    (_, y), (grads, grad_x) = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(weights, x)
    return y, grad_x, grads


@cache
def plain_mathematics(name):
    """Weights and input of a layer, and its output and gradients as they should be."""
    case = CASES[name]
    weights = random_weights(lambda: case.build(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), case.input_shape)
    y, grad_x, grads = jax.jit(lambda weights, x: run(case.reference, weights, x))(weights, x)
    return weights, x, {"output": y, "input": grad_x, **grads}


def module_call(case, graph):
    return jax.jit(lambda state, x: run(lambda state, x: case.call(nnx.merge(graph, state), x), state, x))


@pytest.mark.parametrize("mesh", sweep([None, *MESHES], (1, 2, 4)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_layer_equals_plain_mathematics(name, mesh):
    case = CASES[name]
    build = lambda: case.build(nnx.Rngs(0))
    weights, x, expected = plain_mathematics(name)
    if mesh is None:
        graph, state = without_mesh(build, weights)
        y, grad_x, grads = module_call(case, graph)(state, x)
        actual = {"output": y, "input": grad_x, **by_name(grads, jaxtp.make_mesh())}
    else:
        mesh = jaxtp.make_mesh(*mesh)
        graph, state = state_on_mesh(build, weights, mesh)
        with jax.set_mesh(mesh):
            y, grad_x, grads = module_call(case, graph)(state, x)
            actual = {"output": y, "input": grad_x, **by_name(grads, mesh)}
    assert_close(actual, expected)
