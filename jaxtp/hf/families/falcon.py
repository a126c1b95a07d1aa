"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in every block.

Twelve factors scale what enters and leaves the layers. They scale activations here too, so that the
kernels and their gradients are those of the file.
"""

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    COMMON,
    EMBEDDINGS,
    MLP_BIAS,
    NO_STEP_LIMIT,
    OUT,
    QKV,
    Attribute,
    Family,
    block_tensors,
    mamba_tensors,
    sizes,
    tensors,
    with_biases,
)

_NORMS = {
    "attention_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "pre_ff_layernorm.weight",
}
_MLP = {
    "mlp.gate_up.kernels.0": "feed_forward.gate_proj.weight",
    "mlp.gate_up.kernels.1": "feed_forward.up_proj.weight",
    "mlp.down.kernel": "feed_forward.down_proj.weight",
}
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
        *tensors({"norm.scale": "model.final_layernorm.weight"}),
        *block_tensors(_NORMS),
        *with_biases(*QKV, *OUT, *block_tensors(_MLP, transposed=True)),
        *mamba_tensors("model.layers.{layer}.mamba.", "states"),
    ),
    attributes=(
        *sizes(1e-5, kv_heads=8),
        ATTENTION_BIAS,
        MLP_BIAS,
        Attribute("mamba_n_heads", "delta_value_heads", int, 128),
        Attribute("mamba_d_head", "delta_value_dim", int),
        Attribute("mamba_n_groups", "delta_key_heads", int, 1),
        Attribute("mamba_d_state", "delta_key_dim", int, 256),
        Attribute("mamba_d_conv", "delta_conv", int, 4),
        Attribute("mamba_conv_bias", "mamba_conv_bias", bool, True),
        Attribute("mamba_proj_bias", "mamba_bias", bool, False),
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
