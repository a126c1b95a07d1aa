"""Cohere's Command R: a parallel block with one LayerNorm without bias, interleaved rotation, scaled logits."""

from dataclasses import replace

from jaxtp.hf.families import family as base

_SIZES = tuple(
    replace(attribute, name="layer_norm_eps", default=1e-5) if attribute.name == "rms_norm_eps" else attribute
    for attribute in base.sizes(tied=True)
)

COHERE = base.Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        *base.PROJECTIONS,
        *base.QKV_BIASES,
        *base.OUT_BIAS,
        *(replace(tensor, by_head=True) for tensor in base.QK_NORMS),
    ),
    attributes=(
        *_SIZES,
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
