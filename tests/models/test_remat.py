"""What a block keeps for its backward pass: what the model of memory counts, and no weight that it can gather again."""

import dataclasses

import pytest
from accounts import kept, kept_activations
from support import sweep_of

import jaxtp
from jaxtp.analysis.step_costs import step_costs
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_shape

B, T = 2, 16
MODEL = jaxtp.ModelConfig(
    vocab_size=61,
    d_model=32,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    precision=jaxtp.Precision(compute="bfloat16"),
)
ADAPTERS = {
    "plain": LoraConfig(),
    "adapters": LoraConfig(rank=4),
    "few adapters": LoraConfig(rank=4, targets=("q_proj", "up_proj")),
}
MODELS = {"sequential": {}, "parallel": {"norm_placement": "parallel", "residual_scale": 0.5, "mlp_bias": True}}
MODELS["float8"] = {"precision": dataclasses.replace(MODEL.precision, matmul="float8", matmul_least=16)}
MODELS["parallel, two norms"] = {"norm_placement": "parallel_two", "layer_scale": True}
POLICIES = ["full", "save_reduced", "save_gathered", "save_dots"]


@pytest.mark.parametrize(
    ("adapters", "policy", "model"),
    sweep_of(
        [ADAPTERS, POLICIES, MODELS],
        ("plain", "save_reduced", "sequential"),
        ("adapters", "save_dots", "parallel"),
        ("few adapters", "full", "sequential"),
        ("adapters", "save_gathered", "float8"),
    ),
)
def test_a_block_keeps_the_activations_that_are_counted(policy, adapters, model):
    config = dataclasses.replace(MODEL, remat=policy, lora=ADAPTERS[adapters], **MODELS[model])
    assert kept_activations(config, B, T) == step_costs(config, mesh_shape(), batch_size=B, sequence_length=T).kept


@pytest.mark.parametrize(
    ("adapters", "policy", "model"),
    sweep_of(
        [ADAPTERS, POLICIES, ["sequential", "float8"]],
        ("plain", "save_gathered", "float8"),
        ("few adapters", "save_reduced", "sequential"),
    ),
)
def test_of_rings_no_more_than_a_device_s_part_is_kept(policy, adapters, model):
    tp, ring = 4, {"num_kv_heads": 4, "overlap": "ring"}
    config = dataclasses.replace(MODEL, remat=policy, lora=ADAPTERS[adapters], **ring, **MODELS[model])
    costs = step_costs(config, mesh_shape(tp=tp), batch_size=B, sequence_length=T)
    assert kept_activations(config, B, T, tp) == tp * costs.kept


@pytest.mark.parametrize(
    ("adapters", "policy", "model"),
    sweep_of(
        [ADAPTERS, ["none", *POLICIES], ["sequential", "float8"]],
        ("few adapters", "none", "sequential"),
        ("adapters", "save_dots", "sequential"),
        ("plain", "none", "float8"),
    ),
)
def test_weights_are_kept_as_they_are_stored(policy, adapters, model):
    """In their own dtype: the result of a cast would be that of a gather too. (Integers are of rotary angles.)"""
    config = dataclasses.replace(MODEL, remat=policy, lora=ADAPTERS[adapters], **MODELS[model])
    weights = [array for array in kept(config, B, T) if array.ndim <= 2]
    assert {array.dtype.name for array in weights} - {"int32"} == {"float32"}
