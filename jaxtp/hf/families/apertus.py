"""Apertus (arXiv 2509.14233).

It has a plain MLP whose activation has two learned scalars, and norms of queries and keys.
"""

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    BRANCHES,
    OUTER,
    Family,
    block_tensors,
    sizes,
)

APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    tensors=(
        *OUTER,
        *block_tensors(
            {
                "attention_norm.scale": "attention_layernorm.weight",
                "mlp_norm.scale": "feedforward_layernorm.weight",
            }
        ),
        *BRANCHES,
        *block_tensors({"mlp.alpha_p": "mlp.act_fn.alpha_p", "mlp.alpha_n": "mlp.act_fn.alpha_n"}),
    ),
    constants={
        "model.layers.{layer}.mlp.act_fn.beta": 0.5,
        "model.layers.{layer}.mlp.act_fn.eps": -1e-6,
    },
    attributes=(*sizes(1e-5), ATTENTION_BIAS),
    rope_theta=12_000_000.0,
    default_rope={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    always={"mlp": "plain", "activation": "xielu", "qk_norm": "head"},
    required={"hidden_act": "xielu", "qk_norm": True, "post_norm": False},
)
