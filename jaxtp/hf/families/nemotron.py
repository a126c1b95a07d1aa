"""Nemotron-4 and Minitron (arXiv 2402.16819).

They have LayerNorms of factor 1 + scale, squared ReLU, and partly rotated heads.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    BODY,
    MLP_BIAS,
    PARTIAL_ROPE,
    Attribute,
    Family,
    sizes,
)

NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    tensors=BODY,
    attributes=(
        *sizes(1e-5, eps_name="norm_eps"),
        ATTENTION_BIAS,
        MLP_BIAS,
        Attribute("hidden_act", "activation", ACTIVATIONS, "relu2"),
    ),
    rope_attributes=(replace(PARTIAL_ROPE, default=0.5),),
    always={"norm": "layer_plus_one", "mlp": "plain"},
)
