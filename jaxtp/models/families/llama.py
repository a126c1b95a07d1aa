"""Llama 1 to 3, and what has its shape: arXiv 2302.13971, 2307.09288, 2407.21783."""

from jaxtp.models.families.family import (
    ATTENTION_BIAS,
    BODY,
    MLP_BIASES,
    OUT_BIAS,
    PLAIN,
    QKV_BIASES,
    TP_PLAN,
    UNREAD,
    Attribute,
    Family,
    kv_heads,
    sizes,
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors=BODY + QKV_BIASES + OUT_BIAS + MLP_BIASES,
    attributes=(
        *sizes(),
        kv_heads(),
        ATTENTION_BIAS,
        Attribute("mlp_bias", ("mlp_bias",), bool, False),
    ),
    required={**PLAIN, "sliding_window": None},
    harmless=UNREAD,
    tp_plan=TP_PLAN,
)
