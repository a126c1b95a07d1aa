"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786)."""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    COMMON_REQUIRED,
    OUT_BIAS,
    OUTER,
    PROJECTIONS,
    QK_NORMS,
    QKV_BIASES,
    REPLICATED,
    TP_PLAN,
    Attribute,
    Family,
    Rope,
    Tensor,
    Window,
    kv_heads,
    sizes,
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    tensors=(
        *OUTER,
        Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        Tensor("blocks.attention_after_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        Tensor("blocks.mlp_norm.scale", "model.layers.{layer}.pre_feedforward_layernorm.weight"),
        Tensor("blocks.mlp_after_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight"),
        *PROJECTIONS,
        *QKV_BIASES,
        *OUT_BIAS,
    ),
    attributes=(
        *sizes(tied=True),
        kv_heads(4),
        ATTENTION_BIAS,
        Attribute("hidden_size", ("embedding_scale",), float, power=0.5),
        Attribute("query_pre_attn_scalar", ("query_scale",), float, 256, power=-0.5),
        Attribute("hidden_activation", ("activation",), ACTIVATIONS, "gelu_pytorch_tanh"),
        Attribute("attn_logit_softcapping", ("attention_softcap",), float, 50.0, can_be_null=True),
        Attribute("final_logit_softcapping", ("logit_softcap",), float, 30.0, can_be_null=True),
    ),
    window=Window.ALTERNATE,
    default_head_dim=256,
    always={"norm": "rms_plus_one", "norm_placement": "both"},
    required={
        **{name: value for name, value in COMMON_REQUIRED.items() if name != "hidden_act"},
        "mlp_bias": False,
        "use_bidirectional_attention": False,
    },
    ignored_attributes=frozenset(
        {"hidden_act", "sliding_window_size"}
    ),  # what counts is hidden_activation and sliding_window
    tp_plan=TP_PLAN,
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    tensors=GEMMA2.tensors + QK_NORMS,
    attributes=(
        *(attribute for attribute in GEMMA2.attributes if not attribute.name.endswith("_softcapping")),
        Attribute("final_logit_softcapping", ("logit_softcap",), float, can_be_null=True),
    ),
    window=Window.PERIODIC,
    rope=Rope.BY_WINDOW,
    rope_theta=1_000_000.0,
    always={**GEMMA2.always, "qk_norm": "head"},
    required={**GEMMA2.required, "attn_logit_softcapping": None},  # transformers ignores it
    tp_plan={**TP_PLAN, **REPLICATED},
)
