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
from jaxtp.layers.rope import RopeScaling

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


NORMS = {
    "rms_plus_one": lambda w, x: reference.rms_norm(x, 1 + w["scale"], 1e-3),
    "rms_plain": lambda w, x: reference.rms_norm(x, 1, 1e-3),
    "layer": lambda w, x: reference.layer_norm(x, w["scale"], 1e-3, w["bias"]),
    "layer_plus_one": lambda w, x: reference.layer_norm(x, 1 + w["scale"], 1e-3, w["bias"]),
    "layer_no_bias": lambda w, x: reference.layer_norm(x, w["scale"], 1e-3),
    "layer_plain": lambda w, x: reference.layer_norm(x, 1, 1e-3),
}


def norm_case(kind, norm):
    config = jaxtp.NormConfig(norm=kind, norm_eps=1e-3)
    build = lambda rngs: jaxtp.Norm(D, config, SEQUENCE_PARALLEL)
    return Case(build, lambda layer, x: layer(x), norm, input_shape=(B, 8, D))


def by_scale(norm, plus=0):
    """Returns `norm` as a function of weights, of 0 for queries and 1 for keys, and of heads."""

    def normalise(w, i, x):
        scale = plus + w[f"qk_norms.{i}.scale"]
        return norm(x, scale if scale.size == x.shape[-1] else scale.reshape(x.shape[-2:]), 1e-3)

    return normalise


def rotated(theta, dims, period=HEADS["head_dim"]):
    """Returns a function that rotates `dims` dims by frequencies of heads `period` wide."""
    return lambda x: reference.rotate(x, reference.frequencies_of(period, theta)[: dims // 2])


def cohere(w, q, k, v):
    q, k = (by_scale(reference.layer_norm)(w, i, x) for i, x in enumerate((q, k)))
    return *map(rotated(50.0, 6, 6), (q, k)), v


def gemma_4(w, q, k, v):
    q, k = (by_scale(reference.rms_norm)(w, i, x) for i, x in enumerate((q, k)))
    frequencies = jnp.where(jnp.arange(6) < 3, reference.frequencies_of(12, 50.0) / 2, 0)
    return *(reference.rotate(x, frequencies) for x in (q, k)), reference.rms_norm(v, 1, 1e-3)


def muse_glimmer(w, q, k, v):
    q, k = (reference.rms_norm(x, 1, 1e-3) for x in (q, k))
    q, k = map(rotated(50.0, 12), (q, k))
    return q * (1 + 0.5 * jnp.log(1 + jnp.floor(jnp.arange(q.shape[1]) / 2)))[:, None, None], k, v


def olmo(w, q, k, v):
    return *(rotated(50.0, 12)(jnp.clip(x, -0.3, 0.3)) for x in (q, k)), jnp.clip(v, -0.3, 0.3)


def hunyuan(w, q, k, v):
    return *(by_scale(reference.rms_norm, 1)(w, i, rotated(50.0, 12)(x)) for i, x in enumerate((q, k))), v


def phi_2(w, q, k, v):
    return *map(rotated(50.0, 6, 6), (q, k)), v


def gpt_oss(w, q, k, v):
    return *map(rotated(50.0, 12), (q, k)), v


def phi(w, q, k, v):
    q, k = (by_scale(reference.layer_norm)(w, i, x) + w[f"qk_norms.{i}.bias"] for i, x in enumerate((q, k)))
    return phi_2(w, q, k, v)


GEMMA_ROPE = RopeScaling(kind="proportional", factor=2.0)
PIECES = {
    "cohere": (cohere, "layer_no_bias", {"qk_norm": "heads", "rotary_fraction": 0.5}),
    "gemma 4": (
        gemma_4,
        "rms",
        {"qk_norm": "head", "value_norm": True, "value_is_key": True}
        | {"rotary_fraction": 0.5, "rope_scaling": GEMMA_ROPE},
    ),
    "muse glimmer": (
        muse_glimmer,
        "rms_plus_one",
        {"qk_norm": "head_plain", "attention_gate": True}
        | {"query_temperature": 0.5, "rope_scaling": RopeScaling(original_length=2)},
    ),
    "olmo": (olmo, "layer_plain", {"clip_qkv": 0.3}),
    "hunyuan": (hunyuan, "rms_plus_one", {"qk_norm": "heads", "qk_norm_after_rope": True}),
    "phi": (phi, "layer", {"rotary_fraction": 0.5, "qk_norm": "head_bias"}),
    "phi 2": (phi_2, "layer", {"rotary_fraction": 0.5, "attention_bias": True}),
    "gpt-oss": (gpt_oss, "rms", {"attention_sinks": True}),
}
"""The pieces of families, as each computes queries, keys and values; its norms and its settings."""


def attention_case(change, norm, settings):
    config = jaxtp.AttentionConfig(**HEADS, rope_theta=50.0, **settings)
    norms = jaxtp.NormConfig(norm=norm, norm_eps=1e-3)
    names = {**reference.ATTENTION, "gate": "qkv.kernels.3"}

    def attend(w, x):
        return reference.attention(
            x, reference.named(w, names), *HEADS.values(), None, change=lambda *heads: change(w, *heads)
        )

    build = lambda rngs: jaxtp.CausalSelfAttention(D, config, SEQUENCE_PARALLEL, norm=norms, rngs=rngs)
    return Case(build, lambda layer, x: layer(x), attend, input_shape=(B, 8, D))


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
    **{f"norm, {kind}": norm_case(kind, norm) for kind, norm in NORMS.items()},
    "attention": Case(
        lambda rngs: jaxtp.CausalSelfAttention(D, ATTENTION, rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: reference.attention(x, reference.named(w, reference.ATTENTION), *HEADS.values(), 10_000.0),
    ),
    **{f"attention, {name}": attention_case(*case) for name, case in PIECES.items()},
    "swiglu": Case(
        lambda rngs: jaxtp.MLP(D, jaxtp.MLPConfig(d_ff=F, mlp_bias=True), rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: reference.swiglu(x, reference.named(w, reference.MLP)),
    ),
    "xielu": Case(
        lambda rngs: jaxtp.MLP(D, jaxtp.MLPConfig(d_ff=F - 3, mlp="plain", activation="xielu"), rngs=rngs),
        lambda layer, x: layer(x),
        lambda w, x: reference.xielu(x @ w["up.kernels.0"], w["alpha_p"], w["alpha_n"]) @ w["down.kernel"],
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


RUNS = [(name, mesh) for name in CASES for mesh in (None, *MESHES)]
RUNS += [(name, (1, 1, 3)) for name in CASES if "attention" in name]  # padded heads


IN_FAMILIES = {"attention, cohere", "attention, phi 2"}
"""Also in the references of families that the default suite has, in `tests/hf`."""


@pytest.mark.parametrize(
    "run_case", sweep(RUNS, *((name, (1, 2, 4)) for name in CASES if name not in IN_FAMILIES)), ids=str
)
def test_layer_equals_plain_mathematics(run_case):
    name, mesh = run_case
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


FREE = (
    {"qk_norm": "head_plain"},
    {"attention_softcap": 5.0},
    {"value_is_key": True},
    {"clip_qkv": 0.1},
    {"attention_sinks": True},
)


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"rope_theta": None}, []),
        ({"rotary_fraction": 0.5}, range(6)),
        ({"rotary_fraction": 0.5, "rope_scaling": GEMMA_ROPE}, [0, 1, 2, 6, 7, 8]),
        ({"rope_theta": None, **FREE[0]}, range(12)),
        *(pytest.param({"rope_theta": None, **each}, range(12), marks=pytest.mark.wide) for each in FREE[1:]),
    ],
    ids=str,
)
def test_a_key_bias_has_a_gradient_where_it_matters(settings, trained):
    """Without RoPE it adds the same to all scores of a query, unless the key's norm, cap or value depends on it."""
    config = jaxtp.AttentionConfig(**HEADS | {"rope_theta": 2.0} | settings, attention_bias=True)
    build = lambda: jaxtp.CausalSelfAttention(D, config, rngs=nnx.Rngs(0))
    graph, state = state_on_mesh(build, random_weights(build), mesh := jaxtp.make_mesh(1, 1, 4))
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    with jax.set_mesh(mesh):
        grads = by_name(jax.jit(jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x) ** 2)))(state), mesh)
    keys = grads["qkv.biases.1"].reshape(-1, 12)
    assert [i for i in range(12) if (keys[:, i] != 0).all()] == [*trained]
    assert (keys != 0).sum() == 2 * len([*trained])
