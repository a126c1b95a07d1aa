"""GLM-4 0414: norms before and after, interleaved rotation of half of each head, fused gate and up."""

from dataclasses import replace

from jaxtp.hf.families import family as base

GLM4 = base.Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        base.Tensor("blocks.attention_after_norm.scale", "model.layers.{layer}.post_self_attn_layernorm.weight"),
        # Before the MLP, unlike the norm of this name in Gemma.
        base.Tensor("blocks.mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        base.Tensor("blocks.mlp_after_norm.scale", "model.layers.{layer}.post_mlp_layernorm.weight"),
        *base.QKV,
        *base.QKV_BIASES,
        *base.OUT,
        *(replace(tensor, theirs="model.layers.{layer}.mlp.gate_up_proj.weight") for tensor in base.GATE_UP),
        *base.DOWN,
    ),
    attributes=(
        *base.sizes(1.5625e-7),
        base.kv_heads(2),
        base.Attribute("attention_bias", ("attention_bias",), bool, True),
    ),
    rope_attributes=(replace(base.PARTIAL_ROPE, default=0.5),),
    interleaved_rope=True,
    default_head_dim=128,
    always={"norm_placement": "both"},
    required=base.required(without=("partial_rotary_factor",), mlp_bias=False),
    tp_plan={
        **{module: style for module, style in base.TP_PLAN.items() if ".mlp." not in module},
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    },
)
