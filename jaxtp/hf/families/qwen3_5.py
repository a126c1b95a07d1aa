"""Qwen3-Next and Qwen 3.5, 3.6 and 3.8.

Most layers have Gated DeltaNet (arXiv 2412.06464), the others gated heads.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    COMMON,
    DENSE_LAYERS,
    DENSE_WIDTH,
    EXPERTS,
    LINEAR_LAYERS,
    MLP,
    NORMALIZED,
    NORMS,
    OUT,
    OUTER,
    QK_NORMS,
    QKV,
    Attribute,
    AttributesByType,
    Family,
    Tensors,
    Wrapper,
    block_tensors,
    numbers_of_experts,
    only,
    partial_rope,
    replace_all,
    sizes,
    with_biases,
    with_defaults,
    without,
)
from jaxtp.hf.families.qwen import SHARED_EXPERT

_LINEAR_ATTENTION = "model.layers.{layer}.linear_attn."


def _inputs(name: str, *kernels: int, chunks: str | None = None) -> Tensors:
    """Returns the kernels of q, k, v, z, b and a (0 to 5) that are in one tensor."""
    names = {f"attention.in_proj.kernels.{i}": f"{name}.weight" for i in kernels}
    return block_tensors(names, _LINEAR_ATTENTION, transposed=True, chunks=chunks)


_CONVOLUTIONS = {
    "attention.q_conv": "conv1d.weight",
    "attention.k_conv": "conv1d.weight",
    "attention.v_conv": "conv1d.weight",
}
_BODY = (
    *OUTER,
    *NORMS,
    # Each head's query, then its gate:
    *with_biases(
        replace(QKV[0], chunks="num_heads"),
        replace(QKV[0], path="blocks.attention.qkv.kernels.3", chunks="num_heads"),
        *QKV[1:],
        *replace_all(OUT, unless="delta_value_heads"),
    ),
    *QK_NORMS,
    *block_tensors(_CONVOLUTIONS, _LINEAR_ATTENTION, transposed=True, unit_dim=True),
    # In published files of Qwen 3.5, A_log and the norm are float32, and all else is bfloat16.
    *block_tensors({"attention.decay_log": "A_log"}, _LINEAR_ATTENTION, float32=None),
    *block_tensors({"attention.dt_bias": "dt_bias"}, _LINEAR_ATTENTION),
    *block_tensors({"attention.norm_scale": "norm.weight"}, _LINEAR_ATTENTION, float32=None),
    *block_tensors({"attention.out.kernel": "out_proj.weight"}, _LINEAR_ATTENTION, transposed=True),
    *MLP,
)
_ATTRIBUTES = (
    *sizes(kv_heads=2),
    ATTENTION_BIAS,
    Attribute("linear_num_key_heads", "delta_key_heads", int, 16, can_be_zero=True),
    Attribute("linear_key_head_dim", "delta_key_dim", int, 128, can_be_zero=True),
    Attribute("linear_value_head_dim", "delta_value_dim", int, 128, can_be_zero=True),
    Attribute("linear_conv_kernel_dim", "delta_conv", int, 4),
)
_LINEAR: AttributesByType = {
    "linear_attention": (Attribute("linear_num_value_heads", "delta_value_heads", int, 32),)
}
_EXPERTS: AttributesByType = {
    "experts": (
        Attribute("moe_intermediate_size", "d_ff", int, 512),
        Attribute("shared_expert_intermediate_size", "shared_experts", int, 512, can_be_zero=True),
    )
}
_REQUIRED = {"attn_output_gate": True}


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    tensors=(
        *_BODY,
        *_inputs("in_proj_qkv", 0, 1, 2),
        *_inputs("in_proj_z", 3),
        *_inputs("in_proj_b", 4),
        *_inputs("in_proj_a", 5),
    ),
    attributes=(
        *with_defaults(_ATTRIBUTES, num_key_value_heads=4),
        only("output_gate_type", "swish", "silu", None, default="swish"),
    ),
    layer_attributes=COMMON | LINEAR_LAYERS,
    by_type=_LINEAR,
    mixer_type="linear_attention",
    default_head_dim=256,
    rope_attributes=partial_rope(0.25),
    rope_ignored={"mrope_section", "mrope_interleaved"},
    always={"norm": "rms_plus_one", "qk_norm": "head", "attention_gate": True},
    required=_REQUIRED,
    other_tensors=("mtp.",),
    # The state is float32 in transformers too, whatever mamba_ssm_dtype is.
    ignored_attributes={"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"},
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    tensors=(*QWEN3_5.tensors, *EXPERTS, *SHARED_EXPERT),
    attributes=(
        *with_defaults(without(QWEN3_5.attributes, "intermediate_size"), num_key_value_heads=2),
        *numbers_of_experts("num_experts", 256, 8),
    ),
    # Without a shared expert, transformers has a gate of nothing.
    ignored_tensors=(
        *QWEN3_5.ignored_tensors,
        "model.layers.{layer}.mlp.shared_expert_gate.weight",
    ),
    by_type=_LINEAR | _EXPERTS,
    always_by_type={"experts": {"shared_experts_gate": True}},
    required=_REQUIRED | {"norm_topk_prob": True},
    # Without effect in transformers: all layers have experts.
    ignored_attributes=QWEN3_5.ignored_attributes
    | {"intermediate_size", "mlp_only_layers", "decoder_sparse_step"},
)

QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    tensors=(
        *_BODY,
        *_inputs("in_proj_qkvz", 0, 1, 2, 3, chunks="delta_key_heads"),
        *_inputs("in_proj_ba", 4, 5, chunks="delta_key_heads"),
        *EXPERTS,
        *SHARED_EXPERT,
    ),
    attributes=(
        *_ATTRIBUTES,
        Attribute("num_experts", "num_experts", int, 512, can_be_zero=True),
        Attribute("num_experts_per_tok", "experts_per_token", int, 10),
        replace(NORMALIZED, default=True),
    ),
    layer_attributes=QWEN3_5.layer_attributes | DENSE_LAYERS,
    by_type=_LINEAR | _EXPERTS | {"dense": DENSE_WIDTH},
    required=_REQUIRED | {"use_sliding_window": False},
    ignored_attributes=QWEN3_5.ignored_attributes,
)

QWEN3_5_WRAPPER = Wrapper(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    text_types=("qwen3_5_text",),
    other_tensors=("visual.",),
)
QWEN3_5_MOE_WRAPPER = Wrapper(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    text_types=("qwen3_5_moe_text",),
    other_tensors=("visual.",),
)
