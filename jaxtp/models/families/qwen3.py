"""Qwen 3: queries and keys normalised by head (arXiv 2505.09388)."""

from jaxtp.models.families.family import (
    ATTENTION_BIAS,
    BODY,
    OUT_BIAS,
    PLAIN,
    QK_NORMS,
    QKV_BIASES,
    REPLICATED,
    TP_PLAN,
    UNREAD,
    Family,
    kv_heads,
    sizes,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors=BODY + QKV_BIASES + OUT_BIAS + QK_NORMS,
    attributes=(*sizes(), kv_heads(32), ATTENTION_BIAS),
    window="switched",
    default_head_dim=128,
    always={"qk_norm": "head"},
    required={**PLAIN, "mlp_bias": False},
    harmless=UNREAD,
    tp_plan={**TP_PLAN, **REPLICATED},
)
