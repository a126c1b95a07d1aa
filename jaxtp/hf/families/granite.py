"""Granite 3 and 4, dense or with experts (arXiv 2407.13739).

They are Llama with factors of embeddings, scores, branches and logits.

Granite 4 (model_type granitemoehybrid) has a dense MLP, with or without experts. Its Mamba-2 layers
are not supported.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION,
    ATTENTION_BIAS,
    COMMON,
    MLP_BIAS,
    NORMS,
    OUTER,
    Attribute,
    Family,
    block_tensors,
    numbers_of_experts,
    sizes,
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
_COMMON = (
    *sizes(),
    ATTENTION_BIAS,
    Attribute("embedding_multiplier", "embedding_scale", float, 1.0),
    Attribute("attention_multiplier", "query_scale", float, 1.0),
    Attribute("residual_multiplier", "residual_scale", float, 1.0),
    Attribute("logits_scaling", "logit_scale", float, 1.0, power=-1.0),
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
        *block_tensors(_EXPERTS_IN_FILE, transposed=True, layout="separate"),
        *block_tensors(_EXPERTS_IN_MEMORY, transposed=True, layout="stacked"),
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
    tensors=GRANITEMOE.tensors + _DENSE_MLP,
    attributes=(
        *_COMMON,
        Attribute("num_local_experts", "num_experts", int, 8, can_be_zero=True),
    ),
    layer_attributes=COMMON | {"layer_types", "position_embedding_type"},
    by_type={
        "experts": (
            Attribute("num_experts_per_tok", "experts_per_token", int, 2),
            Attribute("intermediate_size", "d_ff", int),
            Attribute("shared_intermediate_size", "shared_experts", int, 1024),
        ),
        "dense": (Attribute("shared_intermediate_size", "d_ff", int, 1024),),
    },
    only_layer_type="attention",
    required={"normalization_function": "rmsnorm"},
    # transformers checks it.
    written={"mamba_n_heads": 1},
    ignored_attributes=GRANITEMOE.ignored_attributes
    | {
        "mamba_n_heads",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_head",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_proj_bias",
        "time_step_limit",
        "init_method",
    },
)
