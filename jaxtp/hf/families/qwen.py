"""Qwen 2, 2.5 and Qwen2-MoE (arXiv 2407.10671), Qwen 3 and Qwen3-MoE (arXiv 2505.09388)."""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    BODY,
    COMMON,
    DENSE_LAYERS,
    DENSE_WIDTH,
    EXPERTS,
    NORMALIZED,
    ROUTER,
    STACKED_EXPERTS,
    SWITCHED_WINDOW,
    Attribute,
    Family,
    Wrapper,
    block_tensors,
    numbers_of_experts,
    replace_all,
    sizes,
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    attributes=sizes(kv_heads=32),
    layer_attributes=COMMON | SWITCHED_WINDOW | {"layer_types"},
    # Of q, k and v; config.json has no attribute for it.
    always={"attention_bias": True},
)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    attributes=(*sizes(kv_heads=32), ATTENTION_BIAS),
    layer_attributes=COMMON | SWITCHED_WINDOW | {"layer_types"},
    default_head_dim=128,
    always={"qk_norm": "head"},
)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors=BODY + EXPERTS,
    attributes=(
        *sizes(kv_heads=4),
        ATTENTION_BIAS,
        *numbers_of_experts("num_experts", 128, 8, "num_local_experts"),
        NORMALIZED,
    ),
    layer_attributes=COMMON | SWITCHED_WINDOW | DENSE_LAYERS,
    by_type={
        "experts": (Attribute("moe_intermediate_size", "d_ff", int, 768),),
        "dense": DENSE_WIDTH,
    },
    always={"qk_norm": "head"},
)

SHARED_EXPERT = block_tensors(
    {
        "mlp.shared.gate_up.kernels.0": "mlp.shared_expert.gate_proj.weight",
        "mlp.shared.gate_up.kernels.1": "mlp.shared_expert.up_proj.weight",
        "mlp.shared.down.kernel": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_gate": "mlp.shared_expert_gate.weight",
    },
    transposed=True,
)

QWEN2_MOE = replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    tensors=QWEN3_MOE.tensors + SHARED_EXPERT,
    attributes=(
        *sizes(kv_heads=16),
        Attribute("qkv_bias", "attention_bias", bool, True),
        *numbers_of_experts("num_experts", 60, 4),
        NORMALIZED,
    ),
    layer_attributes=QWEN3_MOE.layer_attributes | {"layer_types"},
    by_type={
        "experts": (
            Attribute("moe_intermediate_size", "d_ff", int, 1408),
            Attribute("shared_expert_intermediate_size", "shared_experts", int, 5632),
        ),
        "dense": DENSE_WIDTH,
    },
    always_by_type={"experts": {"shared_experts_gate": True}},
    window_period=0,
    always={},
)

QWEN3_VL_WRAPPER = Wrapper(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    text_types=("qwen3_vl_text",),
    other_tensors=("visual.",),
    # All rows of positions are equal in a text.
    text={"rope_theta": 5e5, "rope_ignored": {"mrope_section", "mrope_interleaved"}},
)
QWEN3_VL_MOE_WRAPPER = replace(
    QWEN3_VL_WRAPPER,
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    text_types=("qwen3_vl_moe_text",),
    text={
        **QWEN3_VL_WRAPPER.text,
        # The Hub has [E, in, out]; transformers 5 writes [E, out, in] by the same names.
        "tensors": (
            *BODY,
            ROUTER,
            *replace_all(STACKED_EXPERTS, layout=None, either_way=True),
        ),
        "attributes": (
            *sizes(kv_heads=16),
            ATTENTION_BIAS,
            *numbers_of_experts("num_experts", 60, 4, "num_local_experts"),
        ),
        "by_type": {
            "experts": (Attribute("moe_intermediate_size", "d_ff", int, 1408),),
            "dense": DENSE_WIDTH,
        },
        "required": {"norm_topk_prob": True},
    },
)
QWEN2_VL_WRAPPER = Wrapper(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    text_types=("qwen2_vl_text",),
    other_tensors=("visual.",),
    text={
        "attributes": sizes(1e-5, kv_heads=8),
        "rope_theta": 1e6,
        "rope_ignored": {"mrope_section"},
        "rope_aliases": {"mrope": "default"},
    },
    can_be_flat=True,
)
QWEN2_5_VL_WRAPPER = replace(
    QWEN2_VL_WRAPPER,
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    text_types=("qwen2_5_vl_text",),
)
