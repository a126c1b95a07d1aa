"""What a family's table consists of, and what most families have in common.

A new family is a file beside this one: a `Family` made of the pieces below, and what is its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LAYER = "{layer}"
"""Stands for the number of a layer in the name of a tensor; ours are stacked."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, and the parameter that it is."""

    ours: str
    """Dotted path of the parameter."""

    theirs: str
    """Name in the file."""

    transposed: bool = False
    """The file has `[out, in]`, we have `[in, out]`."""


@dataclass(frozen=True)
class Attribute:
    """An attribute of config.json that is read into fields of `ModelConfig`."""

    name: str
    fields: tuple[str, ...]
    kind: type
    """int, float or bool."""
    default: Any = None
    """If config.json lacks it, as transformers has it; a string names another attribute. None: it must be there."""

    if_null: str | None = None
    """Another attribute, which holds if this one is null."""


@dataclass(frozen=True)
class Family:
    """A kind of model that transformers knows by its `model_type`."""

    model_type: str
    architecture: str
    """The class in transformers, as config.json names it."""

    tensors: tuple[Tensor, ...]
    """All that a model of the family can have; those are expected whose parameter the model has."""

    attributes: tuple[Attribute, ...]
    """Read one by one. Rotary embedding and windows are spelled in several: see `jaxtp/hf/rope.py`, `window.py`."""

    ignored: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    """Tensors that old versions also stored, and that nothing needs."""

    window: Literal["never", "always", "switched"] = "never"
    """Whether sliding_window is unknown, holds, or holds if use_sliding_window says so."""

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


BODY = (
    Tensor("embedding.embedding", "model.embed_tokens.weight"),
    Tensor("blocks.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
    Tensor("blocks.attention.qkv.kernels.0", "model.layers.{layer}.self_attn.q_proj.weight", transposed=True),
    Tensor("blocks.attention.qkv.kernels.1", "model.layers.{layer}.self_attn.k_proj.weight", transposed=True),
    Tensor("blocks.attention.qkv.kernels.2", "model.layers.{layer}.self_attn.v_proj.weight", transposed=True),
    Tensor("blocks.attention.out.kernel", "model.layers.{layer}.self_attn.o_proj.weight", transposed=True),
    Tensor("blocks.mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
    Tensor("blocks.mlp.gate_up.kernels.0", "model.layers.{layer}.mlp.gate_proj.weight", transposed=True),
    Tensor("blocks.mlp.gate_up.kernels.1", "model.layers.{layer}.mlp.up_proj.weight", transposed=True),
    Tensor("blocks.mlp.down.kernel", "model.layers.{layer}.mlp.down_proj.weight", transposed=True),
    Tensor("norm.scale", "model.norm.weight"),
    Tensor("head.kernel", "lm_head.weight"),
)
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
HEAD_NORMS = (
    Tensor("blocks.attention.qk_norms.0.scale", "model.layers.{layer}.self_attn.q_norm.weight"),
    Tensor("blocks.attention.qk_norms.1.scale", "model.layers.{layer}.self_attn.k_norm.weight"),
)

SIZES = (
    Attribute("vocab_size", ("vocab_size",), int),
    Attribute("hidden_size", ("d_model",), int),
    Attribute("intermediate_size", ("d_ff",), int),
    Attribute("num_hidden_layers", ("num_layers",), int),
    Attribute("num_attention_heads", ("num_heads",), int),
    Attribute("rms_norm_eps", ("norm_eps",), float, 1e-6),
    Attribute("tie_word_embeddings", ("tie_embeddings",), bool, False),
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
"""Of transformers 5."""


def kv_heads(default: int | str) -> Attribute:
    """`num_key_value_heads`, which families default to different things."""
    return Attribute("num_key_value_heads", ("num_kv_heads",), int, default, if_null="num_attention_heads")
