"""Models and adapters that other systems read wrong: what is missing, left over, in another
order or not scaled.
"""

import shutil
from functools import cache

import hf_reference
import numpy as np
import pytest
from flax import nnx
from hf_folders import (
    assert_same,
    read_tensors,
    reference_attributes,
    stored_tensors,
    values,
    write_model,
    write_tensors,
)
from hf_reference import FOLDER
from numpy.random import default_rng
from numpy.testing import assert_allclose
from support import outputs_of
from tables import read_json, write_json

import jaxtp
from jaxtp import hf
from jaxtp.checkpoint.logical import named_variables, replace_arrays
from jaxtp.errors import HFError
from jaxtp.hf.model_folder import INDEX
from jaxtp.hf.safetensors import read_header

LLAMA = "llama31_rope"
TIED = "llama_tied_bias"
EXPERTS = "qwen3_moe"
WRONG = 1e-2


def stored(name):
    return read_tensors(FOLDER / name)


def changed(folder, name, arrays=None, **attributes):
    """A copy of a model with other tensors or attributes."""
    arrays = stored(name) if arrays is None else arrays
    return write_model(folder, reference_attributes(name) | attributes, arrays)


@cache
def loaded():
    return hf.load(FOLDER / LLAMA)


def logits_error(model):
    """How far logits are from those of transformers, in float64, in relation to the largest."""
    reference = hf_reference.load(LLAMA)
    found = outputs_of(model, reference["input_ids"].astype(np.int32))
    return np.abs(np.asarray(found) - reference["logits"]).max() / np.abs(reference["logits"]).max()


def test_aidotnet_2074_queries_and_keys_are_in_the_order_of_their_rotation():
    """https://github.com/ooples/AiDotNet/pull/2074: Hugging Face's Llama rotates pairs of dims half
    a head apart, and the importer took neighbours for pairs, so that logits were wrong without a
    word. Here they are those of transformers.
    """
    graph, state = nnx.split(loaded())
    assert logits_error(loaded()) < 1e-5
    arrays = {path: v[...] for path, v in named_variables(state).items()}
    config = loaded().config
    for index, heads in ((0, config.num_heads), (1, config.num_kv_heads)):
        path = f"blocks.attention.qkv.kernels.{index}"
        halves = arrays[path].reshape(*arrays[path].shape[:2], heads, 2, -1)
        arrays[path] = halves.swapaxes(-1, -2).reshape(arrays[path].shape)
    neighbours = nnx.merge(graph, replace_arrays(state, arrays))
    assert logits_error(neighbours) > WRONG, "as if neighbours were pairs"


def test_mlx_vlm_1710_the_scaling_of_rotary_frequencies_is_applied(tmp_path):
    """https://github.com/Blaizzy/mlx-vlm/pull/1710: ten models declared a scaling in their
    configuration and rotated without it, which short prompts do not show. Here it is applied, and
    one that is not known is refused.
    """
    assert loaded().config.rope_scaling.kind == "llama3"
    assert logits_error(loaded()) < 1e-5
    plain = {"rope_theta": 10000.0, "rope_type": "default"}
    unscaled = hf.load(changed(tmp_path / "plain", LLAMA, rope_parameters=plain))
    assert logits_error(unscaled) > WRONG
    with pytest.raises(HFError, match="twisted"):
        hf.read_config(
            changed(tmp_path / "other", LLAMA, rope_parameters=plain | {"rope_type": "twisted"})
        )


def test_sglang_32279_a_file_that_the_index_names_is_there(tmp_path):
    """https://github.com/sgl-project/sglang/pull/32279: a file of weights that an interrupted
    download had left out was passed over, and its weights stayed as memory was. Here its name is
    the error.
    """
    shutil.copytree(FOLDER / "llama_gqa", tmp_path / "model")
    names = set(read_json(tmp_path / "model" / INDEX)["weight_map"].values())
    missing = sorted(names)[3]
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(HFError, match=missing):
        hf.load(tmp_path / "model")


def test_megatron_bridge_4706_experts_that_a_file_lacks_are_not_random(tmp_path):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4706: a conversion left experts with
    the random values that they had. Here every parameter is in the file, and nothing is in the file
    that no parameter takes.
    """
    arrays = stored(EXPERTS)
    experts = [name for name in arrays if ".layers.1.mlp.experts." in name]
    assert experts
    kept = {name: array for name, array in arrays.items() if name not in experts}
    with pytest.raises(HFError, match=r"missing.*layers\.1\.mlp\.experts"):
        hf.load(changed(tmp_path / "fewer", EXPERTS, kept))
    more = arrays | {
        "model.layers.1.mlp.shared_expert.up_proj.weight": np.zeros((20, 40), np.float32)
    }
    with pytest.raises(HFError, match=r"unexpected.*shared_expert"):
        hf.load(changed(tmp_path / "more", EXPERTS, more))


def test_tensorrt_llm_3324_a_head_that_is_missing_is_not_the_embedding(tmp_path):
    """https://github.com/NVIDIA/TensorRT-LLM/issues/3324: where a head was not found, it was tied
    to the embedding whatever the configuration said. Here a model that is not tied needs its head.
    """
    headless = {name: array for name, array in stored(LLAMA).items() if name != "lm_head.weight"}
    with pytest.raises(HFError, match=r"missing.*lm_head\.weight"):
        hf.load(changed(tmp_path / "model", LLAMA, headless))
    hf.load(changed(tmp_path / "tied", LLAMA, headless, tie_word_embeddings=True))


def test_transformers_42612_a_head_of_its_own_is_not_lost(tmp_path):
    """https://github.com/huggingface/transformers/pull/42612: a head that a file held was
    overwritten by the embedding, because the configuration said that they are one. Here two that
    differ are an error.
    """
    arrays = stored(TIED)
    table = arrays["model.embed_tokens.weight"]
    hf.load(changed(tmp_path / "same", TIED, arrays | {"lm_head.weight": table}))
    with pytest.raises(HFError, match=r"tie_word_embeddings is true, but lm_head\.weight and"):
        hf.load(changed(tmp_path / "other", TIED, arrays | {"lm_head.weight": table[::-1].copy()}))


RANK = 4
ALPHA = 6
ADAPTER = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def adapters(folder, arrays=None, **attributes):
    """A folder in PEFT's format, of the queries of both layers."""
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    write_json(folder / "adapter_config.json", settings | attributes)
    write_tensors(folder / "adapter_model.safetensors", factors() if arrays is None else arrays)
    return folder


def factors():
    random = default_rng(0)
    config = loaded().config
    shapes = {"A": (RANK, config.d_model), "B": (config.num_heads * config.head_dim, RANK)}
    of = lambda shape: random.standard_normal(shape).astype(np.float32)
    return {
        ADAPTER.format(layer, name): of(shape)
        for layer in range(2)
        for name, shape in shapes.items()
    }


def scale_of(folder):
    """By which an adapter's `B A` is in the kernel, once it is merged."""
    path = "blocks.attention.qkv.kernels.0"
    merged = jaxtp.merge_adapters(hf.load_adapters(loaded(), folder))
    before, after = (
        np.float64(named_variables(nnx.state(model))[path][...][1]) for model in (loaded(), merged)
    )
    product = (factors()[ADAPTER.format(1, "B")] @ factors()[ADAPTER.format(1, "A")]).T
    scale = np.sum((after - before) * product) / np.sum(np.square(np.float64(product)))
    assert_allclose(after - before, scale * product, atol=1e-4)
    return scale


def test_transformers_47031_experts_of_two_orders_are_not_mixed_up(tmp_path):
    """https://github.com/huggingface/transformers/issues/47031: Qwen3-VL's experts are transposed
    on the Hub, under the names of those that are not, and a square kernel was taken for one that
    is not. Here shapes tell both apart, an export has the order of its folder, and a square kernel
    is refused.
    """
    name = "qwen3_vl_moe"
    hub = {path: array.astype(np.float32) for path, array in stored(name).items()}
    swapped = {
        path: array.swapaxes(1, 2).copy() if ".experts." in path else array
        for path, array in hub.items()
    }
    for folder, arrays in {"hub": hub, "transformers": swapped}.items():
        source = changed(tmp_path / folder, name, arrays)
        model = hf.load(source)
        assert_same(values(model), values(hf.load(FOLDER / name)))
        hf.save(model, tmp_path / f"{folder} again", like=source)
        assert stored_tensors(tmp_path / f"{folder} again") == stored_tensors(source)
    text = reference_attributes(name)["text_config"] | {"moe_intermediate_size": 16}
    square = {
        path: np.resize(array, (5, 32 if "gate_up" in path else 16, 32))
        if ".experts." in path
        else array
        for path, array in hub.items()
    }
    with pytest.raises(HFError, match=r"gate_up_proj is 5x32x32: .*does not tell"):
        hf.load(changed(tmp_path / "square", name, square, text_config=text))


def test_tensorrt_llm_1668_adapters_say_by_what_their_scale_is_divided(tmp_path):
    """https://github.com/NVIDIA/TensorRT-LLM/issues/1668: alpha was divided by the rank, though the
    adapters had been trained with it divided by the root of the rank. Here the scale is the one of
    use_rslora.
    """
    assert scale_of(adapters(tmp_path / "plain")) == pytest.approx(ALPHA / RANK)
    assert scale_of(adapters(tmp_path / "rslora", use_rslora=True)) == pytest.approx(
        ALPHA / RANK**0.5
    )


def test_peft_3449_a_scale_that_is_put_into_alpha_is_divided_as_it_will_be(tmp_path):
    """https://github.com/huggingface/peft/pull/3449: a combined adapter had its scale in its
    weights, and use_rslora from the first one, so that it was too large by the root of the rank.
    Here the scale that is written is the one that was read, and a scale for some modules alone is
    refused.
    """
    one_layer = {"layers.1.self_attn.q_proj": 10}
    with pytest.raises(
        HFError,
        match=r"layers\.1\..*jaxtp has one rank and one scale for all adapters",
    ):
        hf.load_adapters(
            loaded(), adapters(tmp_path / "some", use_rslora=True, alpha_pattern=one_layer)
        )
    folder = adapters(tmp_path / "in", use_rslora=True, lora_alpha=10)
    assert scale_of(folder) == pytest.approx(10 / RANK**0.5)
    hf.save_adapters(hf.load_adapters(loaded(), folder), tmp_path / "out")
    assert scale_of(tmp_path / "out") == pytest.approx(10 / RANK**0.5)
    assert read_header(tmp_path / "out/adapter_model.safetensors").keys() == factors().keys()


def test_transformers_34068_adapters_that_fit_nothing_are_an_error(tmp_path):
    """https://github.com/huggingface/transformers/pull/34068: tensors that an adapter lacked were
    passed over without a word. Here what is missing, and what no module of the model takes, is
    refused by name.
    """
    missing = ADAPTER.format(1, "B")
    fewer = {name: array for name, array in factors().items() if name != missing}
    with pytest.raises(HFError, match=f"missing: {missing}"):
        hf.load_adapters(loaded(), adapters(tmp_path / "fewer", fewer))
    without_layer = {name: array for name, array in factors().items() if ".1." not in name}
    renamed = {
        name.replace("model.layers", "transformer.h"): array for name, array in factors().items()
    }
    with pytest.raises(HFError, match=r"transformer\.h"):
        hf.load_adapters(loaded(), adapters(tmp_path / "renamed", renamed))
    with pytest.raises(
        HFError, match=r"missing: .*layers\.1\..*which adapter_config.json requires"
    ):
        hf.load_adapters(loaded(), adapters(tmp_path / "layer", without_layer))


def test_unsloth_4193_adapters_of_experts_are_not_skipped(tmp_path):
    """https://github.com/unslothai/unsloth/issues/4193: the targets matched no module of experts,
    which are stacked in one parameter, so that only attention was trained, without a word. Here
    each expert has adapters, and adapters without the experts that their configuration names are
    refused.
    """
    model = hf.load(FOLDER / EXPERTS)
    targets = ("gate_proj", "up_proj", "down_proj")
    adapted = jaxtp.add_adapters(model, jaxtp.LoraConfig(rank=2, targets=targets))
    config = model.config
    hf.save_adapters(adapted, tmp_path / "experts", family="qwen3_moe", experts="separate")
    stored = read_header(tmp_path / "experts/adapter_model.safetensors")
    kernels = config.num_layers * config.num_experts * len(targets)
    assert (
        sum(tensor.num_bytes for tensor in stored.values())
        == kernels * 2 * (config.d_model + config.d_ff) * 4
    )
    attention = jaxtp.add_adapters(model, jaxtp.LoraConfig(rank=2, targets=("q_proj",)))
    hf.save_adapters(attention, tmp_path / "attention", family="qwen3_moe")
    settings = tmp_path / "attention/adapter_config.json"
    write_json(settings, read_json(settings) | {"target_modules": ["q_proj", *targets]})
    with pytest.raises(
        HFError,
        match=r"missing: .*experts\.0\.gate_proj\.lora_A.*which adapter_config.json requires",
    ):
        hf.load_adapters(model, tmp_path / "attention", family="qwen3_moe")
