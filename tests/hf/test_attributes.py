"""config.json as it is found: what says nothing is passed over, what could change the model is refused by name."""

import dataclasses
import functools
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structures import VALUES, changed, examples, gives_one_of, is_one_clear_message

import jaxtp
from jaxtp.data.tokenizer_files import TokenizerError, chat_template, end_token, special_tokens
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.config_json import model_config, write_attributes
from jaxtp.hf.families import FAMILIES
from jaxtp.hf.families import family as base
from jaxtp.hf.model_folder import positive
from jaxtp.tools.check.__main__ import main as check
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.tools.estimate.__main__ import main as estimate
from jaxtp.train.__main__ import main as train

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "use_cache": True,
    "vocab_size": 49152,
}
BOOKKEEPING = {
    "_model_name_or_path": "x",
    "_name_or_path": "x",
    "_flash_attn_2_enabled": True,
    "_anything": [1],
    "unk_token_id": 0,
    "image_token_id": 7,
    "forced_bos_token_id": None,
    "use_flash_attn": True,
    "use_memorry_efficient_attention": False,
    "unsloth_fixed": True,
    "auto_map": {"AutoTokenizer": ["x.X", None], "AutoConfig": "y.Y"},
}


def test_a_real_configuration_is_read():
    config = model_config(SMOLLM2, "config.json")
    assert (config.d_model, config.num_heads, config.num_kv_heads, config.head_dim) == (576, 9, 3, 64)
    assert (config.tie_embeddings, config.rope_theta, config.norm_eps) == (True, 100_000.0, 1e-5)


@pytest.mark.parametrize("name", BOOKKEEPING)
def test_bookkeeping_says_nothing(name):
    assert model_config(SMOLLM2 | {name: BOOKKEEPING[name]}, "config.json") == model_config(SMOLLM2, "config.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_interleaved", True),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("quantization_config", {"bits": 4}),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_what_is_known_to_change_the_model_cannot_be_passed_over(name, value):
    with pytest.raises(jaxtp.HFError, match=f"{name} = .* it is known to change the model$"):
        model_config(SMOLLM2 | {name: value}, "config.json")
    with pytest.raises(jaxtp.HFError, match=f"--ignore-config {name}: it is known to change the model, so it cannot"):
        model_config(SMOLLM2 | {name: value}, "config.json", [name])


def test_an_empty_description_of_quantisation_says_nothing():
    for found in (SMOLLM2, SMOLLM3, GPT_OSS_20B, DEEPSEEK):
        plain = {name: value for name, value in found.items() if name != "quantization_config"}
        assert model_config(plain | {"quantization_config": {}}, "it") == model_config(plain, "it")


@pytest.mark.parametrize("name", ["logit_scale", "use_sparse", "auto_map", "a b"])
def test_what_is_not_understood_is_refused_unless_it_is_passed_over(name):
    found = SMOLLM2 | {name: {"AutoModelForCausalLM": "x.X"}}
    quoted = f"'{name}'" if " " in name else name
    with pytest.raises(jaxtp.HFError, match=f"may change the model; .* by --ignore-config {quoted}$"):
        model_config(found, "config.json")
    assert model_config(found, "config.json", [name]) == model_config(SMOLLM2, "config.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pad_tokn_id", "there is no such attribute; did you mean pad_token_id"),
        ("hidden_size", "it is known to change the model"),
        ("model_type", "it is known to change the model"),
        ("rope_scaling", "it is known to change the model"),
        ("architectures", "it is known to change the model"),
    ],
)
def test_what_cannot_be_passed_over(name, message):
    with pytest.raises(jaxtp.HFError, match=f"--ignore-config {name}: {message}"):
        model_config(SMOLLM2, "config.json", [name])


GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 256000,
    "sliding_window_size": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "cache_implementation": "hybrid",
}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512}
GEMMA4 = {name: value for name, value in GEMMA3.items() if name not in ("hidden_act", "sliding_window_size")}
GEMMA4 |= {"model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size_per_layer_input": 0}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_ctx": 1024,
    "n_positions": 1024,
    "vocab_size": 50257,
    "resid_pdrop": 0.1,
    "summary_first_dropout": 0.1,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI = DEEPSEEK | {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1}
KIMI |= {"topk_group": 1, "n_routed_experts": 384, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0}
KIMI |= {"rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0}, "first_k_dense_replace": 1}
MOONLIGHT = KIMI | {"model_type": "deepseek_v3", "q_lora_rank": None, "rope_scaling": None, "n_shared_experts": 2}
DEEPSEEK_V2 = DEEPSEEK | {"model_type": "deepseek_v2", "architectures": None, "topk_method": "group_limited_greedy"}
DEEPSEEK_V2 |= {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0, "topk_group": 3}
DEEPSEEK_V2 |= {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}}
DEEPSEEK_V2.pop("num_nextn_predict_layers")
LITE = DEEPSEEK_V2 | {"topk_method": "greedy", "q_lora_rank": None}
LITE |= {"rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707}}
GLM_FLASH = {"model_type": "glm4_moe_lite", "first_k_dense_replace": 1, "topk_method": "noaux_tc", "vocab_size": 154880}
GLM_FLASH |= {"hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47, "num_attention_heads": 20}
GLM_FLASH |= {"partial_rotary_factor": 1.0, "rope_scaling": None, "num_nextn_predict_layers": 1}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
PHI3 = SMOLLM2 | {"model_type": "phi3", "architectures": None, "partial_rotary_factor": 1.0}


SMALL = {name: SMOLLM2[name] for name in SIZES}
WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_group")
SMOLLM3, QWEN2_MOE, EXAONE4, GRANITE4, OLMO3, APERTUS = (
    SMALL | {"model_type": kind} for kind in ("smollm3", "qwen2_moe", "exaone4", "granitemoehybrid", "olmo3", "apertus")
)


def windows(config):
    return [block.sliding_window for block in config.layers()]


def test_what_transformers_assumes():
    """Published files say little of it."""
    gemma = model_config(GEMMA2, "it")
    assert (gemma.head_dim, gemma.tie_embeddings, gemma.attention_softcap, gemma.logit_softcap) == (256, True, 50, 30)
    assert (gemma.query_scale, gemma.embedding_scale, gemma.activation) == (1 / 16, 3584**0.5, "gelu_tanh")
    assert windows(gemma) == [4096, None] * 21
    third = model_config(GEMMA3, "it")
    assert windows(third) == ([512] * 5 + [None]) * 4 + [512] * 2
    assert [block.rope_theta for block in third.layers()][4:6] == [1e4, 1e6]
    assert (third.attention_softcap, third.logit_softcap) == (None, None)
    wrapped = model_config({"model_type": "gemma3", "text_config": {"num_hidden_layers": 34}}, "it")
    assert (wrapped.vocab_size, wrapped.num_heads, wrapped.num_layers, wrapped.rope_theta) == (262_208, 8, 34, 1e6)
    fourth = list(model_config(GEMMA4 | {"num_global_key_value_heads": 4}, "it").layers())
    assert [(each.head_dim, each.num_kv_heads, each.value_is_key) for each in fourth[4:6]] == [
        (256, 8, False),
        (512, 8, False),  # transformers reads num_global_key_value_heads with attention_k_eq_v only
    ]
    assert (fourth[5].rotary_fraction, fourth[5].rope_scaling.kind, fourth[5].rope_theta) == (0.25, "proportional", 1e6)
    gpt2 = model_config(GPT2, "it")
    assert (gpt2.d_ff, gpt2.head_dim, gpt2.learned_positions, gpt2.norm_eps) == (3072, 64, 1024, 1e-5)
    assert (gpt2.tie_embeddings, gpt2.rope_theta, gpt2.activation) == (True, None, "gelu_tanh")
    assert model_config({k: v for k, v in PHI3.items() if k != "rms_norm_eps"}, "it").norm_eps == 1e-5


def test_what_transformers_assumes_of_layers():
    sizes = {name: SMOLLM2[name] for name in SIZES}
    assert windows(model_config({**sizes, "model_type": "ministral"}, "it")) == [4096] * 30
    neo = {"model_type": "gpt_neo", "vocab_size": 9, "hidden_size": 64, "num_layers": 24, "num_heads": 4}
    assert windows(model_config(neo, "it")) == [None, 256] * 12
    assert model_config(neo, "it").query_scale == 1
    dots = {**sizes, "model_type": "dots1", "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2}
    found = model_config({**dots, "num_hidden_layers": 64, "first_k_dense_replace": 1}, "it")
    assert windows(found) == [None] * 62 + [4096] * 2
    assert [layer.shared_experts for layer in found.layers()][:2] == [0, 2 * 1408]
    ernie = model_config({**sizes, "model_type": "ernie4_5_moe", "moe_layer_interval": 2}, "it")
    assert [layer.num_experts for layer in ernie.layers()] == [0, 64] * 15
    assert (ernie.rope_theta, ernie.tie_embeddings, ernie.normalize_floor) == (500_000, True, 1e-12)


def test_published_files_of_latent_attention():
    third, kimi, second = (model_config(file, "it") for file in (DEEPSEEK, KIMI, DEEPSEEK_V2))
    assert [(layer.num_experts, layer.d_ff) for layer in third.layers()][2:4] == [(0, 18432), (256, 2048)]
    assert (third.query_rank, third.kv_rank, third.head_dim) == (1536, 512, 192)
    assert (third.rope_head_dim, third.value_head_dim, third.expert_groups, third.groups_per_token) == (64, 128, 8, 4)
    for config, factor, scale in (
        (third, 40, 1),
        (kimi, 32, 1),
        (second, 40, 1),
        (model_config(LITE, "it"), 40, 0.707),
    ):
        assert config.query_scale == pytest.approx(192**-0.5 * (0.1 * scale * np.log(factor) + 1) ** 2)
        assert config.rope_scaling.attention_factor == 1
    assert (second.router_scores, second.group_score, second.normalize_experts) == ("softmax", "max", False)
    moonlight = model_config(MOONLIGHT, "it")
    assert (moonlight.query_rank, moonlight.query_scale, kimi.query_rank) == (0, None, 1536)
    assert model_config(LITE, "it") == model_config(LITE | {"n_group": None, "topk_group": 2}, "it")  # without effect
    flash = model_config(GLM_FLASH, "it")
    assert [layer.num_experts for layer in flash.layers()] == [0] + [64] * 46
    assert (flash.head_dim, flash.rope_head_dim, flash.value_head_dim, flash.query_scale) == (256, 64, 256, None)


@given(
    widths=st.fixed_dictionaries({}, optional={name: VALUES | st.integers(-9, 2**40) for name in WIDTHS}),
    kind=st.sampled_from(["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "mistral4"]),
)
@examples(60)
def test_any_width_of_latents(widths, kind):
    gives_one_of(jaxtp.ModelConfig, jaxtp.HFError, lambda: model_config(SMALL | widths | {"model_type": kind}, "it"))


def test_layers_that_rotate():
    """Of EXAONE 4: all if there is no window, else those with one; of SmolLM3: 1 stands for a rotation."""

    def rotated(attributes):
        return [
            block.rope_theta is not None for block in model_config(attributes | {"num_hidden_layers": 4}, "it").layers()
        ]

    full = {"layer_types": ["full_attention"] * 4}
    assert rotated(EXAONE4) == rotated(EXAONE4 | {"sliding_window_pattern": "LLLG"}) == [True, True, True, False]
    assert rotated(EXAONE4 | full) == [False] * 4
    assert rotated(EXAONE4 | full | {"sliding_window": None}) == [True] * 4
    assert rotated(SMOLLM3) == [True, True, True, False]
    assert rotated(SMOLLM3 | {"no_rope_layers": [0, 1, 1, 0]}) == [False, True, True, False]
    attention = {"layer_types": ["attention"] * 4}
    assert rotated(GRANITE4 | attention | {"position_embedding_type": "rope"}) == [True] * 4
    assert rotated(GRANITE4 | attention) == [False] * 4


def test_a_granite_without_experts():
    """Its MLP has the width of the shared one."""
    layers = {"layer_types": ["attention"] * 30, "num_local_experts": 0, "num_experts_per_tok": 0}
    dense = model_config(GRANITE4 | layers | {"shared_intermediate_size": 70}, "it")
    assert (dense.num_experts, dense.d_ff) == (0, 70)
    sparse = model_config(GRANITE4 | {"layer_types": ["full_attention"] * 30}, "it")
    assert (sparse.num_experts, sparse.d_ff, sparse.shared_experts) == (8, 1536, 1024)


def test_layers_that_differ_are_few_stacks():
    """What repeats is a pattern, what does not runs of equal blocks."""
    assert model_config(GEMMA3, "it").pattern == model_config(GEMMA3 | {"num_hidden_layers": 62}, "it").pattern
    assert len(list(model_config(GEMMA3, "it").kinds())) == 7
    assert len(list(model_config(GEMMA3 | {"num_hidden_layers": 7}, "it").kinds())) == 3
    qwen = {"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "max_window_layers": 21}
    found = model_config({name: SMOLLM2[name] for name in SIZES} | qwen, "it")
    assert windows(found) == [None] * 21 + [4096] * 9
    assert [numbers for _, numbers, _ in found.kinds()] == [range(21), range(21, 30)]


FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = [SLIDING, SLIDING, FULL, SLIDING]
NEW = {**dict.fromkeys(SIZES, 8), "num_hidden_layers": 4, "model_type": "new", "head_dim": 4}
WINDOWS = base.COMMON | base.WINDOW | {"layer_types"}
EXPERT_SIZES = (
    base.Attribute("experts", ("num_experts",), int, 6),
    base.Attribute("chosen", ("experts_per_token",), int, 2),
)
BY_EXPERTS = {
    "attributes": (*FAMILIES["llama"].attributes, *EXPERT_SIZES),
    "by_type": {
        "experts": (
            base.Attribute("expert_size", ("d_ff",), int, 3),
            base.Attribute("shared", ("shared_experts",), int, 2, unit=("d_ff", 1), can_be_zero=True),
        ),
        "dense": (base.Attribute("intermediate_size", ("d_ff",), int),),
    },
}
BY_LAYER = {
    "first dense": ({"first_k_dense_replace"}, BY_EXPERTS, {"first_k_dense_replace": 2}, "d_ff", [8, 8, 3, 3]),
    "listed experts": (
        {"mlp_layer_types"},
        BY_EXPERTS,
        {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
        "shared_experts",
        [6, 0, 6, 0],
    ),
    "from and to": (
        base.EXPERT_RANGE,
        BY_EXPERTS,
        {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
        "num_experts",
        [0, 6, 6, 0],
    ),
    "every other without rotation": (
        base.NO_ROPE_LAYERS,
        {},
        {"no_rope_layers": [1, 0, 1, 0]},
        "rope_theta",
        [1e4, None, 1e4, None],
    ),
    "no rotation by default": ({"no_rope_layers"}, {}, {}, "rope_theta", [1e4, 1e4, 1e4, None]),
    "from the last": (
        WINDOWS | {"layer_rope_theta"},
        {"windows_from_last": True, "window_period": 3},
        {},
        "rope_theta",
        [None, 1e4, 1e4, None],
    ),
    "no rotation without windows": (
        WINDOWS,
        {"always_by_type": {"global": base.NO_ROPE}},
        {"layer_types": TYPES},
        "rope_theta",
        [1e4, 1e4, None, 1e4],
    ),
    "scaled without windows": (
        WINDOWS,
        {"rope_by_type": True},
        {"layer_types": TYPES, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling.factor",
        [1.0, 1.0, 2.0, 1.0],
    ),
    "partly rotated": (
        WINDOWS,
        {"rope_by_type": True, "rope_attributes": (base.PARTIAL_ROPE,)},
        {"layer_types": TYPES, "rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}},
        "rotary_fraction",
        [1.0, 1.0, 0.5, 1.0],
    ),
    "heads by type": (
        WINDOWS,
        {
            "by_type": {
                SLIDING: (base.Attribute("head_dim", ("head_dim",), int, 4),),
                FULL: (base.Attribute("global_head_dim", ("head_dim",), int, 12),),
            }
        },
        {"layer_types": TYPES},
        "head_dim",
        [4, 4, 12, 4],
    ),
    "single layers": (
        base.COMMON | {"per_layer_config"},
        {"by_type": {FULL: (base.Attribute("layer_head_dim", ("head_dim",), int),)}},
        {"per_layer_config": {"2": {"head_dim": 6}}},
        "head_dim",
        [4, 4, 6, 4],
    ),
    "the last has none": (
        WINDOWS,
        {"last_is_global": True, "window_period": 3},
        {"sliding_window": 5},
        "sliding_window",
        [5, 5, None, None],
    ),
}


@pytest.mark.parametrize("case", BY_LAYER)
def test_what_depends_on_the_layer_is_in_the_family_s_table(case, monkeypatch):
    names, changes, attributes, field, expected = BY_LAYER[case]
    table = {"layer_attributes": base.COMMON | names, "window_period": 4, **changes}
    family = dataclasses.replace(FAMILIES["llama"], model_type="new", required={}, **table)
    monkeypatch.setitem(FAMILIES, "new", family)
    config = model_config(NEW | attributes, "it")
    assert [functools.reduce(getattr, field.split("."), layer) for layer in config.layers()] == expected
    if case != "single layers":  # they are written by type
        write_attributes(config, family, "float32")  # checks that it reads back


def test_a_fixed_alpha_is_a_base(monkeypatch):
    """Hunyuan's: it says dynamic, and does not depend on the length. Without alpha it does."""
    family = dataclasses.replace(FAMILIES["llama"], model_type="new", rope_kinds=frozenset({"default", "dynamic"}))
    monkeypatch.setitem(FAMILIES, "new", family)
    config = model_config(NEW | {"rope_scaling": {"type": "dynamic", "alpha": 16.0, "factor": 1.0}}, "it")
    assert (config.rope_theta, config.rope_scaling.kind) == (1e4 * 16.0**2, "none")
    with pytest.raises(jaxtp.HFError, match="without alpha depends on the length"):
        model_config(NEW | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "it")


GPT_OSS_20B = {
    **{
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
    },
    **{"eos_token_id": 200002, "pad_token_id": 199999, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu"},
    **{"hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880},
    **{"layer_types": [SLIDING, FULL] * 12, "max_position_embeddings": 131072, "num_attention_heads": 64},
    **{"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32},
    **{"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9},
    **{
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    },
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
}


def test_the_published_gpt_oss():
    """Its attributes, and what transformers assumes without them."""
    config = model_config(GPT_OSS_20B, "it")
    assert (config.num_experts, config.experts_per_token, config.d_ff, config.swiglu_limit) == (32, 4, 2880, 7.0)
    assert (config.activation, config.normalize_experts, config.router_scores) == ("quick_gelu", True, "softmax")
    assert config.attention_sinks
    assert config.attention_bias
    assert config.experts_bias
    assert config.router_bias
    assert [block.sliding_window for block in config.layers()] == [128, None] * 12
    assert not config.rope_scaling.truncate
    assert model_config({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}, "it") == config
    copy = {name: value for name, value in GPT_OSS_20B.items() if name != "quantization_config"}
    more = {"unsloth_fixed": True, "torch_dtype": "bfloat16", "swiglu_alpha": 1.702}
    assert model_config(copy | more, "it") == config
    written = write_attributes(config, FAMILIES["gpt_oss"], "bfloat16")
    assert {name for name in written.keys() & copy.keys() if written[name] != copy[name]} == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 is not supported, only 1.702"),
        ({"swiglu_limit": None}, "swiglu_limit = missing: should be a number above 0"),
        ({"sliding_window": None}, "sliding_window = missing"),
        ({"experts_per_token": 2}, "experts_per_token = 2 and num_experts_per_tok = 4 are two names"),
        ({"rope_scaling": None}, "rope_theta without rope_parameters or rope_scaling"),
        ({"rope_scaling_factor": 32.0}, "rope_scaling_factor = 32.0 of a gpt_oss is unknown"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_method = 'modelopt' .* only fp8 and mxfp4 in"),
    ],
    ids=str,
)
def test_what_a_gpt_oss_cannot_be(changes, message):
    with pytest.raises(jaxtp.HFError, match=message) as caught:
        model_config(GPT_OSS_20B | changes, "it")
    assert is_one_clear_message(caught.value)


HYBRID = (["linear_attention"] * 3 + ["full_attention"]) * 10
MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
MROPE |= {"rope_theta": 10_000_000, "rope_type": "default"}
QWEN3_5_TEXT = {
    **{"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": None},
    **{"dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256},
    **{"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "layer_types": HYBRID},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
    **{"linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"},
    **{"max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text"},
    **{"moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
    **{"num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40},
    **{"num_key_value_heads": 2, "output_router_logits": False, "pad_token_id": None, "partial_rotary_factor": 0.25},
    **{"rms_norm_eps": 1e-06, "rope_parameters": MROPE, "router_aux_loss_coef": 0.001},
    **{"shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320},
}
QWEN3_5 = {
    **{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5_moe"},
    **{"text_config": QWEN3_5_TEXT, "tie_word_embeddings": False, "transformers_version": "5.7.0"},
    **{"video_token_id": 248057, "vision_config": {"depth": 27}, "vision_end_token_id": 248054},
}
QWEN3_NEXT = {
    **{name: value for name, value in QWEN3_5_TEXT.items() if not name.startswith(("mtp_", "mamba", "rope", "layer"))},
    **{"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "intermediate_size": 5120},
    **{"decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10},
    **{"num_hidden_layers": 48, "rope_scaling": None, "rope_theta": 10_000_000, "use_sliding_window": False},
}


def test_the_published_qwen_3_5():
    """Of 35B-A3B; 3.8 has another name of its gate, and longer texts have yarn."""
    config = model_config(QWEN3_5, "it")
    assert [block.delta_value_heads for block in config.layers()] == [32, 32, 32, 0] * 10
    assert (config.delta_key_heads, config.delta_key_dim, config.delta_value_dim, config.delta_conv) == (
        16,
        128,
        128,
        4,
    )
    assert (config.num_experts, config.experts_per_token, config.d_ff, config.normalize_experts) == (256, 8, 512, True)
    assert (config.shared_experts, config.shared_experts_gate, config.attention_gate) == (512, True, True)
    assert (config.norm, config.qk_norm, config.rotary_fraction, config.rope_theta) == (
        "rms_plus_one",
        "head",
        0.25,
        1e7,
    )
    assert config.rope_scaling.kind == "none"
    assert model_config(QWEN3_5_TEXT | {"output_gate_type": "swish", "layer_types": None}, "it") == config
    yarn = {**MROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    assert model_config(QWEN3_5_TEXT | {"rope_parameters": yarn}, "it").rope_scaling.factor == 4
    full = model_config(QWEN3_5_TEXT | {"layer_types": ["full_attention"] * 40}, "it")
    assert (full.delta_value_heads, full.delta_key_heads, full.pattern) == (0, 0, ())
    assert write_attributes(full, FAMILIES["qwen3_5_moe_text"], "float32")["full_attention_interval"] == 1
    for_text = QWEN3_5_TEXT | {"tie_word_embeddings": True}
    assert not model_config(QWEN3_5 | {"text_config": for_text}, "it").tie_embeddings, "transformers reads the other"


def test_the_published_qwen3_next():
    config = model_config(QWEN3_NEXT, "it")
    assert [block.delta_value_heads for block in config.layers()] == [32, 32, 32, 0] * 12
    assert (config.num_experts, config.rope_theta, config.rotary_fraction) == (512, 1e7, 0.25)
    written = write_attributes(config, FAMILIES["qwen3_next"], "bfloat16")
    assert {name for name in written.keys() & QWEN3_NEXT.keys() if written[name] != QWEN3_NEXT[name]} == {
        "intermediate_size"  # of no layer
    }
    assert written["layer_types"] == HYBRID + HYBRID[:8]
    dense = model_config(QWEN3_NEXT | {"num_experts": 0, "full_attention_interval": 5}, "it")
    assert (dense.num_experts, dense.d_ff, dense.shared_experts) == (0, 5120, 0)
    assert [block.delta_value_heads for block in dense.layers()][3:6] == [32, 0, 32]
    alone = model_config(QWEN3_NEXT | {"shared_expert_intermediate_size": 0, "mlp_only_layers": [0]}, "it")
    assert (alone.num_experts, alone.shared_experts, alone.shared_experts_gate) == (512, 0, False)
    assert [block.d_ff for block in alone.layers()][:2] == [5120, 512]


def test_the_published_gemma_3_of_4b():
    """It leaves out what transformers assumes."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = model_config({"model_type": "gemma3", "text_config": text, "eoi_token_index": 256000}, "it")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert [layer.rope_scaling.factor for layer in config.layers()][4:7] == [1.0, 8.0, 1.0]
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        (GEMMA2 | {"hidden_activation": "xielu"}, "hidden_activation = 'xielu' is not supported; gelu_pytorch_tanh,"),
        (GEMMA2 | {"sliding_window": None}, "sliding_window = missing: should be a whole number"),
        (GEMMA2 | {"layer_types": ["full_attention"]}, "layer_types = .*for each of 42 layers"),
        (GEMMA2 | {"layer_types": [{}] * 42}, "layer_types = .*should be full_attention or sliding_attention"),
        (GEMMA2 | {"sliding_window_pattern": 2}, "sliding_window_pattern = 2 of a gemma2 is unknown"),
        (GEMMA2 | {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647: .*at most 1,024"),
        (GEMMA2 | {"rope_parameters": {"full_attention": {}}}, "full_attention of the rotary embedding 'default'"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported, only None"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters = .*should hold full_attention and"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern = 0: should be a whole number"),
        (GEMMA3 | {"_sliding_window_pattern": 3}, "_sliding_window_pattern = 3 without layer_types: add them"),
        (
            GEMMA3 | {"layer_types": ["full_attention", "sliding_attention"] * 13, "sliding_window_pattern": 6},
            "layer_types and sliding_window_pattern = 6 contradict each other",
        ),
        (
            {"model_type": "gemma3", "text_config": {"final_logit_softcapping": 9.0}},
            "final_logit_softcapping = 9.0 is not",
        ),
        (
            GEMMA4 | {"hidden_size_per_layer_input": None},
            "hidden_size_per_layer_input = missing is not supported; 0 are",
        ),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "'all' is not supported; None, vision are"),
        (GEMMA4 | {"num_kv_shared_layers": 18}, "num_kv_shared_layers = 18 is not supported; 0 are"),
        (GPT2 | {"hidden_size": 64}, "hidden_size = 64 and n_embd = 768 are two names of one attribute"),
        (GPT2 | {"scale_attn_weights": 1}, "scale_attn_weights = 1 is not supported; True, False are"),
        (
            GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_layer": 2**31 - 1},
            "num_hidden_layers = 2147483647: .*at most 1,024",
        ),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        (SMOLLM2 | {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not supported"),
        (
            PHI3 | {"rope_scaling": {"type": "llama3"}},
            "rope_type = 'llama3' is not supported; a phi3 can have default,",
        ),
        (SMOLLM2 | {"rope_scaling": {"type": "su"}}, "rope_type = 'su' is not supported; a llama can have"),
        (GPT2 | {"model_type": "gpt_bigcode", "multi_query": False}, "multi_query = False is not supported, only True"),
        (
            {"model_type": "gpt_neo", "vocab_size": 9, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
            | {"attention_types": [["here", 2]]},
            "attention_types = .*: should be lists of local and global",
        ),
        (
            {"model_type": "gpt_neo", "vocab_size": 9, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
            | {"attention_types": [[["global"] * 9_000, 1024]]},
            "for each of 2 layers",
        ),
        (
            GEMMA4 | {"per_layer_config": {"2": {"rms_norm_eps": 0.5}}},
            "should map numbers of layers to num_key_value_heads",
        ),
        (PHI3 | {"partial_rotary_factor": 1e308}, "the rotated part of a head is 1e.308; it should be at most 1"),
        (QWEN3_5_TEXT | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        (QWEN3_5_TEXT | {"attn_output_gate": False}, "attn_output_gate = False is not supported, only True"),
        (QWEN3_5_TEXT | {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not supported; swish, silu"),
        (QWEN3_5_TEXT | {"norm_topk_prob": False}, "norm_topk_prob = False is not supported, only True"),
        (
            QWEN3_5_TEXT | {"linear_num_value_heads": 30},
            "= 30 is not a multiple of linear_num_key_heads = 16; .* is 32",
        ),
        (QWEN3_5_TEXT | {"linear_num_key_heads": 0}, "linear_num_key_heads = 0: should be a whole number"),
        (QWEN3_5_TEXT | {"linear_num_value_heads": 0}, "linear_num_value_heads = 0: should be a whole number"),
        (QWEN3_5_TEXT | {"layer_types": ["linear_attention"] * 4}, "or linear_attention for each of 40 layers"),
        (QWEN3_5_TEXT | {"layer_types": ["sliding_attention"] * 40}, "should be full_attention or linear_attention"),
        (
            QWEN3_5_TEXT | {"rope_parameters": {**MROPE, "rope_type": "mrope"}},
            "'mrope' is not supported; a qwen3_5_moe",
        ),
        (QWEN3_5_TEXT | {"linear_gate": 1}, "linear_gate = 1 of a qwen3_5_moe_text is unknown"),
        (QWEN3_NEXT | {"full_attention_interval": 0}, "full_attention_interval = 0: should be a whole number"),
        (QWEN3_NEXT | {"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        ({"model_type": "gemma3"}, "text_config = missing: a gemma3 describes its text model there"),
        (SMOLLM3 | {"use_sliding_window": True, "sliding_window": 9}, "without layer_types: add them"),
        (
            SMOLLM3 | {"layer_types": ["sliding_attention"] * 30, "sliding_window": 9},
            "layer_types has sliding_attention, and sliding_window or use_sliding_window says that none has it",
        ),
        (QWEN2_MOE | {"use_sliding_window": True}, "without layer_types: add them"),
        (EXAONE4 | {"sliding_window": None, "layer_types": ["sliding_attention"] * 30}, "says that none has it"),
        (SMOLLM3 | {"layer_types": ["full_attention"] * 31}, "layer_types has 31 types, and there are 30 layers"),
        (QWEN2_MOE | {"layer_types": ["full_attention"] * 25}, "layer_types has 25 types, and there are 30 layers"),
        (QWEN2_MOE | {"layer_types": "full_attention"}, "layer_types = 'full_attention': should be a list"),
        (GRANITE4, "layer_types = missing: only attention is supported, for each of 30 layers"),
        (GRANITE4 | {"layer_types": ["attention", "mamba"] * 15}, "only attention is supported"),
        (OLMO3 | {"rope_theta": 9.0}, "rope_theta = 9.0 without rope_parameters: versions of transformers differ"),
        (APERTUS | {"rope_theta": 9.0}, "rope_theta without rope_parameters or rope_scaling: versions of transformers"),
        (APERTUS | {"hidden_act": "silu"}, "hidden_act = 'silu' is not supported, only 'xielu'"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias = True is not supported, only False"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported, only 'noaux_tc'"),
        (DEEPSEEK | {"auto_map": {"AutoModel": "modeling_deepseek.DeepseekV2Model"}}, "auto_map = .* is unknown"),
        (DEEPSEEK | {"auto_map": {"AutoModel": ["modeling_deepseek.DeepseekV3Model"]}}, "auto_map = .* is unknown"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported, only 1"),
        (DEEPSEEK | {"rope_interleave": None}, "rope_interleave = missing is not supported; True, False are"),
        (DEEPSEEK | {"q_lora_rank": 0}, "q_lora_rank = 0: should be a whole number"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank = missing: should be a whole number"),
        (DEEPSEEK | {"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors' is not"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob = True is not supported, only False"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "'noaux_tc' is not supported; greedy, group_limited_greedy are"),
        (DEEPSEEK_V2 | {"rope_interleave": False}, "rope_interleave = False of a deepseek_v2 is unknown"),
        (GLM_FLASH | {"first_k_dense_replace": 2}, "first_k_dense_replace = 2, which transformers does not read here"),
        (GLM_FLASH | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5: only 1.0"),
        (
            SMALL | {"model_type": "mistral4", "rope_parameters": {"type": "yarn", "partial_rotary_factor": 1.0}},
            "partial_rotary_factor = 1.0: only 0.5",
        ),
        (SMALL | {"model_type": "mistral4", "rope_parameters": {"rope_type": "default"}}, "a mistral4 can have yarn"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_what_a_family_cannot_say(attributes, message):
    with pytest.raises(jaxtp.HFError, match=message) as caught:
        model_config(attributes, "it")
    assert is_one_clear_message(caught.value)


FOLDERS = {
    "train": (train, lambda folder, run: ["--model.from-hf", folder, "--run.dir", run]),
    "check": (check, lambda folder, run: ["--model.from-hf", folder]),
    "estimate": (estimate, lambda folder, run: ["--model.from-hf", folder]),
    "generate": (generate, lambda folder, run: ["--model", folder, "--prompt", "x"]),
    "import": (convert, lambda folder, run: ["import", folder, run]),
    "plan": (convert, lambda folder, run: ["plan", folder]),
}


@pytest.mark.parametrize("command", FOLDERS)
def test_every_command_names_the_way_out_and_has_it(command, tmp_path, capsys):
    main, arguments = FOLDERS[command]
    folder, run = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | {"twist": 1, "turn": 2, "hidden_act": "gelu"}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    given = list(map(str, arguments(folder, run)))
    assert _exit_code(main, given) == 2
    _exit_code(main, [*given, "--ignore-config", "twist"])
    first, second = capsys.readouterr().err.split(": error: ")[1:]
    assert "--ignore-config twist" in first
    assert "--ignore-config turn" in first
    assert "--ignore-config twist" not in second
    assert "--ignore-config turn" in second
    _exit_code(main, [*given, "--ignore-config", "twist", "--ignore-config", "turn"])
    assert "--ignore-config" not in capsys.readouterr().err


def _exit_code(main, arguments):
    try:
        return main(arguments)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True, "1", None, [], 0])
def test_what_is_no_positive_number(value):
    with pytest.raises(jaxtp.HFError, match=r"factor = .*: should be a number above 0"):
        positive("factor", value)


KINDS = st.sampled_from(sorted(FAMILIES))
LAYERS = st.fixed_dictionaries(
    {},
    optional={
        "layer_types": st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=28, max_size=31)
        | VALUES,
        **{name: VALUES | st.integers(0, 9) for name in ("sliding_window", "sliding_window_pattern", "n_inner")},
        **{name: VALUES | st.integers(0, 40) for name in ("max_window_layers", "num_hidden_layers", "n_layer")},
        **{name: VALUES | st.integers(0, 9) for name in ("decoder_sparse_step", "num_experts", "num_local_experts")},
        **{name: VALUES | st.integers(0, 9) for name in ("moe_intermediate_size", "num_experts_per_tok")},
        "mlp_only_layers": st.lists(st.integers(-1, 40), max_size=3) | VALUES,
        "use_sliding_window": st.booleans() | VALUES,
        "scale_attn_by_inverse_layer_idx": st.booleans() | VALUES,
        "rope_parameters": st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), VALUES) | VALUES,
    },
)
ROPES = st.fixed_dictionaries(
    {},
    optional={
        name: VALUES | st.floats(0.5, 8)
        for name in (
            *("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor"),
            *("low_freq_factor", "high_freq_factor", "truncate", "rope_theta"),
        )
    }
    | {name: VALUES | st.lists(VALUES | st.floats(0.5, 8), max_size=40) for name in ("short_factor", "long_factor")}
    | {"rope_type": st.sampled_from(["linear", "llama3", "yarn", "longrope", "su", "default"]) | VALUES},
)
CONFIGS = st.one_of(
    changed(SMOLLM2),
    st.builds(
        lambda kind, rope, layers: (
            {"model_type": kind}
            | (GPT2 if kind == "gpt2" else {name: SMOLLM2[name] for name in SIZES})
            | {name: value for name, value in (rope | layers).items() if name in FAMILIES[kind].known_attributes()}
        ),
        KINDS,
        st.just({}) | ROPES.map(lambda rope: {"rope_scaling": rope}),
        LAYERS,
    ),
)


def check_config(attributes, folder):
    (folder / "config.json").write_text(json.dumps(attributes))
    gives_one_of(jaxtp.ModelConfig, jaxtp.HFError, lambda: jaxtp.read_config(folder))


@examples(40)
@given(CONFIGS)
def test_any_structure_as_config_json(tmp_path, attributes):
    check_config(attributes, tmp_path)


BESIDE = {
    "eos_token": {"content": "</s>"},
    "bos_token": "<s>",
    "eos_token_id": [1, 2],
    "chat_template": [{"name": "default", "template": "x"}],
}


def check_beside(described, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps(described))
    gives_one_of(str | int | None, TokenizerError, lambda: end_token(folder))
    gives_one_of(dict, TokenizerError, lambda: special_tokens(folder))
    gives_one_of(str | None, TokenizerError, lambda: chat_template(folder))


@examples(40)
@given(st.one_of(changed(BESIDE), VALUES))
def test_any_structure_beside_a_tokenizer(tmp_path, described):
    check_beside(described, tmp_path)


@pytest.mark.wide
@examples(300)
@given(CONFIGS, changed(BESIDE))
def test_many_structures(tmp_path, attributes, described):
    check_beside(described, tmp_path)
    check_config(attributes, tmp_path)
