"""LFM2 and LFM2.5, dense and with experts, and LFM3: most layers have a short convolution in place
of attention.

Experts have sigmoid scores, and a bias for their choice. LFM3 has norms on both sides of branches,
windows, and a gate for each head.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    COMMON,
    DENSE_WIDTH,
    EMBEDDINGS,
    NORMALIZED,
    OUT,
    QK_NORMS,
    QKV,
    ROUTER,
    SELECTION_BIAS,
    STACKED_EXPERTS,
    WINDOW,
    Attribute,
    Family,
    Tensor,
    block_tensors,
    numbers_of_experts,
    partial_rope,
    replace_all,
    separate_experts,
    sizes,
    with_names,
    without,
)

_CONVOLUTION = block_tensors(
    {
        "attention.in_proj.kernels.0": "conv.in_proj.weight",
        "attention.in_proj.kernels.1": "conv.in_proj.weight",
        "attention.in_proj.kernels.2": "conv.in_proj.weight",
        "attention.out.kernel": "conv.out_proj.weight",
    },
    transposed=True,
)
_TAPS = block_tensors({"attention.taps": "conv.conv.weight"}, transposed=True, unit_dim=True)
_NORMS = {"attention_norm.scale": "operator_norm.weight", "mlp_norm.scale": "ffn_norm.weight"}
_NAMES = _NORMS | {
    "attention.qk_norms.0.scale": "self_attn.q_layernorm.weight",
    "attention.qk_norms.1.scale": "self_attn.k_layernorm.weight",
}
_AFTER = {
    "attention_after_norm.scale": "post_operator_norm.weight",
    "mlp_after_norm.scale": "post_ffn_norm.weight",
}
_MLP = block_tensors(
    {
        "mlp.gate_up.kernels.0": "feed_forward.w1.weight",
        "mlp.gate_up.kernels.1": "feed_forward.w3.weight",
        "mlp.down.kernel": "feed_forward.w2.weight",
    },
    transposed=True,
)
_ADJUSTED = {"block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"}
"""Attributes that make another width of `intermediate_size`."""

LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    tensors=(
        *EMBEDDINGS,
        Tensor("norm.scale", "model.embedding_norm.weight"),
        *block_tensors(_NAMES),
        *QKV,
        *replace_all(
            OUT, name="model.layers.{layer}.self_attn.out_proj.weight", unless="short_conv"
        ),
        *_CONVOLUTION,
        *_TAPS,
        *_MLP,
    ),
    attributes=(
        *without(
            sizes(1e-5, kv_heads=8, eps_name="norm_eps"), "intermediate_size", "tie_word_embeddings"
        ),
        Attribute("intermediate_size", "d_ff", int, alias="block_ff_dim"),
        Attribute("tie_word_embeddings", "tie_embeddings", bool, True, alias="tie_embedding"),
    ),
    layer_attributes=COMMON | {"layer_types", "full_attn_idxs"} | _ADJUSTED,
    by_type={"linear_attention": (Attribute("conv_L_cache", "short_conv", int, 3),)},
    layer_types={"conv": "linear_attention"},
    rope_theta=1_000_000.0,
    always={"qk_norm": "head"},
    required={"conv_bias": False},
    written={"block_auto_adjust_ff_dim": False},
    # Sizes and initial values that transformers does not read
    ignored_attributes={
        *("block_dim", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init"),
        *("block_mlp_init_scale", "block_out_init_scale", "conv_use_xavier_init"),
        *("conv_dim", "conv_dim_out", "num_heads", "use_pos_enc"),
    },
)

LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    tensors=(
        *LFM2.tensors,
        replace(ROUTER, name="model.layers.{layer}.feed_forward.gate.weight"),
        *separate_experts("feed_forward", gate="w1", up="w3", down="w2"),
        *with_names(STACKED_EXPERTS, "mlp", "feed_forward"),
        replace(SELECTION_BIAS, name="model.layers.{layer}.feed_forward.expert_bias"),
    ),
    attributes=(
        *without(LFM2.attributes, "intermediate_size"),
        *numbers_of_experts("num_experts", 32, 4),
        replace(NORMALIZED, default=True),
        Attribute("routed_scaling_factor", "experts_scale", float, 1.0),
        Attribute("use_expert_bias", "selection_bias", bool, True),
    ),
    layer_attributes=COMMON | {"layer_types", "first_k_dense_replace", "num_dense_layers"},
    by_type={
        **LFM2.by_type,
        "experts": (Attribute("moe_intermediate_size", "d_ff", int, 1792),),
        "dense": DENSE_WIDTH,
    },
    default_dense_layers=2,
    always={"qk_norm": "head", "router_scores": "sigmoid"},
    written={},
)

LFM3 = Family(
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    tensors=(
        *EMBEDDINGS,
        Tensor("norm.scale", "model.embedding_norm.weight"),
        *block_tensors(_NORMS | _AFTER),
        *(QKV + QK_NORMS + replace_all(OUT, unless="short_conv")),
        *block_tensors({"attention.qkv.kernels.3": "self_attn.gate_proj.weight"}, transposed=True),
        *(_CONVOLUTION + _TAPS + _MLP),
    ),
    attributes=(
        *sizes(1e-5, kv_heads=4, eps_name="norm_eps", tied=True),
        Attribute("use_sandwich_norm", "norm_placement", {True: "both", False: "before"}, True),
        Attribute("use_attention_gate", "attention_gate", bool, True, also=("gate_per_head",)),
    ),
    layer_attributes=COMMON | WINDOW | {"layer_types"},
    by_type={"linear_attention": (Attribute("conv_L_cache", "short_conv", int, 7),)},
    layer_types=LFM2.layer_types,
    renamed={".self_attn.gate_proj.": ".self_attn.g_proj."},
    default_window=256,
    window_period=0,
    default_head_dim=128,
    rope_by_type=True,
    rope_kinds={"default", "proportional"},
    rope_attributes=partial_rope(),
    default_rope={
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    rope_theta=1_000_000.0,
    always={"qk_norm": "head"},
    required={"conv_bias": False},
)
