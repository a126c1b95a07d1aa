"""Mistral: Llama with a sliding window (arXiv 2310.06825)."""

from jaxtp.models.families.family import BODY, PLAIN, TP_PLAN, UNREAD, Family, kv_heads, sizes

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    tensors=BODY,
    attributes=(*sizes(), kv_heads(8)),
    window="always",
    required={**PLAIN, "attention_bias": False, "mlp_bias": False},
    harmless=UNREAD,
    tp_plan=TP_PLAN,
)
