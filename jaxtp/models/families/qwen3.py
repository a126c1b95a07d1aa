"""Qwen 3: queries and keys normalised by head (arXiv 2505.09388)."""

from jaxtp.models.families.family import (
    ATTENTION_BIAS,
    BODY,
    HEAD_NORMS,
    OUT_BIAS,
    PLAIN,
    QKV_BIASES,
    SIZES,
    TP_PLAN,
    UNREAD,
    Family,
    kv_heads,
)

_REPLICATED = "replicated_with_grad_allreduce"

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors=BODY + QKV_BIASES + OUT_BIAS + HEAD_NORMS,
    attributes=(*SIZES, kv_heads(32), ATTENTION_BIAS),
    window="switched",
    default_head_dim=128,
    always={"qk_norm": "head"},
    required={**PLAIN, "mlp_bias": False},
    harmless=UNREAD,
    tp_plan={
        **TP_PLAN,
        "layers.*.self_attn.q_norm": _REPLICATED,
        "layers.*.self_attn.k_norm": _REPLICATED,
    },
)
