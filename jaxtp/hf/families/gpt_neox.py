"""GPT-NeoX and Pythia (arXiv 2204.06745).

They have a parallel block with two LayerNorms, biases, and partly rotated heads.

GPT-Neo: GPT-2 with windows and without a scale of attention scores (github.com/EleutherAI/gpt-neo).
"""

from dataclasses import replace

from jaxtp.hf.families import family as base
from jaxtp.hf.families.gpt2 import GPT2

_LAYER = "gpt_neox.layers.{layer}."
_NEO_ATTENTION = "transformer.h.{layer}.attn.attention"

GPT_NEOX = base.Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    tensors=(
        base.Tensor("embedding.embedding", "gpt_neox.embed_in.weight"),
        base.Tensor("head.kernel", "embed_out.weight"),
        *base.with_biases(
            base.Tensor("blocks.attention_norm.scale", f"{_LAYER}input_layernorm.weight"),
            base.Tensor("blocks.mlp_norm.scale", f"{_LAYER}post_attention_layernorm.weight"),
            base.Tensor("norm.scale", "gpt_neox.final_layer_norm.weight"),
            *(
                replace(
                    each, theirs=f"{_LAYER}attention.query_key_value.weight", chunks="num_heads"
                )
                for each in base.QKV
            ),
            base.Tensor(
                "blocks.attention.out.kernel", f"{_LAYER}attention.dense.weight", transposed=True
            ),
            base.Tensor(
                "blocks.mlp.up.kernels.0", f"{_LAYER}mlp.dense_h_to_4h.weight", transposed=True
            ),
            base.Tensor(
                "blocks.mlp.down.kernel", f"{_LAYER}mlp.dense_4h_to_h.weight", transposed=True
            ),
        ),
    ),
    attributes=(
        base.Attribute("vocab_size", ("vocab_size",), int, 50_432),
        base.Attribute("hidden_size", ("d_model",), int, 6144),
        base.Attribute("intermediate_size", ("d_ff",), int, 24_576),
        base.Attribute("num_hidden_layers", ("num_layers",), int, 44),
        base.Attribute("num_attention_heads", ("num_heads", "num_kv_heads"), int, 64),
        base.Attribute("layer_norm_eps", ("norm_eps",), float, 1e-5),
        base.Attribute("tie_word_embeddings", ("tie_embeddings",), bool, False),
        base.Attribute("hidden_act", ("activation",), base.ACTIVATIONS, "gelu"),
        base.Attribute("attention_bias", ("attention_bias", "attention_out_bias"), bool, True),
        base.Attribute(
            "use_parallel_residual",
            ("norm_placement",),
            {True: "parallel_two", False: "before"},
            True,
        ),
    ),
    prefix="gpt_neox.",
    ignored_tensors=tuple(
        f"{_LAYER}attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ),
    layer_attributes=base.ROPE,
    rope_attributes=(
        base.Attribute(
            "rotary_pct", ("rotary_fraction",), float, 0.25, alias="partial_rotary_factor"
        ),
    ),
    rope_theta_name="rotary_emb_base",
    always={"norm": "layer", "mlp": "plain", "mlp_bias": True},
    required=base.required(without=("hidden_act", "partial_rotary_factor", "attention_dropout")),
    ignored_attributes=frozenset(
        {
            *("hidden_dropout", "attention_dropout", "classifier_dropout", "hidden_dropout_prob"),
            *("attention_probs_dropout_prob", "gradient_checkpointing", "num_key_value_heads"),
        }
    ),
    tp_plan={
        "layers.*.attention.query_key_value": "colwise",
        "layers.*.attention.dense": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
        "embed_out": "colwise_gather_output",
    },
)

GPT_NEO = replace(
    GPT2,
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    tensors=(
        *(
            replace(
                tensor,
                theirs=tensor.theirs.replace("attn.c_proj", "attn.attention.out_proj"),
                transposed=".h." in tensor.theirs and ".kernel" in tensor.ours,
            )
            for tensor in GPT2.tensors
            if ".c_attn." not in tensor.theirs
        ),
        *(
            replace(
                each, theirs=each.theirs.replace("model.layers.{layer}.self_attn", _NEO_ATTENTION)
            )
            for each in base.QKV
        ),
    ),
    attributes=(
        base.Attribute("vocab_size", ("vocab_size",), int),
        base.Attribute("max_position_embeddings", ("learned_positions",), int, 2048),
        base.Attribute("hidden_size", ("d_model",), int),
        base.Attribute("intermediate_size", ("d_ff",), int, default_from="d_model", times=4),
        base.Attribute("num_layers", ("num_layers",), int, alias="num_hidden_layers"),
        base.Attribute(
            "num_heads", ("num_heads", "num_kv_heads"), int, alias="num_attention_heads"
        ),
        base.Attribute("layer_norm_epsilon", ("norm_eps",), float, 1e-5),
        base.Attribute("tie_word_embeddings", ("tie_embeddings",), bool, True),
        base.Attribute("activation_function", ("activation",), base.ACTIVATIONS, "gelu_new"),
    ),
    ignored_tensors=tuple(f"{_NEO_ATTENTION}.{name}" for name in ("bias", "masked_bias")),
    layer_attributes=frozenset({"attention_types", "window_size"}),
    default_window=256,
    always={**GPT2.always, "attention_bias": False, "query_scale": 1.0},
    required=base.required(without=("hidden_act", "attention_dropout")),
    ignored_attributes=GPT2.ignored_attributes
    | {
        "attention_layers",
        "attention_dropout",
        "resid_dropout",
        "embed_dropout",
        "classifier_dropout",
    }
    | {"num_key_value_heads", "summary_proj_to_labels"},
)
