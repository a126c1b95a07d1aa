"""Granite 3 and 4, dense or with experts (arXiv 2407.13739), and Bamba.

They are Llama with factors of embeddings, scores, branches and logits.

Granite 4 (model_type granitemoehybrid) has a dense MLP, with or without experts; in Granite 4 H
most layers have Mamba-2. So have Bamba's, whose attention rotates half of each head.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION,
    ATTENTION_BIAS,
    COMMON,
    EMBEDDINGS,
    MAMBA,
    MAMBA_SIZES,
    MLP,
    MLP_BIAS,
    NO_STEP_LIMIT,
    NORMS,
    OUT,
    OUTER,
    QKV,
    ROPE,
    Attribute,
    Family,
    Tensor,
    block_tensors,
    mamba_tensors,
    numbers_of_experts,
    replace_all,
    sizes,
    with_biases,
    with_names,
)

# 0.1 in some files
_DROPOUT = {"attention_dropout"}
_DENSE_MLP = block_tensors(
    {
        # Alone:
        "mlp.gate_up.kernels.0": "shared_mlp.input_linear.weight",
        "mlp.gate_up.kernels.1": "shared_mlp.input_linear.weight",
        "mlp.down.kernel": "shared_mlp.output_linear.weight",
        # With experts:
        "mlp.shared.gate_up.kernels.0": "shared_mlp.input_linear.weight",
        "mlp.shared.gate_up.kernels.1": "shared_mlp.input_linear.weight",
        "mlp.shared.down.kernel": "shared_mlp.output_linear.weight",
    },
    transposed=True,
)
# Both stack experts: files, and transformers 5 in memory.
_EXPERTS_IN_FILE = {
    "mlp.gate": "block_sparse_moe.input_linear.weight",
    "mlp.up": "block_sparse_moe.input_linear.weight",
    "mlp.down": "block_sparse_moe.output_linear.weight",
    "mlp.router": "block_sparse_moe.router.layer.weight",
}
_EXPERTS_IN_MEMORY = {
    "mlp.gate": "block_sparse_moe.experts.gate_up_proj",
    "mlp.up": "block_sparse_moe.experts.gate_up_proj",
    "mlp.down": "block_sparse_moe.experts.down_proj",
    "mlp.router": "block_sparse_moe.router.weight",
}
_EXPERTS = (
    *block_tensors(_EXPERTS_IN_FILE, transposed=True, layout="separate"),
    *block_tensors(_EXPERTS_IN_MEMORY, transposed=True, layout="stacked"),
)
_COMMON = (
    *sizes(),
    ATTENTION_BIAS,
    Attribute("embedding_multiplier", "embedding_scale", float, 1.0),
    Attribute("attention_multiplier", "query_scale", float, 1.0),
    Attribute("residual_multiplier", "residual_scale", float, 1.0),
    Attribute("logits_scaling", "logit_scale", float, 1.0, power=-1.0),
)

_MIXERS = (
    *with_biases(*QKV, *replace_all(OUT, unless="delta_value_heads")),
    *mamba_tensors("model.layers.{layer}.mamba."),
)

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    attributes=(*_COMMON, MLP_BIAS),
    ignored_attributes=_DROPOUT,
)

GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    tensors=(
        *(OUTER + NORMS + ATTENTION),
        *_EXPERTS,
    ),
    attributes=(
        *_COMMON,
        *numbers_of_experts("num_local_experts", 8, 2),
    ),
    ignored_attributes=_DROPOUT,
)

GRANITEMOEHYBRID = replace(
    GRANITEMOE,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    tensors=(
        *(OUTER + NORMS + _MIXERS),
        *(_EXPERTS + _DENSE_MLP),
    ),
    attributes=(
        *_COMMON,
        Attribute("num_local_experts", "num_experts", int, 8, can_be_zero=True),
    ),
    layer_attributes=COMMON | {"layer_types", "position_embedding_type", "mamba_expand"},
    by_type={
        "experts": (
            Attribute("num_experts_per_tok", "experts_per_token", int, 2),
            Attribute("intermediate_size", "d_ff", int),
            Attribute("shared_intermediate_size", "shared_experts", int, 1024),
        ),
        "dense": (Attribute("shared_intermediate_size", "d_ff", int, 1024),),
        "linear_attention": MAMBA_SIZES,
    },
    always_by_type=MAMBA,
    layer_types={"attention": "full_attention", "mamba": "linear_attention"},
    required={"normalization_function": "rmsnorm", "time_step_limit": NO_STEP_LIMIT},
    # transformers checks it.
    written={"mamba_n_heads": 1},
    ignored_attributes=GRANITEMOE.ignored_attributes | {"mamba_chunk_size", "init_method"},
)

BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    tensors=(
        *(EMBEDDINGS + with_names(NORMS, "post_attention_layernorm", "pre_ff_layernorm")),
        Tensor("norm.scale", "model.final_layernorm.weight"),
        *(_MIXERS + with_names(MLP, "mlp", "feed_forward")),
    ),
    attributes=(*sizes(1e-5, kv_heads=8), ATTENTION_BIAS, MLP_BIAS),
    layer_attributes=ROPE | {"attn_layer_indices", "mamba_expand"},
    # transformers replaces any other value.
    rope_attributes=(Attribute("partial_rotary_factor", "rotary_fraction", {0.5: 0.5}, 0.5),),
    by_type={"linear_attention": MAMBA_SIZES},
    always_by_type=MAMBA,
    required={"time_step_limit": NO_STEP_LIMIT},
    written=GRANITEMOEHYBRID.written,
    ignored_attributes=GRANITEMOEHYBRID.ignored_attributes
    | {"num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"},
)
