"""Qwen 2, 2.5 and Qwen2-MoE (arXiv 2407.10671), Qwen 3 and Qwen3-MoE (arXiv 2505.09388)."""

from dataclasses import replace

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
    tensors=(*QWEN3.tensors, *base.EXPERTS),
    attributes=(*base.sizes(), base.kv_heads(4), base.ATTENTION_BIAS, *base.some_experts(128, 8)),
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

SHARED_EXPERT = tuple(
    base.Tensor(
        f"blocks.mlp.{ours}", f"model.layers.{{layer}}.mlp.{theirs}.weight", transposed=True
    )
    for ours, theirs in (
        ("shared.gate_up.kernels.0", "shared_expert.gate_proj"),
        ("shared.gate_up.kernels.1", "shared_expert.up_proj"),
        ("shared.down.kernel", "shared_expert.down_proj"),
        ("shared_gate", "shared_expert_gate"),
    )
)

QWEN2_MOE = replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    tensors=(
        *(tensor for tensor in QWEN3_MOE.tensors if tensor not in base.QK_NORMS + base.OUT_BIAS),
        *SHARED_EXPERT,
    ),
    attributes=(
        *base.sizes(),
        base.kv_heads(16),
        base.Attribute("qkv_bias", ("attention_bias",), bool, True),
        *base.some_experts(60, 4, alias=None),
    ),
    layer_attributes=QWEN3_MOE.layer_attributes | {"layer_types"},
    by_type={
        "experts": (
            base.Attribute("moe_intermediate_size", ("d_ff",), int, 1408),
            base.Attribute("shared_expert_intermediate_size", ("shared_experts",), int, 5632),
        ),
        "dense": (base.Attribute("intermediate_size", ("d_ff",), int),),
    },
    always_by_type={"experts": {"shared_experts_gate": True}},
    window_period=0,
    always={},
    tp_plan=base.TP_PLAN | base.EXPERTS_TP_PLAN,
)
