"""OLMo 2: norms after attention and MLP, queries and keys normalized over all heads (arXiv 2501.00656).

OLMo 3 has windows in three of four layers, and scales the rotation of the others.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

OLMO2 = base.Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_after_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        base.Tensor("blocks.mlp_after_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight"),
        *base.PROJECTIONS,
        *base.QKV_BIASES,
        *base.OUT_BIAS,
        *base.QK_NORMS,
    ),
    attributes=(*base.sizes(1e-5), base.kv_heads(), base.ATTENTION_BIAS),
    always={"norm_placement": "after", "qk_norm": "projection"},
    required=base.required(mlp_bias=False, clip_qkv=None),
    tp_plan={
        **base.TP_PLAN,
        # transformers gathers q and k to normalize them; jaxtp sums the squares over tp.
        **{f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise_split_input",
    },
)

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    layer_attributes=OLMO2.layer_attributes | base.WINDOW | {"layer_types"},
    window_period=4,
    rope_by_type=True,
    rope_theta=500_000.0,
)
