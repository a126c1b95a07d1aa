"""MiniMax M2: experts in every layer, chosen by sigmoid scores and a bias; partly rotated heads."""

from dataclasses import replace

from jaxtp.hf.families.family import (
    BODY,
    SELECTION_BIAS,
    Attribute,
    Family,
    numbers_of_experts,
    partial_rope,
    sizes,
)
from jaxtp.hf.families.mistral import SPARSE_EXPERTS

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    tensors=(
        *BODY,
        replace(
            SELECTION_BIAS,
            name="model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
            layout="separate",
        ),
        replace(
            SELECTION_BIAS,
            name="model.layers.{layer}.mlp.e_score_correction_bias",
            layout="stacked",
        ),
        *SPARSE_EXPERTS,
    ),
    attributes=(
        *sizes(kv_heads=8),
        *numbers_of_experts("num_local_experts", 256, 8, "num_experts"),
    ),
    rope_theta=5_000_000.0,
    rope_attributes=(
        *partial_rope(),
        Attribute("rotary_dim", "rotary_fraction", int, unit=("head_dim", -1.0)),
    ),
    default_head_dim=128,
    always={"qk_norm": "projection", "router_scores": "sigmoid", "selection_bias": True},
    required={
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
    },
    # Attributes of linear attention and of prediction heads in the authors' code, which these
    # models do not have
    ignored_attributes={
        "attn_type_list",
        "layernorm_full_attention_beta",
        "layernorm_linear_attention_beta",
        "layernorm_mlp_beta",
        "mlp_intermediate_size",
        "shared_moe_mode",
        "use_mtp",
        "num_mtp_modules",
        "mtp_transformer_layers",
    },
)
