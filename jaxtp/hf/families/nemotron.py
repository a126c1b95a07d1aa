"""Nemotron-4 and Minitron (arXiv 2402.16819), Nemotron-H and Nemotron 3 (arXiv 2504.03624).

Nemotron-4 has LayerNorms of factor 1 + scale, squared ReLU, and partly rotated heads. A block of
Nemotron-H is Mamba-2, attention without positions, an MLP, or experts, both with squared ReLU.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    DENSE_WIDTH,
    MAMBA,
    MLP_BIAS,
    NO_STEP_LIMIT,
    ROPE,
    Attribute,
    Family,
    block_tensors,
    grouped_experts,
    mamba_tensors,
    partial_rope,
    sizes,
    tensors,
    without,
)

NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    attributes=(
        *sizes(1e-5, eps_name="norm_eps"),
        ATTENTION_BIAS,
        MLP_BIAS,
        Attribute("hidden_act", "activation", ACTIVATIONS, "relu2"),
    ),
    rope_attributes=partial_rope(0.5),
    always={"norm": "layer_plus_one", "mlp": "plain"},
)

_LAYER = "backbone.layers.{layer}."
_OUTER = {
    "embedding.embedding": "backbone.embeddings.weight",
    "norm.scale": "backbone.norm_f.weight",
}
_NORMS = {"attention_norm.scale": "norm.weight", "mlp_norm.scale": "norm.weight"}
_KERNELS = {
    "attention.qkv.kernels.0": "mixer.q_proj.weight",
    "attention.qkv.kernels.1": "mixer.k_proj.weight",
    "attention.qkv.kernels.2": "mixer.v_proj.weight",
    "mlp.up.kernels.0": "mixer.up_proj.weight",
    "mlp.down.kernel": "mixer.down_proj.weight",
    "mlp.shared.up.kernels.0": "mixer.shared_experts.up_proj.weight",
    "mlp.shared.down.kernel": "mixer.shared_experts.down_proj.weight",
    "mlp.latent_down.kernel": "mixer.fc1_latent_proj.weight",
    "mlp.latent_up.kernel": "mixer.fc2_latent_proj.weight",
}
_OUT = {"attention.out.kernel": "mixer.o_proj.weight"}
_EXPERTS = {
    "mlp.up": "mixer.experts.{expert}.up_proj.weight",
    "mlp.down": "mixer.experts.{expert}.down_proj.weight",
}
_STACKED = {"mlp.up": "mixer.experts.up_proj", "mlp.down": "mixer.experts.down_proj"}
_SIZES = without(
    sizes(1e-5, eps_name="layer_norm_epsilon", kv_heads=8),
    *("intermediate_size", "layer_norm_epsilon", "tie_word_embeddings"),
)
_EXPERT_NUMBERS = grouped_experts(8, 2, normalize=True)
# Of other programs, of the initial values, or of kernels
_IGNORED = """
    attention_bias chunk_size expand hidden_act hidden_dropout mamba_chunk_size mamba_dt_init_floor
    mamba_dt_max mamba_dt_min mamba_expand mamba_proj_bias mamba_ssm_cache_dtype
    moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type n_shared_experts
    num_logits_to_keep partial_rotary_factor rescale_prenorm_residual residual_in_fp32
    sliding_window time_step_floor time_step_max time_step_min use_mamba_kernels
"""

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    tensors=(
        *tensors(_OUTER | {"head.kernel": "lm_head.weight"}),
        *block_tensors(_NORMS, _LAYER),
        *block_tensors(_KERNELS, _LAYER, transposed=True),
        *block_tensors(_OUT, _LAYER, transposed=True, unless="delta_value_heads"),
        *mamba_tensors(_LAYER + "mixer."),
        *block_tensors({"mlp.router": "mixer.gate.weight"}, _LAYER, transposed=True, float32=None),
        *block_tensors(
            {"mlp.selection_bias": "mixer.gate.e_score_correction_bias"}, _LAYER, float32=True
        ),
        *block_tensors(_EXPERTS, _LAYER, transposed=True, layout="separate"),
        *block_tensors(_STACKED, _LAYER, transposed=True, layout="stacked"),
    ),
    attributes=(
        *_SIZES,
        Attribute("layer_norm_epsilon", "norm_eps", float, 1e-5, alias="norm_eps"),
        Attribute("mlp_hidden_act", "activation", ACTIVATIONS, "relu2"),
        # A dense model has none.
        replace(_EXPERT_NUMBERS[0], can_be_zero=True),
        *_EXPERT_NUMBERS[1:],
    ),
    layer_attributes={"head_dim", "layers_block_type", "hybrid_override_pattern"},
    by_type={
        "experts": (
            Attribute("moe_intermediate_size", "d_ff", int, 7688),
            Attribute("moe_shared_expert_intermediate_size", "shared_experts", int, 7688),
            Attribute("moe_latent_size", "experts_rank", int, can_be_null=True, off=0),
        ),
        "dense": tuple(replace(width, default=21504) for width in DENSE_WIDTH),
        "linear_attention": (
            Attribute("mamba_num_heads", "delta_value_heads", int, 128),
            Attribute("mamba_head_dim", "delta_value_dim", int, 64),
            Attribute("n_groups", "delta_key_heads", int, 8, alias="mamba_n_groups"),
            Attribute("ssm_state_size", "delta_key_dim", int, 128),
            Attribute("conv_kernel", "delta_conv", int, 4, alias="mamba_d_conv"),
            Attribute("use_conv_bias", "mamba_conv_bias", bool, True, alias="mamba_conv_bias"),
            Attribute("use_bias", "mamba_bias", bool, False),
        ),
    },
    always_by_type={**MAMBA, "experts": {"selection_bias": True}},
    layer_types={
        **{"mamba": "linear_attention", "attention": "full_attention"},
        **{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
    },
    prefix="backbone.",
    renamed={"backbone.": "model."},
    remote_code=("modeling_nemotron_h.NemotronHForCausalLM",),
    other_tensors=("mtp.",),
    default_head_dim=128,
    always={
        "mlp": "plain",
        "rope_theta": None,
        "router_scores": "sigmoid",
    },
    # transformers 5.24 clamps time steps at time_step_min, which the models' own code does not
    # (transformers#48989).
    required={
        "mamba_hidden_act": "silu",
        "tie_word_embeddings": False,
        "time_step_limit": NO_STEP_LIMIT,
        "mamba_dt_limit": NO_STEP_LIMIT,
    },
    ignored_attributes=frozenset(_IGNORED.split()) | ROPE,
)
