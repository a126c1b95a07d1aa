"""Log-probabilities of a decoder's tokens on every mesh are those of a softmax over whole logits on one device."""

import dataclasses
import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import assert_close, by_name, random_weights, relative_error, state_on_mesh, sweep, sweep_of, without_mesh

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.config.schema import ConfigError
from jaxtp.layers.lora import LoraConfig

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
CONFIGS = {
    "plain": dataclasses.replace(PLAIN, logit_softcap=3.0),
    "experts": dataclasses.replace(PLAIN, tie_embeddings=True, **EXPERTS),
    "delta": dataclasses.replace(
        PLAIN, delta_value_heads=4, delta_key_heads=2, delta_key_dim=4, delta_value_dim=5, head_bias=True
    ),
}
MESHES = [(1, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 4), (1, 1, 4, 2), (2, 1, 2, 2)]
IDS, LABELS, *_ = jax.random.randint(jax.random.key(1), (2, B, T), 0, V)
LABELS = LABELS.at[:, 5].set(-100)
TOP = jax.random.randint(jax.random.key(2), (B, T, K), 0, V).at[:, 5:7].set(-100)
SEGMENTS = jnp.broadcast_to(jnp.repeat(jnp.array([1, 2, 3, 0]), 4), (B, T))


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


@pytest.mark.parametrize(("name", "mesh"), sweep_of([CONFIGS, MESHES], ("plain", (1, 1, 4, 2))), ids=str)
def test_log_probabilities_on_a_mesh(name, mesh):
    """Over cp 4 x tp 2 the order is zigzag; tp does not divide the vocabulary, chunks do not divide the tokens."""
    config = CONFIGS[name]
    weights = random_weights(build(config))
    expected, expected_grads = numbers_and_gradients(dense, *without_mesh(build(config), weights))
    on_mesh = jaxtp.make_mesh(*mesh[:2], mesh[3], cp=mesh[2])
    with jax.set_mesh(on_mesh):
        found, grads = numbers_and_gradients(ours, *state_on_mesh(build(config), weights, on_mesh))
    assert max(map(relative_error, found, expected)) < 1e-5
    expected_grads = {name: variable[...] for name, variable in named_variables(expected_grads).items()}
    assert_close(by_name(grads, on_mesh), expected_grads)


ADAPTED = {
    "plain": dataclasses.replace(PLAIN, lora=LoraConfig(rank=2)),
    "experts": dataclasses.replace(PLAIN, shared_experts=8, lora=LoraConfig(rank=2), **EXPERTS),
    "latent": dataclasses.replace(
        PLAIN, num_kv_heads=4, kv_rank=4, query_rank=4, rope_head_dim=2, value_head_dim=3, lora=LoraConfig(rank=2)
    ),
}


@pytest.mark.parametrize("name", sweep([*ADAPTED], "experts"))
def test_a_model_without_adapters_is_its_base(name):
    """Inside a differentiated function, whose model keeps its adapters and gets no gradient through the base."""
    weights = random_weights(build(ADAPTED[name]))
    base = {path: array for path, array in weights.items() if "lora" not in path}
    plain = dataclasses.replace(ADAPTED[name], lora=LoraConfig())
    expected = nnx.merge(*without_mesh(build(plain), base))(IDS)
    graph, adapters, frozen = nnx.split(nnx.merge(*without_mesh(build(ADAPTED[name]), weights)), nnx.LoRAParam, ...)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(adapters):
        model = nnx.merge(graph, adapters, frozen, copy=True)
        without = jaxtp.without_adapters(model)
        assert not jax.tree.leaves(nnx.state(without, nnx.LoRAParam))
        before, logits = jax.tree.leaves(nnx.state(model)), without(IDS)
        assert all(map(operator.is_, before, jax.tree.leaves(nnx.state(model)))), "a scan returns its blocks' arrays"
        return jnp.sum(jnp.sin(logits)), (logits, model(IDS))

    grads, (without, adapted) = run(adapters)
    assert relative_error(without, expected) < 1e-6
    assert relative_error(adapted, expected) > 1e-2
    assert not any(np.asarray(grad).any() for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda model: jaxtp.token_log_probs(model, IDS, LABELS, temperature=0),
            "temperature=0: it divides the logits",
        ),
        (lambda model: jaxtp.top_log_probs(model, IDS, V + 1), f"k={V + 1}: the vocabulary has {V} ids"),
    ],
    ids=["temperature", "k"],
)
def test_mistakes_are_named(read, message):
    with pytest.raises(ConfigError, match=message):
        read(build(PLAIN)())
