"""The parts of a family's table, and what most families have in common.

A new family is a file beside this one: a `Family` made of the pieces below, and what is its own.

A family is a table rather than code for import and for export: the tensors' names and transposes, the attributes that
are read, those that must have a given value, and those that say nothing. An attribute of config.json that is in none of
these lists stops an import, unless `--ignore-config` names it: it may change what the model computes. Whether a family
can be a given model is decided by writing its config.json and reading it back (`hf/attributes.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LAYER, EXPERT = "{layer}", "{expert}"
"""Stand for the number of a layer, and of an expert in it, in the name of a tensor; ours are stacked."""

Layout = Literal["separate", "stacked"]
"""How a file has the experts of a layer: a tensor for each of them, or one in which they are stacked."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, and the parameter that it is.

    Where several have one name in the file, they are its parts, in the order of the table, joined along their outputs.
    Where several are one parameter, a file has it as one of them says: which, may differ from layer to layer.
    """

    ours: str
    """Dotted path of the parameter, without the number of a kind of block."""

    theirs: str
    """Name in the file."""

    transposed: bool = False
    """The file has `[out, in]`, we have `[in, out]`; experts that are stacked come before both."""

    layout: Layout | None = None
    """The layout of experts that it belongs to, where a parameter has another tensor in the other one."""


@dataclass(frozen=True)
class Attribute:
    """An attribute of config.json that is read into fields of `ModelConfig`."""

    name: str
    fields: tuple[str, ...]
    kind: type | Mapping[Any, Any]
    """int, float or bool; or the values that it can have, each with that of the fields."""

    default: Any = None
    """Its value where config.json lacks it, as in transformers. None: it must be there."""

    other: str | None = None
    """Another attribute, which holds if this one is null, or if it is missing and has no default."""

    times: int = 1
    """Multiplies that other attribute."""

    power: float = 1.0
    """The fields have the attribute raised to this."""

    can_be_null: bool = False
    """Null is a value: it switches off what the fields are of."""


@dataclass(frozen=True)
class Family:
    """A kind of model that transformers knows by its `model_type`."""

    model_type: str
    architecture: str
    """The class in transformers, as config.json names it."""

    tensors: tuple[Tensor, ...]
    """All that a model of the family can have; those are expected whose parameter the model has."""

    attributes: tuple[Attribute, ...]
    """Read one by one; the first of a name is the one that is written. Rotary embedding and what differs by layer are
    spelled in several: see `jaxtp/hf/rope.py`, `layers.py`."""

    prefix: str = "model."
    """Begins the names of all tensors but the head's; a file may lack it in all of them."""

    ignored: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    """Tensors that are also stored, and that nothing needs."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of attributes."""

    window: Literal["never", "always", "switched", "switched_for_all", "alternate", "periodic"] = "never"
    """Where sliding_window holds: it is unknown; in all layers; in those that use_sliding_window and max_window_layers
    say; in all if use_sliding_window says so; in every second one; or in all but each one that ends a period of
    sliding_window_pattern."""

    default_window: int | None = 4096
    """sliding_window where config.json lacks it."""

    rope: Literal["never", "one", "by_window"] = "one"
    """Whether positions are rotated: not at all, alike in all layers, or otherwise in layers that have a window."""

    rope_theta: float = 10_000.0
    """Base of the frequencies where config.json says nothing; that of layers with a window is always 10,000."""

    rope_kinds: frozenset[str] = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
    """Kinds of rotary embedding that its models can have."""

    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of these kinds, in older files."""

    original_length: int | None = None
    """original_max_position_embeddings where config.json does not say it outside of the rotary embedding; None is what
    the rotary embedding says, or max_position_embeddings."""

    scale_by_layer: str | None = None
    """An attribute by which, if it is true, the i-th layer divides its scores by i."""

    dense_layers: bool = False
    """mlp_only_layers and decoder_sparse_step say which layers have an MLP of intermediate_size instead of experts of
    moe_intermediate_size."""

    head_dim: bool = True
    """There is an attribute head_dim; without it, it is hidden_size / num_attention_heads."""

    default_head_dim: int | None = None
    """If config.json has none; None is hidden_size / num_attention_heads."""

    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that no attribute announces."""

    required: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that must have this value where they are there: another one would be another model."""

    harmless: frozenset[str] = frozenset()
    """Attributes that say nothing of what the model computes."""

    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """How transformers splits the model over tp: `base_model_tp_plan`, and the head's."""


OUTER = (
    Tensor("embedding.embedding", "model.embed_tokens.weight"),
    Tensor("norm.scale", "model.norm.weight"),
    Tensor("head.kernel", "lm_head.weight"),
)
"""Tensors outside of the blocks."""

NORMS = (
    Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
    Tensor("blocks.mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
)
QKV = (
    Tensor("blocks.attention.qkv.kernels.0", "model.layers.{layer}.self_attn.q_proj.weight", transposed=True),
    Tensor("blocks.attention.qkv.kernels.1", "model.layers.{layer}.self_attn.k_proj.weight", transposed=True),
    Tensor("blocks.attention.qkv.kernels.2", "model.layers.{layer}.self_attn.v_proj.weight", transposed=True),
)
OUT = (Tensor("blocks.attention.out.kernel", "model.layers.{layer}.self_attn.o_proj.weight", transposed=True),)
GATE_UP = (
    Tensor("blocks.mlp.gate_up.kernels.0", "model.layers.{layer}.mlp.gate_proj.weight", transposed=True),
    Tensor("blocks.mlp.gate_up.kernels.1", "model.layers.{layer}.mlp.up_proj.weight", transposed=True),
)
DOWN = (Tensor("blocks.mlp.down.kernel", "model.layers.{layer}.mlp.down_proj.weight", transposed=True),)
PROJECTIONS = QKV + OUT + GATE_UP + DOWN
BODY = OUTER + NORMS + PROJECTIONS
QKV_BIASES = (
    Tensor("blocks.attention.qkv.biases.0", "model.layers.{layer}.self_attn.q_proj.bias"),
    Tensor("blocks.attention.qkv.biases.1", "model.layers.{layer}.self_attn.k_proj.bias"),
    Tensor("blocks.attention.qkv.biases.2", "model.layers.{layer}.self_attn.v_proj.bias"),
)
OUT_BIAS = (Tensor("blocks.attention.out.bias", "model.layers.{layer}.self_attn.o_proj.bias"),)
MLP_BIASES = (
    Tensor("blocks.mlp.gate_up.biases.0", "model.layers.{layer}.mlp.gate_proj.bias"),
    Tensor("blocks.mlp.gate_up.biases.1", "model.layers.{layer}.mlp.up_proj.bias"),
    Tensor("blocks.mlp.down.bias", "model.layers.{layer}.mlp.down_proj.bias"),
)
ROUTER = Tensor("blocks.mlp.router", "model.layers.{layer}.mlp.gate.weight", transposed=True)
STACKED_EXPERTS = tuple(
    Tensor(f"blocks.mlp.{ours}", f"model.layers.{{layer}}.mlp.experts.{theirs}", transposed=True, layout="stacked")
    for ours, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
)
"""As transformers 5 has them in memory."""


def separate_experts(module: str, **names: str) -> tuple[Tensor, ...]:
    """Returns the tensors of experts that are stored one by one.

    Args:
      module: of the layer, in which they are.
      **names: theirs of gate, up and down.
    """
    before = f"model.layers.{{layer}}.{module}.experts.{{expert}}"
    return tuple(
        Tensor(f"blocks.mlp.{ours}", f"{before}.{theirs}.weight", transposed=True, layout="separate")
        for ours, theirs in names.items()
    )


QK_NORMS = (
    Tensor("blocks.attention.qk_norms.0.scale", "model.layers.{layer}.self_attn.q_norm.weight"),
    Tensor("blocks.attention.qk_norms.1.scale", "model.layers.{layer}.self_attn.k_norm.weight"),
)

ATTENTION_BIAS = Attribute("attention_bias", ("attention_bias", "attention_out_bias"), bool, False)
"""One switch for the biases of q, k, v and o."""

PLAIN: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "per_layer_config": None,
    "quantization_config": None,
}
"""Required of all the families here."""

UNREAD = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "name_or_path"),
        *("max_position_embeddings", "model_max_length", "max_sequence_length", "max_seq_length", "max_seq_len"),
        *("initializer_range", "use_cache", "pretraining_tp", "is_llama_config", "is_decoder", "tokenizer_class"),
        *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
        *("base_model_tp_plan", "base_model_pp_plan", "base_model_fsdp_plan", "tie_last_hidden_states"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix"),
        *("torchscript", "tf_legacy_loss", "use_bfloat16", "tie_encoder_decoder", "chunk_size_feed_forward"),
        *("cross_attention_hidden_size", "gradient_checkpointing", "transformers.js_config"),
        *("cache_implementation",),
        # Of generation, which older versions kept here:
        *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("remove_invalid_values", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty"),
    }
)
"""Harmless in all of them. max_position_embeddings is what a model was trained for; it limits nothing here."""

_BOOKKEEPING = re.compile(
    r"_.*"  # what transformers keeps for itself: _name_or_path, _attn_implementation, _flash_attn_2_enabled
    r"|\w+_token_ids?"
    r"|attn_implementation|use_(flash_att\w*|sdpa|xformers|memor+y_efficient_attention|fused_\w+|liger_kernel)"
    r"|unsloth_\w+"
)
"""Names of more that are harmless: ids of tokens, and which kernel or program computes the same."""
_CODE = "auto_map"
"""Classes in Python files beside config.json, which may compute anything if their names begin with AutoModel."""


def says_nothing(name: str, value: Any, family: Family) -> bool:
    """Whether an attribute of config.json says nothing of what a model of a family computes."""
    if name == _CODE:
        return value is None or (isinstance(value, dict) and not any(key.startswith("AutoModel") for key in value))
    return name in family.harmless or _BOOKKEEPING.fullmatch(name) is not None


TP_PLAN: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
"""Plan of transformers 5."""

EXPERTS_TP_PLAN: Mapping[str, str] = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
}
"""Lines of the plan for experts; `layers.*.mlp.experts` beside them splits nothing, but sums what these computed."""

REPLICATED = dict.fromkeys(("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"), "replicated_with_grad_allreduce")
"""Lines of the plan for norms of queries and keys by head."""

ACTIVATIONS: Mapping[str, str] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""As transformers calls them; the first name of one is written."""


def kv_heads(default: int | None = None) -> Attribute:
    """Returns `num_key_value_heads`, which is num_attention_heads unless a family has another default."""
    return Attribute("num_key_value_heads", ("num_kv_heads",), int, default, other="num_attention_heads")


def sizes(eps: float = 1e-6, *, tied: bool = False) -> tuple[Attribute, ...]:
    """Returns what most families call alike, with their defaults of the norms' epsilon and of a tied head."""
    return (
        Attribute("vocab_size", ("vocab_size",), int),
        Attribute("hidden_size", ("d_model",), int),
        Attribute("intermediate_size", ("d_ff",), int),
        Attribute("num_hidden_layers", ("num_layers",), int),
        Attribute("num_attention_heads", ("num_heads",), int),
        Attribute("rms_norm_eps", ("norm_eps",), float, eps),
        Attribute("tie_word_embeddings", ("tie_embeddings",), bool, tied),
    )
