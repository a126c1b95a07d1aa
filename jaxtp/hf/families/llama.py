"""Llama 1 to 3, and models of the same architecture: arXiv 2302.13971, 2307.09288, 2407.21783."""

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    BODY,
    COMMON_REQUIRED,
    MLP_BIASES,
    OUT_BIAS,
    QKV_BIASES,
    TP_PLAN,
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
    required={**COMMON_REQUIRED, "sliding_window": None},
    tp_plan=TP_PLAN,
)
