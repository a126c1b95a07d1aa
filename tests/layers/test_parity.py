"""Layers, on meshes and on none, against the plain mathematics: output, input and weight
gradients.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from numpy.random import default_rng
from support import (
    MESHES,
    assert_close,
    by_name,
    mesh_by_size,
    random_weights,
    state_on_mesh,
    swept,
    without_mesh,
)
from tables import read_table
from variants import variant

from jaxtp import (
    MLP,
    AttentionConfig,
    CausalSelfAttention,
    ColumnParallelLinear,
    MLPConfig,
    Norm,
    NormConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    make_mesh,
)
from jaxtp.layers import HeadConfig, LayerContext, vocab_parallel_logits
from jaxtp.losses import vocab_parallel_cross_entropy

B = 8
T = 8
D = 24
F = 40
V = 19
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 12}
LARGE_V = 203
RANDOM = default_rng(0)
LABELS = np.where(RANDOM.random((B, T)) < 0.2, -100, RANDOM.integers(0, V, (B, T)))
IDS = RANDOM.integers(0, V, (B, T))
LARGE_IDS = RANDOM.integers(0, LARGE_V, (B, T))
LARGE_IDS[:, ::3] = 7  # often the same
SPLIT = LayerContext(sequence_parallel=None)
WHOLE = LayerContext(sequence_parallel=False)


@dataclass(frozen=True)
class Case:
    """A layer, what it computes from its weights by name, how it is called, and the shape of its
    input.
    """

    build: Any
    reference: Any
    call: Any = lambda layer, x: layer(x)
    shape: tuple[int, ...] = (B, T, D)


def loss_and_count(head, x):
    config = HeadConfig(V, chunk_size=2)
    return jnp.stack(vocab_parallel_cross_entropy(x, head.kernel[...], LABELS, config))


def biased_loss(head, x):
    config = HeadConfig(V, chunk_size=2, scale=0.7)
    logits = vocab_parallel_logits(x, head.kernel[...], config, head.bias[...])
    total, _ = vocab_parallel_cross_entropy(x, head.kernel[...], LABELS, config, head.bias[...])
    return logits + total


def biased_loss_by_the_book(w, x):
    logits = 0.7 * (x @ w["kernel"].T + w["bias"])
    return logits + reference.cross_entropy(logits, LABELS)[0]


def column(features=F, context=SPLIT, **options):
    return lambda rngs: ColumnParallelLinear(D, features, context, rngs=rngs, **options)


LINEAR = {
    "column": Case(column(use_bias=True), lambda w, x: x @ w["kernels.0"] + w["biases.0"]),
    "column, not over tokens": Case(column(context=WHOLE), lambda w, x: x @ w["kernels.0"]),
    "column of rows": Case(column(), lambda w, x: x @ w["kernels.0"], shape=(B, D)),
    "several columns": Case(
        column((F, 8, 16), use_bias=True),
        lambda w, x: jnp.concatenate(
            [x @ w[f"kernels.{i}"] + w[f"biases.{i}"] for i in range(3)], axis=-1
        ),
        lambda layer, x: jnp.concatenate(layer(x), axis=-1),
    ),
    "row": Case(
        lambda rngs: RowParallelLinear(F, D, SPLIT, use_bias=True, rngs=rngs),
        lambda w, x: x @ w["kernel"] + w["bias"],
        shape=(B, T, F),
    ),
    "SwiGLU": Case(
        lambda rngs: MLP(D, MLPConfig(d_ff=F, mlp_bias=True), rngs=rngs),
        lambda w, x: reference.swiglu(x, reference.named(w, reference.MLP)),
    ),
    "xIELU": Case(
        lambda rngs: MLP(D, MLPConfig(d_ff=F - 3, mlp="plain", activation="xielu"), rngs=rngs),
        lambda w, x: (
            reference.xielu(x @ w["up.kernels.0"], w["alpha_p"], w["alpha_n"]) @ w["down.kernel"]
        ),
    ),
}
NORMS = (
    "rms",
    "rms_plus_one",
    "rms_plain",
    "layer",
    "layer_plus_one",
    "layer_no_bias",
    "layer_plain",
)
EMBEDDINGS = {
    # An embedding has no float input; the factor is one.
    "embedding": Case(
        lambda rngs: VocabParallelEmbedding(V, D, rngs=rngs),
        lambda w, x: w["embedding"][IDS] * x,
        lambda layer, x: layer(IDS) * x,
    ),
    "exchanged embedding": Case(  # a large table and few tokens
        lambda rngs: VocabParallelEmbedding(LARGE_V, D, SPLIT, scale=3.0, rngs=rngs),
        lambda w, x: 3 * w["embedding"][LARGE_IDS] * x,
        lambda layer, x: layer(LARGE_IDS) * x,
    ),
}
LOSSES = {
    "logits": Case(
        lambda rngs: VocabParallelHead(V, D, rngs=rngs),
        lambda w, x: x @ w["kernel"].T,
        lambda head, x: vocab_parallel_logits(x, head.kernel[...], HeadConfig(V)),
    ),
    "loss": Case(
        lambda rngs: VocabParallelHead(V, D, rngs=rngs),
        lambda w, x: jnp.stack(reference.cross_entropy(x @ w["kernel"].T, LABELS)),
        loss_and_count,
    ),
    "biased loss": Case(
        lambda rngs: VocabParallelHead(V, D, use_bias=True, rngs=rngs),
        biased_loss_by_the_book,
        biased_loss,
    ),
}


def norm_by_the_book(kind, w, x, prefix="", shape=(-1,)):
    """A norm, with the weights that it has."""
    by = reference.layer_norm if kind.startswith("layer") else reference.rms_norm
    scale = w.get(f"{prefix}scale", jnp.ones(())) + kind.endswith("plus_one")
    return by(x, scale.reshape(shape) if scale.ndim else 1, 1e-3) + w.get(f"{prefix}bias", 0)


def norm_case(kind):
    config = NormConfig(norm=kind, norm_eps=1e-3)
    return Case(lambda rngs: Norm(D, config, SPLIT), lambda w, x: norm_by_the_book(kind, w, x))


TABLE = read_table(__file__)
ATTENTION = TABLE["attention"]


def heads_of(config, norm, w, q, k, v):
    """Returns queries, keys and values as a family computes them from their projections."""
    rotated = 12
    if config.rope_scaling.kind != "proportional":
        rotated *= config.rotary_fraction
    frequencies = reference.frequencies_of(int(rotated), 50.0)
    if config.rope_scaling.kind == "proportional":
        frequencies = jnp.where(jnp.arange(6) < 3, frequencies / config.rope_scaling.factor, 0)

    def normalised(i, x):
        if config.qk_norm == "none":
            return x
        kind = "rms_plain" if config.qk_norm == "head_plain" else norm
        shape = x.shape[-2:] if config.qk_norm == "heads" else (-1,)
        return norm_by_the_book(kind, w, x, f"qk_norms.{i}.", shape)

    def clipped(x):
        return x if config.clip_qkv is None else jnp.clip(x, -config.clip_qkv, config.clip_qkv)

    def prepared(i, x):
        if config.qk_norm_after_rope:
            return normalised(i, reference.rotate(clipped(x), frequencies))
        return reference.rotate(clipped(normalised(i, x)), frequencies)

    if config.value_norm:
        v = reference.rms_norm(v, 1, 1e-3)
    times = jnp.floor(jnp.arange(T) / config.rope_scaling.original_length)
    temperature = 1 + config.query_temperature * jnp.log(1 + times)
    return prepared(0, q) * temperature[:, None, None], prepared(1, k), clipped(v)


def attention_case(norm, settings):
    config = variant(AttentionConfig(**HEADS, rope_theta=50.0), settings)
    norms = NormConfig(norm=norm, norm_eps=1e-3)
    names = {**reference.ATTENTION, "gate": "qkv.kernels.3"}

    def attend(w, x):
        change = lambda *projections: heads_of(config, norm, w, *projections)
        return reference.attention(
            x, reference.named(w, names), *HEADS.values(), None, change=change
        )

    return Case(lambda rngs: CausalSelfAttention(D, config, SPLIT, norm=norms, rngs=rngs), attend)


CASES = {**LINEAR, **EMBEDDINGS, **LOSSES, **{f"norm {kind}": norm_case(kind) for kind in NORMS}}
CASES |= {f"attention of {name}": attention_case(*about) for name, about in ATTENTION.items()}
GROUPS = {
    "linear": [*LINEAR],
    "norms": [f"norm {kind}" for kind in NORMS],
    "embeddings": [*EMBEDDINGS],
    "losses": [*LOSSES],
    **{name: [name] for name in CASES if name.startswith("attention")},
}
"""Layers that one program computes."""


def build(group):
    return {name: CASES[name].build(nnx.Rngs(0)) for name in GROUPS[group]}


def with_gradients(function, weights, inputs):
    """Returns the outputs of layers, and the gradients of their product with fixed random
    numbers.
    """

    def scalar(weights, inputs):
        outputs = function(weights, inputs)
        random = default_rng(3)
        return sum(
            jnp.sum(y * random.standard_normal(y.shape).astype("f4")) for y in outputs.values()
        ), outputs

    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(weights, inputs)


def results(found, weights_by_name):
    (_, outputs), (grads, grad_inputs) = found
    return {
        **{f"{name}: output": y for name, y in outputs.items()},
        **{f"{name}: input": grad for name, grad in grad_inputs.items()},
        **weights_by_name(grads),
    }


@cache
def plain_mathematics(group):
    """Returns weights and inputs of layers, and their outputs and gradients as they should be."""
    weights = random_weights(lambda: build(group))
    inputs = {
        name: RANDOM.standard_normal(CASES[name].shape).astype("f4") for name in GROUPS[group]
    }

    def expected(weights, inputs):
        own = lambda name: {
            path.removeprefix(f"{name}."): a
            for path, a in weights.items()
            if path.startswith(name + ".")
        }
        return {name: CASES[name].reference(own(name), x) for name, x in inputs.items()}

    found = jax.jit(lambda weights, inputs: with_gradients(expected, weights, inputs))(
        weights, inputs
    )
    return weights, inputs, results(found, dict)


def on_mesh(group, mesh):
    weights, inputs, _ = plain_mathematics(group)
    on = mesh_by_size(*(mesh or (1, 1, 1)))
    make = lambda: build(group)
    graph, state = state_on_mesh(make, weights, on) if mesh else without_mesh(make, weights)

    def layers(state, inputs):
        modules = nnx.merge(graph, state)
        return {name: CASES[name].call(modules[name], x) for name, x in inputs.items()}

    with jax.set_mesh(on) if mesh else nullcontext():
        found = jax.jit(lambda state, inputs: with_gradients(layers, state, inputs))(state, inputs)
        return results(found, lambda grads: by_name(grads, on))


ON_ALL = ("embeddings", "losses")
"""With collectives of their own."""


def rotated_meshes():
    """Each group without a mesh and on one, and on all where it has collectives of its own; and
    padded heads.
    """
    pairs = []
    for place, group in enumerate(GROUPS):
        some = MESHES[1:] if group in ON_ALL else [MESHES[1 + 2 * place % 7]]
        padded = [(1, 1, 3)] if group.startswith("attention") else []
        pairs += [(group, mesh) for mesh in (None, *some, *padded)]
    return pairs


DEFAULT = [(group, (1, 2, 4)) for group in ("linear", "embeddings", "losses")]


@swept("case", [*dict.fromkeys([*DEFAULT, *rotated_meshes()])], *DEFAULT)
def test_layers_equal_plain_mathematics(case):
    group, mesh = case
    assert_close(on_mesh(group, mesh), plain_mathematics(group)[2])


KEY_BIASES = TABLE["key biases"]


@pytest.mark.wide
def test_a_key_bias_has_a_gradient_where_it_matters():
    """Without RoPE it adds the same to all scores of a query, unless the key's norm, cap or
    value depends on it.
    """
    x = RANDOM.standard_normal((B, 5, D)).astype("f4")

    def layer(settings):
        config = variant(AttentionConfig(**HEADS, rope_theta=2.0, attention_bias=True), settings)
        return CausalSelfAttention(D, config, rngs=nnx.Rngs(0))

    make = lambda: [layer(row["settings"]) for row in KEY_BIASES.values()]
    mesh = make_mesh(tp=4)
    graph, state = state_on_mesh(make, random_weights(make), mesh)
    loss = lambda state: sum(jnp.sum(layer(x) ** 2) for layer in nnx.merge(graph, state))
    with jax.set_mesh(mesh):
        grads = by_name(jax.jit(jax.grad(loss))(state), mesh)
    for i, (name, row) in enumerate(KEY_BIASES.items()):
        keys = grads[f"{i}.qkv.biases.1"].reshape(-1, 12) != 0
        assert keys.tolist() == [[place in row["trained"] for place in range(12)]] * 2, name
