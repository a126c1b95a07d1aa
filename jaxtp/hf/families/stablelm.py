"""StableLM 2 (arXiv 2402.17834): Llama with LayerNorms and partly rotated heads.

12B has a parallel block.
"""

from jaxtp.hf.families.family import (
    ATTENTION,
    MLP,
    NORMS,
    OUTER,
    ROPE,
    Attribute,
    Family,
    block_tensors,
    partial_rope,
    sizes,
)

STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    tensors=(
        *(OUTER + NORMS + ATTENTION + MLP),
        *block_tensors(
            {
                "attention.qk_norms.0.scale": "self_attn.q_layernorm.norms.{head}.weight",
                "attention.qk_norms.1.scale": "self_attn.k_layernorm.norms.{head}.weight",
            }
        ),
    ),
    attributes=(
        *sizes(1e-5, eps_name="layer_norm_eps", kv_heads=32),
        Attribute("use_qkv_bias", "attention_bias", bool, False),
        Attribute("qk_layernorm", "qk_norm", {False: "none", True: "heads"}, False),
        Attribute(
            "use_parallel_residual", "norm_placement", {False: "before", True: "parallel"}, False
        ),
    ),
    layer_attributes=ROPE,
    rope_attributes=partial_rope(0.25),
    always={"norm": "layer"},
)
