"""Cohere's Command R and R7B.

They have a parallel block with one LayerNorm without bias, interleaved rotation, and scaled logits.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

COHERE = base.Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        *(base.PROJECTIONS + base.QKV_BIASES + base.OUT_BIAS),
        *(replace(tensor, by_head=True) for tensor in base.QK_NORMS),
    ),
    attributes=(
        *base.sizes(1e-5, eps_name="layer_norm_eps", tied=True),
        base.kv_heads(),
        base.ATTENTION_BIAS,
        base.Attribute("logit_scale", ("logit_scale",), float, 0.0625),
        base.Attribute("use_qk_norm", ("qk_norm",), {False: "none", True: "heads"}, False),
    ),
    rope_theta=500_000.0,
    interleaved_rope=True,
    always={"norm": "layer_no_bias", "norm_placement": "parallel"},
    required=base.required(mlp_bias=False),
)

COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    tensors=tuple(tensor for tensor in COHERE.tensors if tensor not in COHERE.tensors[-2:]),
    attributes=COHERE.attributes[:-1],
    layer_attributes=base.ROPE | base.WINDOW | {"layer_types", "sliding_window_pattern"},
    window_period=4,
    window_can_be_null=True,
    rope_theta=10_000.0,
    always_by_type={"full_attention": base.NO_ROPE},
    required={
        **COHERE.required,
        **{"use_qk_norm": False, "rotary_pct": 1.0, "position_embedding_type": "rope_gptj"},
        **{"use_gated_activation": True, "use_parallel_block": True},
        "order_of_interleaved_layers": "local_attn_first",
    },
    # transformers computes head_dim, and reads sliding_window_pattern and tie_word_embeddings
    # instead of the others.
    ignored_attributes=frozenset(
        {"head_dim", "layer_switch", "use_embedding_sharing", "use_parallel_embedding"}
    ),
)
