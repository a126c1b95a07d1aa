"""GLM-4 (arXiv 2406.12793): interleaved rotation of half of each head, fused gate and up.

GLM-4 0414: norms before and after. GLM-4.5 to 4.7: experts with sigmoid scores, a bias for their
choice and shared experts (arXiv 2508.06471). GLM-4.7-Flash: DeepSeek-V3 in other sizes.

Solar Open and Sarvam 30B are GLM-4.5 with full rotation.
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
    MLP,
    NORMS,
    OUT,
    OUTER,
    QKV,
    ROPE,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    Attribute,
    Family,
    Wrapper,
    block_tensors,
    first_dense,
    grouped_experts,
    partial_rope,
    replace_all,
    sizes,
    tensors,
    with_biases,
    with_defaults,
    without,
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
    rotated="pairs",
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
    only_layer_types=True,
    by_type=first_dense(1536, 1),
    default_dense_layers=1,
    remote_code=(),
)

SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    attributes=without(GLM4_MOE.attributes, "intermediate_size", "use_qk_norm"),
    layer_attributes=COMMON,
    by_type={"experts": first_dense(1280, 1)["experts"]},
    rope_attributes=(),
    rope_theta=1e6,
    default_head_dim=128,
    later_layers=False,
    required={"first_k_dense_replace": 0, "use_qk_norm": False},
    # No layer has this width.
    ignored_attributes={"intermediate_size"},
)

_NORMS_OF_HEADS = {
    "attention.qk_norms.0.scale": "attention.query_layernorm.weight",
    "attention.qk_norms.1.scale": "attention.key_layernorm.weight",
}

SARVAM_MOE = replace(
    GLM4_MOE,
    model_type="sarvam_moe",
    tensors=(
        *tensors({"embedding.embedding": "model.word_embeddings.weight"}),
        *OUTER[1:],
        *NORMS,
        *with_biases(
            *replace_all(
                QKV,
                name="model.layers.{layer}.attention.query_key_value.weight",
                layout="separate",
            ),
            # As in memory
            *replace_all(QKV, layout="stacked"),
        ),
        *replace_all(OUT, name="model.layers.{layer}.attention.dense.weight"),
        *block_tensors(_NORMS_OF_HEADS),
        *MLP,
        *EXPERTS,
        replace(SELECTION_BIAS, name="model.layers.{layer}.mlp.gate.expert_bias"),
        *SHARED_EXPERTS,
    ),
    attributes=(
        *sizes(kv_heads=4),
        Attribute("attention_bias", "attention_bias", bool, False, alias="use_qkv_bias"),
        Attribute("use_qk_norm", "qk_norm", {False: "none", True: "head"}, True),
        *with_defaults(
            grouped_experts(128, 6, normalize=True, alias="num_experts"),
            routed_scaling_factor=2.5,
        ),
    ),
    by_type=first_dense(1024, 1, alias="num_shared_experts"),
    renamed={
        "word_embeddings": "embed_tokens",
        ".attention.": ".self_attn.",
        "self_attn.dense": "self_attn.o_proj",
        "query_layernorm": "q_norm",
        "key_layernorm": "k_norm",
    },
    rope_attributes=partial_rope(),
    rope_theta=8e6,
    default_head_dim=64,
    remote_code=("modeling_sarvam_moe.SarvamMoEModel", "modeling_sarvam_moe.SarvamMoEForCausalLM"),
    later_layers=False,
    required={
        "use_bias": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    ignored_attributes={"max_window_layers", "output_dropout", "router_dtype"},
)

GLM4V_WRAPPER = Wrapper(
    "glm4v",
    "Glm4vForConditionalGeneration",
    text_types=("glm4v_text",),
    other_tensors=("visual.",),
    text={
        "attributes": with_defaults(GLM4.attributes, rms_norm_eps=1e-5),
        "rope_attributes": partial_rope(),
        "rope_ignored": {"mrope_section"},
        "default_head_dim": None,
    },
)
GLM4V_MOE_WRAPPER = Wrapper(
    "glm4v_moe",
    "Glm4vMoeForConditionalGeneration",
    text_types=("glm4v_moe_text",),
    other_tensors=("visual.",),
    text={
        "attributes": with_defaults(GLM4_MOE.attributes, attention_bias=True),
        "rope_ignored": {"mrope_section"},
    },
)
