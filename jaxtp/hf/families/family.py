"""Types and shared entries of the families' tables, which serve import and export.

A new family is a file in this folder, listed last in `__init__.py`, because an export takes the
first that fits. `tests/hf/test_transformers.py` needs a reference of it. An import refuses
config.json attributes that the table lacks, unless `--ignore-config` names them: they may change
the model's output.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

LAYER = "{layer}"
EXPERT = "{expert}"
HEAD = "{head}"
"""Placeholders for the number of a layer, expert or head in tensor names; jaxtp stacks them."""

Values = Mapping[str, Any]
"""Values of fields of `ModelConfig`, or of attributes, by name."""

# Experts in a file: one tensor per expert, or one stacked tensor per layer
Layout = Literal["separate", "stacked"]


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file (`name`) and the parameter that it holds (`path`).

    The path is dotted, without the index of the stack of layers.

    Entries with the same `name` whose parameters a model has are parts of one tensor, concatenated
    along the output dim, or cut into chunks that alternate. Entries with the same `path` are
    alternatives; a file may use another one in each layer.
    """

    path: str
    name: str
    transposed: bool = False
    """The file has `[out, in]`, jaxtp `[in, out]`; the expert dim comes first in both."""
    layout: Layout | Literal["mxfp4"] | None = None
    """The layout of experts that has this tensor; None if both have it. An export never writes
    "mxfp4"."""
    chunks: str | None = None
    """Field with the number of chunks of each part. With num_heads, a fused kernel has the output
    dims `[N, parts, H]`; with num_kv_heads, the queries, key and value of each group in turn; with
    d_ff, parts that alternate."""
    by_head: bool = False
    """The file has a dim of heads, `[N, H]`; jaxtp `[N*H]`."""
    unit_dim: bool = False
    """The file has a dim of 1 before the last: `[1, N]`, jaxtp `[N]`."""
    around: bool = False
    """The file has dims of 1 around: `[1, 1, N, 1]`, jaxtp `[N]`."""
    float32: bool | None = False
    """Whether it is float32 in a file with another dtype; None: in some files."""
    unless: str | None = None
    """Field that is 0 in a block with this tensor."""
    either_way: bool = False
    """A file may also have it with the last two dims swapped, as its shape tells."""


Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Attribute:
    """A config.json attribute and the `ModelConfig` field that it sets.

    Without a field, its `kind` lists the values that do not change the model; an export writes the
    first.
    """

    name: str
    field: str | None
    kind: type | Mapping[Any, Any]
    """Type int, float or bool; or a map from the attribute's values to the fields' values."""
    default: Any = None
    """The default of transformers; None: the attribute is required."""
    alias: str | None = None
    """Alternative name in config.json."""
    default_from: str | None = None
    """Field of an earlier attribute. Multiplied by `times`, it replaces null, and a missing value
    without `default`."""
    times: int = 1
    only_if: tuple[str, object] | None = None
    """Another attribute, and the value that it must have for this attribute to have an effect."""
    power: float = 1.0
    """The fields are the attribute raised to this power."""
    unit: tuple[str, float] | None = None
    """An earlier field and an exponent: their power multiplies the attribute."""
    plus: str | None = None
    """An earlier field that is added."""
    can_be_null: bool = False
    """Null switches the feature off: the fields are `off`."""
    off: int | None = None
    can_be_zero: bool = False
    """Zero switches the feature off."""
    also: tuple[str, ...] = ()
    """Further fields that get the same value."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that the attribute sets."""
        return () if self.field is None else (self.field, *self.also)

    def scale(self, fields: Values) -> Any:
        """Returns the factor of `unit`."""
        return 1 if self.unit is None else fields[self.unit[0]] ** self.unit[1]

    def in_unit(self, value: Any, fields: Values) -> Any:
        """Returns a value of `kind` times the factor of `unit`, if there is one."""
        return value if self.unit is None or value is None else value * self.scale(fields)


Attributes = tuple[Attribute, ...]
AttentionType = Literal["linear_attention", "full_attention", "sliding_attention", "global"]
LayerType = Literal[AttentionType, "rope", "no_rope", "experts", "dense"]
"""Types of layers; one has several. A global layer has full attention in a model with windows."""
AttributesByType = dict[LayerType, Attributes]


TEXT_IN_MEMORY = "model.language_model."
"""Prefix of the names of most multimodal models' text modules in transformers' memory."""
OTHER_TEXT_IN_MEMORY = "model.text_model."
TEXT_PREFIXES = (
    ("language_model.model.", "language_model."),
    (TEXT_IN_MEMORY, ""),
    (OTHER_TEXT_IN_MEMORY, ""),
)
"""Names of text tensors in a multimodal file: what replaces a family's prefix, and what precedes
its head."""


@dataclass(frozen=True)
class Wrapper:
    """A multimodal `model_type`.

    Its config.json has the text model's attributes in `text_config`.
    """

    model_type: str
    architecture: str
    """Class name in transformers."""
    text_types: tuple[str, ...]
    """Supported values of the `model_type` in `text_config`; the first is the default."""
    other_tensors: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    """Beginnings of the names of tensors outside of the text model, without a leading `model.`."""
    text: Values = field(default_factory=dict)
    """Fields of the text model's `Family` that are others here."""
    in_memory: str = TEXT_IN_MEMORY
    can_be_flat: bool = False
    """Whether files without `text_config` have its attributes beside `vision_config`."""


ROPE = frozenset(
    {"rope_parameters", "rope_theta", "rope_scaling", "original_max_position_embeddings"}
)
"""Attributes of rotary embeddings; with rope_local_base_freq, layers with a window have their own
base."""
WINDOW = {"sliding_window"}
"""Attribute that gives all layers a window; layer_types restricts it to some layers."""
SWITCHED_WINDOW = WINDOW | {"use_sliding_window", "max_window_layers"}
DENSE_LAYERS = {"mlp_only_layers", "decoder_sparse_step"}
"""Attributes that name dense layers; the others have experts."""
LINEAR_LAYERS = {"layer_types", "full_attention_interval"}
"""Attributes that name layers with full attention; the others have linear attention."""
NO_ROPE: Values = {"rope_theta": None, "rope_scaling": {"kind": "none"}}
"""Fields of layers that rotate nothing."""
# A `window_period` that no model reaches: every layer has a window
NEVER = 1 << 20
EXPERT_RANGE = {"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"}
"""Attributes that name the layers with experts."""
NO_ROPE_LAYERS = {"no_rope_layers", "no_rope_layer_interval"}
"""Attributes that name layers without a rotation."""
SCALE_BY_LAYER = "scale_attn_by_inverse_layer_idx"
"""Attribute that, if true, divides the attention scores of layer i (from 1) by i."""
COMMON = ROPE | {"head_dim"}
ONE_VALUE: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "per_layer_config": None,
    "quantization_config": None,
}
"""Attributes with one supported value, in the families that neither read nor ignore them."""


def names_of(attributes: Iterable[Attribute]) -> set[str]:
    """Returns the names and aliases of attributes."""
    names = ((attribute.name, attribute.alias or attribute.name) for attribute in attributes)
    return set(chain.from_iterable(names))


def tensors(names: Mapping[str, str], **options: Any) -> Tensors:
    """Returns a tensor for each parameter's path and its name in a file."""
    return tuple(Tensor(path, name, **options) for path, name in names.items())


def block_tensors(
    names: Mapping[str, str], prefix: str = "model.layers.{layer}.", **options: Any
) -> Tensors:
    """Like `tensors`, for the parameters of blocks.

    `names` omits `blocks.` at the beginning of each path, and `prefix` at the beginning of each
    name.
    """
    full_names = {f"blocks.{path}": prefix + name for path, name in names.items()}
    return tensors(full_names, **options)


def replace_all(tensors: Collection[Tensor], **changes: Any) -> Tensors:
    """Returns the tensors, with the same changes made to each."""
    return tuple(replace(tensor, **changes) for tensor in tensors)


def with_names(tensors: Iterable[Tensor], before: str, after: str) -> Tensors:
    """Returns the tensors, with `after` in place of `before` in their names."""
    return tuple(replace(tensor, name=tensor.name.replace(before, after)) for tensor in tensors)


def with_biases(*tensors: Tensor) -> Tensors:
    """Returns the tensors of norms' scales and of kernels, and their biases."""
    biases = (
        replace(
            tensor,
            path=re.sub(r"kernel|scale", "bias", tensor.path).replace("biass", "biases"),
            name=tensor.name.removesuffix("weight") + "bias",
            transposed=False,
        )
        for tensor in tensors
    )
    return (*tensors, *biases)


EMBEDDINGS = tensors(
    {
        "embedding.embedding": "model.embed_tokens.weight",
        "head.kernel": "lm_head.weight",
        "head.bias": "lm_head.bias",
    }
)
OUTER = EMBEDDINGS + with_biases(Tensor("norm.scale", "model.norm.weight"))
"""Tensors outside of the blocks."""
NORMS = with_biases(
    *block_tensors(
        {
            "attention_norm.scale": "input_layernorm.weight",
            "mlp_norm.scale": "post_attention_layernorm.weight",
        }
    )
)
QKV = block_tensors(
    {
        "attention.qkv.kernels.0": "self_attn.q_proj.weight",
        "attention.qkv.kernels.1": "self_attn.k_proj.weight",
        "attention.qkv.kernels.2": "self_attn.v_proj.weight",
    },
    transposed=True,
)
OUT = block_tensors({"attention.out.kernel": "self_attn.o_proj.weight"}, transposed=True)
GATE_UP = block_tensors(
    {
        "mlp.gate_up.kernels.0": "mlp.gate_proj.weight",
        "mlp.gate_up.kernels.1": "mlp.up_proj.weight",
    },
    transposed=True,
)
UP = block_tensors({"mlp.up.kernels.0": "mlp.up_proj.weight"}, transposed=True)
"""The first projection of a plain MLP."""
DOWN = block_tensors({"mlp.down.kernel": "mlp.down_proj.weight"}, transposed=True)
ATTENTION = with_biases(*QKV, *OUT)
QK_NORMS = block_tensors(
    {
        "attention.qk_norms.0.scale": "self_attn.q_norm.weight",
        "attention.qk_norms.1.scale": "self_attn.k_norm.weight",
    }
)
MLP = with_biases(*UP, *GATE_UP, *DOWN)
BRANCHES = ATTENTION + QK_NORMS + MLP
BODY = OUTER + NORMS + BRANCHES
"""The usual names of all tensors but experts. Most models lack some biases, or norms of queries
and keys, or have only one of both kinds of MLP."""
ROUTER = Tensor("blocks.mlp.router", "model.layers.{layer}.mlp.gate.weight", transposed=True)
STACKED_EXPERTS = block_tensors(
    {
        "mlp.gate": "mlp.experts.gate_up_proj",
        "mlp.up": "mlp.experts.gate_up_proj",
        "mlp.down": "mlp.experts.down_proj",
    },
    transposed=True,
    layout="stacked",
)
"""As in transformers 5."""


def separate_experts(module: str, **names: str) -> Tensors:
    """Returns the tensors of a layer's module, one for each expert.

    `names` are the names of gate, up and down in a file.
    """
    full_names = {
        f"mlp.{path}": f"{module}.experts.{{expert}}.{name}.weight" for path, name in names.items()
    }
    return block_tensors(full_names, transposed=True, layout="separate")


EXPERTS = (
    ROUTER,
    *separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *STACKED_EXPERTS,
)


ATTENTION_BIAS = Attribute(
    "attention_bias", "attention_bias", bool, False, also=("attention_out_bias",)
)
"""One switch for the biases of q, k, v and o."""
MLP_BIAS = Attribute("mlp_bias", "mlp_bias", bool, False)
SELECTION_BIAS = Tensor(
    "blocks.mlp.selection_bias",
    "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    float32=True,
)
SHARED_EXPERTS = block_tensors(
    {
        "mlp.shared.gate_up.kernels.0": "mlp.shared_experts.gate_proj.weight",
        "mlp.shared.gate_up.kernels.1": "mlp.shared_experts.up_proj.weight",
        "mlp.shared.down.kernel": "mlp.shared_experts.down_proj.weight",
    },
    transposed=True,
)
ACTIVATIONS: Mapping[str, str] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in transformers; an export writes the first name."""


MAMBA: Mapping[LayerType, Values] = {"linear_attention": {"delta_kind": "mamba2"}}
"""`Family.always_by_type` of a family with Mamba-2."""
MAMBA_SIZES = (
    Attribute("mamba_n_heads", "delta_value_heads", int, 128),
    Attribute("mamba_d_head", "delta_value_dim", int),
    Attribute("mamba_n_groups", "delta_key_heads", int, 1),
    Attribute("mamba_d_state", "delta_key_dim", int, 256),
    Attribute("mamba_d_conv", "delta_conv", int, 4),
    Attribute("mamba_conv_bias", "mamba_conv_bias", bool, True),
    Attribute("mamba_proj_bias", "mamba_bias", bool, False),
)
"""Sizes of Mamba-2, by the names that families with attention give them."""
NO_STEP_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""A time_step_limit of none, as files of the Hub and as transformers 5 write it."""


def mamba_tensors(prefix: str, module: str = "attention") -> Tensors:
    """Returns the tensors of Mamba-2, whose names begin with `prefix`, of a branch."""
    # The gate, the values (x), the keys (B), the queries (C) and the time step
    inputs = {f"{module}.in_proj.kernels.{i}": "in_proj.weight" for i in (3, 2, 1, 0, 4)}
    taps = {f"{module}.{name}_conv": "conv1d.weight" for name in "vkq"}
    biases = {f"{module}.{name}_conv_bias": "conv1d.bias" for name in "vkq"}
    numbers = {
        f"{module}.decay_log": "A_log",
        f"{module}.dt_bias": "dt_bias",
        f"{module}.skip_scale": "D",
    }
    out = {f"{module}.out.kernel": "out_proj.weight"}
    return (
        *with_biases(*block_tensors(inputs | out, prefix, transposed=True)),
        *block_tensors(taps, prefix, transposed=True, unit_dim=True),
        *block_tensors(biases, prefix),
        *block_tensors(numbers, prefix, float32=None),
        *block_tensors({f"{module}.norm_scale": "norm.weight"}, prefix),
    )


def only(name: str, *values: object, default: object = None) -> Attribute:
    """Returns an attribute whose other values would change the model.

    A missing one has its `default`.
    """
    return Attribute(name, None, dict.fromkeys(values), default)


def without(attributes: Collection[Attribute], *names: str) -> Attributes:
    """Returns the attributes that have none of these names."""
    return tuple(attribute for attribute in attributes if attribute.name not in names)


def with_defaults(attributes: Collection[Attribute], **defaults: object) -> Attributes:
    """Returns attributes with other defaults."""
    return tuple(
        replace(attribute, default=defaults.get(attribute.name, attribute.default))
        for attribute in attributes
    )


NORMALIZED = Attribute("norm_topk_prob", "normalize_experts", bool, False)
"""Whether the weights of a token's experts add up to 1."""


def numbers_of_experts(
    name: str, count: int | None, per_token: int | None, alias: str | None = None
) -> Attributes:
    """Returns the attributes with the numbers of all experts (`name`) and of a token's experts.

    Missing ones have their defaults.
    """
    return (
        Attribute(name, "num_experts", int, count, alias=alias),
        Attribute("num_experts_per_tok", "experts_per_token", int, per_token),
    )


def grouped_experts(
    count: int | None = None,
    per_token: int | None = None,
    *,
    normalize: bool,
    name: str = "n_routed_experts",
    alias: str = "num_local_experts",
) -> Attributes:
    """Returns DeepSeek-V3's router attributes."""
    return (
        *numbers_of_experts(name, count, per_token, alias),
        replace(NORMALIZED, default=normalize),
        Attribute("routed_scaling_factor", "experts_scale", float, 1.0),
        Attribute("n_group", "expert_groups", int, 1),
        Attribute("topk_group", "groups_per_token", int, 1),
    )


DENSE_WIDTH = (Attribute("intermediate_size", "d_ff", int),)
"""Width of the MLPs in layers without experts."""


def first_dense(
    width: int | None,
    shared: int | None = None,
    name: str = "n_shared_experts",
    alias: str | None = None,
) -> AttributesByType:
    """Returns DeepSeek's widths of experts, shared experts and dense layers.

    Missing ones have their defaults.
    """
    return {
        "experts": (
            Attribute("moe_intermediate_size", "d_ff", int, width),
            Attribute(
                name,
                "shared_experts",
                int,
                shared,
                alias=alias,
                unit=("d_ff", 1),
                can_be_zero=True,
            ),
        ),
        "dense": DENSE_WIDTH,
    }


def partial_rope(default: float = 1.0) -> Attributes:
    """Returns the attribute with the rotated part of each head."""
    return (Attribute("partial_rotary_factor", "rotary_fraction", float, default),)


def sizes(
    eps: float = 1e-6,
    *,
    kv_heads: int | None = None,
    eps_name: str = "rms_norm_eps",
    tied: bool = False,
) -> Attributes:
    """Returns attributes that most families share.

    Without `kv_heads`, num_key_value_heads is equal to num_attention_heads by default.
    """
    return (
        Attribute("vocab_size", "vocab_size", int),
        Attribute("hidden_size", "d_model", int),
        Attribute("intermediate_size", "d_ff", int),
        Attribute("num_hidden_layers", "num_layers", int),
        Attribute("num_attention_heads", "num_heads", int),
        Attribute("num_key_value_heads", "num_kv_heads", int, kv_heads, default_from="num_heads"),
        Attribute(eps_name, "norm_eps", float, eps),
        Attribute("tie_word_embeddings", "tie_embeddings", bool, tied),
    )


@dataclass(frozen=True)
class Family:
    """The models of one transformers `model_type`."""

    model_type: str
    architecture: str
    """Class name in transformers."""
    attributes: Attributes
    """If several entries have one name, an export writes the first."""
    tensors: Tensors = BODY
    """All tensors that a model may have, or more; a tensor is required if the model has its
    parameter."""
    layer_attributes: Set[str] = COMMON
    """Further attributes, read by `hf/config_blocks.py`. If one is missing here, the family lacks
    its feature."""
    rope_attributes: Attributes = ()
    """Attributes in `rope_parameters` (or `rope_scaling`) or beside it. Of two attributes with one
    field, the first in the file counts, and an export writes the first here."""
    by_type: AttributesByType = field(default_factory=dict)
    """Attributes of the layers of one type."""
    always_by_type: Mapping[LayerType, Values] = field(default_factory=dict)
    """Fields of `BlockConfig` with a fixed value in the layers of one type."""
    prefix: str = "model."
    """Prefix of all tensor names except the head's; a file may lack it."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensor names that are others in transformers' memory, which names adapters; each is
    replaced in turn."""
    wrapper: Wrapper | None = None
    """The multimodal model that holds this text model, if any."""
    rotated: Literal["halves", "pairs", "negative"] = "halves"
    """Order of the rotated query or key dims in the file: the two dims of a pair are half of them
    apart, as in jaxtp, or next to each other, if rope_interleave does not switch it off; negative
    angles rotate halves that jaxtp has in the other order."""
    rope_in_head: bool = False
    """Whether latent attention has a partial_rotary_factor in rope_parameters: the rotated part of
    a head."""
    scaled_scores: bool = False
    """Whether mscale_all_dim of yarn also scales the attention scores."""
    remote_code: tuple[str, ...] = ()
    """Classes in auto_map that transformers has too."""
    other_tensors: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not read, but copied by an export, such as
    prediction heads."""
    later_layers: bool = False
    """Whether layers from num_hidden_layers on are prediction heads, among `other_tensors`."""
    ignored_tensors: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    """Tensors in files that an import skips."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Scalar tensors of each layer with one supported value. A file may lack them; an export writes
    them."""
    default_window: int | None = 4096
    """Default of sliding_window."""
    window_period: int = 2
    """Without layer_types, every n-th layer has no window; sliding_window_pattern overrides n. If
    0, layer_types is required."""
    default_full_layers: int = 28
    """Default of max_window_layers."""
    global_layer: int | None = None
    """The first (0) or last (-1) layer, if these layers are counted from there; None: from the
    end of the first period."""
    last_is_global: bool = False
    """Whether the last layer never has a window."""
    window_can_be_null: bool = False
    """Whether a sliding_window of null means no windows, and layers are global only without it."""
    pattern_is_default: bool = False
    """Whether layer_types replaces another sliding_window_pattern."""
    layer_types: Mapping[str, str] = field(default_factory=dict)
    """Names in layer_types that an export writes for the usual ones."""
    default_dense_layers: int = 0
    """Default of first_k_dense_replace and moe_layer_start_index."""
    only_layer_types: bool = False
    """Whether transformers reads dense layers from mlp_layer_types alone."""
    rope_theta: float = 10_000.0
    """Default of rope_theta; with rope_local_base_freq, it is 10,000 in layers with a window."""
    rope_theta_name: str = "rope_theta"
    """Name of rope_theta beside `rope_scaling`."""
    rope_by_type: bool = False
    """Whether rope_parameters holds one rotary embedding for each attention type; a `rope_scaling`
    is for layers with full attention."""
    default_rope: Values = field(default_factory=dict)
    """The rope_parameters of a file without any."""
    rope_ignored: Set[str] = frozenset()
    """Parameters of the rotary embedding without effect on text."""
    rope_kinds: Set[str] = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
    """Supported kinds of rotary embedding."""
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of these kinds, in older files."""
    original_length: int | None = None
    """Default of a top-level original_max_position_embeddings; None: the value in rope_scaling or
    rope_parameters, else max_position_embeddings."""
    default_head_dim: int | None = None
    """Default of head_dim; None: hidden_size / num_attention_heads."""
    always: Values = field(default_factory=dict)
    """Fields of `ModelConfig` with a fixed value."""
    required: Mapping[str, object] = field(default_factory=dict)
    """Further attributes with one supported value; others would change the model."""
    written: Mapping[str, object] = field(default_factory=dict)
    """Attributes that an export adds, without effect on the model."""
    ignored_attributes: Set[str] = frozenset()
    """Ignored in addition to `IGNORED_ATTRIBUTES`."""
    quantization: Set[str] = frozenset({"fp8"})
    """Supported values of quant_method in quantization_config."""

    def changing_fields(self) -> Iterable[str]:
        """Returns the fields that depend on a layer's types, always in the same order."""
        attributes = chain.from_iterable(self.by_type.values())
        fields = chain.from_iterable(attribute.fields for attribute in attributes)
        return dict.fromkeys(chain(fields, *self.always_by_type.values()))

    def known_attributes(self) -> Set[str]:
        """Returns the attributes that an import reads."""
        attributes = chain(self.attributes, self.rope_attributes, *self.by_type.values())
        return names_of(attributes) | self.layer_attributes | {"model_type", self.rope_theta_name}

    def fixed_attributes(self) -> dict[str, object]:
        """Returns the attributes with one supported value, and this value."""
        names = self.known_attributes() | self.ignored_attributes
        common = {name: value for name, value in ONE_VALUE.items() if name not in names}
        return common | dict(self.required)


# Generation settings, which older versions of transformers stored in config.json
_GENERATION_ATTRIBUTES = """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values suppress_tokens begin_suppress_tokens exponential_decay_length_penalty
"""
_MODEL_ATTRIBUTES = """
    architectures model_type transformers_version torch_dtype dtype name_or_path
    max_position_embeddings model_max_length max_sequence_length max_seq_length max_seq_len
    initializer_range use_cache pretraining_tp is_llama_config is_decoder tokenizer_class
    output_attentions output_hidden_states return_dict return_dict_in_generate output_scores
    num_nextn_predict_layers num_mtp_layers
    base_model_tp_plan base_model_pp_plan base_model_fsdp_plan tie_last_hidden_states id2label
    label2id num_labels problem_type finetuning_task task_specific_params prefix torchscript
    tf_legacy_loss use_bfloat16 tie_encoder_decoder chunk_size_feed_forward
    cross_attention_hidden_size gradient_checkpointing transformers.js_config
    cache_implementation output_router_logits router_aux_loss_coef
"""
# Their dropout is not applied.
_DROPOUTS = """
    hidden_dropout hidden_dropout_prob attention_probs_dropout_prob residual_dropout resid_dropout
    resid_pdrop embedding_dropout embed_dropout embd_pdrop classifier_dropout summary_first_dropout
    summary_last_dropout
"""
IGNORED_ATTRIBUTES = frozenset((_MODEL_ATTRIBUTES + _GENERATION_ATTRIBUTES + _DROPOUTS).split())
"""Ignored by all families. max_position_embeddings is the trained length; a `ModelConfig` has no
such limit."""
_BOOKKEEPING = re.compile(
    r"_.*"  # internal to transformers: _name_or_path, _attn_implementation, _flash_attn_2_enabled
    r"|\w+_token_ids?"
    r"|attn_implementation|use_(flash_att\w*|sdpa|xformers|memor+y_efficient_attention|fused_\w+|liger_kernel)"
    r"|unsloth_\w+"
)
"""Further ignored names: token ids, and choices between kernels with equal results."""


def is_ignorable(name: str, value: object, family: Family) -> bool:
    """Returns whether an attribute has no effect on model output."""
    # Classes in Python files of the folder; an AutoModel... class may compute anything.
    if name == "auto_map":
        if not isinstance(value, dict):
            return value is None
        return all(
            model in family.remote_code or not key.startswith("AutoModel")
            for key, model in value.items()
        )
    return (
        name in IGNORED_ATTRIBUTES | family.ignored_attributes
        or _BOOKKEEPING.fullmatch(name) is not None
    )
