"""Reads and writes config.json attributes of layers: rotary embeddings, windows and experts.

transformers 5 writes rotary embeddings in `rope_parameters`, older versions in `rope_theta` and
`rope_scaling`. A family's `layer_attributes` name the attributes that give each layer its types;
`by_type` has what depends on a type.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from dataclasses import fields as fields_of
from itertools import chain, filterfalse, islice, repeat
from typing import Any, NamedTuple

from jaxtp.config.reading import truncate
from jaxtp.data.tokenizer_files import MAX_POSITIONS
from jaxtp.hf.families.family import (
    NO_ROPE,
    SCALE_BY_LAYER,
    Attribute,
    Family,
    LayerType,
    names_of,
)
from jaxtp.hf.model_folder import (
    READ,
    Attributes,
    HFError,
    MutableAttributes,
    choice,
    plain_number,
    positive,
    quote,
    switch,
    whole,
)
from jaxtp.layers.rope import UNSCALED, RopeScaling
from jaxtp.models.block import BlockConfig
from jaxtp.models.block_rules import rope_problems
from jaxtp.models.config import ModelConfig, repeated_patterns

_ORIGINAL = "original_max_position_embeddings"
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"
_INTERVAL = "full_attention_interval"
_DEFAULT_INTERVAL = 4
_BLOCK_TYPES = "layers_block_type"
_PATTERN = "hybrid_override_pattern"
_PARTS = {_LINEAR: "mixer", _FULL: "mixer", "mlp": "mlp", "moe": "mlp"}
"""Types of layers that have one branch, and the part of a block that they are."""
_NESTED = "linear_attn_config"
_NESTED_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""An attribute that has others, and their names in it and in transformers."""
_INNER = "mamba_d_ssm"
_DEFAULT_INNER = 1024
_MULTIPLIERS: Mapping[str, Mapping[str, int | None]] = {
    "attention_scales": {
        "attention_in_multiplier": None,
        "key_multiplier": None,
        "attention_out_multiplier": None,
    },
    "mlp_scales": {"mlp_multipliers": 2},
    "mamba_scales": {"ssm_in_multiplier": None, "ssm_multipliers": 5, "ssm_out_multiplier": None},
}
"""Fields with several factors, and the attributes that hold them, each with the length of its list,
or None for a number."""
_FULL_LAYERS = "full_attn_idxs"
_EXPANDS = {"expand", "mamba_expand"}
"""Names of the width of Mamba-2's heads in units of the model's, which follows from other sizes."""
_INDICES = "attn_layer_indices"
"""Names of lists of the layers with full attention. If it is null, all layers have it by the first,
and none by the second."""
_ADJUSTS = "block_auto_adjust_ff_dim"
_OTHER_NAMES = {
    "num_dense_layers": "first_k_dense_replace",
    "global_attn_every_n_layers": "sliding_window_pattern",
}
"""Attributes of some families, and what most families call them."""
_TYPES = "attention_types"
_KINDS = {"global": _FULL, "local": _SLIDING}
"""An attribute that lists groups of layers, and its names of attention types."""
_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate", _ORIGINAL),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL),
    "proportional": ("factor",),
    "dynamic": ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
"""Parameters of each kind of rotary embedding."""
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_LISTS = ("short_factor", "long_factor")
_ALL_DIM = "mscale_all_dim"
_ATTENTION_SCALES = ("mscale", _ALL_DIM)
"""Parameters of YaRN that an export writes only if they scale the scores; others follow
attention_factor."""
_PARTIAL = "partial_rotary_factor"
_COMMON_PARAMETERS = {"rope_theta", "rope_type", "type", _PARTIAL, MAX_POSITIONS}
# Default of rope_local_base_freq
_LOCAL_THETA = 10_000.0
_NO_ROPE_PERIOD = "no_rope_layer_interval"
# Default of transformers
_DEFAULT_NO_ROPE_PERIOD = 4
_OVERRIDES = "per_layer_config"
_OVERRIDDEN = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
"""The attribute with other values for single layers, and what it can have: names and fields."""
_DEFAULTS = {field.name: field.default for field in fields_of(BlockConfig)}
_MAX_LAYERS = 1024

Settings = Mapping[str, Any]
"""Plain values of fields of `ModelConfig` or `BlockConfig`."""
MutableSettings = dict[str, Any]


class LayerKind(NamedTuple):
    """The properties that distinguish the layers of a model."""

    has_window: bool
    rotates: bool
    is_linear: bool
    has_experts: bool
    parts: str = "both"

    def types(self, *, any_window: bool) -> Iterator[LayerType]:
        """Yields the layer's types, in a model with a window in any layer or in none."""
        if self.has_window:
            yield "sliding_attention"
        elif self.is_linear:
            yield "linear_attention"
        else:
            yield "full_attention"
            if any_window:
                yield "global"
        yield "rope" if self.rotates else "no_rope"
        yield "experts" if self.has_experts else "dense"


def read_layers(attributes: Attributes, family: Family, fields: Settings) -> Settings:
    """Returns `ModelConfig` fields for all layers; if they differ, a `pattern` or `first_blocks`.

    `fields` come from other attributes. Raises for invalid or contradicting values.
    """
    names = family.layer_attributes
    count = fields["num_layers"]
    if count > _MAX_LAYERS:
        raise HFError(f"num_hidden_layers = {count}: at most {_MAX_LAYERS:,} are supported")
    ropes: Sequence[Settings] = ({}, {})
    if "rope_theta" in names:
        ropes = [_read_rope(attributes, family, fields, windowed=flag) for flag in (False, True)]
    attributes = _expanded(_usual_names(attributes, family), family)
    num_experts = fields.get("num_experts") or 0
    kinds = _read_kinds(attributes, family, count, num_experts)
    has_window = any(kind.has_window for kind in kinds)
    window = attributes.get("sliding_window", family.default_window)
    any_window = has_window or (family.window_can_be_null and window is not None)
    window = whole("sliding_window", window) if has_window else None
    # All layers set the same fields, so that each that differs from the model's is a change.
    common = {name: fields.get(name, _DEFAULTS.get(name)) for name in family.changing_fields()}
    common["num_experts"] = num_experts
    if _INNER in names:
        common |= _read_multipliers(attributes)
    if _BLOCK_TYPES in names:
        common["parts"] = "both"
    if _ADJUSTS in names:
        common["d_ff"] = _adjusted_width(attributes, fields["d_ff"])
    has_linear = any(kind.is_linear for kind in kinds)
    if not has_linear and _INNER not in names:
        common |= {name: _DEFAULTS[name] for name in fields if name.startswith("delta_")}

    def settings(kind: LayerKind) -> Settings:
        layer = {**common, "sliding_window": window if kind.has_window else None}
        layer |= ropes[kind.has_window]
        if not kind.rotates:
            layer |= NO_ROPE
        if not kind.has_experts:
            layer["num_experts"] = 0
        if "parts" in layer:
            layer["parts"] = kind.parts
        for layer_type in kind.types(any_window=any_window):
            layer |= _read_type(layer_type, attributes, family, {**fields, **layer})
        if layer.get("shared_experts") == 0 and "shared_experts_gate" in layer:
            layer["shared_experts_gate"] = False
        return layer

    overrides = _read_overrides(attributes, family, fields)
    usual = [settings(kind) for kind in kinds]
    layers = [{**layer, **overrides.get(i, {})} for i, layer in enumerate(usual)]
    model = usual[0] if _BLOCK_TYPES in names else settings(_model_kind(kinds))
    if model in usual:
        model = layers[usual.index(model)]
    if has_linear and "delta_key_heads" in fields:
        _check_multiple(
            model["delta_value_heads"], whole("linear_num_key_heads", fields["delta_key_heads"])
        )
    if SCALE_BY_LAYER in names and switch(SCALE_BY_LAYER, attributes.get(SCALE_BY_LAYER, False)):
        scale = fields["query_scale"] or fields["head_dim"] ** -0.5
        layers = [{**layer, "query_scale": scale / i} for i, layer in enumerate(layers, start=1)]
    return _compress_layers(model, layers)


def _read_kinds(
    attributes: Attributes, family: Family, count: int, num_experts: int
) -> list[LayerKind]:
    windows = _read_windows(attributes, family, count)
    rotated = _read_rotated(attributes, family, windows)
    linear = _read_linear(attributes, family, count)
    sparse = _read_sparse(attributes, family, count)
    parts = ["both"] * count
    if _BLOCK_TYPES in family.layer_attributes:
        types: Any = attributes["layer_types"]
        linear = [name == _LINEAR for name in types]
        sparse = [name == "moe" for name in types]
        parts = [_PARTS[name] for name in types]
    _check_lengths(attributes, family.layer_attributes, count)
    if sparse is None or not num_experts:
        sparse = [num_experts > 0] * count
    return list(map(LayerKind, windows, rotated, linear, sparse, parts))


def _model_kind(kinds: Sequence[LayerKind]) -> LayerKind:
    """Returns a kind with all that any layer has, and a window if all have one."""
    windows, rotates, linear, experts, _ = zip(*kinds, strict=True)
    return LayerKind(all(windows), any(rotates), any(linear), any(experts))


def with_layer_types(attributes: Attributes, family: Family) -> Attributes:
    """Returns attributes with `layer_types`, if the family describes layers in another way.

    Blocks of one branch also get their number.
    """
    if _NESTED in family.layer_attributes:
        return _unnested(attributes)
    if _INNER in family.layer_attributes:
        return _with_width_of_heads(attributes)
    if _BLOCK_TYPES not in family.layer_attributes:
        return attributes
    types = attributes.get(_BLOCK_TYPES)
    if types is None:
        letters = attributes.get(_PATTERN)
        types = list(letters) if isinstance(letters, str) else None
    names = {**family.layer_types, **{name: name for name in _PARTS}}
    if not isinstance(types, list) or not types or not {*map(str, types)} <= names.keys():
        raise HFError(
            f"{_BLOCK_TYPES} or {_PATTERN} = {quote(types)}: should name the type of each layer: "
            f"{', '.join(names)}"
        )
    types = [names[name] for name in types]
    num_layers = attributes.get("num_hidden_layers")
    if num_layers not in (None, len(types)):
        raise HFError(
            f"num_hidden_layers = {quote(num_layers)}: should be {len(types)}, as many as the "
            f"types of layers in {_BLOCK_TYPES} or {_PATTERN}"
        )
    return {**attributes, "layer_types": types, "num_hidden_layers": len(types)}


def _with_width_of_heads(attributes: Attributes) -> Attributes:
    """Returns attributes with Falcon-H1's `mamba_d_head`, which may be auto."""
    width = attributes.get(_INNER, _DEFAULT_INNER)
    if width is None:
        expand = whole("mamba_expand", attributes.get("mamba_expand", 2))
        width = expand * whole("hidden_size", attributes.get("hidden_size"))
    heads = whole("mamba_n_heads", attributes.get("mamba_n_heads", 128))
    head_width: Any = attributes.get("mamba_d_head", "auto")
    if head_width == "auto":
        head_width = whole(_INNER, width) // heads
    if whole("mamba_d_head", head_width) * heads != width:
        raise HFError(
            f"{_INNER} = {quote(width)}: should be mamba_n_heads = {heads} times mamba_d_head = "
            f"{head_width}, {heads * head_width}"
        )
    return {**attributes, "mamba_d_head": head_width}


def _read_multipliers(attributes: Attributes) -> Settings:
    fields: MutableSettings = {}
    for field, names in _MULTIPLIERS.items():
        factors: list[float] = []
        for name, count in names.items():
            value: Any = attributes.get(name)
            if value is None:
                value = [1.0] * (count or 1)
            elif count is None:
                value = [value]
            if not isinstance(value, list) or len(value) != (count or 1):
                raise HFError(f"{name} = {quote(value)}: should be a list of {count} numbers")
            factors += [positive(name, factor) for factor in value]
        fields[field] = tuple(factors)
    return fields


def _write_multipliers(block: BlockConfig) -> MutableAttributes:
    written: MutableAttributes = {}
    for field, names in _MULTIPLIERS.items():
        factors = iter(getattr(block, field))
        for name, count in names.items():
            written[name] = next(factors) if count is None else list(islice(factors, count))
    return written


def _unnested(attributes: Attributes) -> Attributes:
    """Returns attributes with those in Kimi's `linear_attn_config`, where layers count from 1."""
    nested: Any = attributes.get(_NESTED)
    if nested is None:
        return attributes
    count = attributes.get("num_hidden_layers")
    try:
        full = nested["full_attn_layers"]
        linear = nested["kda_layers"]
        types = dict.fromkeys(full, _FULL) | dict.fromkeys(linear, _LINEAR)
        listed = [types[i] for i in range(1, len(full) + len(linear) + 1)]
        flat = {name: nested[key] for key, name in _NESTED_NAMES.items()}
    except (KeyError, TypeError):
        listed = []
    if not listed or len(listed) != count:
        raise HFError(
            f"{_NESTED} = {quote(nested)}: should have {', '.join(_NESTED_NAMES)}, and each of the "
            f"layers from 1 to num_hidden_layers = {quote(count)} in kda_layers or in "
            "full_attn_layers"
        )
    return {"layer_types": listed, **attributes, **flat}


def _read_type(
    layer_type: LayerType, attributes: Attributes, family: Family, fields: Settings
) -> Settings:
    """Returns the fields of the layers of one type."""
    settings: MutableSettings = {}
    for attribute in family.by_type.get(layer_type, ()):
        # An override of single layers replaces the defaults of a type.
        if _OVERRIDES not in attributes or name_in_file(attribute, attributes) in attributes:
            value = read_attribute(attribute, attributes, {**fields, **settings})
            settings |= dict.fromkeys(attribute.fields, value)
    return {**settings, **family.always_by_type.get(layer_type, {})}


def write_layers(config: ModelConfig, family: Family) -> MutableAttributes:
    """Returns the family's `layer_attributes`, and its attributes `by_type`."""
    names = family.layer_attributes
    layers = list(config.layers())
    written: MutableAttributes = {}
    if "head_dim" in names:
        written["head_dim"] = config.head_dim
    if names & {"sliding_window", _TYPES}:
        written |= _write_windows(layers, family)
    if "rope_theta" in names:
        written |= _write_ropes(layers, family)
    if names & {_INTERVAL, _INDICES} or family.layer_types:
        written |= _write_mixers(layers, family)
    inner = max(layer.delta_value_heads * layer.delta_value_dim for layer in layers)
    if _INNER in names:
        written |= {_INNER: inner, **_write_multipliers(layers[0])}
    if inner:
        written |= dict.fromkeys(names & _EXPANDS, plain_number(inner / config.d_model))
    by_layer = _write_rotated(layers) | _write_sparse([bool(layer.num_experts) for layer in layers])
    written |= {name: value for name, value in by_layer.items() if name in names}
    for other, name in _OTHER_NAMES.items():
        if other in names and name in written:
            written[other] = written[name]
    any_window = any(layer.sliding_window for layer in layers)
    # In reverse, so that the first layer of a type decides.
    for layer in reversed(layers):
        kind = LayerKind(
            has_window=layer.sliding_window is not None,
            rotates=layer.rope_theta is not None,
            is_linear=bool(layer.delta_value_heads or layer.short_conv),
            has_experts=bool(layer.num_experts),
        )
        for layer_type in kind.types(any_window=any_window):
            written |= write_fields(family.by_type.get(layer_type, ()), vars(layer))
    if SCALE_BY_LAYER in names:
        scales = [layer.query_scale or 0.0 for layer in layers[:2]]
        written[SCALE_BY_LAYER] = scales[0] > 0 and scales[1:] == [scales[0] / 2]
    return written


def name_in_file(attribute: Attribute, attributes: Attributes) -> str:
    """Returns the attribute's name or its alias; raises if both are present and differ."""
    name = attribute.name
    alias = attribute.alias
    if alias is None or alias not in attributes:
        return name
    if name in attributes and attributes[name] != attributes[alias]:
        raise HFError(
            f"{alias} = {quote(attributes[alias])} and {name} = {quote(attributes[name])} are two "
            "names of one attribute, and must be equal"
        )
    return alias


def read_attribute(attribute: Attribute, attributes: Attributes, fields: Settings) -> Any:
    """Returns the value of the attribute's fields; `fields` come from earlier attributes."""
    name = name_in_file(attribute, attributes)
    value = attributes.get(name, attribute.default)
    if (
        attribute.only_if is not None
        and attributes.get(attribute.only_if[0]) != attribute.only_if[1]
    ):
        value = None
    if value is None and attribute.default_from is not None:
        value = fields[attribute.default_from] * attribute.times
    if isinstance(attribute.kind, Mapping):
        return attribute.in_unit(choice(name, value, attribute.kind), fields)
    if value is None and attribute.can_be_null:
        return attribute.off
    if attribute.can_be_zero and type(value) in (int, float) and not value:
        return value
    number = READ[attribute.kind](name, value)
    if attribute.plus is not None:
        number += fields[attribute.plus]
    if attribute.power != 1:
        number = _power(name, number, attribute.power)
    return number if attribute.unit is None else number * attribute.scale(fields)


def _power(name: str, base: float, exponent: float) -> float:
    try:
        return positive(name, base**exponent)
    except OverflowError:
        raise HFError(f"{name} = {base}: to the power of {exponent:g} it is too large") from None


def write_fields(attributes: Sequence[Attribute], fields: Settings) -> MutableAttributes:
    """Returns the values of the attributes that have these fields, by name.

    Of attributes with the same name, the first decides.
    """
    written: MutableAttributes = {}
    for attribute in reversed(attributes):
        value = None if attribute.field is None else fields[attribute.field]
        if isinstance(attribute.kind, Mapping):
            names = (
                name
                for name, result in attribute.kind.items()
                if attribute.in_unit(result, fields) == value
            )
            written[attribute.name] = next(names, attribute.default)
        elif value and (attribute.power != 1 or attribute.unit is not None):
            number = round((value / attribute.scale(fields)) ** (1 / attribute.power), 6)
            written[attribute.name] = plain_number(number)
        elif attribute.plus is not None:
            written[attribute.name] = value - fields[attribute.plus]
        elif value is not None or attribute.can_be_null:
            written[attribute.name] = None if value == attribute.off else value
    return written


def _read_overrides(
    attributes: Attributes, family: Family, fields: Settings
) -> dict[int, Settings]:
    listed = attributes.get(_OVERRIDES)
    if _OVERRIDES not in family.layer_attributes or listed is None:
        return {}
    layers = set(map(str, range(fields["num_layers"])))
    if not isinstance(listed, dict) or not all(
        layer in layers and isinstance(changes, dict) and changes.keys() <= _OVERRIDDEN.keys()
        for layer, changes in listed.items()
    ):
        raise HFError(
            f"{_OVERRIDES} = {quote(listed)}: should map numbers of layers to "
            f"{' and '.join(_OVERRIDDEN)}"
        )
    overrides: dict[int, Settings] = {}
    for layer, changes in listed.items():
        overrides[int(layer)] = {_OVERRIDDEN[name]: whole(name, changes[name]) for name in changes}
    return overrides


def _changes(base: Settings, layer: Settings) -> Settings:
    # Without heads, other settings of states have no effect.
    has_states = layer.get("delta_value_heads", 0) > 0
    return {
        name: value
        for name, value in layer.items()
        if (name not in base or base[name] != value)
        and (has_states or name == "delta_value_heads" or not name.startswith("delta_"))
    }


def _compress_layers(base: Settings, layers: Sequence[Settings]) -> Settings:
    """Returns `base` with the `pattern` or `first_blocks` that compiles the fewest blocks."""
    changes = [_changes(base, layer) for layer in layers]
    if not any(changes):
        return {**base}
    period = next(p for p in range(1, len(changes) + 1) if changes[p:] == changes[:-p])
    listed = repeated_patterns(changes)
    remainder = repeated_patterns(changes[: len(changes) % period])
    if period + _num_items(remainder) <= _num_items(listed):
        return {**base, "pattern": changes[:period]}
    pattern, repeats = listed[-1]
    num_first = len(changes) - repeats * len(pattern)
    return {**base, "first_blocks": changes[:num_first], "pattern": pattern}


def _num_items(patterns: Sequence[tuple[Sequence[Settings], int]]) -> int:
    return sum(len(pattern) for pattern, _ in patterns)


def _are_of_type(
    name: str,
    types: object,
    layer_type: str,
    other_types: Sequence[str],
    count: int,
    in_file: Mapping[str, str] | None = None,
) -> list[bool]:
    """Returns which layers have `layer_type`; raises if any has another than `other_types`.

    A message has the names `in_file` of types.
    """
    supported_types = (*other_types, layer_type)
    in_file = in_file or {}
    other_length = ""
    if isinstance(types, list):
        if len(types) == count and {*supported_types} >= set(map(str, types)):
            return [kind == layer_type for kind in types]
        types = [in_file.get(str(kind), kind) for kind in types]
        other_length = f", not of {len(types)}" if len(types) != count else ""
    names = " or ".join(in_file.get(kind, kind) for kind in supported_types)
    raise HFError(
        f"{name} = {quote(types)}: should be {names} for each of {count} layers{other_length}"
    )


def _all_but_every(period: int, count: int, start: int = -1) -> list[bool]:
    """Returns false for every `period`-th layer, counted from layer `start`, and true for others.

    By default the first of these layers is the last of the first period.
    """
    return [(i - start) % period != 0 for i in range(count)]


def _period(flags: list[bool]) -> int | None:
    """Returns the period that `_all_but_every` has for these flags, if any."""
    period = [*flags, False].index(False) + 1
    return period if flags == _all_but_every(period, len(flags)) else None


def _read_windows(attributes: Attributes, family: Family, count: int) -> list[bool]:
    names = family.layer_attributes
    window = attributes.get("sliding_window", family.default_window)
    is_on = "use_sliding_window" not in names or switch(
        "use_sliding_window", attributes.get("use_sliding_window", False)
    )
    can_be_null = family.window_can_be_null or "use_sliding_window" in names
    types = attributes.get("layer_types")
    if not names & {"sliding_window", _TYPES} or not is_on or (can_be_null and window is None):
        decides = "layer_types" in names and (family.window_can_be_null or not family.window_period)
        if decides and isinstance(types, list) and _SLIDING in types:
            raise HFError(
                f"layer_types has {_SLIDING}, and sliding_window or use_sliding_window says that "
                "none has it"
            )
        return [False] * count
    if not names & {"layer_types", _TYPES}:
        first = attributes.get("max_window_layers")
        if "max_window_layers" in names and first:
            raise HFError(
                f"max_window_layers = {quote(first)} and use_sliding_window = True: some versions "
                "of transformers give a window to the layers from this number on, others to all "
                "layers; set max_window_layers to 0 for a window in all layers, or "
                "use_sliding_window to false for none"
            )
        return [window is not None] * count
    if types is None:
        return _windows_by_index(attributes, family, count)
    other_types = (_FULL, _LINEAR) if family.layer_types else (_FULL,)
    windows = _are_of_type("layer_types", types, _SLIDING, other_types, count)
    windows[-1] &= not family.last_is_global
    period = attributes.get("sliding_window_pattern")
    if period is None or family.pattern_is_default:
        return windows
    if windows != _windows_by_index(attributes, family, count):
        raise HFError(
            f"layer_types and sliding_window_pattern = {quote(period)} contradict each other"
        )
    return windows


def _check_lengths(attributes: Attributes, names: Collection[str], count: int) -> None:
    """Raises for a list whose length is not the number of layers, even for one without effect."""
    for name in ("layer_types", "mlp_layer_types"):
        types = attributes.get(name) if name in names else None
        if types is not None and not (isinstance(types, list) and len(types) == count):
            raise HFError(
                f"{name} = {quote(types)}: should be a list with a type for each of {count} layers"
            )


def _usual_names(attributes: Attributes, family: Family) -> Attributes:
    """Renames attributes in `_OTHER_NAMES`, and types of layers, as most families call them."""
    renamed = {_OTHER_NAMES[name]: attributes[name] for name in _OTHER_NAMES.keys() & attributes}
    types = attributes.get("layer_types")
    if isinstance(types, list):
        renamed["layer_types"] = [family.layer_types.get(str(name), name) for name in types]
    return {**attributes, **renamed}


def _expanded(attributes: Attributes, family: Family) -> Attributes:
    """Returns attributes in which `layer_types` and `sliding_window` replace `attention_types`."""
    if _TYPES not in family.layer_attributes:
        return attributes
    groups: Any = attributes.get(_TYPES) or [[["global", "local"], 12]]
    try:
        # Lazily, because a file may ask for any number of layers.
        repeated = (repeat(kinds, min(times, _MAX_LAYERS)) for kinds, times in groups)
        kinds = chain.from_iterable(chain.from_iterable(repeated))
        types = [_KINDS[kind] for kind in islice(kinds, _MAX_LAYERS + 1)]
    except (KeyError, TypeError, ValueError):
        raise HFError(
            f"{_TYPES} = {quote(groups)}: should be lists of local and global, each with a number"
        ) from None
    return {
        **attributes,
        "layer_types": types,
        "sliding_window": attributes.get("window_size", family.default_window),
    }


def _windows_by_index(attributes: Attributes, family: Family, count: int) -> list[bool]:
    if not family.window_period:
        raise HFError("use_sliding_window = True without layer_types: add them, one for each layer")
    if "max_window_layers" in family.layer_attributes:
        first = _layer_number(attributes, "max_window_layers", family.default_full_layers)
        return [i >= first for i in range(count)]
    period = attributes.get("sliding_window_pattern")
    hidden = attributes.get("_sliding_window_pattern")
    if (
        period is None
        and hidden not in (None, family.window_period)
        and "layer_types" not in attributes
    ):
        raise HFError(
            f"_sliding_window_pattern = {quote(hidden)} without layer_types: add them, one for "
            "each layer"
        )
    # L is a layer with a window (local), G one without (global).
    if isinstance(period, str) and period and set(period) <= {"L", "G"}:
        return [period[i % len(period)] == "L" and i < count - 1 for i in range(count)]
    period = whole("sliding_window_pattern", family.window_period if period is None else period)
    start = -1 if family.global_layer is None else family.global_layer % count
    windows = _all_but_every(period, count, start)
    return [*windows[:-1], windows[-1] and not family.last_is_global]


def _write_windows(layers: Sequence[BlockConfig], family: Family) -> MutableAttributes:
    names = family.layer_attributes
    types = [_FULL if layer.sliding_window is None else _SLIDING for layer in layers]
    window = None
    if _SLIDING in types:
        window = layers[types.index(_SLIDING)].sliding_window
    if _TYPES in names:
        kinds = ["local" if kind == _SLIDING else "global" for kind in types]
        return {_TYPES: [[kinds, 1]], "window_size": window or family.default_window}
    can_be_null = (
        family.window_can_be_null or "layer_types" not in names or "use_sliding_window" in names
    )
    written: MutableAttributes = {"sliding_window": window}
    if window is None and not can_be_null:
        written["sliding_window"] = family.default_window
    if "use_sliding_window" in names:
        written["use_sliding_window"] = window is not None
    if "max_window_layers" in names:
        written["max_window_layers"] = 0 if window is None else types.index(_SLIDING)
    period = _period([kind == _SLIDING for kind in types])
    if "sliding_window_pattern" in names and period is not None:
        written["sliding_window_pattern"] = period
    by_index = "max_window_layers" in names and family.window_period > 0
    if "layer_types" in names and not (by_index and len(set(types)) == 1):
        written["layer_types"] = types
    return written


def _read_rotated(attributes: Attributes, family: Family, windows: Sequence[bool]) -> list[bool]:
    names = family.layer_attributes
    count = len(windows)
    if "position_embedding_type" in names:
        kind = attributes.get("position_embedding_type")
        kinds = {"rope": True, "nope": False, None: False}
        return [choice("position_embedding_type", kind, kinds)] * count
    if not names & {"no_rope_layers", "layer_rope_theta"}:
        return [True] * count
    name = "no_rope_layers" if "no_rope_layers" in names else "layer_rope_theta"
    listed = attributes.get(name)
    if listed is None:
        if name == "layer_rope_theta":
            return _windows_by_index({}, family, count)
        period = whole(_NO_ROPE_PERIOD, attributes.get(_NO_ROPE_PERIOD, _DEFAULT_NO_ROPE_PERIOD))
        return _all_but_every(period, count)
    theta = 1
    if name == "layer_rope_theta":
        theta = _read_rope(attributes, family, {}, windowed=False)["rope_theta"]
    if (
        not isinstance(listed, list)
        or len(listed) < count
        or not {int, float}.issuperset(map(type, listed))
        or not {0, theta}.issuperset(listed)
    ):
        raise HFError(
            f"{name} = {quote(listed)}: should have {theta:g} for each of {count} layers, or 0 for "
            "one without a rotation"
        )
    return list(map(bool, listed[:count]))


def _write_rotated(layers: Sequence[BlockConfig]) -> MutableAttributes:
    thetas = [layer.rope_theta or 0 for layer in layers]
    return {
        "no_rope_layers": [int(theta > 0) for theta in thetas],
        "layer_rope_theta": thetas,
        "position_embedding_type": "rope" if any(thetas) else "nope",
    }


def _read_linear(attributes: Attributes, family: Family, count: int) -> list[bool]:
    """Returns whether each layer has another mixer than attention."""
    names = family.layer_attributes
    if _INDICES in names:
        full = _layer_numbers(_INDICES, attributes.get(_INDICES))
        return [i not in full for i in range(count)]
    if _BLOCK_TYPES in names or not (family.layer_types or _INTERVAL in names):
        return [False] * count
    types = attributes.get("layer_types")
    if types is None and _INTERVAL in names:
        period = whole(_INTERVAL, attributes.get(_INTERVAL, _DEFAULT_INTERVAL))
        return _all_but_every(period, count)
    if types is None and _FULL_LAYERS in names:
        indices = attributes.get(_FULL_LAYERS)
        full = list(range(count)) if indices is None else _layer_numbers(_FULL_LAYERS, indices)
        return [i not in full for i in range(count)]
    other_types = (_FULL, _SLIDING) if "sliding_window" in names else (_FULL,)
    in_file = {usual: name for name, usual in family.layer_types.items()}
    return _are_of_type("layer_types", types, _LINEAR, other_types, count, in_file)


def _adjusted_width(attributes: Attributes, width: int) -> int:
    """Returns the width of LFM2's MLPs."""
    if not switch(_ADJUSTS, attributes.get(_ADJUSTS, True)):
        return width
    width = int(2 * width / 3)
    name = "block_ffn_dim_multiplier"
    times = attributes.get(name, 1.0)
    if times is None:
        return width
    step = whole("block_multiple_of", attributes.get("block_multiple_of", 256))
    # A file's number may make a width that is not finite.
    product = positive(f"{name} times the width", positive(name, times) * width)
    return math.ceil(int(product) / step) * step


def _check_multiple(values: int, keys: int) -> None:
    if values % keys:
        nearest = max(1, round(values / keys)) * keys
        raise HFError(
            f"linear_num_value_heads = {values} is not a multiple of linear_num_key_heads = "
            f"{keys}; the nearest is {nearest}"
        )


def _write_mixers(layers: Sequence[BlockConfig], family: Family) -> MutableAttributes:
    linear = [bool(layer.delta_value_heads or layer.short_conv) for layer in layers]
    types = [_LINEAR if is_linear else _FULL for is_linear in linear]
    if "sliding_window" in family.layer_attributes:
        for i, layer in enumerate(layers):
            if layer.sliding_window is not None:
                types[i] = _SLIDING
    if _INDICES in family.layer_attributes:
        return {_INDICES: [i for i in range(len(types)) if not linear[i]]}
    if _BLOCK_TYPES in family.layer_attributes:
        for i, layer in enumerate(layers):
            if layer.parts == "mlp":
                types[i] = "moe" if layer.num_experts else "mlp"
        letters = {usual: name for name, usual in family.layer_types.items() if len(name) == 1}
        pattern = "".join(map(letters.__getitem__, types))
        return {_BLOCK_TYPES: types, _PATTERN: pattern}
    names = {usual: name for name, usual in family.layer_types.items()}
    written: MutableAttributes = {"layer_types": [names.get(name, name) for name in types]}
    if family.layer_types:
        return written
    # Some programs read only the interval.
    period = _period(linear)
    if period is not None:
        written[_INTERVAL] = period
    return written


def _read_sparse(attributes: Attributes, family: Family, count: int) -> list[bool] | None:
    """Returns whether each layer has experts; None if the family does not distinguish layers."""
    names = family.layer_attributes
    first = family.default_dense_layers
    types = attributes.get("mlp_layer_types")
    if "mlp_layer_types" in names and types is not None:
        return _are_of_type("mlp_layer_types", types, "sparse", ("dense",), count)
    if "enable_moe_block" in names:
        return [switch("enable_moe_block", attributes.get("enable_moe_block", False))] * count
    if "first_k_dense_replace" in names:
        first = _layer_number(attributes, "first_k_dense_replace", first)
        if family.only_layer_types and first != family.default_dense_layers:
            raise HFError(
                f"first_k_dense_replace = {first}, which transformers does not read here; add "
                "mlp_layer_types"
            )
        return [i >= first for i in range(count)]
    if "moe_layer_start_index" in names:
        first = _layer_number(attributes, "moe_layer_start_index", first)
        last = count - 1
        if attributes.get("moe_layer_end_index") != -1:
            last = _layer_number(attributes, "moe_layer_end_index", last)
        step = whole("moe_layer_interval", attributes.get("moe_layer_interval", 1))
        return [first <= i <= last and (i + 1) % step == 0 for i in range(count)]
    if "decoder_sparse_step" not in names:
        return None
    step = whole("decoder_sparse_step", attributes.get("decoder_sparse_step", 1))
    dense = _layer_numbers("mlp_only_layers", attributes.get("mlp_only_layers"))
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def _layer_numbers(name: str, value: object) -> list[int]:
    if value is None:
        return []
    if isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value):
        return value
    raise HFError(f"{name} = {quote(value)}: should be a list of layer numbers, from 0")


def _layer_number(attributes: Attributes, name: str, default: int) -> int:
    value = attributes.get(name, default)
    if type(value) is not int or value < 0:
        raise HFError(f"{name} = {quote(value)}: should be a layer number, from 0")
    return value


def _write_sparse(has_experts: Sequence[bool]) -> MutableAttributes:
    count = len(has_experts)
    sparse = [i for i in range(count) if has_experts[i]]
    first = min(sparse, default=count)
    last = max(sparse, default=count)
    step = math.gcd(*(i + 1 for i in sparse)) or 1
    dense = [i for i in range(step - 1, count, step) if not has_experts[i]]
    return {
        "mlp_layer_types": ["sparse" if experts else "dense" for experts in has_experts],
        "enable_moe_block": bool(sparse),
        "first_k_dense_replace": first,
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": step,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
    }


def _read_rope(
    attributes: Attributes, family: Family, fields: Settings, *, windowed: bool
) -> Settings:
    """Returns `rope_theta`, `rope_scaling` and the family's `rope_attributes` of blocks.

    The blocks have a window if `windowed`, else none.
    """
    attributes, default_theta = _rope_of_type(attributes, family, windowed=windowed)
    parameters = _rope_parameters(attributes)
    kind = _rope_kind(parameters, family)
    head_dim = fields.get("head_dim", 2)
    width = fields.get("rope_head_dim") or head_dim
    _check_rope_parameters(kind, parameters, family, width / head_dim)
    theta = _read_theta(parameters, attributes, family, default_theta)
    read = _read_rope_attributes(family, parameters, attributes, fields)
    if "proportional" in family.rope_kinds and kind != "proportional":
        # In transformers, the other kinds ignore the fraction.
        read["rotary_fraction"] = 1.0
    fraction = read.get("rotary_fraction", 1.0)
    if fraction > 1:
        raise HFError(f"the rotated part of a head is {fraction}; it should be at most 1")
    if kind == "dynamic":
        alpha = parameters.get("alpha")
        if not alpha:
            raise HFError(
                "rope_type = 'dynamic' without alpha is not supported: it depends on the length of "
                "a text above max_position_embeddings; for shorter ones, remove it from config.json"
            )
        kind = "default"
        theta *= _power("alpha", positive("alpha", alpha), width / max(width - 2, 1))
    scaling = _read_scaling(kind, parameters, {_ORIGINAL: family.original_length, **attributes})
    if fields and width % 2 == 0:
        for problem in rope_problems(width, theta, scaling, fraction):
            raise HFError(f"the rotary embedding {kind!r} is invalid: {problem}")
    all_dim = parameters.get(_ALL_DIM) if family.scaled_scores and fields else None
    if all_dim and scaling.kind == "yarn" and scaling.factor > 1:
        scale = _mscale(_ALL_DIM, all_dim, scaling.factor) ** 2
        read["query_scale"] = head_dim**-0.5 * scale
    changes = {"kind": scaling.kind, **_changes(asdict(UNSCALED), asdict(scaling))}
    return {"rope_theta": theta, "rope_scaling": changes, **read}


def _rope_kind(parameters: Attributes, family: Family) -> str:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if isinstance(kind, str):
        kind = family.rope_aliases.get(kind, kind)
        if kind in family.rope_kinds:
            return kind
    supported = ", ".join(filter(family.rope_kinds.__contains__, _SCALINGS))
    raise HFError(
        f"rope_type = {quote(kind)} is not supported; a {family.model_type} can have {supported}"
    )


def _check_rope_parameters(
    kind: str, parameters: Attributes, family: Family, rotated_part: float
) -> None:
    """Refuses parameters that may change the model.

    `rotated_part` is the part of a head that latent attention rotates.
    """
    names = names_of(family.rope_attributes)
    allowed = {*_SCALINGS[kind], *_COMMON_PARAMETERS, *names, *family.rope_ignored}
    if kind == "yarn":
        allowed |= set(_ATTENTION_SCALES)
    for name in parameters:
        if name not in allowed:
            raise HFError(
                f"{truncate(name)} of the rotary embedding {kind!r} is unknown; it may change "
                "the model"
            )
    part = rotated_part if family.rope_in_head else 1.0
    if _PARTIAL not in names and parameters.get(_PARTIAL, part) != part:
        raise HFError(f"{_PARTIAL} = {quote(parameters[_PARTIAL])}: only {part} is supported")


def _read_theta(
    parameters: Attributes, attributes: Attributes, family: Family, default: float
) -> float:
    values = (
        parameters.get("rope_theta"),
        attributes.get("rope_theta"),
        attributes.get(family.rope_theta_name),
    )
    thetas = sorted({positive("rope_theta", value) for value in values if value is not None})
    if len(thetas) > 1:
        raise HFError(f"rope_theta has two values: {' and '.join(map(str, thetas))}")
    return thetas[0] if thetas else default


def _rope_of_type(
    attributes: Attributes, family: Family, *, windowed: bool
) -> tuple[Attributes, float]:
    """Returns the attributes of one attention type, and the default of its `rope_theta`."""
    default_theta = family.rope_theta
    theta_name = family.rope_theta_name
    has_parameters = attributes.get("rope_parameters") or attributes.get("rope_scaling")
    if not has_parameters and not attributes.get(theta_name):
        attributes = {**attributes, "rope_parameters": family.default_rope}
    elif not has_parameters and family.default_rope:
        raise HFError(
            f"{theta_name} without rope_parameters or rope_scaling: versions of transformers "
            "differ; add one"
        )
    if not family.rope_by_type:
        return attributes, default_theta
    has_local = "rope_local_base_freq" in family.layer_attributes
    nested = attributes.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not set(nested) <= {_FULL, _SLIDING}:
        raise HFError(f"rope_parameters = {quote(nested)}: should hold {_FULL} and {_SLIDING}")
    if not (has_local or nested) and attributes.get(theta_name) not in (None, default_theta):
        raise HFError(
            f"{theta_name} = {quote(attributes[theta_name])} without rope_parameters: versions of "
            "transformers differ in layers with a window; give the base of both types in "
            "rope_parameters"
        )
    attributes = {**attributes, _ORIGINAL: None}
    attributes["rope_parameters"] = nested.get(_SLIDING if windowed else _FULL)
    if windowed:
        attributes["rope_scaling"] = None
        if has_local:
            default_theta = _LOCAL_THETA
            attributes["rope_theta"] = attributes.get("rope_local_base_freq")
    return attributes, default_theta


def _read_rope_attributes(
    family: Family, parameters: Attributes, attributes: Attributes, fields: Settings
) -> MutableSettings:
    read: MutableSettings = {}
    for source in (parameters, attributes):
        for attribute in family.rope_attributes:
            if attribute.field not in read and name_in_file(attribute, source) in source:
                read |= dict.fromkeys(attribute.fields, read_attribute(attribute, source, fields))
    for attribute in family.rope_attributes:
        if attribute.field not in read:
            read |= dict.fromkeys(attribute.fields, read_attribute(attribute, {}, fields))
    return read


def _rope_parameters(attributes: Attributes) -> Attributes:
    present: list[Attributes] = []
    for name in ("rope_parameters", "rope_scaling"):
        value = attributes.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise HFError(f"{name} = {quote(value)} should be an object")
        if value:
            present.append(value)
    if not present:
        return {}
    # The base may be in only one of them.
    if {**present[0], "rope_theta": None} != {**present[-1], "rope_theta": None}:
        raise HFError(
            "rope_parameters and rope_scaling contradict each other; remove the wrong one"
        )
    return present[0]


def _read_scaling(kind: str, parameters: Attributes, attributes: Attributes) -> RopeScaling:
    names = _SCALINGS[kind]
    max_positions = attributes.get(MAX_POSITIONS)
    settings: MutableSettings = {"kind": "none" if kind == "default" else kind}
    defaults = {"beta_fast": UNSCALED.beta_fast, "beta_slow": UNSCALED.beta_slow}
    if kind == "proportional":
        defaults["factor"] = 1.0
    if _ORIGINAL in names:
        length = attributes.get(_ORIGINAL)
        if length is None:
            length = parameters.get(_ORIGINAL)
        if length is None:
            length = max_positions
        if length is None:
            raise HFError(f"{_ORIGINAL} of the rotary embedding is missing")
        settings["original_length"] = whole(_ORIGINAL, length)
        if "attention_factor" in names and max_positions is not None:
            defaults["factor"] = whole(MAX_POSITIONS, max_positions) / settings["original_length"]
    for name in names:
        if name in _NUMBERS:
            value = parameters.get(name)
            value = defaults.get(name) if value is None else value
            settings[name] = positive(f"{name} of the rotary embedding", value)
        elif name in _LISTS:
            settings[name] = _factors(name, parameters)
    if "truncate" in names:
        value = parameters.get("truncate", True)
        settings["truncate"] = switch("truncate of the rotary embedding", value)
    if "attention_factor" in names:
        settings["attention_factor"] = _attention_factor(parameters, settings["factor"])
    return RopeScaling(**settings)


def _factors(name: str, parameters: Attributes) -> tuple[float, ...]:
    values = parameters.get(name)
    if not isinstance(values, list):
        raise HFError(
            f"{name} of the rotary embedding = {quote(values)}: should be a list of numbers"
        )
    return tuple(
        positive(f"{name}[{i}] of the rotary embedding", factor) for i, factor in enumerate(values)
    )


def _attention_factor(parameters: Attributes, factor: float) -> float | None:
    if parameters.get("attention_factor") is not None:
        return positive("attention_factor", parameters["attention_factor"])
    scale = parameters.get("mscale")
    all_dim = parameters.get(_ALL_DIM)
    if not (scale and all_dim):
        return None
    ratio = _mscale("mscale", scale, factor) / _mscale("mscale", all_dim, factor)
    return positive("the attention factor from mscale and mscale_all_dim", ratio)


def _mscale(name: str, scale: object, factor: float) -> float:
    return 0.1 * positive(name, scale) * math.log(factor) + 1 if factor > 1 else 1.0


def _write_ropes(layers: Sequence[BlockConfig], family: Family) -> MutableAttributes:
    """Returns rotary embeddings in the older format, which every version of transformers reads.

    If only the newer format can express the scaling, it is returned in that format.
    """
    rotating = [layer for layer in layers if layer.rope_theta is not None] or layers
    full = next((layer for layer in rotating if layer.sliding_window is None), rotating[0])
    sliding = next((layer for layer in rotating if layer.sliding_window is not None), rotating[0])
    theta = full.rope_theta or family.rope_theta
    local_theta = sliding.rope_theta or family.rope_theta
    scaling = full.rope_scaling
    parameters = _scaling_parameters(full, family)
    written: MutableAttributes = {family.rope_theta_name: theta, "rope_scaling": parameters or None}
    if not family.rope_by_type or full == sliding:
        written |= write_fields(list(filter(_is_outside, family.rope_attributes)), vars(full))
    max_positions = {}
    if _ORIGINAL in parameters:
        # transformers requires both attributes.
        max_positions = {MAX_POSITIONS: math.ceil(scaling.original_length * scaling.factor)}
    if scaling.kind == "longrope":
        # Before transformers 5, the factor was max / original positions.
        written[_ORIGINAL] = scaling.original_length
    if family.rope_in_head and parameters:
        # transformers does not complete the older format.
        part = {"rope_theta": theta, _PARTIAL: full.rope_head_dim / full.head_dim}
        return max_positions | {"rope_parameters": parameters | part}
    if family.default_rope and not (parameters or family.rope_by_type):
        return written | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    written |= max_positions
    if not family.rope_by_type:
        return written
    has_local = "rope_local_base_freq" in family.layer_attributes
    is_default = full == sliding and not (parameters or family.default_rope)
    if is_default and (has_local or theta == family.rope_theta):
        return written
    if not _scaling_parameters(sliding, family):
        if has_local:
            return written | {"rope_local_base_freq": local_theta}
        if theta == local_theta == family.rope_theta and not family.rope_attributes:
            return written
    nested = {
        _FULL: _nested_parameters(full, family),
        _SLIDING: _nested_parameters(sliding, family),
    }
    return {"rope_parameters": nested, **max_positions}


def _nested_parameters(layer: BlockConfig, family: Family) -> MutableAttributes:
    return {
        "rope_type": "default",
        **_scaling_parameters(layer, family),
        "rope_theta": layer.rope_theta or family.rope_theta,
        **write_fields(family.rope_attributes, vars(layer)),
    }


def _is_outside(attribute: Attribute) -> bool:
    """Returns whether every version reads an attribute outside of `rope_scaling`."""
    return attribute.field == "rotary_fraction"


def _scaling_parameters(layer: BlockConfig, family: Family) -> MutableAttributes:
    scaling = layer.rope_scaling
    if scaling.kind == "none":
        return {}
    values = {**vars(scaling), _ORIGINAL: scaling.original_length}
    written: MutableAttributes = {}
    for name in _SCALINGS[scaling.kind]:
        if values[name] is not None:
            written[name] = list(values[name]) if name in _LISTS else values[name]
    if family.scaled_scores and scaling.kind == "yarn" and layer.query_scale and scaling.factor > 1:
        # The inverse of reading. Some programs read these two, others attention_factor.
        unit = 0.1 * math.log(scaling.factor)
        scale = math.sqrt(layer.query_scale * layer.head_dim**0.5)
        factor = unit + 1 if scaling.attention_factor is None else scaling.attention_factor
        written |= {
            "mscale": round((factor * scale - 1) / unit, 6),
            _ALL_DIM: round((scale - 1) / unit, 6),
        }
    inside = list(filterfalse(_is_outside, family.rope_attributes))
    return {"rope_type": scaling.kind, **written, **write_fields(inside, vars(layer))}
