"""Qwen 2 and 2.5 (arXiv 2407.10671), Qwen 3 and Qwen3-MoE (arXiv 2505.09388)."""

from jaxtp.hf.families import family as base

QWEN2 = base.Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    tensors=base.BODY + base.QKV_BIASES,
    attributes=(*base.sizes(), base.kv_heads(32)),
    layer_attributes=base.COMMON | base.SWITCHED_WINDOW | {"layer_types"},
    always={"attention_bias": True},  # of q, k and v; config.json has no attribute for it
    required=base.required(mlp_bias=False),
)


QWEN3 = base.Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors=base.BODY + base.QKV_BIASES + base.OUT_BIAS + base.QK_NORMS,
    attributes=(*base.sizes(), base.kv_heads(32), base.ATTENTION_BIAS),
    layer_attributes=base.COMMON | base.SWITCHED_WINDOW | {"layer_types"},
    default_head_dim=128,
    always={"qk_norm": "head"},
    required=base.required(mlp_bias=False),
    tp_plan=base.TP_PLAN | base.REPLICATED,
)


QWEN3_MOE = base.Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors=(
        *QWEN3.tensors,
        base.ROUTER,
        *base.separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *base.STACKED_EXPERTS,
    ),
    attributes=(
        *base.sizes(),
        base.kv_heads(4),
        base.ATTENTION_BIAS,
        base.Attribute("num_experts", ("num_experts",), int, 128, alias="num_local_experts"),
        base.Attribute("num_experts_per_tok", ("experts_per_token",), int, 8),
        base.Attribute("norm_topk_prob", ("normalize_experts",), bool, False),
    ),
    layer_attributes=base.COMMON | base.SWITCHED_WINDOW | base.DENSE_LAYERS,
    by_type={
        "experts": (base.Attribute("moe_intermediate_size", ("d_ff",), int, 768),),
        "dense": (base.Attribute("intermediate_size", ("d_ff",), int),),
    },
    always={"qk_norm": "head"},
    required=base.required(mlp_bias=False),
    ignored_attributes=base.ROUTER_LOSS,
    tp_plan=base.TP_PLAN | base.REPLICATED | base.EXPERTS_TP_PLAN,
)
