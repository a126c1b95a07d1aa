"""Mistral: Llama with a sliding window (arXiv 2310.06825); Mixtral: with experts in every layer (arXiv 2401.04088)."""

from dataclasses import replace

from jaxtp.hf.families import family as base

MISTRAL = base.Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    tensors=base.BODY,
    attributes=(*base.sizes(), base.kv_heads(8)),
    layer_attributes=base.COMMON | base.WINDOW,
    required=base.required(attention_bias=False, mlp_bias=False),
)


MIXTRAL = base.Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors=(
        *base.OUTER,
        *base.NORMS,
        *base.QKV,
        *base.OUT,
        replace(base.ROUTER, theirs="model.layers.{layer}.block_sparse_moe.gate.weight", layout="separate"),
        replace(base.ROUTER, layout="stacked"),
        *base.separate_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *base.STACKED_EXPERTS,
    ),
    attributes=(
        *base.sizes(1e-5),
        base.kv_heads(8),
        base.Attribute("num_local_experts", ("num_experts",), int, 8, alias="num_experts"),
        base.Attribute("num_experts_per_tok", ("experts_per_token",), int, 2),
    ),
    layer_attributes=base.COMMON | base.WINDOW,
    default_window=None,
    rope_theta=1e6,
    required=base.required(attention_bias=False, mlp_bias=False, router_jitter_noise=0.0),
    ignored_attributes=base.ROUTER_LOSS,
    tp_plan={module: style for module, style in base.TP_PLAN.items() if ".mlp." not in module} | base.EXPERTS_TP_PLAN,
)

MISTRAL3_WRAPPER = base.Wrapper("mistral3", "Mistral3ForConditionalGeneration", text_types=("mistral",))
