"""Granite 3 and 4, dense or with experts (arXiv 2407.13739).

They are Llama with factors of embeddings, scores, branches and logits.

Granite 4 (model_type granitemoehybrid) has a dense MLP, with or without experts. Its Mamba-2 layers
are not supported.
"""

from collections.abc import Iterator
from dataclasses import replace

from jaxtp.hf.families import family as base

_LAYER = "model.layers.{layer}."
_DROPOUT = frozenset({"attention_dropout"})  # 0.1 in some files
_IN = "input_linear.weight"
_GATE_UP = "experts.gate_up_proj"
_SHARED = tuple(
    base.Tensor(
        f"blocks.mlp.{module}{ours}", f"{_LAYER}shared_mlp.{theirs}.weight", transposed=True
    )
    for module in ("", "shared.")  # alone, or with experts
    for ours, theirs in (
        ("gate_up.kernels.0", "input_linear"),
        ("gate_up.kernels.1", "input_linear"),
        ("down.kernel", "output_linear"),
    )
)


def _experts(layout: base.Layout, **names: str) -> Iterator[base.Tensor]:
    for ours, theirs in names.items():
        before = f"{_LAYER}block_sparse_moe."
        yield base.Tensor(f"blocks.mlp.{ours}", before + theirs, transposed=True, layout=layout)


_COMMON = (
    *base.sizes(),
    base.kv_heads(),
    base.ATTENTION_BIAS,
    base.Attribute("embedding_multiplier", ("embedding_scale",), float, 1.0),
    base.Attribute("attention_multiplier", ("query_scale",), float, 1.0),
    base.Attribute("residual_multiplier", ("residual_scale",), float, 1.0),
    base.Attribute("logits_scaling", ("logit_scale",), float, 1.0, power=-1.0),
)

GRANITE = base.Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    tensors=base.BODY + base.QKV_BIASES + base.OUT_BIAS + base.MLP_BIASES,
    attributes=(*_COMMON, base.MLP_BIAS),
    required=base.required(without=_DROPOUT),
    ignored_attributes=_DROPOUT,
)

GRANITEMOE = base.Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    tensors=(
        *(base.OUTER + base.NORMS + base.ATTENTION),
        # Both stack experts: files, and transformers 5 in memory.
        *_experts(
            "separate", gate=_IN, up=_IN, down="output_linear.weight", router="router.layer.weight"
        ),
        *_experts(
            "stacked", gate=_GATE_UP, up=_GATE_UP, down="experts.down_proj", router="router.weight"
        ),
    ),
    attributes=(
        *_COMMON,
        base.Attribute("num_local_experts", ("num_experts",), int, 8),
        base.Attribute("num_experts_per_tok", ("experts_per_token",), int, 2),
    ),
    required=base.required(without=_DROPOUT, mlp_bias=False),
    ignored_attributes=_DROPOUT | base.ROUTER_LOSS,
    tp_plan={
        "layers.*.block_sparse_moe.experts.gate_up_proj": "packed_colwise",
        "layers.*.block_sparse_moe.experts.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
)

GRANITEMOEHYBRID = replace(
    GRANITEMOE,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    tensors=GRANITEMOE.tensors + _SHARED,
    attributes=(
        *_COMMON,
        base.Attribute("num_local_experts", ("num_experts",), int, 8, can_be_zero=True),
    ),
    layer_attributes=base.COMMON | {"layer_types", "position_embedding_type"},
    by_type={
        "experts": (
            base.Attribute("num_experts_per_tok", ("experts_per_token",), int, 2),
            base.Attribute("intermediate_size", ("d_ff",), int),
            base.Attribute("shared_intermediate_size", ("shared_experts",), int, 1024),
        ),
        "dense": (base.Attribute("shared_intermediate_size", ("d_ff",), int, 1024),),
    },
    only_layer_type="attention",
    required=base.required(without=_DROPOUT, mlp_bias=False, normalization_function="rmsnorm"),
    written={"mamba_n_heads": 1},  # transformers checks it
    ignored_attributes=GRANITEMOE.ignored_attributes
    | {
        f"mamba_{name}"
        for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size")
    }
    | {"mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "init_method"},
)
