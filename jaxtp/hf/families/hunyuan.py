"""Hunyuan (dense): Llama with queries and keys normalized after a rotation with a scaled base.

Hy3: experts with sigmoid scores, a bias for their choice and a shared expert.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION,
    ATTENTION_BIAS,
    BODY,
    COMMON,
    EXPERTS,
    MLP,
    NORMS,
    OUTER,
    ROUTER,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    Attribute,
    Family,
    block_tensors,
    first_dense,
    numbers_of_experts,
    sizes,
    with_names,
)

HUNYUAN = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    tensors=(
        *(OUTER + NORMS + ATTENTION + MLP),
        *block_tensors(
            {
                "attention.qk_norms.0.scale": "self_attn.query_layernorm.weight",
                "attention.qk_norms.1.scale": "self_attn.key_layernorm.weight",
            }
        ),
    ),
    attributes=(*sizes(1e-5), ATTENTION_BIAS),
    rope_kinds=Family.rope_kinds | {"dynamic"},
    always={"qk_norm": "head", "qk_norm_after_rope": True},
    required={
        "use_qk_norm": True,
        "use_cla": False,
        "norm_type": "rms",
        "use_rotary_pos_emb": True,
        "position_embedding_xdrope": False,
        "add_classification_head": False,
    },
    # Attributes of other models in the authors' code: image and text tokens, classes, layers that
    # share keys
    ignored_attributes={
        "attention_head_dim",
        "cla_share_factor",
        "class_num",
        "dense_list",
        "enable_lm_head_fp32",
        "org_vocab_size",
        "pad_id",
        "mask_init_id",
        "text_start_id",
        "text_end_id",
        "im_start_id",
        "im_end_id",
        "pool_type",
        "skip_cls_token",
        "num_media_embeds",
    },
)

HY_V3 = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    tensors=(
        *BODY,
        replace(ROUTER, name="model.layers.{layer}.mlp.router.gate.weight", float32=None),
        *EXPERTS[1:],
        replace(SELECTION_BIAS, name="model.layers.{layer}.mlp.expert_bias"),
        *with_names(SHARED_EXPERTS, "shared_experts", "shared_mlp"),
    ),
    attributes=(
        *sizes(1e-5, kv_heads=8),
        ATTENTION_BIAS,
        *numbers_of_experts("num_experts", 192, 8, "num_local_experts"),
        Attribute("router_scaling_factor", "experts_scale", float, 2.826),
    ),
    layer_attributes=COMMON | {"mlp_layer_types", "first_k_dense_replace"},
    only_layer_types=True,
    default_dense_layers=1,
    by_type=first_dense(1536, 1, "num_shared_experts"),
    later_layers=True,
    renamed={"router.gate": "gate", "shared_mlp": "shared_experts"},
    rope_theta=11_158_840.0,
    default_head_dim=128,
    always={"qk_norm": "head", "router_scores": "sigmoid", "selection_bias": True},
    required={
        "qk_norm": True,
        "route_norm": True,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
    },
    # A dtype in which transformers adds
    ignored_attributes={"enable_moe_fp32_combine"},
)
