"""Streamed weights are those of an exported folder, one at a time."""

import jax
import pytest
from flax import nnx
from hf_folders import assert_same, move_adapters, random_model, read_tensors
from hf_reference import FOLDER
from support import decoder, swept, use_mesh
from variants import small_model

import jaxtp
from jaxtp import hf

NAMES = ["mixtral", "qwen3_next", "gpt_oss"]
"""Models, which are of families of the same names; and a Llama."""
LLAMA = small_model(num_layers=2)


def adapted(name):
    model = random_model(LLAMA) if name == "llama" else hf.load(FOLDER / name)
    return move_adapters(
        jaxtp.add_adapters(
            model, jaxtp.LoraConfig(rank=2, targets=("q_proj", "o_proj", "down_proj"))
        )
    )


@swept("name", ["llama", *NAMES], "llama")
def test_streamed_weights_equal_those_in_the_files(name, tmp_path):
    with use_mesh(fsdp=2, tp=2):
        model = adapted(name)
        hf.save(jaxtp.merge_adapters(model), tmp_path / "out", family=name)
        streamed = dict(hf.stream_weights(model, family=name))
        _, rounded = next(hf.stream_weights(model, family=name, dtype="bfloat16"))
    assert_same(streamed, read_tensors(tmp_path / "out"))
    assert rounded.dtype == "bfloat16"


def test_a_device_holds_one_tensor_more_at_a_time():
    with use_mesh(fsdp=2, tp=2):
        model = adapted("llama")
        before = live_bytes()
        more = [(live_bytes() - before, array.nbytes) for _, array in hf.stream_weights(model)]
    assert max(each for each, _ in more) <= max(size for _, size in more)
    assert live_bytes() == before


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_model_of_no_family_is_refused_before_the_first_tensor():
    config = jaxtp.ModelConfig(num_layers=1, d_model=16, residual_scale=0.3, logit_softcap=3.0)
    abstract = nnx.eval_shape(decoder(config))
    with pytest.raises(jaxtp.errors.HFError, match="no family can represent this model"):
        hf.stream_weights(abstract)
