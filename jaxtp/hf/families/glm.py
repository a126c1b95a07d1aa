"""GLM-4 (arXiv 2406.12793): interleaved rotation of half of each head, fused gate and up.

GLM-4 0414: norms before and after. GLM-4.5 to 4.7: experts with sigmoid scores, a bias for their
choice and shared experts (arXiv 2508.06471). GLM-4.7-Flash: DeepSeek-V3 in other sizes.
"""

from dataclasses import replace

from jaxtp.hf.families.deepseek import DEEPSEEK_V3
from jaxtp.hf.families.family import (
    ATTENTION,
    BODY,
    COMMON,
    DOWN,
    EXPERTS,
    GATE_UP,
    OUTER,
    ROPE,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    Attribute,
    Family,
    block_tensors,
    first_dense,
    grouped_experts,
    partial_rope,
    replace_all,
    sizes,
    with_defaults,
)

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    tensors=(
        *OUTER,
        *block_tensors(
            {
                "attention_norm.scale": "input_layernorm.weight",
                "attention_after_norm.scale": "post_self_attn_layernorm.weight",
                # Before the MLP, unlike the norm of this name in Gemma.
                "mlp_norm.scale": "post_attention_layernorm.weight",
                "mlp_after_norm.scale": "post_mlp_layernorm.weight",
            }
        ),
        *ATTENTION,
        *replace_all(GATE_UP, name="model.layers.{layer}.mlp.gate_up_proj.weight"),
        *DOWN,
    ),
    attributes=(
        *sizes(1.5625e-7, kv_heads=2),
        Attribute("attention_bias", "attention_bias", bool, True),
    ),
    rope_attributes=partial_rope(0.5),
    interleaved_rope=True,
    default_head_dim=128,
    always={"norm_placement": "both"},
)

GLM = replace(
    GLM4,
    model_type="glm",
    architecture="GlmForCausalLM",
    always={},
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    tensors=(
        *BODY,
        *EXPERTS,
        SELECTION_BIAS,
        *SHARED_EXPERTS,
    ),
    attributes=(
        *sizes(1e-5, kv_heads=8),
        Attribute("attention_bias", "attention_bias", bool, False),
        Attribute("use_qk_norm", "qk_norm", {False: "none", True: "head"}, False),
        *grouped_experts(128, 8, normalize=True),
    ),
    layer_attributes=COMMON | {"first_k_dense_replace"},
    default_dense_layers=1,
    by_type=first_dense(1408, 1),
    rope_attributes=partial_rope(0.5),
    later_layers=True,
    always={"router_scores": "sigmoid", "selection_bias": True},
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    attributes=with_defaults(
        DEEPSEEK_V3.attributes,
        rms_norm_eps=1e-5,
        num_key_value_heads=20,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        n_routed_experts=64,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
        n_group=1,
        topk_group=1,
    ),
    layer_attributes=ROPE | {"mlp_layer_types", "first_k_dense_replace"},
    by_type=first_dense(1536, 1),
    default_dense_layers=1,
    remote_code=(),
)
