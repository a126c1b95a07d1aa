"""The decoder's layers and gradients, and configurations that are refused. (Its mathematics:
tests/hf/test_references.py.)"""

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import numpy as np
import pytest
from flax import nnx
from numpy.random import default_rng
from support import (
    assert_close,
    by_name,
    decoder,
    random_weights,
    use_mesh,
    without_mesh,
)
from tables import assert_errors, raised_by, read_table, with_tuples
from variants import variant

from jaxtp import Decoder, ModelConfig, Precision, make_mesh
from jaxtp.config.schema import ConfigError
from jaxtp.layers import DecoderBlock
from jaxtp.layers.remat import RematPolicy
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import stored_arrays

TABLE = read_table(__file__)
PLAIN = variant(ModelConfig(), TABLE["base"])
B = 4
T = 8


def test_a_layer_scale_is_stored_and_not_trained():
    arrays = stored_arrays(TrainConfig(model=replace(PLAIN, layer_scale=True)))
    found = [(each.name, each.shape, each.trained) for each in arrays if "layer_scale" in each.name]
    assert found == [("model.blocks.layer_scale", (2,), False)]


def test_the_residual_stream_may_be_in_float32():
    config = replace(PLAIN, precision=Precision(compute="bfloat16"))
    ids = np.zeros((B, T), np.int32)

    def stream(is_wide):
        model = Decoder(replace(config, residual_float32=is_wide), rngs=nnx.Rngs(0))
        return model.hidden(ids)

    found = [jax.eval_shape(partial(stream, is_wide)).dtype for is_wide in (False, True)]
    assert found == ["bfloat16", "float32"]


def test_norms_after_a_branch_may_have_another_epsilon():
    block = DecoderBlock(
        replace(PLAIN, norm_placement="both", norm_after_eps=1e-8), rngs=nnx.Rngs(0)
    )
    epsilons = [(before.eps, after.eps) for _, _, before, after in block.branches()]
    assert epsilons == [(PLAIN.norm_eps, 1e-8)] * 2


@pytest.mark.wide
def test_remat_changes_no_gradient():
    build = decoder(PLAIN)
    _, state = without_mesh(build, random_weights(build))
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
