"""Arcee's Trinity: norms before and after, a gate on the heads, rotations only with a window.

Its experts have sigmoid scores, a bias for their choice, and shared experts.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    BRANCHES,
    COMMON,
    EXPERTS,
    NO_ROPE,
    OUTER,
    ROUTER,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    WINDOW,
    Attribute,
    Family,
    block_tensors,
    first_dense,
    numbers_of_experts,
    sizes,
)

AFMOE = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    tensors=(
        *OUTER,
        *block_tensors(
            {
                "attention_norm.scale": "input_layernorm.weight",
                "attention_after_norm.scale": "post_attention_layernorm.weight",
                "mlp_norm.scale": "pre_mlp_layernorm.weight",
                "mlp_after_norm.scale": "post_mlp_layernorm.weight",
            }
        ),
        *BRANCHES,
        *block_tensors({"attention.qkv.kernels.3": "self_attn.gate_proj.weight"}, transposed=True),
        replace(ROUTER, name="model.layers.{layer}.mlp.router.gate.weight"),
        *EXPERTS[1:],
        replace(SELECTION_BIAS, name="model.layers.{layer}.mlp.expert_bias"),
        *SHARED_EXPERTS,
    ),
    attributes=(
        *sizes(1e-5),
        *numbers_of_experts("num_experts", 64, 6),
        Attribute("route_scale", "experts_scale", float, 1.0),
        # Embeddings are multiplied by the root of their width.
        Attribute(
            "mup_enabled", "embedding_scale", {False: None, True: 1.0}, False, unit=("d_model", 0.5)
        ),
    ),
    layer_attributes=COMMON
    | WINDOW
    | {
        "layer_types",
        "sliding_window_pattern",
        "global_attn_every_n_layers",
        "first_k_dense_replace",
        "num_dense_layers",
    },
    default_window=1024,
    window_period=4,
    pattern_is_default=True,
    always_by_type={"full_attention": NO_ROPE},
    default_dense_layers=1,
    by_type=first_dense(1408, 2, "num_shared_experts"),
    default_head_dim=128,
    remote_code=("modeling_afmoe.AfmoeModel", "modeling_afmoe.AfmoeForCausalLM"),
    always={
        "norm_placement": "both",
        "qk_norm": "head",
        "attention_gate": True,
        "router_scores": "sigmoid",
        "selection_bias": True,
    },
    required={
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
    },
    ignored_attributes={"load_balance_coeff", "use_grouped_mm"},
)
