"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786)."""

from dataclasses import replace

from jaxtp.hf.families import family as base

GEMMA2 = base.Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        base.Tensor("blocks.attention_after_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        base.Tensor("blocks.mlp_norm.scale", "model.layers.{layer}.pre_feedforward_layernorm.weight"),
        base.Tensor("blocks.mlp_after_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight"),
        *base.PROJECTIONS,
        *base.QKV_BIASES,
        *base.OUT_BIAS,
    ),
    attributes=(
        *base.sizes(tied=True),
        base.kv_heads(4),
        base.ATTENTION_BIAS,
        base.Attribute("hidden_size", ("embedding_scale",), float, power=0.5),
        base.Attribute("query_pre_attn_scalar", ("query_scale",), float, 256, power=-0.5),
        base.Attribute("hidden_activation", ("activation",), base.ACTIVATIONS, "gelu_pytorch_tanh"),
        base.Attribute("attn_logit_softcapping", ("attention_softcap",), float, 50.0, can_be_null=True),
        base.Attribute("final_logit_softcapping", ("logit_softcap",), float, 30.0, can_be_null=True),
    ),
    layer_attributes=base.COMMON | base.WINDOW | {"layer_types"},
    default_head_dim=256,
    always={"norm": "rms_plus_one", "norm_placement": "both"},
    required=base.required(without=("hidden_act",), mlp_bias=False, use_bidirectional_attention=False),
    # transformers reads hidden_activation and sliding_window instead.
    ignored_attributes=frozenset({"hidden_act", "sliding_window_size"}),
)

_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Defaults, which the published 4b relies on."""
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    tensors=GEMMA2.tensors + base.QK_NORMS,
    attributes=(
        *(
            replace(attribute, default=_SIZES.get(attribute.name, attribute.default))
            for attribute in GEMMA2.attributes
            if not attribute.name.endswith("_softcapping")
        ),
        base.Attribute("final_logit_softcapping", ("logit_softcap",), float, can_be_null=True),
    ),
    layer_attributes=GEMMA2.layer_attributes | {"sliding_window_pattern", "rope_local_base_freq"},
    window_period=6,
    rope_by_type=True,
    rope_theta=1_000_000.0,
    always={**GEMMA2.always, "qk_norm": "head"},
    required={**GEMMA2.required, "attn_logit_softcapping": None},  # transformers ignores it
    tp_plan=base.TP_PLAN | base.REPLICATED,
)

GEMMA3_WRAPPER = base.Wrapper("gemma3", "Gemma3ForConditionalGeneration", text_types=("gemma3_text",))
