"""GPT-NeoX and Pythia (arXiv 2204.06745).

They have a parallel block with two LayerNorms, biases, and partly rotated heads.

GPT-Neo: GPT-2 with windows and without a scale of attention scores (github.com/EleutherAI/gpt-neo).
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    QKV,
    ROPE,
    Attribute,
    Family,
    block_tensors,
    replace_all,
    tensors,
    with_biases,
    with_names,
    without,
)
from jaxtp.hf.families.gpt2 import GPT2, TRANSPOSED

_LAYER = "gpt_neox.layers.{layer}."

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    tensors=(
        *tensors(
            {"embedding.embedding": "gpt_neox.embed_in.weight", "head.kernel": "embed_out.weight"}
        ),
        *with_biases(
            *block_tensors(
                {
                    "attention_norm.scale": "input_layernorm.weight",
                    "mlp_norm.scale": "post_attention_layernorm.weight",
                },
                _LAYER,
            ),
            *tensors({"norm.scale": "gpt_neox.final_layer_norm.weight"}),
            *replace_all(
                QKV,
                name="gpt_neox.layers.{layer}.attention.query_key_value.weight",
                chunks="num_heads",
            ),
            *block_tensors(
                {
                    "attention.out.kernel": "attention.dense.weight",
                    "mlp.up.kernels.0": "mlp.dense_h_to_4h.weight",
                    "mlp.down.kernel": "mlp.dense_4h_to_h.weight",
                },
                _LAYER,
                transposed=True,
            ),
        ),
    ),
    attributes=(
        Attribute("vocab_size", "vocab_size", int, 50_432),
        Attribute("hidden_size", "d_model", int, 6144),
        Attribute("intermediate_size", "d_ff", int, 24_576),
        Attribute("num_hidden_layers", "num_layers", int, 44),
        Attribute("num_attention_heads", "num_heads", int, 64, also=("num_kv_heads",)),
        Attribute("layer_norm_eps", "norm_eps", float, 1e-5),
        Attribute("tie_word_embeddings", "tie_embeddings", bool, False),
        Attribute("hidden_act", "activation", ACTIVATIONS, "gelu"),
        replace(ATTENTION_BIAS, default=True),
        Attribute(
            "use_parallel_residual",
            "norm_placement",
            {True: "parallel_two", False: "before"},
            True,
        ),
    ),
    prefix="gpt_neox.",
    ignored_tensors=(
        "gpt_neox.layers.{layer}.attention.bias",
        "gpt_neox.layers.{layer}.attention.masked_bias",
        "gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq",
    ),
    layer_attributes=ROPE,
    rope_attributes=(
        Attribute("rotary_pct", "rotary_fraction", float, 0.25, alias="partial_rotary_factor"),
    ),
    rope_theta_name="rotary_emb_base",
    always={"norm": "layer", "mlp": "plain", "mlp_bias": True},
    ignored_attributes={
        "attention_dropout",
        "num_key_value_heads",
    },
)

GPT_NEO = replace(
    GPT2,
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    tensors=(
        *with_names(
            [tensor for tensor in TRANSPOSED if ".c_attn." not in tensor.name],
            "attn.c_proj",
            "attn.attention.out_proj",
        ),
        *block_tensors(
            {
                "attention.qkv.kernels.0": "q_proj.weight",
                "attention.qkv.kernels.1": "k_proj.weight",
                "attention.qkv.kernels.2": "v_proj.weight",
            },
            "transformer.h.{layer}.attn.attention.",
            transposed=True,
        ),
    ),
    attributes=(
        Attribute("max_position_embeddings", "learned_positions", int, 2048),
        Attribute("hidden_size", "d_model", int),
        Attribute("intermediate_size", "d_ff", int, default_from="d_model", times=4),
        Attribute("num_layers", "num_layers", int, alias="num_hidden_layers"),
        Attribute(
            "num_heads", "num_heads", int, alias="num_attention_heads", also=("num_kv_heads",)
        ),
        # Not those that GPT-2 has by other names:
        *without(
            GPT2.attributes,
            *("n_positions", "n_embd", "n_inner", "n_layer", "n_head", "scale_attn_weights"),
        ),
    ),
    ignored_tensors=(
        "transformer.h.{layer}.attn.attention.bias",
        "transformer.h.{layer}.attn.attention.masked_bias",
    ),
    layer_attributes={"attention_types", "window_size"},
    default_window=256,
    always={**GPT2.always, "attention_bias": False, "query_scale": 1.0},
    ignored_attributes=GPT2.ignored_attributes | {"attention_layers", "num_key_value_heads"},
)
