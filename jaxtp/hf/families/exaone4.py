"""EXAONE 4 and K-EXAONE: rotations only in layers with a window (arXiv 2507.11407, 2601.01739).

EXAONE 4 uses the block of OLMo 2. K-EXAONE uses the block of GLM-4.5, with experts.
"""

from dataclasses import replace

from jaxtp.hf.families.deepseek import ROUTER_V3
from jaxtp.hf.families.family import (
    BODY,
    COMMON,
    EXPERTS,
    NO_ROPE,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    WINDOW,
    Wrapper,
    first_dense,
    grouped_experts,
    sizes,
    with_defaults,
)
from jaxtp.hf.families.olmo import OLMO2

EXAONE4 = replace(
    OLMO2,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    attributes=sizes(1e-5, kv_heads=32),
    layer_attributes=COMMON | WINDOW | {"layer_types", "sliding_window_pattern"},
    always_by_type={"global": NO_ROPE},
    window_period=4,
    pattern_is_default=True,
    window_can_be_null=True,
    always={"norm_placement": "after", "qk_norm": "head"},
    required={},
)

EXAONE_MOE = replace(
    EXAONE4,
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    tensors=(
        *(BODY + EXPERTS),
        replace(SELECTION_BIAS, name="model.layers.{layer}.mlp.e_score_correction_bias"),
        *SHARED_EXPERTS,
    ),
    attributes=(
        *EXAONE4.attributes,
        *with_defaults(
            grouped_experts(64, 8, normalize=True, name="num_experts"), routed_scaling_factor=2.5
        ),
    ),
    layer_attributes=EXAONE4.layer_attributes | {"mlp_layer_types", "first_k_dense_replace"},
    default_dense_layers=1,
    by_type=first_dense(1024, 1, "num_shared_experts"),
    other_tensors=("mtp.",),
    always={"qk_norm": "head", "router_scores": "sigmoid", "selection_bias": True},
    required=ROUTER_V3,
)

EXAONE4_5_WRAPPER = Wrapper(
    "exaone4_5",
    "Exaone4_5_ForConditionalGeneration",
    # The second name is of the first release.
    text_types=("exaone4", "exaone4_5_text"),
    other_tensors=("visual.", "mtp."),
)
