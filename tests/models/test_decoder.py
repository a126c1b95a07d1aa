"""The decoder against plain mathematics, and configurations that are refused."""

import dataclasses
from contextlib import nullcontext
from typing import get_args

import jax
import numpy as np
import pytest
import reference
from flax import nnx
from support import assert_close, by_name, random_weights, state_on_mesh, without_mesh
from variants import variants

import jaxtp
from jaxtp.config.schema import ConfigError
from jaxtp.layers.remat import RematPolicy
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import stored_arrays

PLAIN = jaxtp.ModelConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4, d_ff=24, norm_eps=1e-3
)
ODD = {
    "vocab_size": 19,
    "num_kv_heads": 2,
    "head_dim": 6,
    "tie_embeddings": True,
    "attention_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "mlp_bias": True,
    "loss_chunk": 3,
    "remat": "none",
}
PARALLEL = {
    **ODD,
    "norm_placement": "parallel",
    "logit_scale": 0.3,
    "head_bias": True,
    "residual_scale": 0.7,
    "embedding_norm": True,
}
MODELS = variants(
    PLAIN,
    {
        "plain": {},
        "odd": ODD,
        "parallel, layer scale": {**PARALLEL, "layer_scale": True},
        "parallel, saved dots": {**PARALLEL, "remat": "save_dots", "tie_embeddings": False, "dropout": 0.1},
        "parallel, rings": {**PARALLEL, "overlap": "ring", "remat": "save_gathered"},
        "parallel, two norms": {**PARALLEL, "norm_placement": "parallel_two", "scan_layers": False},
        "layer scale": {"num_layers": 1, "layer_scale": True, "head_bias": True, "num_kv_heads": 1},
    },
)
MESHES = {
    "plain": (1, 1, 3),
    "odd": (1, 1, 4),
    "parallel, layer scale": (2, 2, 2),
    "parallel, saved dots": None,
    "parallel, rings": (1, 1, 4),
    "parallel, two norms": (2, 2, 2),
    "layer scale": (1, 1, 2),
}
B, T = 4, 8


def build_and_weights(config):
    build = lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))
    weights = random_weights(build)
    if config.layer_scale:
        weights["blocks.layer_scale"] = np.array([-2.0, 0.5][: config.num_layers], np.float32)
    return build, weights


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "layer scale" else pytest.mark.wide) for name in MODELS]
)
def test_logits_loss_and_gradients_equal_the_plain_mathematics(name):
    config = MODELS[name]
    mesh = MESHES[name] and jaxtp.make_mesh(*MESHES[name])
    build, weights = build_and_weights(config)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (B, T), np.int32)
    labels = np.roll(ids, -1, axis=1)
    labels[:, -1] = -100

    @jax.jit
    def plain(weights):
        def loss(weights):
            logits = reference.decoder_logits(weights, config, ids)
            total, count = reference.cross_entropy(logits, labels)
            return total / count, logits

        return jax.value_and_grad(loss, has_aux=True)(weights)

    @jax.jit
    def ours(state):
        def loss(state):
            model = nnx.merge(graph, state)
            total, count = model.loss(ids, labels)
            return total / count, model(ids)

        return jax.value_and_grad(loss, has_aux=True)(state)

    graph, state = state_on_mesh(build, weights, mesh) if mesh else without_mesh(build, weights)
    with jax.set_mesh(mesh) if mesh else nullcontext():
        (loss, logits), gradients = ours(state)
        found = by_name(gradients, mesh or jaxtp.make_mesh())
    (expected_loss, expected_logits), expected = plain(weights)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(found, expected, tolerance=2e-5)
    assert_close({"logits": logits}, {"logits": expected_logits})


def test_a_layer_scale_is_stored_and_not_trained():
    arrays = stored_arrays(TrainConfig(model=MODELS["layer scale"]))
    found = [(each.name, each.shape, each.trained) for each in arrays if "layer_scale" in each.name]
    assert found == [("model.blocks.layer_scale", (1,), False)]


def test_norms_after_a_branch_may_have_another_epsilon():
    block = jaxtp.DecoderBlock(dataclasses.replace(PLAIN, norm_placement="both", norm_after_eps=1e-8), rngs=nnx.Rngs(0))
    epsilons = [(before.eps, after.eps) for _, _, before, after in block.branches()]
    assert epsilons == [(PLAIN.norm_eps, 1e-8)] * 2


@pytest.mark.wide
def test_remat_changes_no_gradient():
    build, weights = build_and_weights(PLAIN)
    _, state = without_mesh(build, weights)
    ids = np.random.default_rng(1).integers(0, PLAIN.vocab_size, (B, T), np.int32)

    def gradients(policy, state):
        config = dataclasses.replace(PLAIN, remat=policy)
        graph = nnx.graphdef(nnx.eval_shape(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))))
        return jax.grad(lambda state: nnx.merge(graph, state).loss(ids, ids)[0])(state)

    every = jax.jit(lambda state: {policy: gradients(policy, state) for policy in get_args(RematPolicy)})(state)
    found = {policy: by_name(each, jaxtp.make_mesh()) for policy, each in every.items()}
    for each in found.values():
        assert_close(each, found["none"])


REFUSED = [
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
    ({"lora": jaxtp.LoraConfig(rank=2, targets=("kv_b_proj",))}, "no block has kv_b_proj; it can be q_proj, k_proj"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_a_configuration_that_cannot_be_is_refused_in_python_too(changes, message):
    with pytest.raises(ConfigError, match=message):
        jaxtp.Decoder(dataclasses.replace(PLAIN, **changes), rngs=nnx.Rngs(0))


def test_a_sequence_beyond_the_learned_positions_is_refused():
    """JAX would take the last of them for all that come after."""
    config = dataclasses.replace(PLAIN, learned_positions=4)
    with pytest.raises(ConfigError, match=r"5 tokens .* 4 positions"):
        jax.eval_shape(lambda ids: jaxtp.Decoder(config, rngs=nnx.Rngs(0))(ids), np.zeros((1, 5), np.int32))


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="a Decoder takes a ModelConfig, not 'small'"):
        jaxtp.Decoder("small", rngs=nnx.Rngs(0))


def test_a_width_that_the_mesh_does_not_divide_is_refused_with_what_fits():
    """The hints build the model's branches, for which the mesh in context is not the one that is
    asked about."""
    with jax.set_mesh(jaxtp.make_mesh(fsdp=7)), pytest.raises(ConfigError, match="fsdp=7; fsdp can be 1, 2, 4"):
        jaxtp.Decoder(PLAIN, rngs=nnx.Rngs(0))
    for sizes, product, changes in (
        ({"cp": 3}, 3, {}),
        ({"cp": 5, "tp": 2}, 5, {"num_experts": 4, "d_ff": 10}),
        ({"fsdp": 2, "cp": 3}, 6, {"norm": "layer", "mlp": "plain"}),
    ):
        model = jaxtp.ModelConfig(d_model=64, num_layers=1, **changes)
        nearest = f"or d_model {64 // product * product} or {-(-64 // product) * product}"
        with jax.set_mesh(jaxtp.make_mesh(**sizes)), pytest.raises(ConfigError, match=nearest):
            jaxtp.Decoder(model, rngs=nnx.Rngs(0))
