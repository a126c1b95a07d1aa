"""Ernie 4.5, dense and with experts: Llama with interleaved rotation.

See the Ernie 4.5 technical report, 2025.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

ERNIE4_5 = base.Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    tensors=base.BODY + base.QKV_BIASES + base.OUT_BIAS + base.MLP_BIASES,
    attributes=(
        *base.sizes(1e-5, tied=True),
        base.kv_heads(2),
        base.Attribute(
            "use_bias", ("attention_bias", "attention_out_bias", "mlp_bias"), bool, False
        ),
    ),
    interleaved_rope=True,
    rope_theta=500_000.0,
    default_head_dim=128,
    required=base.required(compression_ratio=1.0),
)

ERNIE4_5_MOE = base.Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    tensors=(
        *ERNIE4_5.tensors,
        base.Tensor("head.bias", "lm_head.bias"),
        *base.EXPERTS,
        replace(
            base.SELECTION_BIAS,
            theirs="model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",
            unit_dim=True,
        ),
        *base.with_biases(*base.SHARED_EXPERTS),
    ),
    attributes=(
        *base.sizes(1e-5, tied=True),
        base.kv_heads(4),
        base.Attribute(
            "use_bias",
            ("attention_bias", "attention_out_bias", "mlp_bias", "head_bias"),
            bool,
            False,
        ),
        base.Attribute("moe_num_experts", ("num_experts",), int, 64, alias="num_experts"),
        base.Attribute("moe_k", ("experts_per_token",), int, 6, alias="num_experts_per_tok"),
        base.Attribute("moe_norm_min", ("normalize_floor",), float, 1e-12, can_be_zero=True),
    ),
    layer_attributes=base.COMMON | base.EXPERT_RANGE,
    by_type={
        "experts": (
            base.Attribute("moe_intermediate_size", ("d_ff",), int, 1536),
            base.Attribute(
                "moe_num_shared_experts",
                ("shared_experts",),
                int,
                2,
                unit=("d_ff", 1),
                can_be_zero=True,
            ),
        ),
        "dense": (base.Attribute("intermediate_size", ("d_ff",), int),),
    },
    default_dense_layers=1,
    interleaved_rope=True,
    rope_theta=500_000.0,
    others=("model.mtp_",),
    always={"selection_bias": True},
    required=base.required(moe_gate="topk", moe_use_aux_free=True),
    ignored_attributes=base.ROUTER_LOSS
    | {"moe_capacity", "num_nextn_predict_layers", "num_mtp_layers"},
    tp_plan=base.TP_PLAN | base.EXPERTS_TP_PLAN | base.SHARED_TP_PLAN,
)
