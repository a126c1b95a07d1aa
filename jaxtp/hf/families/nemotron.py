"""Nemotron-4 and Minitron (arXiv 2402.16819).

They have LayerNorms of factor 1 + scale, squared ReLU, and partly rotated heads.
"""

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    MLP_BIAS,
    Attribute,
    Family,
    partial_rope,
    sizes,
)

NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    attributes=(
        *sizes(1e-5, eps_name="norm_eps"),
        ATTENTION_BIAS,
        MLP_BIAS,
        Attribute("hidden_act", "activation", ACTIVATIONS, "relu2"),
    ),
    rope_attributes=partial_rope(0.5),
    always={"norm": "layer_plus_one", "mlp": "plain"},
)
