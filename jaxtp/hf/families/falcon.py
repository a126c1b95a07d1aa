"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in every block.

Twelve factors scale the inputs and outputs of the layers. They scale activations here too, and
kernels have the values of the file, so that their gradients are the same.
"""

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    COMMON,
    EMBEDDINGS,
    MAMBA_SIZES,
    MLP,
    MLP_BIAS,
    NO_STEP_LIMIT,
    NORMS,
    OUT,
    QKV,
    Attribute,
    Family,
    Tensor,
    mamba_tensors,
    sizes,
    with_biases,
    with_names,
)

# Of initial values, of kernels, or of other programs
_IGNORED = """
    mamba_chunk_size mamba_expand mlp_expansion_factor num_logits_to_keep time_step_floor
    time_step_max time_step_min time_step_rank
"""

FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    tensors=(
        *EMBEDDINGS,
        Tensor("norm.scale", "model.final_layernorm.weight"),
        *with_names(NORMS, "post_attention_layernorm", "pre_ff_layernorm"),
        *with_biases(*QKV, *OUT),
        *with_names(MLP, "mlp", "feed_forward"),
        *mamba_tensors("model.layers.{layer}.mamba.", "states"),
    ),
    attributes=(
        *sizes(1e-5, kv_heads=8),
        ATTENTION_BIAS,
        MLP_BIAS,
        *MAMBA_SIZES,
        Attribute("projectors_bias", "mamba_out_bias", bool, False),
        Attribute("mamba_rms_norm", "mamba_norm", bool, False),
        Attribute(
            "mamba_norm_before_gate",
            None,
            {False: None, None: None},
            True,
            only_if=("mamba_rms_norm", True),
        ),
        Attribute("embedding_multiplier", "embedding_scale", float, 1.0),
        Attribute("lm_head_multiplier", "logit_scale", float, 1.0),
    ),
    layer_attributes=COMMON
    | {"mamba_d_ssm", "attention_in_multiplier", "attention_out_multiplier", "key_multiplier"}
    | {"mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier"},
    always={"parts": "all", "delta_kind": "mamba2"},
    required={
        "attn_layer_indices": None,
        "mamba_use_mlp": True,
        "time_step_limit": NO_STEP_LIMIT,
    },
    ignored_attributes=frozenset(_IGNORED.split()),
)
