import dataclasses
from contextlib import nullcontext
from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from support import assert_close, by_name, random_weights, state_on_mesh, sweep_of, without_mesh

import jaxtp
from jaxtp.config.schema import ConfigError
from jaxtp.layers.remat import RematPolicy
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import stored_arrays

PLAIN = jaxtp.ModelConfig(
    vocab_size=32, d_model=16, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=4, d_ff=24, norm_eps=1e-3
)
ODD = dataclasses.replace(
    PLAIN,
    vocab_size=19,
    num_kv_heads=2,
    head_dim=6,
    tie_embeddings=True,
    attention_bias=True,
    attention_out_bias=True,
    attention_sinks=True,
    mlp_bias=True,
    loss_chunk=3,
    remat="none",
)
PARALLEL = dataclasses.replace(
    ODD, norm_placement="parallel", logit_scale=0.3, head_bias=True, residual_scale=0.7, embedding_norm=True
)
MODELS = {
    "plain": PLAIN,
    "odd": ODD,
    "parallel": PARALLEL,
    "parallel, saved dots": dataclasses.replace(PARALLEL, remat="save_dots", tie_embeddings=False, dropout=0.1),
    "parallel, rings": dataclasses.replace(PARALLEL, overlap="ring", remat="save_gathered"),
    "parallel, two norms": dataclasses.replace(PARALLEL, norm_placement="parallel_two", scan_layers=False),
    "layer scale": dataclasses.replace(PLAIN, layer_scale=True, head_bias=True, num_kv_heads=1),
}
B, T = 4, 8


def build_and_weights(config):
    build = lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))
    weights = random_weights(build)
    if config.layer_scale:
        weights["blocks.layer_scale"] = jnp.array([0.5, 1.5, -2.0])
    return build, weights


@pytest.mark.parametrize(
    ("name", "mesh"),
    sweep_of([MODELS, [None, (1, 1, 4), (2, 2, 2), (1, 1, 3)]], ("parallel", (2, 2, 2)), ("layer scale", None)),
    ids=str,
)
def test_logits_loss_and_gradients_equal_the_plain_mathematics(name, mesh):
    config, mesh = MODELS[name], jaxtp.make_mesh(*mesh) if mesh else None
    build, weights = build_and_weights(config)
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, config.vocab_size)
    labels = jnp.roll(ids, -1, axis=1).at[:, -1].set(-100)

    def plain(weights):
        total, count = reference.cross_entropy(reference.decoder_logits(weights, config, ids), labels)
        return total / count

    def ours(state):
        total, count = nnx.merge(graph, state).loss(ids, labels)
        return total / count

    graph, state = state_on_mesh(build, weights, mesh) if mesh else without_mesh(build, weights)
    with jax.set_mesh(mesh) if mesh else nullcontext():
        loss, grads = jax.jit(jax.value_and_grad(ours))(state)
        logits = jax.jit(lambda state: nnx.merge(graph, state)(ids))(state)
        actual = by_name(grads, mesh or jaxtp.make_mesh())
    expected_loss, expected_grads = jax.jit(jax.value_and_grad(plain))(weights)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(actual, expected_grads)
    expected_logits = jax.jit(lambda weights: reference.decoder_logits(weights, config, ids))(weights)
    assert_close({"logits": logits}, {"logits": expected_logits})


def test_a_layer_scale_is_stored_and_not_trained():
    arrays = stored_arrays(TrainConfig(model=MODELS["layer scale"]))
    found = [(each.name, each.shape, each.trained) for each in arrays if "layer_scale" in each.name]
    assert found == [("model.blocks.layer_scale", (3,), False)]


def test_norms_after_a_branch_may_have_another_epsilon():
    block = jaxtp.DecoderBlock(dataclasses.replace(PLAIN, norm_placement="both", norm_after_eps=1e-8), rngs=nnx.Rngs(0))
    epsilons = [(before.eps, after.eps) for _, _, before, after in block.branches()]
    assert epsilons == [(PLAIN.norm_eps, 1e-8)] * 2


def test_no_position_sees_the_future():
    """The gradient of position t with respect to the embeddings after t is exactly zero."""
    build, weights = build_and_weights(PLAIN)
    graph, state = without_mesh(build, weights)
    model = nnx.merge(graph, state)
    first = jax.tree.map(lambda a: a[0], nnx.state(model.blocks))
    layer = nnx.merge(nnx.graphdef(model.blocks), first)
    x = jax.random.normal(jax.random.key(2), (1, T, PLAIN.d_model))
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x).sum(axis=-1)))(x)[0, :, 0]  # [T out, T in, D]
    influence = jnp.abs(jacobian).sum(axis=-1)
    assert jnp.all(jnp.triu(influence, k=1) == 0)
    assert jnp.all(jnp.diagonal(influence) > 0)


@cache
def plain_gradients():
    """Gradients of the loss by the plain mathematics, at the weights that every policy starts from."""
    _, weights = build_and_weights(PLAIN)
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, PLAIN.vocab_size)
    loss = lambda w: reference.cross_entropy(reference.decoder_logits(w, PLAIN, ids), ids)[0]
    return jax.jit(jax.grad(loss))(weights)


@pytest.mark.wide
@pytest.mark.parametrize("remat", get_args(RematPolicy))
def test_remat_changes_no_gradient(remat):
    config = dataclasses.replace(PLAIN, remat=remat)
    build, weights = build_and_weights(config)
    graph, state = without_mesh(build, weights)
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, config.vocab_size)
    grads = jax.jit(jax.grad(lambda s: nnx.merge(graph, s).loss(ids, ids)[0]))(state)
    assert_close({".".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(grads)}, plain_gradients())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 0}, "d_model = 0: should be greater"),
        ({"num_layers": -1}, "num_layers = -1"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by model.num_kv_heads=3; num_kv_heads can be 1, 2, 4"),
        ({"qk_norm": "rms"}, "qk_norm = 'rms'"),
        ({"attention": "flash"}, "attention = 'flash'"),
        ({"dropout": 1.5}, "dropout = 1.5"),
        ({"precision": "bfloat16"}, "precision = 'bfloat16'"),
        ({"precision": jaxtp.Precision(param="float64")}, "precision.param = 'float64'"),
        (
            {"attention": "cudnn", "pattern": ({"attention_softcap": 5.0}, {})},
            "attention=cudnn: it has no .*softcap; use auto .fused on cuda or blockwise or xla",
        ),
        ({"pattern": ({"sliding_windo": 4}, {})}, r"(?s)model.pattern\[0\].*sliding_windo.*did you mean"),
        ({"first_blocks": ({"norm": "batch"},)}, r"(?s)model.first_blocks\[0\]:.*norm = 'batch'"),
        ({"pattern": ((1, 2, 3),)}, "pattern"),
        ({"lora": jaxtp.LoraConfig(rank=-1)}, "lora.rank = -1"),
        ({"lora": jaxtp.LoraConfig(rank=2, targets=("query",))}, r"lora.targets.0 = 'query'"),
        (
            {"lora": jaxtp.LoraConfig(rank=2, targets=("kv_b_proj",))},
            "no block has kv_b_proj; it can be q_proj, k_proj",
        ),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused_in_python_too(changes, message):
    with pytest.raises(ConfigError, match=message):
        jaxtp.Decoder(dataclasses.replace(PLAIN, **changes), rngs=nnx.Rngs(0))


def test_a_sequence_beyond_the_learned_positions_is_refused():
    """JAX would take the last of them for all that come after."""
    model = jaxtp.Decoder(dataclasses.replace(PLAIN, learned_positions=4), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="a sequence of 5 tokens is longer than the 4 positions of the model"):
        model(np.zeros((1, 5), np.int32))


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="a Decoder takes a ModelConfig, not 'small'"):
        jaxtp.Decoder("small", rngs=nnx.Rngs(0))


def test_a_model_that_does_not_fit_the_mesh_is_refused_with_what_does():
    message = r"d_model=\d+ is not divisible by mesh.fsdp=7; fsdp can be 1, 2, 4"
    with jax.set_mesh(jaxtp.make_mesh(fsdp=7)), pytest.raises(ConfigError, match=message):
        jaxtp.Decoder(PLAIN, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("sizes", [{"cp": 3}, {"cp": 5, "tp": 2}, {"fsdp": 2, "cp": 3}], ids=str)
@pytest.mark.parametrize("changes", [{}, {"num_experts": 4, "d_ff": 10}, {"norm": "layer", "mlp": "plain"}], ids=str)
def test_a_width_that_context_parallelism_does_not_divide_is_refused_with_what_fits(sizes, changes):
    """The hints build the model's branches, for which the mesh in context is not the one that is asked about."""
    model = jaxtp.ModelConfig(d_model=64, num_layers=1, **changes)
    product = sizes["cp"] * sizes.get("fsdp", 1)
    nearest = f"or d_model {64 // product * product} or {-(-64 // product) * product}"
    with jax.set_mesh(jaxtp.make_mesh(**sizes)), pytest.raises(ConfigError, match=nearest):
        jaxtp.Decoder(model, rngs=nnx.Rngs(0))
