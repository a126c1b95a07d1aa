"""Gemma 4 but for E2B and E4B, and its text models with another embedding of images (12B)."""

from dataclasses import replace

from jaxtp.hf.families import family as base
from jaxtp.hf.families.gemma import GEMMA3

GEMMA4 = replace(
    GEMMA3,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    tensors=(*GEMMA3.tensors, base.Tensor("blocks.layer_scale", "model.layers.{layer}.layer_scalar")),
    attributes=(
        *base.with_defaults(
            tuple(each for each in GEMMA3.attributes if each.name != "query_pre_attn_scalar"),
            **{"vocab_size": 262_144, "num_hidden_layers": 30},
        ),
        base.only("hidden_size_per_layer_input", 0, default=256),
        base.only("num_kv_shared_layers", 0, default=0),
        base.only("use_double_wide_mlp", False, default=False),
        base.only("enable_moe_block", False, default=False),
        base.only("use_bidirectional_attention", None, "vision"),  # causal for text
    ),
    layer_attributes=base.COMMON | base.WINDOW | {"layer_types", "per_layer_config"},
    by_type={
        "sliding_attention": (
            base.Attribute("head_dim", ("head_dim",), int, 256),
            base.Attribute("num_key_value_heads", ("num_kv_heads",), int, 4),
        ),
        "full_attention": (
            base.Attribute("global_head_dim", ("head_dim",), int, 512),
            base.Attribute("attention_k_eq_v", ("value_is_key",), bool, False),
            base.Attribute(
                *("num_global_key_value_heads", ("num_kv_heads",), int),
                default_from="num_kv_heads",
                only_if="value_is_key",
            ),
        ),
    },
    default_window=512,
    last_is_global=True,
    rope_kinds=frozenset({"default", "proportional"}),
    rope_attributes=(base.PARTIAL_ROPE,),
    default_rope={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    always={
        **{"norm": "rms", "norm_placement": "both", "qk_norm": "head", "value_norm": True},
        **{"query_scale": 1.0, "layer_scale": True},
    },
    required=base.required(without=("hidden_act", "partial_rotary_factor", "per_layer_config"), mlp_bias=False),
    ignored_attributes=frozenset(
        {"vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size"}
    ),
)

GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    attributes=base.with_defaults(
        GEMMA4.attributes, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"
    ),
    default_window=1024,
)

GEMMA4_WRAPPER = base.Wrapper(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    text_types=("gemma4_text",),
    others=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
)
GEMMA4_UNIFIED_WRAPPER = base.Wrapper(
    "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
    text_types=("gemma4_unified_text",),
    others=("vision_embedder.", "embed_vision.", "embed_audio."),
)
