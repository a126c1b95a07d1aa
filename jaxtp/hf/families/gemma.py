"""Gemma 1 (arXiv 2403.08295), 2 (2408.00118), VaultGemma (2510.15001), and Gemma 3's text models.

Gemma 3 is arXiv 2503.19786.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

_EMBEDDING_SCALE = base.Attribute("hidden_size", ("embedding_scale",), float, power=0.5)

GEMMA = base.Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    tensors=base.BODY + base.QKV_BIASES + base.OUT_BIAS,
    attributes=(
        *base.sizes(tied=True),
        base.kv_heads(16),
        base.ATTENTION_BIAS,
        _EMBEDDING_SCALE,
        # transformers takes gelu, which older files have, as its approximation by tanh.
        base.Attribute(
            "hidden_act",
            ("activation",),
            {**base.ACTIVATIONS, "gelu": "gelu_tanh"},
            "gelu_pytorch_tanh",
        ),
    ),
    default_head_dim=256,
    always={"norm": "rms_plus_one"},
    required=base.required(
        without=("hidden_act",), mlp_bias=False, use_bidirectional_attention=False
    ),
    ignored_attributes=frozenset({"hidden_activation"}),  # transformers reads hidden_act instead
)

GEMMA2 = base.Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        base.Tensor(
            "blocks.attention_after_norm.scale",
            "model.layers.{layer}.post_attention_layernorm.weight",
        ),
        base.Tensor(
            "blocks.mlp_norm.scale", "model.layers.{layer}.pre_feedforward_layernorm.weight"
        ),
        base.Tensor(
            "blocks.mlp_after_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight"
        ),
        *(base.PROJECTIONS + base.QKV_BIASES + base.OUT_BIAS),
    ),
    attributes=(
        *base.sizes(tied=True),
        base.kv_heads(4),
        base.ATTENTION_BIAS,
        _EMBEDDING_SCALE,
        base.Attribute("query_pre_attn_scalar", ("query_scale",), float, 256, power=-0.5),
        base.Attribute("hidden_activation", ("activation",), base.ACTIVATIONS, "gelu_pytorch_tanh"),
        base.Attribute(
            "attn_logit_softcapping", ("attention_softcap",), float, 50.0, can_be_null=True
        ),
        base.Attribute(
            "final_logit_softcapping", ("logit_softcap",), float, 30.0, can_be_null=True
        ),
    ),
    layer_attributes=base.COMMON | base.WINDOW | {"layer_types"},
    default_head_dim=256,
    always={"norm": "rms_plus_one", "norm_placement": "both"},
    required=base.required(
        without=("hidden_act",), mlp_bias=False, use_bidirectional_attention=False
    ),
    # transformers reads hidden_activation and sliding_window instead.
    ignored_attributes=frozenset({"hidden_act", "sliding_window_size"}),
)

VAULTGEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    tensors=tuple(tensor for tensor in GEMMA2.tensors if "after_norm" not in tensor.ours),
    always={"norm": "rms_plus_one"},
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    tensors=GEMMA2.tensors + base.QK_NORMS,
    attributes=base.with_defaults(
        (
            *(
                attribute
                for attribute in GEMMA2.attributes
                if not attribute.name.endswith("_softcapping")
            ),
            base.Attribute("final_logit_softcapping", ("logit_softcap",), float, can_be_null=True),
        ),
        # The text models of multimodal files rely on these.
        **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216},
        **{"num_hidden_layers": 26, "num_attention_heads": 8},
    ),
    layer_attributes=GEMMA2.layer_attributes | {"sliding_window_pattern", "rope_local_base_freq"},
    window_period=6,
    rope_by_type=True,
    rope_theta=1_000_000.0,
    always={**GEMMA2.always, "qk_norm": "head"},
    required={**GEMMA2.required, "attn_logit_softcapping": None},  # transformers ignores it
    tp_plan=base.TP_PLAN | base.REPLICATED,
)

GEMMA3_WRAPPER = base.Wrapper(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    text_types=("gemma3_text",),
    required={"final_logit_softcapping": None},  # transformers ignores it here
)
