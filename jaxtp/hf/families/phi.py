"""Phi-1, 1.5 and 2 (arXiv 2309.05463).

They have a parallel block with one LayerNorm, biases, and partly rotated heads.
"""

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    EMBEDDINGS,
    NORMS,
    QKV,
    ROPE,
    Attribute,
    Family,
    Tensor,
    block_tensors,
    partial_rope,
    sizes,
    with_biases,
)

PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    tensors=(
        *(EMBEDDINGS + NORMS),
        *with_biases(
            Tensor("norm.scale", "model.final_layernorm.weight"),
            *QKV,
            *block_tensors(
                {
                    "attention.out.kernel": "self_attn.dense.weight",
                    "mlp.up.kernels.0": "mlp.fc1.weight",
                    "mlp.down.kernel": "mlp.fc2.weight",
                },
                transposed=True,
            ),
            *block_tensors(
                {
                    "attention.qk_norms.0.scale": "self_attn.q_layernorm.weight",
                    "attention.qk_norms.1.scale": "self_attn.k_layernorm.weight",
                }
            ),
        ),
    ),
    attributes=(
        *sizes(1e-5, eps_name="layer_norm_eps"),
        Attribute("hidden_act", "activation", ACTIVATIONS, "gelu_new"),
        Attribute("qk_layernorm", "qk_norm", {False: "none", True: "head_bias"}, False),
    ),
    layer_attributes=ROPE,
    rope_attributes=partial_rope(0.5),
    always={
        "norm": "layer",
        "norm_placement": "parallel",
        "mlp": "plain",
        "head_bias": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
)
