"""Llama 1 to 3, and models of the same architecture: arXiv 2302.13971, 2307.09288, 2407.21783."""

from jaxtp.hf.families import family as base

LLAMA = base.Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors=base.BODY + base.QKV_BIASES + base.OUT_BIAS + base.MLP_BIASES,
    attributes=(
        *base.sizes(),
        base.kv_heads(),
        base.ATTENTION_BIAS,
        base.Attribute("mlp_bias", ("mlp_bias",), bool, False),
    ),
    required=base.required(sliding_window=None),
)
