"""Gemma 4: 31B, 26B-A4B (experts and a dense MLP in each block) and 12B, without E2B and E4B."""

from dataclasses import replace

from jaxtp.hf.families.family import (
    COMMON,
    WINDOW,
    Attribute,
    Wrapper,
    block_tensors,
    only,
    partial_rope,
    with_defaults,
    without,
)
from jaxtp.hf.families.gemma import GEMMA3

GEMMA4 = replace(
    GEMMA3,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    tensors=(
        *GEMMA3.tensors,
        *block_tensors({"layer_scale": "layer_scalar"}),
        # In blocks with experts the MLP is one of two:
        *(
            replace(tensor, path=tensor.path.replace(".mlp", ".mlp.mlp"))
            for tensor in GEMMA3.tensors
            if tensor.path.startswith(("blocks.mlp.", "blocks.mlp_norm."))
        ),
        *block_tensors(
            {
                "mlp.mlp_after_norm.scale": "post_feedforward_layernorm_1.weight",
                "mlp.experts.input_scale": "pre_feedforward_layernorm_2.weight",
                "mlp.experts_after_norm.scale": "post_feedforward_layernorm_2.weight",
            }
        ),
        *block_tensors({"mlp.experts.router": "router.proj.weight"}, transposed=True),
        *block_tensors(
            {
                "mlp.experts.router_scale": "router.scale",
                "mlp.experts.expert_scale": "router.per_expert_scale",
            }
        ),
        *block_tensors(
            {
                "mlp.experts.gate": "experts.gate_up_proj",
                "mlp.experts.up": "experts.gate_up_proj",
                "mlp.experts.down": "experts.down_proj",
            },
            transposed=True,
        ),
    ),
    attributes=(
        *with_defaults(
            without(GEMMA3.attributes, "query_pre_attn_scalar"),
            vocab_size=262_144,
            num_hidden_layers=30,
        ),
        only("hidden_size_per_layer_input", 0, default=256),
        only("num_kv_shared_layers", 0, default=0),
        only("use_double_wide_mlp", False, default=False),
        Attribute("num_experts", "num_experts", int, can_be_null=True, can_be_zero=True),
        # Causal for text.
        only("use_bidirectional_attention", None, "vision"),
    ),
    layer_attributes=COMMON | WINDOW | {"layer_types", "per_layer_config", "enable_moe_block"},
    by_type={
        "experts": (
            Attribute("top_k_experts", "experts_per_token", int),
            Attribute("moe_intermediate_size", "d_ff", int),
            Attribute("intermediate_size", "dense_mlp", int, 9216),
        ),
        "dense": (Attribute("intermediate_size", "d_ff", int, 9216),),
        "sliding_attention": (
            Attribute("head_dim", "head_dim", int, 256),
            Attribute("num_key_value_heads", "num_kv_heads", int, 4),
        ),
        "full_attention": (
            Attribute("global_head_dim", "head_dim", int, 512),
            Attribute("attention_k_eq_v", "value_is_key", bool, False),
            Attribute(
                "num_global_key_value_heads",
                "num_kv_heads",
                int,
                default_from="num_kv_heads",
                only_if=("attention_k_eq_v", True),
            ),
        ),
    },
    default_window=512,
    last_is_global=True,
    rope_kinds={"default", "proportional"},
    rope_attributes=partial_rope(),
    default_rope={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    always={
        "norm": "rms",
        "norm_placement": "both",
        "qk_norm": "head",
        "value_norm": True,
        "query_scale": 1.0,
        "layer_scale": True,
    },
    required={},
    # transformers reads hidden_activation instead of the first.
    ignored_attributes={"hidden_act", "vocab_size_per_layer_input"},
)

GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    attributes=with_defaults(
        without(GEMMA4.attributes, "num_experts"),
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
    ),
    layer_attributes=GEMMA4.layer_attributes - {"enable_moe_block"},
    default_window=1024,
)

GEMMA4_WRAPPER = Wrapper(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    text_types=("gemma4_text",),
    other_tensors=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
)
GEMMA4_UNIFIED_WRAPPER = Wrapper(
    "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
    text_types=("gemma4_unified_text",),
    other_tensors=("vision_embedder.", "embed_vision.", "embed_audio."),
)
