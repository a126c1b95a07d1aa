"""Qwen3-Next and Qwen 3.5, 3.6 and 3.8.

Most layers have Gated DeltaNet (arXiv 2412.06464), the others gated heads.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base
from jaxtp.hf.families.qwen import SHARED_EXPERT

_LAYER = "model.layers.{layer}."


def _delta(
    ours: str, theirs: str, *, chunks: str | None = None, float32: bool | None = False
) -> base.Tensor:
    paths = (f"blocks.attention.{ours}", f"{_LAYER}linear_attn.{theirs}")
    conv = "_conv" in ours
    transposed = conv or "kernel" in ours
    return base.Tensor(*paths, transposed=transposed, unit_dim=conv, chunks=chunks, float32=float32)


def _inputs(theirs: str, *kernels: int, chunks: str | None = None) -> tuple[base.Tensor, ...]:
    """Returns the kernels of q, k, v, z, b and a (0 to 5) that are in one tensor."""
    return tuple(_delta(f"in_proj.kernels.{i}", f"{theirs}.weight", chunks=chunks) for i in kernels)


_GATED = tuple(
    replace(tensor, ours=tensor.ours[:-1] + i, chunks="num_heads")
    for tensor in (base.QKV[0], base.QKV_BIASES[0])
    for i in "03"
)
"""Each head's query, then its gate."""
_BODY = (
    *base.OUTER,
    *base.NORMS,
    *_GATED,
    *base.QKV[1:],
    *base.QKV_BIASES[1:],
    *(replace(tensor, unless="delta_value_heads") for tensor in base.OUT),
    *base.OUT_BIAS,
    *base.QK_NORMS,
    *(_delta(f"{part}_conv", "conv1d.weight") for part in "qkv"),
    # In published files of Qwen 3.5, A_log and the norm are float32, and all else is bfloat16.
    _delta("decay_log", "A_log", float32=None),
    _delta("dt_bias", "dt_bias"),
    _delta("norm_scale", "norm.weight", float32=None),
    _delta("out.kernel", "out_proj.weight"),
    *base.GATE_UP,
    *base.DOWN,
)
_ATTRIBUTES = (
    *base.sizes(),
    base.ATTENTION_BIAS,
    base.Attribute("linear_num_key_heads", ("delta_key_heads",), int, 16, can_be_zero=True),
    base.Attribute("linear_key_head_dim", ("delta_key_dim",), int, 128, can_be_zero=True),
    base.Attribute("linear_value_head_dim", ("delta_value_dim",), int, 128, can_be_zero=True),
    base.Attribute("linear_conv_kernel_dim", ("delta_conv",), int, 4),
)
_LINEAR: dict[base.LayerType, tuple[base.Attribute, ...]] = {
    "linear_attention": (base.Attribute("linear_num_value_heads", ("delta_value_heads",), int, 32),)
}
_EXPERTS: dict[base.LayerType, tuple[base.Attribute, ...]] = {
    "experts": (
        base.Attribute("moe_intermediate_size", ("d_ff",), int, 512),
        base.Attribute(
            "shared_expert_intermediate_size", ("shared_experts",), int, 512, can_be_zero=True
        ),
    )
}
_REQUIRED = base.required(without=("partial_rotary_factor",), mlp_bias=False, attn_output_gate=True)
_ATTENTION_TP_PLAN = base.ATTENTION_TP_PLAN | base.REPLICATED
_SHARED_TP_PLAN = {
    name.replace("_experts", "_expert"): style for name, style in base.SHARED_TP_PLAN.items()
}


def _linear_tp_plan(*modules: str) -> dict[str, str]:
    return {
        f"layers.*.linear_attn.{module}": "colwise_gather_output"
        for module in (*modules, "out_proj")
    }


_LINEAR_TP_PLAN = _linear_tp_plan("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

QWEN3_5 = base.Family(
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
        *_ATTRIBUTES,
        base.kv_heads(4),
        base.only("output_gate_type", "swish", "silu", None, default="swish"),
    ),
    layer_attributes=base.COMMON | base.LINEAR_LAYERS,
    by_type=_LINEAR,
    default_head_dim=256,
    rope_attributes=(replace(base.PARTIAL_ROPE, default=0.25),),
    rope_ignored=frozenset({"mrope_section", "mrope_interleaved"}),
    always={"norm": "rms_plus_one", "qk_norm": "head", "attention_gate": True},
    required=_REQUIRED,
    others=("mtp.",),
    # The state is float32 in transformers too, whatever mamba_ssm_dtype is.
    ignored_attributes=frozenset(
        {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    ),
    tp_plan=base.TP_PLAN | base.REPLICATED | _LINEAR_TP_PLAN,
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    tensors=(*QWEN3_5.tensors, *base.EXPERTS, *SHARED_EXPERT),
    attributes=(
        *(
            each
            for each in QWEN3_5.attributes
            if each.name not in ("intermediate_size", "num_key_value_heads")
        ),
        base.kv_heads(2),
        base.Attribute("num_experts", ("num_experts",), int, 256),
        base.Attribute("num_experts_per_tok", ("experts_per_token",), int, 8),
    ),
    # Without a shared expert, transformers has a gate of nothing.
    ignored_tensors=(*QWEN3_5.ignored_tensors, f"{_LAYER}mlp.shared_expert_gate.weight"),
    by_type=_LINEAR | _EXPERTS,
    always_by_type={"experts": {"shared_experts_gate": True}},
    required=_REQUIRED | {"norm_topk_prob": True},
    # Without effect in transformers: all layers have experts.
    ignored_attributes=QWEN3_5.ignored_attributes
    | base.ROUTER_LOSS
    | {"intermediate_size", "mlp_only_layers", "decoder_sparse_step"},
    tp_plan=_ATTENTION_TP_PLAN | _LINEAR_TP_PLAN | base.EXPERTS_TP_PLAN | _SHARED_TP_PLAN,
)

QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    tensors=(
        *_BODY,
        *_inputs("in_proj_qkvz", 0, 1, 2, 3, chunks="delta_key_heads"),
        *_inputs("in_proj_ba", 4, 5, chunks="delta_key_heads"),
        *base.EXPERTS,
        *SHARED_EXPERT,
    ),
    attributes=(
        *_ATTRIBUTES,
        base.kv_heads(2),
        base.Attribute("num_experts", ("num_experts",), int, 512, can_be_zero=True),
        base.Attribute("num_experts_per_tok", ("experts_per_token",), int, 10),
        base.Attribute("norm_topk_prob", ("normalize_experts",), bool, True),
    ),
    layer_attributes=QWEN3_5.layer_attributes | base.DENSE_LAYERS,
    by_type=_LINEAR | _EXPERTS | {"dense": (base.Attribute("intermediate_size", ("d_ff",), int),)},
    required=_REQUIRED | {"use_sliding_window": False},
    ignored_attributes=QWEN3_5.ignored_attributes | base.ROUTER_LOSS,
    tp_plan=base.TP_PLAN
    | base.REPLICATED
    | _linear_tp_plan("in_proj_qkvz", "in_proj_ba")
    | base.EXPERTS_TP_PLAN
    | _SHARED_TP_PLAN,
)

QWEN3_5_WRAPPER = base.Wrapper(
    "qwen3_5", "Qwen3_5ForConditionalGeneration", text_types=("qwen3_5_text",), others=("visual.",)
)
QWEN3_5_MOE_WRAPPER = base.Wrapper(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    text_types=("qwen3_5_moe_text",),
    others=("visual.",),
)
