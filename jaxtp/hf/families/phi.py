"""Phi-1, 1.5 and 2 (arXiv 2309.05463).

They have a parallel block with one LayerNorm, biases, and partly rotated heads.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

_LAYER = "model.layers.{layer}."

PHI = base.Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    tensors=(
        *base.OUTER[::2],
        base.Tensor("head.bias", "lm_head.bias"),
        *base.with_biases(
            base.Tensor("norm.scale", "model.final_layernorm.weight"),
            base.Tensor("blocks.attention_norm.scale", f"{_LAYER}input_layernorm.weight"),
            *base.QKV,
            base.Tensor(
                "blocks.attention.out.kernel", f"{_LAYER}self_attn.dense.weight", transposed=True
            ),
            base.Tensor("blocks.mlp.up.kernels.0", f"{_LAYER}mlp.fc1.weight", transposed=True),
            base.Tensor("blocks.mlp.down.kernel", f"{_LAYER}mlp.fc2.weight", transposed=True),
            base.Tensor(
                "blocks.attention.qk_norms.0.scale", f"{_LAYER}self_attn.q_layernorm.weight"
            ),
            base.Tensor(
                "blocks.attention.qk_norms.1.scale", f"{_LAYER}self_attn.k_layernorm.weight"
            ),
        ),
    ),
    attributes=(
        *base.sizes(1e-5, eps_name="layer_norm_eps"),
        base.kv_heads(),
        base.Attribute("hidden_act", ("activation",), base.ACTIVATIONS, "gelu_new"),
        base.Attribute("qk_layernorm", ("qk_norm",), {False: "none", True: "head_bias"}, False),
    ),
    layer_attributes=base.ROPE,
    rope_attributes=(replace(base.PARTIAL_ROPE, default=0.5),),
    always={
        **{"norm": "layer", "norm_placement": "parallel", "mlp": "plain", "head_bias": True},
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
    },
    required=base.required(without=("hidden_act", "partial_rotary_factor")),
    ignored_attributes=frozenset({"resid_pdrop", "embd_pdrop"}),
    tp_plan={
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.dense": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
        "lm_head": "colwise_gather_output",
    },
)
