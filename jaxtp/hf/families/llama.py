"""Llama 1 to 3, and models of the same architecture: arXiv 2302.13971, 2307.09288, 2407.21783.

Seed-OSS: other defaults. Arcee AFM: a plain MLP. SmolLM3: layers without rotations.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    COMMON,
    MLP_BIAS,
    NO_ROPE_LAYERS,
    WINDOW,
    Attribute,
    Family,
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
