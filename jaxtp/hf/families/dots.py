"""dots.llm1 (arXiv 2506.05767).

It has experts chosen by sigmoid scores within groups, and shared experts.
"""

from jaxtp.hf.families import family as base

DOTS1 = base.Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    tensors=(
        *base.BODY,
        *base.QKV_BIASES,
        *base.OUT_BIAS,
        *base.QK_NORMS,
        *base.EXPERTS,
        base.SELECTION_BIAS,
        *base.SHARED_EXPERTS,
    ),
    attributes=(
        *base.sizes(),
        base.kv_heads(32),
        base.ATTENTION_BIAS,
        *base.grouped_experts(normalize=False),
    ),
    layer_attributes=base.COMMON
    | base.WINDOW
    | {"layer_types", "max_window_layers", "first_k_dense_replace"},
    by_type=base.first_dense(1408),
    window_can_be_null=True,
    default_full_layers=62,
    always={"qk_norm": "head", "router_scores": "sigmoid", "selection_bias": True},
    required=base.required(
        mlp_bias=False, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1
    ),
    ignored_attributes=base.ROUTER_LOSS
    | {"aux_loss_alpha", "seq_aux", "ep_size", "use_sliding_window"},
    tp_plan=base.TP_PLAN | base.REPLICATED | base.EXPERTS_TP_PLAN | base.SHARED_TP_PLAN,
)
