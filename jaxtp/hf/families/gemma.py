"""Gemma 1 (arXiv 2403.08295), 2 (2408.00118), VaultGemma (2510.15001), and Gemma 3's text models.

Gemma 3 is arXiv 2503.19786.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    BRANCHES,
    COMMON,
    OUTER,
    WINDOW,
    Attribute,
    Family,
    Wrapper,
    block_tensors,
    sizes,
    with_defaults,
    without,
)

_EMBEDDING_SCALE = Attribute("hidden_size", "embedding_scale", float, power=0.5)

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    attributes=(
        *sizes(tied=True, kv_heads=16),
        ATTENTION_BIAS,
        _EMBEDDING_SCALE,
        # transformers takes gelu, which older files have, as its approximation by tanh.
        Attribute(
            "hidden_act",
            "activation",
            {**ACTIVATIONS, "gelu": "gelu_tanh"},
            "gelu_pytorch_tanh",
        ),
    ),
    default_head_dim=256,
    always={"norm": "rms_plus_one"},
    required={"use_bidirectional_attention": False},
    # transformers reads hidden_act instead.
    ignored_attributes={"hidden_activation"},
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    tensors=(
        *OUTER,
        *block_tensors(
            {
                "attention_norm.scale": "input_layernorm.weight",
                "attention_after_norm.scale": "post_attention_layernorm.weight",
                "mlp_norm.scale": "pre_feedforward_layernorm.weight",
                "mlp_after_norm.scale": "post_feedforward_layernorm.weight",
            }
        ),
        *BRANCHES,
    ),
    attributes=(
        *sizes(tied=True, kv_heads=4),
        ATTENTION_BIAS,
        _EMBEDDING_SCALE,
        Attribute("query_pre_attn_scalar", "query_scale", float, 256, power=-0.5),
        Attribute("hidden_activation", "activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        Attribute("attn_logit_softcapping", "attention_softcap", float, 50.0, can_be_null=True),
        Attribute("final_logit_softcapping", "logit_softcap", float, 30.0, can_be_null=True),
    ),
    layer_attributes=COMMON | WINDOW | {"layer_types"},
    default_head_dim=256,
    always={"norm": "rms_plus_one", "norm_placement": "both"},
    required={"use_bidirectional_attention": False},
    # transformers reads hidden_activation and sliding_window instead.
    ignored_attributes={"hidden_act", "sliding_window_size"},
)

VAULTGEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    always={"norm": "rms_plus_one"},
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    attributes=with_defaults(
        without(GEMMA2.attributes, "attn_logit_softcapping"),
        final_logit_softcapping=None,
        # The text models of multimodal files rely on these.
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
    ),
    layer_attributes=GEMMA2.layer_attributes | {"sliding_window_pattern", "rope_local_base_freq"},
    window_period=6,
    rope_by_type=True,
    rope_theta=1_000_000.0,
    always={**GEMMA2.always, "qk_norm": "head"},
    # transformers ignores it.
    required={**GEMMA2.required, "attn_logit_softcapping": None},
)

GEMMA3_WRAPPER = Wrapper(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    text_types=("gemma3_text",),
    # transformers ignores it here.
    text={"required": {**GEMMA3.required, "final_logit_softcapping": None}},
)
