"""Mamba-2 alone, as in Codestral Mamba (arXiv 2405.21060): each block is one layer with states.

The residual stream is in float32. A file says `norm_before_gate`, which transformers does not read.
"""

from jaxtp.hf.families.family import (
    NO_STEP_LIMIT,
    Attribute,
    Family,
    block_tensors,
    mamba_tensors,
    sizes,
    tensors,
    without,
)

_LAYER = "backbone.layers.{layer}."
_OUTER = {
    "embedding.embedding": "backbone.embeddings.weight",
    "head.kernel": "lm_head.weight",
    "norm.scale": "backbone.norm_f.weight",
}
# Of other programs, of layers that there are not, of the initial values, or of kernels
_IGNORED = """
    chunk_size intermediate_size norm_before_gate num_attention_heads num_key_value_heads
    rescale_prenorm_residual time_step_floor time_step_init_scheme time_step_max time_step_min
    time_step_rank time_step_scale
"""

MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    tensors=(
        *tensors(_OUTER),
        *block_tensors({"attention_norm.scale": "norm.weight"}, _LAYER),
        *mamba_tensors(_LAYER + "mixer."),
    ),
    attributes=(
        *without(
            sizes(1e-5, eps_name="layer_norm_epsilon"),
            *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
        ),
        Attribute("residual_in_fp32", "residual_float32", bool, True),
    ),
    layer_attributes={"expand"},
    # All layers
    by_type={
        "dense": (
            Attribute("num_heads", "delta_value_heads", int, 128),
            Attribute("head_dim", "delta_value_dim", int, 64),
            Attribute("n_groups", "delta_key_heads", int, 8),
            Attribute("state_size", "delta_key_dim", int, 128),
            Attribute("conv_kernel", "delta_conv", int, 4),
            Attribute("use_conv_bias", "mamba_conv_bias", bool, True),
            Attribute("use_bias", "mamba_bias", bool, False),
        )
    },
    always_by_type={"dense": {"delta_kind": "mamba2", "parts": "mixer"}},
    prefix="backbone.",
    # No layer has attention.
    default_head_dim=32,
    always={"rope_theta": None},
    required={"rms_norm": True, "time_step_limit": NO_STEP_LIMIT},
    ignored_attributes=frozenset(_IGNORED.split()),
)
