"""StableLM 2 (arXiv 2402.17834): Llama with LayerNorms and partly rotated heads.

12B has a parallel block.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

STABLELM = base.Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    tensors=(
        *base.OUTER[::2],
        *base.with_biases(base.OUTER[1], *base.NORMS),
        *base.PROJECTIONS,
        *base.QKV_BIASES,
        *(
            base.Tensor(
                f"blocks.attention.qk_norms.{i}.scale",
                f"model.layers.{{layer}}.self_attn.{name}_layernorm.norms.{base.HEAD}.weight",
            )
            for i, name in enumerate("qk")
        ),
    ),
    attributes=(
        *base.sizes(1e-5, eps_name="layer_norm_eps"),
        base.kv_heads(32),
        base.Attribute("use_qkv_bias", ("attention_bias",), bool, False),
        base.Attribute("qk_layernorm", ("qk_norm",), {False: "none", True: "heads"}, False),
        base.Attribute(
            "use_parallel_residual", ("norm_placement",), {False: "before", True: "parallel"}, False
        ),
    ),
    layer_attributes=base.ROPE,
    rope_attributes=(replace(base.PARTIAL_ROPE, default=0.25),),
    always={"norm": "layer"},
    required=base.required(without=("partial_rotary_factor",)),
    ignored_attributes=frozenset({"hidden_dropout"}),
    tp_plan={},
)
