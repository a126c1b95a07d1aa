"""GPT-2 (Radford et al. 2019): learned positions, LayerNorms, biases, a plain MLP.

The file stores kernels as `[in, out]`, like jaxtp, and fuses q, k and v.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    SCALE_BY_LAYER,
    Attribute,
    Family,
    Tensor,
    block_tensors,
    tensors,
    with_biases,
)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    tensors=(
        *tensors(
            {
                "embedding.embedding": "transformer.wte.weight",
                "positions.table": "transformer.wpe.weight",
                "head.kernel": "lm_head.weight",
            }
        ),
        *with_biases(
            *block_tensors(
                {
                    "attention_norm.scale": "ln_1.weight",
                    "attention.qkv.kernels.0": "attn.c_attn.weight",
                    "attention.qkv.kernels.1": "attn.c_attn.weight",
                    "attention.qkv.kernels.2": "attn.c_attn.weight",
                    "attention.out.kernel": "attn.c_proj.weight",
                    "mlp_norm.scale": "ln_2.weight",
                    "mlp.up.kernels.0": "mlp.c_fc.weight",
                    "mlp.down.kernel": "mlp.c_proj.weight",
                },
                "transformer.h.{layer}.",
            ),
            Tensor("norm.scale", "transformer.ln_f.weight"),
        ),
    ),
    attributes=(
        Attribute("vocab_size", "vocab_size", int),
        Attribute("n_positions", "learned_positions", int, 1024, alias="max_position_embeddings"),
        Attribute("n_embd", "d_model", int, alias="hidden_size"),
        Attribute("n_inner", "d_ff", int, default_from="d_model", times=4),
        Attribute("n_layer", "num_layers", int, alias="num_hidden_layers"),
        Attribute("n_head", "num_heads", int, alias="num_attention_heads", also=("num_kv_heads",)),
        Attribute("layer_norm_epsilon", "norm_eps", float, 1e-5),
        Attribute("tie_word_embeddings", "tie_embeddings", bool, True),
        Attribute("activation_function", "activation", ACTIVATIONS, "gelu_new"),
        Attribute("scale_attn_weights", "query_scale", {True: None, False: 1.0}, True),
    ),
    prefix="transformer.",
    # Masks:
    ignored_tensors=("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),
    layer_attributes={SCALE_BY_LAYER},
    always={
        "norm": "layer",
        "mlp": "plain",
        "rope_theta": None,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    # transformers reads activation_function and attn_pdrop instead of the first two.
    ignored_attributes={
        "hidden_act",
        "attention_dropout",
        "attn_pdrop",
        "reorder_and_upcast_attn",
        "n_ctx",
        "n_special",
        "predict_special_tokens",
        "output_past",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
    },
)
TRANSPOSED = tuple(
    replace(tensor, transposed=".h." in tensor.name and ".kernel" in tensor.path)
    for tensor in GPT2.tensors
)
"""The tensors of models like GPT-2 whose files have kernels as `[out, in]`."""
