"""Qwen 2 and 2.5 (arXiv 2407.10671), Qwen 3 and Qwen3-MoE (arXiv 2505.09388)."""

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    BODY,
    COMMON_REQUIRED,
    EXPERTS_TP_PLAN,
    OUT_BIAS,
    QK_NORMS,
    QKV_BIASES,
    REPLICATED,
    ROUTER,
    STACKED_EXPERTS,
    TP_PLAN,
    Attribute,
    Family,
    Window,
    kv_heads,
    separate_experts,
    sizes,
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    tensors=BODY + QKV_BIASES,
    attributes=(*sizes(), kv_heads(32)),
    window=Window.SWITCHED,
    always={"attention_bias": True},  # of q, k and v; config.json has no attribute for it
    required={**COMMON_REQUIRED, "mlp_bias": False},
    tp_plan=TP_PLAN,
)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors=BODY + QKV_BIASES + OUT_BIAS + QK_NORMS,
    attributes=(*sizes(), kv_heads(32), ATTENTION_BIAS),
    window=Window.SWITCHED,
    default_head_dim=128,
    always={"qk_norm": "head"},
    required={**COMMON_REQUIRED, "mlp_bias": False},
    tp_plan={**TP_PLAN, **REPLICATED},
)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors=(
        *BODY,
        *QKV_BIASES,
        *OUT_BIAS,
        *QK_NORMS,
        ROUTER,
        *separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *STACKED_EXPERTS,
    ),
    attributes=(
        *sizes(),
        kv_heads(4),
        ATTENTION_BIAS,
        Attribute("num_experts", ("num_experts",), int, 128),
        Attribute("num_experts_per_tok", ("experts_per_token",), int, 8),
        Attribute("norm_topk_prob", ("normalize_experts",), bool, False),
    ),
    aliases={"num_local_experts": "num_experts"},
    window=Window.SWITCHED_FOR_ALL,
    dense_layers=True,
    always={"qk_norm": "head"},
    required={**COMMON_REQUIRED, "mlp_bias": False},
    ignored_attributes=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    tp_plan={**TP_PLAN, **REPLICATED, **EXPERTS_TP_PLAN},
)
