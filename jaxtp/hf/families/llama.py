"""Llama 1 to 3, and models of the same architecture: arXiv 2302.13971, 2307.09288, 2407.21783.

Seed-OSS, IQuest-Coder: other defaults. InternLM3: two switches of biases. Arcee AFM: a plain MLP.
SmolLM3: layers without rotations. Code World Model: windows.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    COMMON,
    MLP_BIAS,
    NO_ROPE_LAYERS,
    OTHER_TEXT_IN_MEMORY,
    WINDOW,
    Attribute,
    Family,
    Wrapper,
    sizes,
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    attributes=(*sizes(), ATTENTION_BIAS, MLP_BIAS),
    required={"sliding_window": None},
)

SEED_OSS = replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    attributes=(
        *sizes(kv_heads=8),
        Attribute("attention_bias", "attention_bias", bool, True),
        Attribute("attention_out_bias", "attention_out_bias", bool, False),
        MLP_BIAS,
    ),
    default_head_dim=128,
    # 0.1 by default.
    ignored_attributes={"attention_dropout"},
)

ARCEE = replace(
    LLAMA,
    model_type="arcee",
    architecture="ArceeForCausalLM",
    attributes=(
        *sizes(1e-5),
        ATTENTION_BIAS,
        MLP_BIAS,
        Attribute("hidden_act", "activation", ACTIVATIONS, "relu2"),
    ),
    always={"mlp": "plain"},
)

SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    attributes=(*sizes(tied=True, kv_heads=4), ATTENTION_BIAS, MLP_BIAS),
    layer_attributes=COMMON | WINDOW | NO_ROPE_LAYERS | {"use_sliding_window", "layer_types"},
    default_window=None,
    window_period=0,
    rope_theta=2_000_000.0,
    required={},
    # transformers does not read it.
    ignored_attributes={"max_window_layers"},
)

INTERNLM3 = replace(
    LLAMA,
    model_type="internlm3",
    attributes=(
        *sizes(1e-5, kv_heads=2),
        # Of q, k and v; the other switch is of o too.
        Attribute("attention_bias", "attention_bias", bool, False, alias="qkv_bias"),
        Attribute("mlp_bias", "attention_out_bias", bool, False, alias="bias", also=("mlp_bias",)),
    ),
    rope_kinds=LLAMA.rope_kinds | {"dynamic"},
    default_head_dim=128,
    remote_code=("modeling_internlm3.InternLM3Model", "modeling_internlm3.InternLM3ForCausalLM"),
)

IQUESTCODER = replace(
    LLAMA,
    model_type="iquestcoder",
    attributes=(*sizes(1e-5, kv_heads=8), ATTENTION_BIAS, MLP_BIAS),
    default_head_dim=128,
    required={"clip_qkv": None, "use_sliding_window": False},
    # Without effect as long as `use_sliding_window` is false.
    ignored_attributes={"sliding_window", "max_window_layers"},
    remote_code=(
        "modeling_iquestcoder.IQuestCoderModel",
        "modeling_iquestcoder.IQuestCoderForCausalLM",
    ),
)

CWM = replace(
    LLAMA,
    model_type="cwm",
    architecture="CwmForCausalLM",
    attributes=(*sizes(1e-5, kv_heads=8), MLP_BIAS),
    layer_attributes=COMMON | WINDOW | {"layer_types"},
    default_window=8192,
    window_period=4,
    global_layer=0,
    window_can_be_null=True,
    default_head_dim=128,
    rope_theta=1e6,
    default_rope={
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    required={},
)

INTERNVL_WRAPPER = Wrapper(
    "internvl",
    "InternVLForConditionalGeneration",
    text_types=("qwen2", "qwen3", "qwen3_moe", "llama"),
)
_LLAVA = Wrapper(
    "llava",
    "LlavaForConditionalGeneration",
    text_types=("llama", "mistral", "qwen2"),
    other_tensors=(*INTERNVL_WRAPPER.other_tensors, "image_newline"),
)
IDEFICS3_WRAPPER = Wrapper(
    "idefics3",
    "Idefics3ForConditionalGeneration",
    text_types=("llama",),
    other_tensors=("vision_model.", "connector."),
    text={
        # Of a resampler that no model has
        "ignored_attributes": {"perceiver_config", "pixel_shuffle_factor", "neftune_noise_alpha"},
        "required": {**LLAMA.required, "qk_layer_norms": False, "use_resampler": False},
    },
    in_memory=OTHER_TEXT_IN_MEMORY,
)
SMOLVLM_WRAPPER = replace(
    IDEFICS3_WRAPPER, model_type="smolvlm", architecture="SmolVLMForConditionalGeneration"
)
LLAVA_WRAPPERS = (
    _LLAVA,
    replace(_LLAVA, model_type="llava_next", architecture="LlavaNextForConditionalGeneration"),
)
