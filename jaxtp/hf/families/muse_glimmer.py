"""Muse Glimmer.

It has a gate on the heads' results, queries and keys without learned norms, and layers without
rotation.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    Attribute,
    Wrapper,
    block_tensors,
    sizes,
    with_defaults,
)
from jaxtp.hf.families.gemma import GEMMA2

MUSE_GLIMMER = replace(
    GEMMA2,
    model_type="muse_glimmer_text",
    architecture="MuseGlimmerForCausalLM",
    tensors=(
        *GEMMA2.tensors,
        *block_tensors({"attention.qkv.kernels.3": "self_attn.gate_proj.weight"}, transposed=True),
    ),
    attributes=(
        *with_defaults(
            sizes(1e-5, kv_heads=2),
            vocab_size=202_048,
            hidden_size=6656,
            intermediate_size=19_968,
            num_hidden_layers=52,
            num_attention_heads=32,
        ),
        Attribute("hidden_activation", "activation", ACTIVATIONS, "silu"),
        Attribute("qk_scale_factor", "query_scale", float, 3.87, unit=("head_dim", -0.5)),
        Attribute("post_norm_eps", "norm_after_eps", float, 1e-8),
        Attribute("output_multiplier", "logit_scale", float, 0.19611613513818404),
        Attribute("final_logit_softcapping", "logit_softcap", float, 20.0),
    ),
    layer_attributes=GEMMA2.layer_attributes | {"layer_rope_theta"},
    default_window=2048,
    window_period=4,
    global_layer=-1,
    default_head_dim=128,
    always={
        **GEMMA2.always,
        "final_norm": "rms",
        "embedding_norm": True,
        "qk_norm": "head_plain",
        "attention_gate": True,
    },
    required={},
)

MUSE_GLIMMER_WRAPPER = Wrapper(
    "muse_glimmer",
    "MuseGlimmerForConditionalGeneration",
    text_types=("muse_glimmer_text",),
    other_tensors=("vision_tower.", "vision_adapter.", "vision_projection."),
)
