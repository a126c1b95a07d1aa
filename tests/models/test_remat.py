"""What a block keeps for its backward pass: what the model of memory counts, and no weight that it
can gather again."""

from accounts import kept, kept_activations
from support import swept
from tables import read_table
from variants import small_model, variant

import jaxtp
from jaxtp.analysis.step_costs import step_costs
from jaxtp.mesh import mesh_shape

B = 2
T = 16
MODEL = small_model(
    d_model=32, num_heads=8, head_dim=8, d_ff=64, precision=jaxtp.Precision(compute="bfloat16")
)
ADAPTERS = [{}, {"rank": 4}, {"rank": 4, "targets": ["q_proj", "up_proj"]}]
MODELS = read_table(__file__)
POLICIES = ["full", "save_reduced", "save_gathered", "save_dots"]


def with_adapters(model, policies, **changes):
    """Yields configurations with each policy, and with all, no or few adapters in turn."""
    for index, policy in enumerate(policies):
        turn = (index + [*MODELS].index(model)) % len(ADAPTERS)
        lora = {} if model == "latent" and turn == 2 else ADAPTERS[turn]
        yield variant(MODEL, {"remat": policy, "lora": lora, **changes, **MODELS[model]})


@swept("model", MODELS, "sequential")
def test_a_block_keeps_the_activations_that_are_counted(model):
    for config in with_adapters(model, POLICIES):
        counted = step_costs(config, mesh_shape(), batch_size=B, sequence_length=T).saved
        assert kept_activations(config, B, T) == counted, (config.remat, config.lora)


@swept("model", ["sequential", "float8"])
def test_of_rings_a_device_keeps_its_part(model):
    tp = 4
    for config in with_adapters(model, POLICIES, num_kv_heads=4, overlap="ring"):
        counted = step_costs(config, mesh_shape(tp=tp), batch_size=B, sequence_length=T).saved
        assert kept_activations(config, B, T, tp) == tp * counted, (config.remat, config.lora)


@swept("model", ["sequential", "float8"], "sequential")
def test_weights_are_kept_as_they_are_stored(model):
    """In their own dtype: the result of a cast would be that of a gather too. (Integers are of
    rotary angles.)"""
    for config in with_adapters(model, ["none", *POLICIES]):
        weights = [array for array in kept(config, B, T) if array.ndim <= 2]
        assert {array.dtype.name for array in weights} - {"int32"} == {"float32"}, (
            config.remat,
            config.lora,
        )
