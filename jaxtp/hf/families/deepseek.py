"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437).

They have latent attention, and experts chosen within groups.

Kimi-K2, Moonlight and Sarvam 105B are DeepSeek-V3 in other sizes; Youtu has no experts. Kimi Linear
(arXiv 2510.26692) has Kimi Delta Attention in most layers, and rotates nothing.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    BODY,
    DOWN,
    EXPERTS,
    GATE_UP,
    ROPE,
    ROUTER,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    Attribute,
    Family,
    Layout,
    Tensor,
    Tensors,
    Wrapper,
    block_tensors,
    first_dense,
    grouped_experts,
    numbers_of_experts,
    only,
    separate_experts,
    sizes,
    with_defaults,
    with_names,
)


def _tensor(path: str, name: str, unless: str | None = None) -> Tensor:
    name = f"model.layers.{{layer}}.self_attn.{name}.weight"
    return Tensor(f"blocks.attention.{path}", name, transposed="norm" not in path, unless=unless)


LATENT_BODY = (
    *BODY,
    _tensor("query_up.kernels.0", "q_proj", unless="query_rank"),
    _tensor("query_down.kernel", "q_a_proj"),
    _tensor("query_norm.scale", "q_a_layernorm"),
    _tensor("query_up.kernels.0", "q_b_proj"),
    _tensor("latent_down.kernel", "kv_a_proj_with_mqa"),
    _tensor("latent_norm.scale", "kv_a_layernorm"),
    _tensor("latent_up.kernels.0", "kv_b_proj"),
)


# Of all but the experts
_ATTRIBUTES = (
    *sizes(),
    Attribute("q_lora_rank", "query_rank", int, 1536, can_be_null=True, off=0),
    Attribute("kv_lora_rank", "kv_rank", int, 512),
    Attribute("qk_rope_head_dim", "rope_head_dim", int, 64),
    Attribute("qk_nope_head_dim", "head_dim", int, 128, plus="rope_head_dim"),
    Attribute("v_head_dim", "value_head_dim", int, 128),
)
# The layout of the file, which an import follows; an export writes the usual one.
_INTERLEAVED = only("rope_interleave", True, False, default=True)


def _remote_code(version: str) -> tuple[str, ...]:
    return tuple(f"modeling_deepseek.Deepseek{version}{kind}" for kind in ("Model", "ForCausalLM"))


_ROUTER_V2 = {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1}
ROUTER_V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
"""Attributes that other programs than transformers read."""


def _limit(name: str, field: str) -> Attribute:
    return Attribute(
        name,
        field,
        int,
        only_if=("topk_method", "group_limited_greedy"),
        can_be_null=True,
        off=1,
    )


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    tensors=(*LATENT_BODY, *EXPERTS, *SHARED_EXPERTS),
    attributes=(
        *_ATTRIBUTES,
        *numbers_of_experts("n_routed_experts", 64, None, "num_experts"),
        Attribute("routed_scaling_factor", "experts_scale", float, 1.0),
        Attribute(
            "topk_method",
            "group_score",
            {"greedy": "top2", "group_limited_greedy": "max"},
            "greedy",
        ),
        _limit("n_group", "expert_groups"),
        _limit("topk_group", "groups_per_token"),
    ),
    layer_attributes=ROPE | {"first_k_dense_replace"},
    by_type=first_dense(1407, 2),
    rotated="pairs",
    scaled_scores=True,
    remote_code=_remote_code("V2"),
    always={"normalize_experts": False},
    required=_ROUTER_V2,
    written=_ROUTER_V2,
    # transformers computes the first two from other attributes.
    ignored_attributes={"head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size"},
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    tensors=(*DEEPSEEK_V2.tensors, SELECTION_BIAS),
    attributes=with_defaults(
        (
            *_ATTRIBUTES,
            _INTERLEAVED,
            *grouped_experts(256, 8, normalize=True),
        ),
        num_key_value_heads=128,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
    ),
    default_dense_layers=3,
    by_type=first_dense(2048, 1),
    later_layers=True,
    remote_code=_remote_code("V3"),
    always={"router_scores": "sigmoid", "selection_bias": True},
    required=ROUTER_V3,
    written={**ROUTER_V3, "num_nextn_predict_layers": 0},
)

KIMI_K25_WRAPPER = Wrapper(
    "kimi_k25",
    "Kimi_K25ForConditionalGeneration",
    text_types=("deepseek_v3", "kimi_k2"),
    other_tensors=("vision_tower.", "mm_projector."),
    text={
        "remote_code": (
            *DEEPSEEK_V3.remote_code,
            "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        )
    },
)

SARVAM_MLA = replace(
    DEEPSEEK_V3,
    model_type="sarvam_mla",
    attributes=with_defaults(
        (
            *_ATTRIBUTES,
            _INTERLEAVED,
            *grouped_experts(128, 8, normalize=True, alias="num_experts"),
        ),
        q_lora_rank=None,
        routed_scaling_factor=2.5,
    ),
    default_dense_layers=1,
    by_type=first_dense(2048, 1, alias="num_shared_experts"),
    rope_aliases={"deepseek_yarn": "yarn"},
    remote_code=("modeling_sarvam_moe.SarvamMLAForCausalLM",),
    ignored_attributes=DEEPSEEK_V3.ignored_attributes | {"q_head_dim"},
)

YOUTU = replace(
    DEEPSEEK_V3,
    model_type="youtu",
    architecture="YoutuForCausalLM",
    tensors=LATENT_BODY,
    attributes=with_defaults(
        (*_ATTRIBUTES, _INTERLEAVED), num_key_value_heads=16, tie_word_embeddings=True
    ),
    layer_attributes=ROPE,
    by_type={},
    later_layers=False,
    remote_code=("modeling_youtu.YoutuModel", "modeling_youtu.YoutuForCausalLM"),
    always={},
    required={},
    written={},
    ignored_attributes={"head_dim", "qk_head_dim", "embedding_initializer_range"},
)

_KIMI_KERNELS = {
    "in_proj.kernels.0": "q_proj",
    "in_proj.kernels.1": "k_proj",
    "in_proj.kernels.2": "v_proj",
    "in_proj.kernels.3": "b_proj",
    "decay_down.kernel": "f_a_proj",
    "decay_up.kernels.0": "f_b_proj",
    "gate_down.kernel": "g_a_proj",
    "gate_up.kernels.0": "g_b_proj",
}
_KIMI_NAMES = {
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
_KIMI_EXPERTS = tuple(
    replace(attribute, name=_KIMI_NAMES[attribute.name], alias=attribute.name)
    if attribute.name in _KIMI_NAMES
    else attribute
    for attribute in grouped_experts(256, 8, normalize=True, name="num_experts")
)
# transformers writes dense MLPs with these names too.
_KIMI_MLP = with_names(
    (*GATE_UP, *DOWN, ROUTER, SELECTION_BIAS, *SHARED_EXPERTS), "mlp", "block_sparse_moe"
)
_KIMI_REQUIRED = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}


def _kimi_convolutions(layout: Layout, name: str = "conv1d") -> Tensors:
    names = {f"attention.{x}_conv": f"self_attn.{name.format(x)}.weight" for x in "qkv"}
    return block_tensors(names, transposed=True, unit_dim=True, layout=layout)


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    tensors=(
        *LATENT_BODY,
        *(_tensor(path, name) for path, name in _KIMI_KERNELS.items()),
        *_kimi_convolutions("separate", "{}_conv1d"),
        *_kimi_convolutions("stacked"),
        *block_tensors({"attention.decay_log": "self_attn.A_log"}, around=True, float32=None),
        *block_tensors({"attention.dt_bias": "self_attn.dt_bias"}, float32=None),
        *block_tensors({"attention.norm_scale": "self_attn.o_norm.weight"}),
        *_KIMI_MLP,
        *separate_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *STACKED_EXPERTS,
    ),
    renamed={
        "block_sparse_moe.": "mlp.",
        "self_attn.f_": "self_attn.forget_gate.f_",
        "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
        "self_attn.A_log": "self_attn.forget_gate.A_log",
    },
    attributes=with_defaults(
        (
            *_ATTRIBUTES,
            *_KIMI_EXPERTS,
            Attribute("linear_num_heads", "delta_key_heads", int, 32, can_be_zero=True),
            Attribute(
                "linear_head_dim",
                "delta_key_dim",
                int,
                128,
                can_be_zero=True,
                also=("delta_value_dim", "delta_gate_rank"),
            ),
            Attribute("linear_conv_kernel_dim", "delta_conv", int, 4),
        ),
        q_lora_rank=None,
        rms_norm_eps=1e-5,
        routed_scaling_factor=2.446,
    ),
    layer_attributes={
        *("layer_types", "linear_attn_config"),
        *("first_k_dense_replace", "mlp_layer_types"),
    },
    layer_types={"linear_attention": "linear_attention"},
    default_dense_layers=1,
    by_type={
        "linear_attention": (Attribute("linear_num_heads", "delta_value_heads", int, 32),),
        **first_dense(1024, 1, "num_shared_experts", "n_shared_experts"),
    },
    remote_code=("modeling_kimi.KimiLinearModel", "modeling_kimi.KimiLinearForCausalLM"),
    always={"router_scores": "sigmoid", "selection_bias": True, "rope_theta": None},
    required=_KIMI_REQUIRED,
    written=_KIMI_REQUIRED,
    ignored_attributes={"head_dim", "qk_head_dim", *ROPE},
)
