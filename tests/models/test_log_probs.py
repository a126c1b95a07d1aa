"""Log-probabilities of a decoder's tokens on every mesh are those of a softmax over whole logits on
one device."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import assert_close, by_name, random_weights, relative_error, state_on_mesh, sweep, without_mesh
from variants import variant

import jaxtp
from jaxtp.config.schema import ConfigError

B, T, V, K = 4, 16, 29, 3
PLAIN = jaxtp.ModelConfig(
    vocab_size=V,
    d_model=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    d_ff=24,
    rope_theta=2.0,
    loss_chunk=6,
)
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "d_ff": 8}
DELTA = {"delta_value_heads": 4, "delta_key_heads": 2, "delta_key_dim": 4, "delta_value_dim": 5}
# Over cp 4 x tp 2 the order is zigzag; tp does not divide the vocabulary, chunks do not divide the
# tokens.
CASES = {
    "soft caps": ((1, 1, 4, 2), {"logit_softcap": 3.0}),
    "tied": ((2, 1, 2, 2), {"tie_embeddings": True}),
    "experts": ((1, 2, 1, 4), {"tie_embeddings": True, **EXPERTS}),
    "states": ((1, 1, 1, 2), {"head_bias": True, **DELTA}),
}
RANDOM = np.random.default_rng(1)
IDS, LABELS = RANDOM.integers(0, V, (2, B, T), np.int32)
TOP = RANDOM.integers(0, V, (B, T, K), np.int32)
LABELS[:, 5] = -100
TOP[:, 5:7] = -100
SEGMENTS = np.broadcast_to(np.repeat(np.array([1, 2, 3, 0], np.int32), 4), (B, T))


def build(config):
    return lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))


def objective(log_probs, entropy, of_top):
    return sum(jnp.sum(jnp.sin(each)) for each in (log_probs, entropy, of_top))


def dense(model):
    logits_BTV = model(IDS, SEGMENTS)
    warm_BTV, plain_BTV = (jax.nn.log_softmax(logits_BTV / temperature) for temperature in (1.3, 1.0))
    take = lambda labels: jnp.take_along_axis(plain_BTV, jnp.maximum(labels, 0), axis=-1)
    warm = jnp.take_along_axis(warm_BTV, jnp.maximum(LABELS, 0)[..., None], axis=-1)[..., 0]
    numbers = jnp.where(LABELS < 0, 0, warm), -jnp.sum(jnp.exp(warm_BTV) * warm_BTV, axis=-1)
    of_top = jnp.where(TOP < 0, 0, take(TOP))
    return objective(*numbers, of_top), (*numbers, of_top, *jax.lax.top_k(warm_BTV, K))


def ours(model):
    numbers = jaxtp.token_log_probs(model, IDS, LABELS, SEGMENTS, temperature=1.3, entropy=True)
    of_top = jaxtp.token_log_probs(model, IDS, TOP, SEGMENTS)
    return objective(*numbers, of_top), (
        *numbers,
        of_top,
        *jaxtp.top_log_probs(model, IDS, K, SEGMENTS, temperature=1.3),
    )


def numbers_and_gradients(fn, graph, state):
    run = lambda state: fn(nnx.merge(graph, state))
    (_, numbers), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(state)
    return numbers, grads


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_on_a_mesh(name):
    (dp, fsdp, cp, tp), changes = CASES[name]
    make = build(variant(PLAIN, changes))
    weights = random_weights(make)
    expected, expected_grads = numbers_and_gradients(dense, *without_mesh(make, weights))
    mesh = jaxtp.make_mesh(dp, fsdp, tp, cp=cp)
    with jax.set_mesh(mesh):
        found, grads = numbers_and_gradients(ours, *state_on_mesh(make, weights, mesh))
    assert max(map(relative_error, found, expected)) < 1e-5
    assert_close(by_name(grads, mesh), by_name(expected_grads, jaxtp.make_mesh()))


def test_log_probabilities_over_cp_and_a_split_vocabulary():
    """The numbers alone."""
    make = build(PLAIN)
    weights = random_weights(make)
    graph, state = without_mesh(make, weights)
    _, expected = jax.jit(lambda state: dense(nnx.merge(graph, state)))(state)
    mesh = jaxtp.make_mesh(tp=2, cp=2)
    with jax.set_mesh(mesh):
        graph, state = state_on_mesh(make, weights, mesh)
        _, found = jax.jit(lambda state: ours(nnx.merge(graph, state)))(state)
    assert max(map(relative_error, found, expected)) < 1e-5


ADAPTED = {
    "plain": {},
    "experts": {"shared_experts": 8, **EXPERTS},
    "latent": {"num_kv_heads": 4, "kv_rank": 4, "query_rank": 4, "rope_head_dim": 2, "value_head_dim": 3},
}


@pytest.mark.parametrize("name", sweep(ADAPTED, "plain"))
def test_a_model_without_adapters_is_its_base(name):
    """Inside a differentiated function, whose model keeps its adapters and gets no gradient through
    the base."""
    adapted, plain = (build(variant(PLAIN, {"lora": {"rank": rank}, **ADAPTED[name]})) for rank in (2, 0))
    weights = random_weights(adapted)
    base_graph, base = without_mesh(plain, {path: array for path, array in weights.items() if "lora" not in path})
    graph, adapters, frozen = nnx.split(nnx.merge(*without_mesh(adapted, weights)), nnx.LoRAParam, ...)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(adapters):
        model = nnx.merge(graph, adapters, frozen, copy=True)
        without = jaxtp.without_adapters(model)
        assert not jax.tree.leaves(nnx.state(without, nnx.LoRAParam))
        before = jax.tree.leaves(nnx.state(model))
        logits = without(IDS)
        assert all(map(operator.is_, before, jax.tree.leaves(nnx.state(model)))), "a scan returns its blocks' arrays"
        return jnp.sum(jnp.sin(logits)), (logits, model(IDS))

    grads, (without, adapted) = run(adapters)
    expected = jax.jit(lambda base: nnx.merge(base_graph, base)(IDS))(base)
    assert relative_error(without, expected) < 1e-6
    assert relative_error(adapted, expected) > 1e-2
    assert not any(np.asarray(grad).any() for grad in jax.tree.leaves(grads))


def test_a_temperature_of_zero_and_too_many_ids_are_refused():
    with pytest.raises(ConfigError, match="temperature=0"):
        jax.eval_shape(lambda: jaxtp.token_log_probs(build(PLAIN)(), IDS, LABELS, temperature=0))
    with pytest.raises(ConfigError, match=f"k={V + 1}: the vocabulary has {V} ids"):
        jax.eval_shape(lambda: jaxtp.top_log_probs(build(PLAIN)(), IDS, V + 1))
