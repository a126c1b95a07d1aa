"""OLMo, OLMo 2, OLMo 3, OLMoE and FlexOlmo.

See arXiv 2402.00838, 2501.00656, 2512.13961, 2409.02060 and 2507.07024.

From OLMo 2 on, norms follow attention and MLP, and queries and keys are normalized over all heads,
as in OLMoE.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    BODY,
    BRANCHES,
    COMMON,
    EXPERTS,
    NORMALIZED,
    OUTER,
    ROPE,
    WINDOW,
    Attribute,
    Family,
    block_tensors,
    numbers_of_experts,
    sizes,
    without,
)

_CLIP = Attribute("clip_qkv", "clip_qkv", float, can_be_null=True)


OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    attributes=(
        *without(sizes(), "rms_norm_eps"),
        ATTENTION_BIAS,
        _CLIP,
    ),
    always={"norm": "layer_plain", "norm_eps": 1e-5},
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    tensors=(
        *OUTER,
        *block_tensors(
            {
                "attention_after_norm.scale": "post_attention_layernorm.weight",
                "mlp_after_norm.scale": "post_feedforward_layernorm.weight",
            }
        ),
        *BRANCHES,
    ),
    attributes=(*sizes(1e-5), ATTENTION_BIAS),
    always={"norm_placement": "after", "qk_norm": "projection"},
    required={"clip_qkv": None},
)

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    layer_attributes=COMMON | WINDOW | {"layer_types"},
    window_period=4,
    rope_by_type=True,
    rope_theta=500_000.0,
)

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    tensors=BODY + EXPERTS,
    attributes=(
        *sizes(1e-5),
        ATTENTION_BIAS,
        _CLIP,
        *numbers_of_experts("num_experts", 64, 8, "num_local_experts"),
        NORMALIZED,
    ),
    # Its norms need a head_dim of hidden_size / num_attention_heads.
    layer_attributes=ROPE,
    always={"qk_norm": "projection"},
    required={"sliding_window": None},
)

FLEX_OLMO = replace(
    OLMO2,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    tensors=OLMO2.tensors + EXPERTS,
    attributes=(
        *sizes(),
        ATTENTION_BIAS,
        *numbers_of_experts("num_experts", 7, 5, "num_local_experts"),
        NORMALIZED,
    ),
    rope_theta=500_000.0,
)
