"""GPT-2 (Radford et al. 2019): learned positions, LayerNorms, biases, a plain MLP.

The file stores kernels as `[in, out]`, like jaxtp, and fuses q, k and v.
"""

from jaxtp.hf.families import family as base

_LAYER = "transformer.h.{layer}."
_NAMES = (
    ("blocks.attention_norm.scale", f"{_LAYER}ln_1.weight"),
    *((f"blocks.attention.qkv.kernels.{i}", f"{_LAYER}attn.c_attn.weight") for i in range(3)),
    ("blocks.attention.out.kernel", f"{_LAYER}attn.c_proj.weight"),
    ("blocks.mlp_norm.scale", f"{_LAYER}ln_2.weight"),
    ("blocks.mlp.up.kernels.0", f"{_LAYER}mlp.c_fc.weight"),
    ("blocks.mlp.down.kernel", f"{_LAYER}mlp.c_proj.weight"),
    ("norm.scale", "transformer.ln_f.weight"),
)
"""Tensors with biases."""

GPT2 = base.Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    tensors=(
        base.Tensor("embedding.embedding", "transformer.wte.weight"),
        base.Tensor("positions.table", "transformer.wpe.weight"),
        base.Tensor("head.kernel", "lm_head.weight"),
        *base.with_biases(*(base.Tensor(*names) for names in _NAMES)),
    ),
    attributes=(
        base.Attribute("vocab_size", ("vocab_size",), int),
        base.Attribute(
            "n_positions", ("learned_positions",), int, 1024, alias="max_position_embeddings"
        ),
        base.Attribute("n_embd", ("d_model",), int, alias="hidden_size"),
        base.Attribute("n_inner", ("d_ff",), int, default_from="d_model", times=4),
        base.Attribute("n_layer", ("num_layers",), int, alias="num_hidden_layers"),
        base.Attribute("n_head", ("num_heads", "num_kv_heads"), int, alias="num_attention_heads"),
        base.Attribute("layer_norm_epsilon", ("norm_eps",), float, 1e-5),
        base.Attribute("tie_word_embeddings", ("tie_embeddings",), bool, True),
        base.Attribute("activation_function", ("activation",), base.ACTIVATIONS, "gelu_new"),
        base.Attribute("scale_attn_weights", ("query_scale",), {True: None, False: 1.0}, True),
    ),
    prefix="transformer.",
    ignored_tensors=(f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias"),  # masks
    layer_attributes=frozenset({base.SCALE_BY_LAYER}),
    always={
        "norm": "layer",
        "mlp": "plain",
        "rope_theta": None,
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
    },
    required=base.required(without=("hidden_act", "attention_dropout")),
    ignored_attributes=frozenset(
        {
            *("resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn", "n_ctx"),
            *("n_special", "predict_special_tokens", "output_past"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            *("summary_first_dropout", "summary_last_dropout"),
        }
    ),
    tp_plan={},
)
