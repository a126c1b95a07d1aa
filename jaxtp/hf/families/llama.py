"""Llama 1 to 3, and models of the same architecture: arXiv 2302.13971, 2307.09288, 2407.21783.

Seed-OSS: other defaults. Arcee AFM: a plain MLP. SmolLM3: layers without rotations.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

LLAMA = base.Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors=base.BODY + base.QKV_BIASES + base.OUT_BIAS + base.MLP_BIASES,
    attributes=(*base.sizes(), base.kv_heads(), base.ATTENTION_BIAS, base.MLP_BIAS),
    required=base.required(sliding_window=None),
)

SEED_OSS = replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    attributes=(
        *base.sizes(),
        base.kv_heads(8),
        base.Attribute("attention_bias", ("attention_bias",), bool, True),
        base.Attribute("attention_out_bias", ("attention_out_bias",), bool, False),
        base.MLP_BIAS,
    ),
    default_head_dim=128,
    required=base.required(without=("attention_dropout",), sliding_window=None),
    ignored_attributes=frozenset({"attention_dropout", "residual_dropout"}),  # 0.1 by default
)

ARCEE = replace(
    LLAMA,
    model_type="arcee",
    architecture="ArceeForCausalLM",
    tensors=base.OUTER + base.NORMS + base.ATTENTION + base.with_biases(*base.UP, *base.DOWN),
    attributes=(
        *base.sizes(1e-5),
        base.kv_heads(),
        base.ATTENTION_BIAS,
        base.MLP_BIAS,
        base.Attribute("hidden_act", ("activation",), base.ACTIVATIONS, "relu2"),
    ),
    always={"mlp": "plain"},
    required=base.required(without=("hidden_act",), sliding_window=None),
    tp_plan={module: style for module, style in base.TP_PLAN.items() if "gate" not in module},
)

SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    attributes=(*base.sizes(tied=True), base.kv_heads(4), base.ATTENTION_BIAS, base.MLP_BIAS),
    layer_attributes=base.COMMON
    | base.WINDOW
    | base.NO_ROPE_LAYERS
    | {"use_sliding_window", "layer_types"},
    default_window=None,
    window_period=0,
    rope_theta=2_000_000.0,
    required=base.required(),
    ignored_attributes=frozenset({"max_window_layers"}),  # transformers does not read it
)
