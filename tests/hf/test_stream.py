"""Streamed weights are those of an exported folder, one at a time."""

import jax
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from safetensors.numpy import load_file
from support import sweep

import jaxtp

NAMES = {"llama_gqa": "llama", "mixtral": "mixtral", "qwen3_next": "qwen3_next", "gpt_oss": "gpt_oss"}


def adapted(name):
    """A model whose adapters are not zero."""
    model = jaxtp.add_adapters(jaxtp.load_hf(FOLDER / name), jaxtp.LoraConfig(rank=2))
    nnx.update(model, jax.tree.map(lambda array: array + 0.1, nnx.state(model, nnx.LoRAParam)))
    return model


@pytest.mark.parametrize("name", sweep([*NAMES], "llama_gqa"))
def test_they_equal_those_in_the_files(name, tmp_path):
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=2)):
        model = adapted(name)
        jaxtp.save_hf(jaxtp.merge_adapters(model), tmp_path / "out", family=NAMES[name])
        streamed = dict(jaxtp.stream_weights(model, family=NAMES[name]))
        one = next(jaxtp.stream_weights(model, family=NAMES[name], dtype="bfloat16"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert streamed.keys() == written.keys()
    for tensor, array in streamed.items():
        np.testing.assert_array_equal(array, written[tensor], err_msg=tensor)
    assert one[1].dtype == "bfloat16"


def test_a_device_holds_a_tensor_more_at_a_time():
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=2)):
        model = adapted("llama_gqa")
        before = live_bytes()
        more = [(live_bytes() - before, array.nbytes) for _, array in jaxtp.stream_weights(model)]
    assert max(each for each, _ in more) <= max(size for _, size in more)
    assert live_bytes() == before


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_model_of_no_family_is_refused_before_the_first_tensor():
    config = jaxtp.ModelConfig(num_layers=1, residual_scale=0.3, logit_softcap=3.0)
    with pytest.raises(jaxtp.HFError, match="no family can represent this model"):
        jaxtp.stream_weights(jaxtp.Decoder(config, rngs=nnx.Rngs(0)))
