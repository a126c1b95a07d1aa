"""Log-probabilities of a decoder's tokens on every mesh are those of a softmax over whole logits on
one device."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.random import default_rng
from support import (
    assert_close,
    by_name,
    decoder,
    random_weights,
    relative_error,
    sizes_of,
    state_on_mesh,
    swept,
    without_mesh,
)
from tables import read_table
from variants import variant

import jaxtp
from jaxtp.config.schema import ConfigError
from jaxtp.losses import token_log_probs, top_log_probs
from jaxtp.mesh import mesh_of

B = 4
T = 16
V = 29
K = 3
TABLE = read_table(__file__)
PLAIN = variant(jaxtp.ModelConfig(vocab_size=V), TABLE["base"])
CASES = TABLE["cases"]
RANDOM = default_rng(1)
IDS, LABELS = RANDOM.integers(0, V, (2, B, T), np.int32)
TOP = RANDOM.integers(0, V, (B, T, K), np.int32)
LABELS[:, 5] = -100
TOP[:, 5:7] = -100
SEGMENTS = np.broadcast_to(np.repeat(np.array([1, 2, 3, 0], np.int32), 4), (B, T))


def expected(model):
    warm_BTV, plain_BTV = (
        jax.nn.log_softmax(model(IDS, segments=SEGMENTS) / temperature)
        for temperature in (1.3, 1.0)
    )
    of_labels = jnp.take_along_axis(warm_BTV, jnp.maximum(LABELS, 0)[..., None], axis=-1)[..., 0]
    of_top = jnp.take_along_axis(plain_BTV, jnp.maximum(TOP, 0), axis=-1)
    entropy = -jnp.sum(jnp.exp(warm_BTV) * warm_BTV, axis=-1)
    given = jnp.where(LABELS < 0, 0, of_labels), entropy, jnp.where(TOP < 0, 0, of_top)
    return *given, *jax.lax.top_k(warm_BTV, K)


def found(model):
    log_probs, entropy = token_log_probs(
        model, IDS, LABELS, segments=SEGMENTS, temperature=1.3, entropy=True
    )
    of_top = token_log_probs(model, IDS, TOP, segments=SEGMENTS)
    return (
        log_probs,
        entropy,
        of_top,
        *top_log_probs(model, IDS, K, segments=SEGMENTS, temperature=1.3),
    )


def with_gradients(numbers, graph, state):
    def scalar(state):
        results = numbers(nnx.merge(graph, state))
        return sum(jnp.sum(jnp.sin(each)) for each in results[:3]), results

    grads, results = jax.jit(jax.grad(scalar, has_aux=True))(state)
    return results, grads


@swept("name", CASES)
def test_log_probabilities_and_their_gradients(name):
    make = decoder(variant(PLAIN, CASES[name]["model"]))
    weights = random_weights(make)
    right, right_grads = with_gradients(expected, *without_mesh(make, weights))
    mesh = mesh_of(sizes_of(CASES[name]["mesh"]))
    with jax.set_mesh(mesh):
        numbers, grads = with_gradients(found, *state_on_mesh(make, weights, mesh))
    assert max(map(relative_error, numbers, right)) < 1e-5
    assert_close(by_name(grads, mesh), by_name(right_grads, jaxtp.make_mesh()))


@swept("name", TABLE["adapted"], "plain")
def test_a_model_without_adapters_is_its_base(name):
    """Inside a differentiated function, whose model keeps its adapters and gets no gradient
    through the base.
    """
    adapted, plain = (
        decoder(variant(PLAIN, {"lora": {"rank": rank}, **TABLE["adapted"][name]}))
        for rank in (2, 0)
    )
    weights = random_weights(adapted)
    base_graph, base = without_mesh(
        plain, {path: array for path, array in weights.items() if "lora" not in path}
    )
    graph, adapters, frozen = nnx.split(
        nnx.merge(*without_mesh(adapted, weights)), nnx.LoRAParam, ...
    )

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(adapters):
        model = nnx.merge(graph, adapters, frozen, copy=True)
        before = jax.tree.leaves(nnx.state(model))
        logits = jaxtp.without_adapters(model)(IDS)
        assert all(map(operator.is_, before, jax.tree.leaves(nnx.state(model)))), (
            "a scan returns its blocks' arrays"
        )
        return jnp.sum(jnp.sin(logits)), (logits, model(IDS))

    grads, (without, with_them) = run(adapters)
    right = jax.jit(lambda base: nnx.merge(base_graph, base)(IDS))(base)
    assert relative_error(without, right) < 1e-6
    assert relative_error(with_them, right) > 1e-2
    assert not any(np.asarray(grad).any() for grad in jax.tree.leaves(grads))


def test_a_temperature_of_zero_and_too_many_ids_are_refused():
    with pytest.raises(ConfigError, match="temperature=0"):
        jax.eval_shape(lambda: token_log_probs(decoder(PLAIN)(), IDS, LABELS, temperature=0))
    with pytest.raises(ConfigError, match=f"k={V + 1}: the vocabulary has {V} ids"):
        jax.eval_shape(lambda: top_log_probs(decoder(PLAIN)(), IDS, V + 1))
