"""EXAONE 4: the block of OLMo 2, rotations only in layers with a window (arXiv 2507.11407)."""

from dataclasses import replace

from jaxtp.hf.families.family import COMMON, NO_ROPE, WINDOW, sizes
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
