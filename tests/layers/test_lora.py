"""An adapter adds `alpha / rank * A @ B` to its kernel, and begins as nothing."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import assert_close, decoder, outputs_of, random_weights, without_mesh
from tables import read_table
from variants import small_model

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.layers.lora import LoraConfig

CONFIG = small_model(vocab_size=19, head_dim=6)
ADAPTED = replace(CONFIG, lora=LoraConfig(rank=3, alpha=5.0))
PLACES = read_table(__file__)
IDS = jax.random.randint(jax.random.key(1), (2, 7), 0, CONFIG.vocab_size)


def logits(config, weights):
    return outputs_of(nnx.merge(*without_mesh(decoder(config), weights)), IDS)


@pytest.mark.wide
def test_an_adapter_is_what_it_adds_to_the_kernel():
    weights = random_weights(decoder(ADAPTED))
    merged = {name: array for name, array in weights.items() if "loras" not in name}
    for kernel, lora in PLACES.values():
        a, b = (np.asarray(weights[f"blocks.{lora}.{part}"]) for part in "ab")
        merged[f"blocks.{kernel}"] = merged[f"blocks.{kernel}"] + 5.0 / 3 * a @ b
    assert_close({"logits": logits(ADAPTED, weights)}, {"logits": logits(CONFIG, merged)})


def test_a_new_adapter_changes_nothing():
    """Its second factor is zero, and its first one is random."""
    for name, array in jax.jit(lambda: arrays_of(decoder(ADAPTED)()))().items():
        if name.endswith(".b"):
            assert not array.any()
        if name.endswith("down.loras.0.a"):
            assert np.abs(array).max() <= CONFIG.d_ff**-0.5
            assert array.std() > 0.1 * CONFIG.d_ff**-0.5


def arrays_of(model):
    return {name: variable[...] for name, variable in named_variables(nnx.state(model)).items()}


def test_only_the_targets_have_an_adapter():
    for target, (_, adapter) in PLACES.items():
        config = replace(CONFIG, lora=LoraConfig(rank=2, targets=(target,)))
        names = {
            name
            for name in named_variables(nnx.state(nnx.eval_shape(decoder(config))))
            if "loras" in name
        }
        # With one target its adapter is the first of its layer.
        layer = adapter.rpartition(".")[0]
        assert names == {f"blocks.{layer}.0.{part}" for part in "ab"}


@pytest.mark.wide
def test_an_optimizer_of_all_params_trains_the_adapters_alone():
    """With frozen weights that are an `nnx.Param` too, a plain NNX optimizer trained all of the
    model, silently.
    """
    model = jaxtp.add_adapters(decoder(CONFIG)(), LoraConfig(rank=3))
    before = {name: np.asarray(array) for name, array in arrays_of(model).items()}
    adapters = {name for name in before if "loras" in name}
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    gradient = nnx.jit(nnx.grad(lambda model: model.loss(IDS, IDS)[0]))
    for _ in range(2):  # the first update has no gradient of A: B is zero
        grads = gradient(model)
        assert named_variables(grads).keys() == adapters
        optimizer.update(model, grads)
    after = arrays_of(model)
    assert {name for name in after if (after[name] != before[name]).any()} == adapters

    merged = jaxtp.merge_adapters(model)
    assert {type(v) for v in named_variables(nnx.state(merged)).values()} == {nnx.Param}


@pytest.mark.parametrize("layer", [jaxtp.ColumnParallelLinear, jaxtp.RowParallelLinear])
def test_a_misspelt_keyword_of_a_layer_is_named(layer):
    with pytest.raises(TypeError, match="presicion"):
        layer(8, 8, presicion=jaxtp.Precision(), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="rngs"):
        layer(8, 8)
