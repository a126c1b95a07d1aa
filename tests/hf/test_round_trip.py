"""Import then export, bit by bit, from any mesh; never a half-written folder; families chosen and refused by name."""

import dataclasses
import itertools
import json
import math

import hf_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_reference import COPIED, FOLDER, MADE, NEWER, model_types
from support import sweep

import jaxtp
from jaxtp.hf.config_json import choose_family, family_of, write_attributes
from jaxtp.hf.families import FAMILIES, WRAPPERS
from jaxtp.hf.model_folder import INDEX, open_folder, read_attributes
from jaxtp.hf.safetensors import DTYPES, read_header, write_file
from jaxtp.hf.tensor_map import _is_ignored, full_names
from jaxtp.layers.rope import RopeScaling

SMALL = jaxtp.ModelConfig(vocab_size=11, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=12)

MESHES = [{}, {"cp": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}, {"fsdp": 2, "tp": 4}, {"fsdp": 2, "cp": 2, "tp": 2}]
READ = [name for name in NEWER if model_types(name) <= FAMILIES.keys() | WRAPPERS.keys()]
# An export has 16 bits instead of MXFP4; Apertus has float64 scalars, which are constants.
WHOLE = [name for name in COPIED + MADE + READ if not name.endswith(("mxfp4", "apertus"))]
CASES = list(zip(WHOLE, itertools.cycle(MESHES), strict=False))
FIRST = [case for case in CASES if case[0] == "phi3"]


def stored(folder):
    """Names to dtype, shape and bytes."""
    return {
        n: (t.dtype, t.shape, t.read().tobytes() if t.shape else b"") for n, t in open_folder(folder).tensors.items()
    }


def in_dtype(source, target, dtype):
    """The same model with its weights in another dtype."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    arrays = {name: t.read().astype(DTYPES[dtype]) for name, t in open_folder(source).tensors.items()}
    write_file(target / "model.safetensors", {n: (dtype, a.shape) for n, a in arrays.items()}, arrays.__getitem__)
    return target


@pytest.mark.parametrize("case", sweep(CASES, *FIRST), ids=str)
def test_bit_by_bit(case, tmp_path):
    name, mesh = case
    source = in_dtype(FOLDER / name, tmp_path / "source", "F32") if name in NEWER else FOLDER / name
    with jax.set_mesh(jaxtp.make_mesh(**mesh)):
        model = jaxtp.load_hf(source)
    family = family_of(read_attributes(source), name)
    whole = {"family": family.model_type} if family.wrapper is None else {"like": source}
    jaxtp.save_hf(model, tmp_path / "out", **whole, max_shard_size="20KB")
    expected = stored(source)
    if family.wrapper is None:
        expected = {n: t for n, t in full_names(expected, family).items() if not _is_ignored(n, family)}
    found = stored(tmp_path / "out")
    if read_attributes(source).get("rope_interleave") is False:  # written as pairs: other values at the same places
        expected, found = ({n: t[:2] for n, t in each.items()} for each in (expected, found))
    assert {n: t for n, t in found.items() if n in expected or not _is_ignored(n, family)} == expected
    assert jaxtp.read_config(tmp_path / "out") == jaxtp.read_config(source)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"].keys() == found.keys()
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "source"}


@pytest.mark.parametrize(
    ("dtype", "param"), [("BF16", "bfloat16"), pytest.param("F16", "float32", marks=pytest.mark.wide)]
)
def test_sixteen_bits(dtype, param, tmp_path):
    source = in_dtype(FOLDER / "llama_linear", tmp_path / "source", dtype)
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 2)):
        model = jaxtp.load_hf(source)
    assert model.config.precision.param == param
    assert all(leaf.dtype == param for leaf in jax.tree.leaves(nnx.state(model)))
    jaxtp.save_hf(model, tmp_path / "out", dtype="float16" if dtype == "F16" else None)
    assert stored(tmp_path / "out") == stored(source)


@pytest.mark.wide
def test_a_padded_vocabulary_is_cut(tmp_path):
    with jax.set_mesh(jaxtp.make_mesh(tp=2)):
        model = jaxtp.Decoder(SMALL, rngs=nnx.Rngs(0))
    assert model.embedding.embedding.shape == (12, 8)
    jaxtp.save_hf(model, tmp_path / "out")
    assert stored(tmp_path / "out")["lm_head.weight"][1] == (11, 8)
    ids = np.arange(8, dtype=np.int32).reshape(2, 4)
    with jax.set_mesh(jaxtp.make_mesh(tp=2)):
        again = jaxtp.load_hf(tmp_path / "out")
        assert again.embedding.embedding.shape == (12, 8)
        np.testing.assert_array_equal(model(ids), again(ids))


def test_each_device_gets_its_share_and_no_more():
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 4)):
        model = jaxtp.load_hf(FOLDER / "llama_gqa")
    kernel = model.blocks.mlp.down.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 192 // 4, 96 // 2)}


def test_an_interrupted_export_leaves_nothing(tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    model = jaxtp.load_hf(FOLDER / "llama_linear")
    with pytest.raises(KeyboardInterrupt):
        jaxtp.save_hf(model, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer_says_so(tmp_path, capsys):
    model = jaxtp.Decoder(SMALL, rngs=nnx.Rngs(0))
    jaxtp.save_hf(model, tmp_path / "out")
    assert capsys.readouterr().err == "no tokenizer is written: tokenizer_from (--tokenizer-from DIR) copies one\n"
    (tmp_path / "out/tokenizer.json").write_text("{}")
    jaxtp.save_hf(model, tmp_path / "with", tokenizer_from=tmp_path / "out")
    assert capsys.readouterr().err == ""


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(jaxtp.HFError, match="already exists; name a new folder"):
        jaxtp.save_hf(jaxtp.Decoder(SMALL, rngs=nnx.Rngs(0)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["mistral", "phi3", "gpt2"])
def test_progress_counts_every_byte(name, tmp_path):
    """Once, also where a tensor is several parameters."""
    read, written = [], []
    model = jaxtp.load_hf(FOLDER / name, progress=lambda done, total: read.append((done, total)))
    jaxtp.save_hf(model, tmp_path / "out", progress=lambda done, total: written.append((done, total)))
    total = sum(tensor.num_bytes for tensor in read_header(FOLDER / name / "model.safetensors").values())
    assert read[-1] == written[-1] == (total, total)


GEMMA = {
    "norm": "rms_plus_one",
    "norm_placement": "both",
    "query_scale": 144**-0.5,
    "embedding_scale": 8**0.5,
    "activation": "gelu_tanh",
}
BIASES = dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True)
GPT = {**BIASES, "norm": "layer", "mlp": "plain", "rope_theta": None, "learned_positions": 9, "activation": "gelu_tanh"}
MULTIPLIERS = {"embedding_scale": 12.0, "query_scale": 0.1, "residual_scale": 0.22, "logit_scale": 1 / 6}
GEMMA4 = {
    **{"norm_placement": "both", "qk_norm": "head", "value_norm": True, "query_scale": 1.0, "layer_scale": True},
    **{"embedding_scale": 8**0.5, "activation": "gelu_tanh", "value_is_key": True, "num_kv_heads": 2},
    **{"rotary_fraction": 0.5, "rope_scaling": RopeScaling(kind="proportional", factor=1.0)},
    "first_blocks": (
        {
            **{"head_dim": 6, "num_kv_heads": 1, "value_is_key": False, "sliding_window": 4},
            **{"rotary_fraction": 1.0, "rope_theta": 9.0, "rope_scaling": {"kind": "none"}},
        },
    ),
}
FAMILY_OF = {
    "llama": {"rope_scaling": RopeScaling(kind="llama3", factor=8.0), "mlp_bias": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"attention_bias": True, "sliding_window": 3},
    "qwen3": {"qk_norm": "head", "rope_scaling": RopeScaling(kind="yarn", factor=2.0, attention_factor=1.5)},
    "gemma2": {**GEMMA, "attention_softcap": 50.0, "pattern": ({}, {"sliding_window": 4})},
    "gemma3_text": {
        **GEMMA,
        "qk_norm": "head",
        "first_blocks": ({"sliding_window": 4, "rope_scaling": {"kind": "linear", "factor": 2.0}},),
    },
    "gemma": {**GEMMA, "norm_placement": "before", "query_scale": None},
    "vaultgemma": {**GEMMA, "norm_placement": "before", "logit_softcap": 3.0},
    "gemma4_text": GEMMA4,
    "muse_glimmer_text": {
        **{"norm": "rms_plus_one", "norm_placement": "both", "norm_after_eps": 1e-3, "final_norm": "rms"},
        **{"qk_norm": "head_plain", "query_scale": 2.0, "attention_gate": True, "embedding_norm": True},
        **{"logit_scale": 0.3, "logit_softcap": 5.0, "pattern": ({"sliding_window": 4}, {"rope_theta": None})},
    },
    "olmo2": {"norm_placement": "after", "qk_norm": "projection"},
    "gpt2": {
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
        "num_kv_heads": 2,
        "norm": "layer",
        "mlp": "plain",
        "rope_theta": None,
        "learned_positions": 9,
        "activation": "relu",
        "pattern": ({"query_scale": 0.5}, {"query_scale": 0.25}),
    },
    "mixtral": {"num_experts": 3, "rope_theta": 7.0, "pattern": ({"experts_per_token": 2}, {"experts_per_token": 2})},
    "ministral3": {
        "query_temperature": 0.2,
        "rope_scaling": RopeScaling(kind="yarn", factor=2.0, attention_factor=1.0),
    },
    "gpt_neox": {
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
        "num_kv_heads": 2,
        "norm": "layer",
        "norm_placement": "parallel_two",
        "mlp": "plain",
        "activation": "gelu",
        "rotary_fraction": 0.5,
    },
    "glm4": {"norm_placement": "both", "rotary_fraction": 0.5, "attention_bias": True},
    "glm4_moe": {
        "rotary_fraction": 0.5,
        "router_scores": "sigmoid",
        "selection_bias": True,
        "num_experts": 4,
        "shared_experts": 24,
        "experts_scale": 2.5,
        "first_blocks": ({"num_experts": 0, "d_ff": 9, "shared_experts": 0},),
    },
    "phi3": {"rotary_fraction": 0.5},
    "phi": {
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "head_bias"), True),
        "norm": "layer",
        "norm_placement": "parallel",
        "mlp": "plain",
        "activation": "gelu_tanh",
        "qk_norm": "head_bias",
    },
    "glm": {"rotary_fraction": 0.5, "attention_bias": True},
    "minimax_m2": {
        "qk_norm": "projection",
        "rotary_fraction": 0.5,
        "num_experts": 4,
        "router_scores": "sigmoid",
        "selection_bias": True,
    },
    "cohere2": {
        "norm": "layer_no_bias",
        "norm_placement": "parallel",
        "pattern": ({"sliding_window": 4}, {"rope_theta": None}),
    },
    "nemotron": {"norm": "layer_plus_one", "mlp": "plain", "activation": "relu2", "rotary_fraction": 0.5},
    "hunyuan_v1_dense": {"qk_norm": "head", "qk_norm_after_rope": True, "attention_out_bias": True}
    | {"attention_bias": True},
    "stablelm": {"norm": "layer", "norm_placement": "parallel", "qk_norm": "heads", "attention_bias": True},
    "cohere": {"norm": "layer_no_bias", "norm_placement": "parallel", "qk_norm": "heads", "logit_scale": 0.5},
    "olmo": {"norm": "layer_plain", "clip_qkv": 8.0},
    "olmo3": {
        "norm_placement": "after",
        "qk_norm": "projection",
        "rope_theta": 9.0,
        "pattern": ({"sliding_window": 4}, {"rope_scaling": {"kind": "linear", "factor": 2.0}}),
    },
    "olmoe": {"qk_norm": "projection", "num_experts": 4, "num_kv_heads": 2, "clip_qkv": 8.0},
    "flex_olmo": {"norm_placement": "after", "qk_norm": "projection", "num_experts": 4},
    "smollm3": {"pattern": ({}, {"rope_theta": None, "sliding_window": 5})},
    "seed_oss": {"attention_bias": True, "mlp_bias": True},
    "arcee": {"mlp": "plain", "activation": "relu2", "mlp_bias": True},
    "apertus": {"mlp": "plain", "activation": "xielu", "qk_norm": "head"},
    "exaone4": {
        "norm_placement": "after",
        "qk_norm": "head",
        "pattern": ({"sliding_window": 5}, {"rope_theta": None}),
    },
    "qwen2_moe": {
        "attention_bias": True,
        "normalize_experts": False,
        "first_blocks": ({"num_experts": 4, "shared_experts": 5, "shared_experts_gate": True, "sliding_window": 3},),
    },
    "granite": MULTIPLIERS,
    "granitemoe": {**MULTIPLIERS, "num_experts": 4},
    "granitemoehybrid": {**MULTIPLIERS, "num_experts": 4, "shared_experts": 5, "rope_theta": None},
    "qwen3_moe": {
        "qk_norm": "head",
        "normalize_experts": False,
        "first_blocks": ({"num_experts": 4, "experts_per_token": 3, "d_ff": 9},),
    },
}
FAMILY_OF |= {
    "ministral": {"pattern": ({"sliding_window": 4}, {})},
    "gpt_neo": {**GPT, "num_kv_heads": 2, "attention_bias": False, "query_scale": 1.0},
    "gpt_bigcode": GPT,
    "starcoder2": {**BIASES, "norm": "layer", "mlp": "plain", "activation": "gelu_tanh", "sliding_window": 4},
    "ernie4_5_moe": {"num_experts": 3, "selection_bias": True, "shared_experts": 24, "mlp_bias": False},
    "dots1": {
        **{"num_experts": 3, "selection_bias": True, "router_scores": "sigmoid", "qk_norm": "head"},
        "pattern": ({}, {"sliding_window": 4}),
    },
}
YARN = RopeScaling(kind="yarn", factor=4.0, attention_factor=0.9)
LATENT = {"kv_rank": 6, "rope_head_dim": 2, "head_dim": 6, "value_head_dim": 5, "num_kv_heads": SMALL.num_heads}
LATENT |= {"num_experts": 4, "shared_experts": 24, "experts_scale": 2.5, "rope_scaling": YARN}
LATENT |= {"query_scale": 6**-0.5 * (0.05 * math.log(4.0) + 1) ** 2}
FAMILY_OF |= {
    "deepseek_v2": {**LATENT, "normalize_experts": False, "expert_groups": 2, "group_score": "max"},
    "deepseek_v3": {
        **{**LATENT, "query_rank": 3, "router_scores": "sigmoid", "selection_bias": True, "expert_groups": 2},
        "first_blocks": ({"num_experts": 0, "d_ff": 9, "shared_experts": 0},),
    },
    "mistral4": {**LATENT, "query_rank": 3, "query_temperature": 0.2, "expert_groups": 2},
}
FAMILY_OF["gpt_oss"] = {
    **{"activation": "quick_gelu", "swiglu_limit": 7.0, "num_experts": 4, "router_bias": True, "experts_bias": True},
    **{
        "attention_sinks": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "pattern": ({"sliding_window": 4}, {}),
    },
}
DELTA = {"delta_value_heads": 4, "delta_key_heads": 2, "delta_key_dim": 3, "delta_value_dim": 5, "delta_conv": 3}
DELTA |= {"norm": "rms_plus_one", "qk_norm": "head", "attention_gate": True, "rotary_fraction": 0.5}
FAMILY_OF |= {
    "qwen3_5_text": {**DELTA, "pattern": ({"delta_value_heads": 0}, {})},
    "qwen3_5_moe_text": {**DELTA, "num_experts": 4, "shared_experts": 5, "shared_experts_gate": True},
    "qwen3_next": {**DELTA, "normalize_experts": False, "first_blocks": ({"num_experts": 4, "d_ff": 9},)},
}
NEVER_FIRST = {"gemma4_unified_text", "ernie4_5", "glm4_moe_lite"}
"""Families whose models another family can represent too."""
assert FAMILY_OF.keys() | NEVER_FIRST == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILY_OF)
def test_the_family_follows_from_the_model(family):
    config = dataclasses.replace(SMALL, **FAMILY_OF[family])
    assert choose_family(config, None).model_type == family
    attributes = write_attributes(config, FAMILIES[family], "float32")
    assert set(attributes) - {"architectures", "model_type"}, "it reads back as itself: write_attributes has checked"


def test_what_no_family_can_be_is_refused():
    config = dataclasses.replace(SMALL, qk_norm="projection")
    with pytest.raises(
        jaxtp.HFError, match=r"no family can represent this model:\n  a llama cannot .*qk_norm: projection -> none"
    ):
        choose_family(config, None)
    with pytest.raises(jaxtp.HFError) as refused:
        choose_family(dataclasses.replace(SMALL, attention_sinks=True), None)
    assert "attention_sinks: True -> False" in str(refused.value)
    assert "experts" not in str(refused.value), "families with experts are not the nearest of a dense model"
    with pytest.raises(jaxtp.HFError, match=r"a llama cannot represent this model .*sliding_window: 4 -> None"):
        write_attributes(dataclasses.replace(SMALL, sliding_window=4), FAMILIES["llama"], "float32")


@pytest.mark.parametrize(("size", "files"), [(10**9, 1), ("2KB", 3), (1, 21)])
def test_shards_hold_what_fits(size, files, tmp_path):
    jaxtp.save_hf(jaxtp.Decoder(SMALL, rngs=nnx.Rngs(0)), tmp_path / "out", max_shard_size=size)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == files
    with pytest.raises(jaxtp.HFError, match="max_shard_size = '5 apples'"):
        jaxtp.save_hf(jaxtp.Decoder(SMALL, rngs=nnx.Rngs(0)), tmp_path / "other", max_shard_size="5 apples")


def test_the_largest_yarn_scale_is_of_two_mscales():
    """DeepSeek's form: the quotient of two scales."""
    attributes = json.loads((FOLDER / "llama_yarn/config.json").read_text())
    attributes["rope_parameters"] |= {"mscale": 2.0, "mscale_all_dim": 0.5}
    config = jaxtp.hf.config_json.model_config(attributes, "test")
    scaled = [1 + 0.1 * scale * jnp.log(4.0) for scale in (2.0, 0.5)]
    assert config.rope_scaling.attention_factor == pytest.approx(float(scaled[0] / scaled[1]), rel=1e-6)


def test_scalars_with_one_value(tmp_path):
    """An export writes them in the dtype of the others; an import needs none, and refuses other values."""
    model, name = jaxtp.load_hf(FOLDER / "apertus"), "model.layers.1.mlp.act_fn.beta"
    jaxtp.save_hf(model, tmp_path / "out", dtype="bfloat16")
    tensors = open_folder(tmp_path / "out").tensors
    assert (tensors[name].dtype, tensors[name].shape, tensors[name].is_about(0.5)) == ("BF16", (), True)
    assert jaxtp.load_hf(tmp_path / "out").config.precision.param == "bfloat16"
    arrays = {key: tensor.read() for key, tensor in open_folder(FOLDER / "apertus").tensors.items() if tensor.shape}
    for folder, more in (("without", {}), ("wrong", {name: np.float32(0.6)})):
        every = arrays | more
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_bytes((FOLDER / "apertus/config.json").read_bytes())
        header = {key: ("BF16" if array.dtype != np.float32 else "F32", array.shape) for key, array in every.items()}
        write_file(tmp_path / folder / "model.safetensors", header, every.__getitem__)
    assert jaxtp.load_hf(tmp_path / "without").config == model.config
    with pytest.raises(jaxtp.HFError, match=rf"not supported: {name}, which should be the number 0\.5$"):
        jaxtp.load_hf(tmp_path / "wrong")


def test_windows_in_some_layers():
    attributes = json.loads((FOLDER / "qwen2_window/config.json").read_text())
    for change in (
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": None, "max_window_layers": 1},
    ):
        config = jaxtp.hf.config_json.model_config(attributes | change, "test")
        assert [block.sliding_window for block in config.layers()] == [None, 5]
        written = write_attributes(config, FAMILIES["qwen2"], "float32")
        assert (written["max_window_layers"], written["layer_types"][1]) == (1, "sliding_attention")
    for change in ({"layer_types": None, "max_window_layers": 2}, {"use_sliding_window": False}):
        assert jaxtp.hf.config_json.model_config(attributes | change, "test").sliding_window is None


@pytest.mark.wide
def test_a_window_is_what_the_reference_stresses():
    """Without it, the logits are others: a window that is not applied would not pass."""
    reference = hf_reference.load("mistral")
    model = jaxtp.load_hf(FOLDER / "mistral")
    unwindowed = jaxtp.Decoder(dataclasses.replace(model.config, sliding_window=None), rngs=nnx.Rngs(0))
    logits = nnx.merge(nnx.graphdef(unwindowed), nnx.state(model))(reference["input_ids"].astype(np.int32))
    assert np.abs(np.asarray(logits) - reference["logits"]).max() > 0.1
