"""Mistral: Llama with a sliding window (arXiv 2310.06825); Mixtral: with experts in every layer (arXiv 2401.04088)."""

from dataclasses import replace

from jaxtp.hf.families.family import (
    BODY,
    COMMON_REQUIRED,
    EXPERTS_TP_PLAN,
    NORMS,
    OUT,
    OUTER,
    QKV,
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

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    tensors=BODY,
    attributes=(*sizes(), kv_heads(8)),
    window=Window.ALWAYS,
    required={**COMMON_REQUIRED, "attention_bias": False, "mlp_bias": False},
    tp_plan=TP_PLAN,
)


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors=(
        *OUTER,
        *NORMS,
        *QKV,
        *OUT,
        replace(ROUTER, theirs="model.layers.{layer}.block_sparse_moe.gate.weight", layout="separate"),
        replace(ROUTER, layout="stacked"),
        *separate_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *STACKED_EXPERTS,
    ),
    attributes=(
        *sizes(1e-5),
        kv_heads(8),
        Attribute("num_local_experts", ("num_experts",), int, 8),
        Attribute("num_experts_per_tok", ("experts_per_token",), int, 2),
    ),
    aliases={"num_experts": "num_local_experts"},
    window=Window.ALWAYS,
    default_window=None,
    rope_theta=1e6,
    required={**COMMON_REQUIRED, "attention_bias": False, "mlp_bias": False, "router_jitter_noise": 0.0},
    ignored_attributes=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    tp_plan={
        **{module: style for module, style in TP_PLAN.items() if ".mlp." not in module},
        **EXPERTS_TP_PLAN,
    },
)
