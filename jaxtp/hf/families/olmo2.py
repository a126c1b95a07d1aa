"""OLMo 2: norms after attention and MLP, queries and keys normalized over all heads (arXiv 2501.00656)."""

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    COMMON_REQUIRED,
    OUT_BIAS,
    OUTER,
    PROJECTIONS,
    QK_NORMS,
    QKV_BIASES,
    TP_PLAN,
    Family,
    Tensor,
    kv_heads,
    sizes,
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    tensors=(
        *OUTER,
        Tensor("blocks.attention_after_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        Tensor("blocks.mlp_after_norm.scale", "model.layers.{layer}.post_feedforward_layernorm.weight"),
        *PROJECTIONS,
        *QKV_BIASES,
        *OUT_BIAS,
        *QK_NORMS,
    ),
    attributes=(*sizes(1e-5), kv_heads(), ATTENTION_BIAS),
    always={"norm_placement": "after", "qk_norm": "projection"},
    required={**COMMON_REQUIRED, "mlp_bias": False, "clip_qkv": None},
    tp_plan={
        **TP_PLAN,
        # transformers gathers q and k to normalize them; jaxtp sums the squares over tp.
        **{f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise_split_input",
    },
)
