"""Cohere's Command R and R7B.

They have a parallel block with one LayerNorm without bias, interleaved rotation, and scaled logits.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION,
    ATTENTION_BIAS,
    MLP,
    NO_ROPE,
    NORMS,
    OUTER,
    QK_NORMS,
    ROPE,
    WINDOW,
    Attribute,
    Family,
    replace_all,
    sizes,
)

COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    tensors=(
        *(OUTER + NORMS + ATTENTION + MLP),
        *replace_all(QK_NORMS, by_head=True),
    ),
    attributes=(
        *sizes(1e-5, eps_name="layer_norm_eps", tied=True),
        ATTENTION_BIAS,
        Attribute("logit_scale", "logit_scale", float, 0.0625),
        Attribute("use_qk_norm", "qk_norm", {False: "none", True: "heads"}, False),
    ),
    rope_theta=500_000.0,
    rotated="pairs",
    always={"norm": "layer_no_bias", "norm_placement": "parallel"},
)

COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    attributes=COHERE.attributes[:-1],
    layer_attributes=ROPE | WINDOW | {"layer_types", "sliding_window_pattern"},
    window_period=4,
    window_can_be_null=True,
    rope_theta=10_000.0,
    always_by_type={"full_attention": NO_ROPE},
    required={
        "use_qk_norm": False,
        "rotary_pct": 1.0,
        "position_embedding_type": "rope_gptj",
        "use_gated_activation": True,
        "use_parallel_block": True,
        "order_of_interleaved_layers": "local_attn_first",
    },
    # transformers computes head_dim, and reads sliding_window_pattern and tie_word_embeddings
    # instead of the others.
    ignored_attributes={
        "head_dim",
        "layer_switch",
        "use_embedding_sharing",
        "use_parallel_embedding",
    },
)
