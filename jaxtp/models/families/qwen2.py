"""Qwen 2 and 2.5: Llama with biases on q, k and v that no attribute announces (arXiv 2407.10671)."""

from jaxtp.models.families.family import BODY, PLAIN, QKV_BIASES, TP_PLAN, UNREAD, Family, kv_heads, sizes

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    tensors=BODY + QKV_BIASES,
    attributes=(*sizes(), kv_heads(32)),
    window="switched",
    always={"attention_bias": True},
    required={**PLAIN, "mlp_bias": False},
    harmless=UNREAD,
    tp_plan=TP_PLAN,
)
