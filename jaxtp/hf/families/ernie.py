"""Ernie 4.5, dense and with experts: Llama with interleaved rotation.

See the Ernie 4.5 technical report, 2025.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    BODY,
    COMMON,
    DENSE_WIDTH,
    EXPERT_RANGE,
    EXPERTS,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    Attribute,
    Family,
    sizes,
    with_biases,
)

ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    attributes=(
        *sizes(1e-5, tied=True, kv_heads=2),
        Attribute(
            "use_bias",
            "attention_bias",
            bool,
            False,
            also=(
                "attention_out_bias",
                "mlp_bias",
            ),
        ),
    ),
    rotated="pairs",
    rope_theta=500_000.0,
    default_head_dim=128,
    required={"compression_ratio": 1.0},
)

ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    tensors=(
        *(BODY + EXPERTS),
        replace(
            SELECTION_BIAS,
            name="model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",
            unit_dim=True,
        ),
        *with_biases(*SHARED_EXPERTS),
    ),
    attributes=(
        *sizes(1e-5, tied=True, kv_heads=4),
        Attribute(
            "use_bias",
            "attention_bias",
            bool,
            False,
            also=("attention_out_bias", "mlp_bias", "head_bias"),
        ),
        Attribute("moe_num_experts", "num_experts", int, 64, alias="num_experts"),
        Attribute("moe_k", "experts_per_token", int, 6, alias="num_experts_per_tok"),
        Attribute("moe_norm_min", "normalize_floor", float, 1e-12, can_be_zero=True),
    ),
    layer_attributes=COMMON | EXPERT_RANGE,
    by_type={
        "experts": (
            Attribute("moe_intermediate_size", "d_ff", int, 1536),
            Attribute(
                "moe_num_shared_experts",
                "shared_experts",
                int,
                2,
                unit=("d_ff", 1),
                can_be_zero=True,
            ),
        ),
        "dense": DENSE_WIDTH,
    },
    default_dense_layers=1,
    rotated="pairs",
    rope_theta=500_000.0,
    other_tensors=("model.mtp_",),
    always={"selection_bias": True},
    required={"moe_gate": "topk", "moe_use_aux_free": True},
    ignored_attributes={"moe_capacity"},
)
