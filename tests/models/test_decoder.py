"""The decoder against plain mathematics, and configurations that are refused."""

from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from numpy.random import default_rng
from support import (
    assert_close,
    by_name,
    decoder,
    mesh_by_size,
    random_weights,
    state_on_mesh,
    swept,
    use_mesh,
    without_mesh,
)
from tables import assert_errors, raised_by, read_table, with_tuples
from variants import variant, variants

from jaxtp import ModelConfig, make_mesh
from jaxtp.config.schema import ConfigError
from jaxtp.layers import DecoderBlock
from jaxtp.layers.remat import RematPolicy
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import stored_arrays

TABLE = read_table(__file__)
PLAIN = variant(ModelConfig(), TABLE["base"])
MODELS = variants(PLAIN, TABLE["models"])
B = 4
T = 8


def build_and_weights(config):
    build = decoder(config)
    weights = random_weights(build)
    if config.layer_scale:
        weights["blocks.layer_scale"] = np.array([-2.0, 0.5][: config.num_layers], np.float32)
    return build, weights


@swept("name", MODELS, "layer scale")
def test_logits_loss_and_gradients_equal_the_plain_mathematics(name):
    config = MODELS[name]
    mesh = mesh_by_size(*TABLE["meshes"][name])
    build, weights = build_and_weights(config)
    ids = default_rng(1).integers(0, config.vocab_size, (B, T), np.int32)
    labels = np.roll(ids, -1, axis=1)
    labels[:, -1] = -100

    def plain(weights):
        logits = reference.decoder_logits(weights, config, ids)
        total, count = reference.cross_entropy(logits, labels)
        return total / count, logits

    def ours(state):
        model = nnx.merge(graph, state)
        total, count = model.loss(ids, labels)
        return total / count, model(ids)

    graph, state = state_on_mesh(build, weights, mesh)
    with jax.set_mesh(mesh):
        (loss, logits), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(state)
        found = {"loss": loss, "logits": logits, **by_name(gradients, mesh)}
    with jax.enable_x64(True):
        wide = {path: jnp.asarray(array, "float64") for path, array in weights.items()}
        (loss, logits), gradients = jax.jit(jax.value_and_grad(plain, has_aux=True))(wide)
    assert_close(found, {"loss": loss, "logits": logits, **gradients})


def test_a_layer_scale_is_stored_and_not_trained():
    arrays = stored_arrays(TrainConfig(model=MODELS["layer scale"]))
    found = [(each.name, each.shape, each.trained) for each in arrays if "layer_scale" in each.name]
    assert found == [("model.blocks.layer_scale", (1,), False)]


def test_norms_after_a_branch_may_have_another_epsilon():
    block = DecoderBlock(
        replace(PLAIN, norm_placement="both", norm_after_eps=1e-8), rngs=nnx.Rngs(0)
    )
    epsilons = [(before.eps, after.eps) for _, _, before, after in block.branches()]
    assert epsilons == [(PLAIN.norm_eps, 1e-8)] * 2


@pytest.mark.wide
def test_remat_changes_no_gradient():
    build, weights = build_and_weights(PLAIN)
    _, state = without_mesh(build, weights)
    ids = default_rng(1).integers(0, PLAIN.vocab_size, (B, T), np.int32)

    def gradients(policy, state):
        graph = nnx.graphdef(nnx.eval_shape(decoder(replace(PLAIN, remat=policy))))
        return jax.grad(lambda state: nnx.merge(graph, state).loss(ids, ids)[0])(state)

    every = jax.jit(
        lambda state: {policy: gradients(policy, state) for policy in get_args(RematPolicy)}
    )(state)
    found = {policy: by_name(each, make_mesh()) for policy, each in every.items()}
    for each in found.values():
        assert_close(each, found["none"])


def test_a_configuration_that_cannot_be_is_refused_in_python_too():
    def error_of(row):
        return raised_by(
            lambda: decoder(replace(PLAIN, **with_tuples(row["model"])))(), kind=ConfigError
        )

    assert_errors(TABLE["refused"], error_of)


def test_a_sequence_beyond_the_learned_positions_is_refused():
    """JAX would take the last of them for all that come after."""
    config = replace(PLAIN, learned_positions=4)
    with pytest.raises(ConfigError, match=r"5 tokens .* 4 positions"):
        jax.eval_shape(lambda ids: decoder(config)()(ids), np.zeros((1, 5), np.int32))


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="a Decoder takes a ModelConfig, not 'small'"):
        decoder("small")()


def test_a_width_that_the_mesh_does_not_divide_is_refused_with_what_fits():
    """The hints build the model's branches, for which the mesh in context is not the one that is
    asked about."""
    with (
        use_mesh(fsdp=7),
        pytest.raises(ConfigError, match="fsdp=7; fsdp can be 1, 2, 4"),
    ):
        decoder(PLAIN)()
    for sizes, product, changes in TABLE["widths"]:
        model = ModelConfig(d_model=64, num_layers=1, **changes)
        nearest = f"or d_model {64 // product * product} or {-(-64 // product) * product}"
        with use_mesh(**sizes), pytest.raises(ConfigError, match=nearest):
            decoder(model)()
