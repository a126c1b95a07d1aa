"""OLMo, OLMo 2, OLMo 3, OLMoE and FlexOlmo.

See arXiv 2402.00838, 2501.00656, 2512.13961, 2409.02060 and 2507.07024.

From OLMo 2 on, norms follow attention and MLP, and queries and keys are normalized over all heads,
as in OLMoE.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

_CLIP = base.Attribute("clip_qkv", ("clip_qkv",), float, can_be_null=True)
_TP_PLAN = base.TP_PLAN | base.GATHERED_TP_PLAN
_EXPERTS_TP_PLAN = {module: style for module, style in _TP_PLAN.items() if ".mlp." not in module}


OLMO = base.Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    # The last norm has no scale.
    tensors=base.OUTER[::2] + base.ATTENTION + base.GATE_UP + base.DOWN,
    attributes=(
        *(attribute for attribute in base.sizes() if attribute.name != "rms_norm_eps"),
        base.kv_heads(),
        base.ATTENTION_BIAS,
        _CLIP,
    ),
    always={"norm": "layer_plain", "norm_eps": 1e-5},
    required=base.required(mlp_bias=False),
)

OLMO2 = base.Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor(
            "blocks.attention_after_norm.scale",
            "model.layers.{layer}.post_attention_layernorm.weight",
        ),
        base.Tensor(
            "blocks.mlp_after_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight"
        ),
        *(base.PROJECTIONS + base.QKV_BIASES + base.OUT_BIAS + base.QK_NORMS),
    ),
    attributes=(*base.sizes(1e-5), base.kv_heads(), base.ATTENTION_BIAS),
    always={"norm_placement": "after", "qk_norm": "projection"},
    required=base.required(mlp_bias=False, clip_qkv=None),
    tp_plan=_TP_PLAN,
)

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    layer_attributes=base.COMMON | base.WINDOW | {"layer_types"},
    window_period=4,
    rope_by_type=True,
    rope_theta=500_000.0,
)

OLMOE = base.Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    tensors=base.OUTER + base.NORMS + base.ATTENTION + base.QK_NORMS + base.EXPERTS,
    attributes=(
        *base.sizes(1e-5),
        base.kv_heads(),
        base.ATTENTION_BIAS,
        _CLIP,
        *base.some_experts(64, 8),
    ),
    layer_attributes=base.ROPE,  # its norms need a head_dim of hidden_size / num_attention_heads
    always={"qk_norm": "projection"},
    required=base.required(mlp_bias=False, sliding_window=None),
    ignored_attributes=base.ROUTER_LOSS,
    tp_plan=_EXPERTS_TP_PLAN | base.EXPERTS_TP_PLAN,
)

FLEX_OLMO = replace(
    OLMO2,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    tensors=tuple(tensor for tensor in OLMO2.tensors if ".mlp." not in tensor.ours) + base.EXPERTS,
    attributes=(*base.sizes(), base.kv_heads(), base.ATTENTION_BIAS, *base.some_experts(7, 5)),
    rope_theta=500_000.0,
    ignored_attributes=base.ROUTER_LOSS,
    tp_plan=_EXPERTS_TP_PLAN | base.EXPERTS_TP_PLAN,
)
