"""Hunyuan (dense): Llama with queries and keys normalized after a rotation with a scaled base."""

from jaxtp.hf.families.family import (
    ATTENTION,
    ATTENTION_BIAS,
    MLP,
    NORMS,
    OUTER,
    Family,
    block_tensors,
    sizes,
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
