"""dots.llm1 (arXiv 2506.05767).

It has experts chosen by sigmoid scores within groups, and shared experts.
"""

from jaxtp.hf.families.deepseek import ROUTER_V3
from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    BODY,
    COMMON,
    EXPERTS,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    WINDOW,
    Family,
    first_dense,
    grouped_experts,
    sizes,
)

DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    tensors=(
        *BODY,
        *EXPERTS,
        SELECTION_BIAS,
        *SHARED_EXPERTS,
    ),
    attributes=(
        *sizes(kv_heads=32),
        ATTENTION_BIAS,
        *grouped_experts(normalize=False),
    ),
    layer_attributes=COMMON
    | WINDOW
    | {"layer_types", "max_window_layers", "first_k_dense_replace"},
    by_type=first_dense(1408),
    window_can_be_null=True,
    default_full_layers=62,
    always={"qk_norm": "head", "router_scores": "sigmoid", "selection_bias": True},
    required=ROUTER_V3,
    ignored_attributes={"aux_loss_alpha", "seq_aux", "ep_size", "use_sliding_window"},
)
