"""GLM-4 (arXiv 2406.12793): interleaved rotation of half of each head, fused gate and up.

GLM-4 0414: norms before and after. GLM-4.5 to 4.7: experts with sigmoid scores, a bias for their
choice and shared experts (arXiv 2508.06471). GLM-4.7-Flash: DeepSeek-V3 in other sizes.
"""

from dataclasses import replace

from jaxtp.hf.families import deepseek
from jaxtp.hf.families import family as base

GLM4 = base.Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        base.Tensor(
            "blocks.attention_after_norm.scale",
            "model.layers.{layer}.post_self_attn_layernorm.weight",
        ),
        # Before the MLP, unlike the norm of this name in Gemma.
        base.Tensor(
            "blocks.mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"
        ),
        base.Tensor(
            "blocks.mlp_after_norm.scale", "model.layers.{layer}.post_mlp_layernorm.weight"
        ),
        *(base.QKV + base.QKV_BIASES + base.OUT),
        *(
            replace(tensor, theirs="model.layers.{layer}.mlp.gate_up_proj.weight")
            for tensor in base.GATE_UP
        ),
        *base.DOWN,
    ),
    attributes=(
        *base.sizes(1.5625e-7),
        base.kv_heads(2),
        base.Attribute("attention_bias", ("attention_bias",), bool, True),
    ),
    rope_attributes=(replace(base.PARTIAL_ROPE, default=0.5),),
    interleaved_rope=True,
    default_head_dim=128,
    always={"norm_placement": "both"},
    required=base.required(without=("partial_rotary_factor",), mlp_bias=False),
    tp_plan={
        **base.ATTENTION_TP_PLAN,
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    },
)

GLM = replace(
    GLM4,
    model_type="glm",
    architecture="GlmForCausalLM",
    tensors=tuple(tensor for tensor in GLM4.tensors if "after_norm" not in tensor.ours),
    always={},
)

GLM4_MOE = base.Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    tensors=(
        *base.BODY,
        *base.QKV_BIASES,
        *base.QK_NORMS,
        *base.EXPERTS,
        base.SELECTION_BIAS,
        *base.SHARED_EXPERTS,
    ),
    attributes=(
        *base.sizes(1e-5),
        base.kv_heads(8),
        base.Attribute("attention_bias", ("attention_bias",), bool, False),
        base.Attribute("use_qk_norm", ("qk_norm",), {False: "none", True: "head"}, False),
        *base.grouped_experts(128, 8, normalize=True),
    ),
    layer_attributes=base.COMMON | {"first_k_dense_replace"},
    default_dense_layers=1,
    by_type=base.first_dense(1408, 1),
    rope_attributes=(replace(base.PARTIAL_ROPE, default=0.5),),
    later_layers=True,
    always={"router_scores": "sigmoid", "selection_bias": True},
    required=base.required(without=("partial_rotary_factor",), mlp_bias=False),
    ignored_attributes=base.ROUTER_LOSS | {"num_nextn_predict_layers", "num_mtp_layers"},
    tp_plan=base.TP_PLAN | base.EXPERTS_TP_PLAN | base.SHARED_TP_PLAN,
)

GLM4_MOE_LITE = replace(
    deepseek.DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    attributes=base.with_defaults(
        (
            *deepseek.attributes(1e-5),
            deepseek.ROPE_PAIRS,
            *base.grouped_experts(64, 4, normalize=True),
        ),
        num_key_value_heads=20,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        routed_scaling_factor=1.8,
    ),
    layer_attributes=base.ROPE | {"mlp_layer_types", "first_k_dense_replace"},
    by_type=base.first_dense(1536, 1),
    default_dense_layers=1,
    remote_code=(),
    tp_plan=base.TP_PLAN | deepseek.ATTENTION_TP_PLAN | base.EXPERTS_TP_PLAN,
)
