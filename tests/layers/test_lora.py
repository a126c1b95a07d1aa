"""An adapter adds `alpha / rank * A @ B` to its kernel, and begins as nothing."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import assert_close, random_weights, without_mesh

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.config.schema import ConfigError
from jaxtp.layers.lora import LoraConfig

CONFIG = jaxtp.ModelConfig(vocab_size=19, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=24)
ADAPTED = dataclasses.replace(CONFIG, lora=LoraConfig(rank=3, alpha=5.0))
PLACES = {  # by target: the kernel, and the adapter beside it
    "q_proj": ("attention.qkv.kernels.0", "attention.qkv.loras.0"),
    "k_proj": ("attention.qkv.kernels.1", "attention.qkv.loras.1"),
    "v_proj": ("attention.qkv.kernels.2", "attention.qkv.loras.2"),
    "o_proj": ("attention.out.kernel", "attention.out.loras.0"),
    "gate_proj": ("mlp.gate_up.kernels.0", "mlp.gate_up.loras.0"),
    "up_proj": ("mlp.gate_up.kernels.1", "mlp.gate_up.loras.1"),
    "down_proj": ("mlp.down.kernel", "mlp.down.loras.0"),
}
IDS = jax.random.randint(jax.random.key(1), (2, 7), 0, CONFIG.vocab_size)


def build(config):
    return lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))


def logits(config, weights):
    graph, state = without_mesh(build(config), weights)
    return jax.jit(lambda state: nnx.merge(graph, state)(IDS))(state)


def test_an_adapter_is_what_it_adds_to_the_kernel():
    weights = random_weights(build(ADAPTED))
    merged = {name: array for name, array in weights.items() if "loras" not in name}
    for kernel, lora in PLACES.values():
        a, b = (np.asarray(weights[f"blocks.{lora}.{part}"]) for part in "ab")
        merged[f"blocks.{kernel}"] = merged[f"blocks.{kernel}"] + 5.0 / 3 * a @ b
    assert_close({"logits": logits(ADAPTED, weights)}, {"logits": logits(CONFIG, merged)})


def test_a_new_adapter_changes_nothing():
    plain, adapted = build(CONFIG)(), build(ADAPTED)()
    state = nnx.state(adapted)
    nnx.update(adapted, nnx.merge_state(state, nnx.state(plain)))
    np.testing.assert_array_equal(plain(IDS), adapted(IDS))
    a = nnx.state(adapted, nnx.LoRAParam)["blocks"]["mlp"]["down"]["loras"][0]["a"][...]
    assert np.abs(a).max() <= CONFIG.d_ff**-0.5
    assert a.std() > 0.1 * CONFIG.d_ff**-0.5


def test_only_the_targets_have_one():
    for target in PLACES:
        config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2, targets=(target,)))
        names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(build(config)(), nnx.LoRAParam))}
        # With one target its adapter is the first of its layer.
        layer = PLACES[target][1].rpartition(".")[0]
        assert names == {f"blocks.{layer}.0.{part}" for part in "ab"}


@pytest.mark.wide
def test_what_trains_each_param_trains_the_adapters_alone():
    """With frozen weights that are an `nnx.Param` too, a plain NNX optimizer trained all of the model, silently."""
    model = jaxtp.add_adapters(build(CONFIG)(), LoraConfig(rank=3))
    before = {name: np.asarray(variable[...]) for name, variable in named_variables(nnx.state(model)).items()}
    adapters = {name for name in before if "loras" in name}
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    moments = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(optimizer.opt_state)) if leaf.size > 1)
    assert moments == 2 * sum(before[name].size for name in adapters)

    grads = nnx.grad(lambda model: model.loss(IDS, IDS)[0])(model)
    assert named_variables(grads).keys() == adapters
    optimizer.update(model, grads)
    optimizer.update(model, nnx.grad(lambda model: model.loss(IDS, IDS)[0])(model))
    after = named_variables(nnx.state(model))
    assert {name for name in after if (np.asarray(after[name][...]) != before[name]).any()} == adapters
    assert {type(after[name]) for name in after} == {nnx.LoRAParam, jaxtp.FrozenParam}

    nnx.update(model, jax.tree.map(lambda a: 0 * a, nnx.state(model, nnx.LoRAParam)))
    merged = jaxtp.merge_adapters(model)
    assert {type(v) for v in named_variables(nnx.state(merged)).values()} == {nnx.Param}


@pytest.mark.parametrize("layer", [jaxtp.ColumnParallelLinear, jaxtp.RowParallelLinear])
def test_a_keyword_that_no_layer_takes_is_an_error(layer):
    with pytest.raises(TypeError, match="unexpected keyword argument 'presicion'"):
        layer(8, 8, presicion=jaxtp.Precision(), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'rngs'"):
        layer(8, 8)


def test_experts_refuse_adapters():
    config = jaxtp.ModelConfig(num_experts=4, experts_per_token=2)
    with pytest.raises(ConfigError, match="experts have no adapters"):
        jaxtp.MixtureOfExperts(8, config, jaxtp.LayerContext(lora=LoraConfig(rank=2)), rngs=nnx.Rngs(0))
