"""Reads and writes config.json attributes that may differ between layers.

They are rotary embeddings, windows, and experts.

transformers 5 writes rotary embeddings in `rope_parameters`, older versions in `rope_theta` and
`rope_scaling`. A family's `layer_attributes` name the attributes that give each layer its types;
`by_type` has what depends on a type.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from dataclasses import fields as fields_of
from itertools import chain, groupby, islice
from typing import Any

from jaxtp.config.reading import truncate
from jaxtp.hf.families.family import NO_ROPE, SCALE_BY_LAYER, Attribute, Family, LayerType
from jaxtp.hf.model_folder import READ, Attributes, HFError, choice, positive, quote, switch, whole
from jaxtp.layers.rope import UNSCALED, RopeScaling, rope_problems
from jaxtp.models.config import BlockConfig, ModelConfig

_ORIGINAL = "original_max_position_embeddings"
_MAX_POSITIONS = "max_position_embeddings"
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"
_INTERVAL = "full_attention_interval"
_DEFAULT_INTERVAL = 4
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
_COMMON_PARAMETERS = {"rope_theta", "rope_type", "type", _PARTIAL, _MAX_POSITIONS}
_LOCAL_THETA = 10_000.0  # Default of rope_local_base_freq
_NO_ROPE_PERIOD = "no_rope_layer_interval"
_OVERRIDES = "per_layer_config"
_DEFAULT_NO_ROPE_PERIOD = 4  # Default of transformers
_DEFAULTS = {field.name: field.default for field in fields_of(BlockConfig)}
_MAX_LAYERS = 1024

Settings = Mapping[str, Any]  # Plain values of fields of `ModelConfig` or `BlockConfig`


def read_layers(attributes: Attributes, family: Family, fields: Settings) -> Settings:
    """Returns `ModelConfig` fields for all layers.

    They have a `pattern` or `first_blocks` if layers differ.

    `fields` come from other attributes. Raises for invalid or contradicting values.
    """
    names = family.layer_attributes
    if (count := fields["num_layers"]) > _MAX_LAYERS:
        raise HFError(f"num_hidden_layers = {count}: at most {_MAX_LAYERS:,} are supported")
    ropes: Sequence[Settings] = ({}, {})
    if "rope_theta" in names:
        ropes = [
            _read_rope(attributes, family, fields, windowed=windowed) for windowed in (False, True)
        ]
    attributes = _expanded(attributes, family)
    kinds = _read_windows(attributes, family, count)
    window = (
        whole("sliding_window", attributes.get("sliding_window", family.default_window))
        if any(kinds)
        else None
    )
    not_null = (
        family.window_can_be_null
        and attributes.get("sliding_window", family.default_window) is not None
    )
    rotated = _read_rotated(attributes, family, kinds)
    linear = _read_linear(attributes, family, count)
    sparse = _read_sparse(attributes, family, count)
    _check_lengths(attributes, names, count)
    if sparse is not None and not fields["num_experts"]:
        sparse = [False] * count
    has_experts = [bool(fields.get("num_experts"))] * count if sparse is None else sparse
    # All layers set the same fields, so that each that differs from the model's is a change.
    common = {name: fields.get(name, _DEFAULTS.get(name)) for name in family.changing_fields()}
    common |= {} if sparse is None else {"num_experts": fields["num_experts"]}
    common |= (
        {}
        if any(linear)
        else {name: _DEFAULTS[name] for name in fields if name.startswith("delta_")}
    )

    def settings(windowed: bool, rotates: bool, is_linear: bool, experts: bool) -> Settings:
        layer = {**common, "sliding_window": window if windowed else None, **ropes[windowed]}
        layer |= {} if rotates else {**NO_ROPE}
        layer |= {} if experts or sparse is None else {"num_experts": 0}
        for kind in _types(
            windowed, rotates, is_linear, experts, any_window=any(kinds) or not_null
        ):
            for each in family.by_type.get(kind, ()):
                # An override of single layers replaces the defaults of a type.
                if name_in_file(each, attributes) in attributes or _OVERRIDES not in attributes:
                    layer |= dict.fromkeys(
                        each.fields, read_attribute(each, attributes, {**fields, **layer})
                    )
            layer |= {**family.always_by_type.get(kind, {})}
        if layer.get("shared_experts") == 0 and "shared_experts_gate" in layer:
            layer["shared_experts_gate"] = False
        return layer

    overrides = _read_overrides(attributes, family, fields)
    usual = [settings(*each) for each in zip(kinds, rotated, linear, has_experts, strict=True)]
    layers = [{**layer, **overrides.get(i, {})} for i, layer in enumerate(usual)]
    model = settings(all(kinds), any(rotated), any(linear), any(has_experts))
    model = next(
        (layer for layer, before in zip(layers, usual, strict=True) if before == model), model
    )
    if values := model.get("delta_value_heads"):
        _check_multiple(values, whole("linear_num_key_heads", fields["delta_key_heads"]))
    if SCALE_BY_LAYER in names and switch(SCALE_BY_LAYER, attributes.get(SCALE_BY_LAYER, False)):
        scale = fields["query_scale"] or fields["head_dim"] ** -0.5
        layers = [{**layer, "query_scale": scale / i} for i, layer in enumerate(layers, start=1)]
    return _compress_layers(model, layers)


def _types(
    windowed: bool, rotates: bool, linear: bool, experts: bool, *, any_window: bool
) -> tuple[LayerType, ...]:
    attention: tuple[LayerType, ...] = (
        ("full_attention", "global") if any_window else ("full_attention",)
    )
    attention = ("linear_attention",) if linear else attention
    return (
        *(("sliding_attention",) if windowed else attention),
        "rope" if rotates else "no_rope",
        "experts" if experts else "dense",
    )


def write_layers(config: ModelConfig, family: Family) -> dict[str, object]:
    """Returns the family's `layer_attributes`, and its attributes `by_type`."""
    names = family.layer_attributes
    layers = list(config.layers())
    written = {
        **({"head_dim": config.head_dim} if "head_dim" in names else {}),
        **(_write_windows(layers, family) if names & {"sliding_window", _TYPES} else {}),
        **(_write_ropes(layers, family) if "rope_theta" in names else {}),
        **(
            {"layer_types": [family.only_layer_type] * len(layers)}
            if family.only_layer_type
            else {}
        ),
        **_write_rotated(layers, family),
        **(_write_linear(layers) if _INTERVAL in names else {}),
        **_write_sparse([bool(layer.num_experts) for layer in layers], family),
    }
    any_window = any(layer.sliding_window for layer in layers)
    for layer in reversed(layers):  # so the first layer of a type wins
        windowed = layer.sliding_window is not None
        rotates = layer.rope_theta is not None
        flags = windowed, rotates, bool(layer.delta_value_heads), bool(layer.num_experts)
        for kind in _types(*flags, any_window=any_window):
            written |= dict(write_fields(family.by_type.get(kind, ()), vars(layer)))
    if SCALE_BY_LAYER in names:
        first, *others = (layer.query_scale for layer in layers)
        written[SCALE_BY_LAYER] = bool(others) and first is not None and others[0] == first / 2
    return written


def name_in_file(attribute: Attribute, attributes: Attributes) -> str:
    """Returns the attribute's name or its alias; raises if both are there and differ."""
    name = attribute.name
    alias = attribute.alias
    if alias is None or alias not in attributes:
        return name
    if attributes.get(name, attributes[alias]) != attributes[alias]:
        both = f"{alias} = {quote(attributes[alias])} and {name} = {quote(attributes[name])}"
        raise HFError(f"{both} are two names of one attribute, and must be equal")
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
        return choice(name, value, attribute.kind)
    if value is None and attribute.can_be_null:
        return attribute.off
    if attribute.can_be_zero and type(value) in (int, float) and not value:
        return value
    number = READ[attribute.kind](name, value) + (
        0 if attribute.plus is None else fields[attribute.plus]
    )
    number = number if attribute.power == 1 else _power(name, number, attribute.power)
    return number if attribute.unit is None else number * attribute.scale(fields)


def _power(name: str, base: float, exponent: float) -> float:
    try:
        return positive(name, base**exponent)
    except OverflowError:
        raise HFError(f"{name} = {base}: to the power of {exponent:g} it is too large") from None


def write_fields(attributes: Sequence[Attribute], fields: Settings) -> Iterator[tuple[str, object]]:
    """Yields the names and values of the attributes that have these fields.

    Of equal names, the first is last.
    """
    for attribute in reversed(attributes):
        value = fields[attribute.fields[0]] if attribute.fields else None
        if isinstance(attribute.kind, Mapping):
            names = (theirs for theirs, ours in attribute.kind.items() if ours == value)
            yield attribute.name, next(names, attribute.default)
        elif value and (attribute.power != 1 or attribute.unit is not None):
            number = round((value / attribute.scale(fields)) ** (1 / attribute.power), 6)
            yield attribute.name, int(number) if float(number).is_integer() else number
        elif attribute.plus is not None:
            yield attribute.name, value - fields[attribute.plus]
        elif value is not None or attribute.can_be_null:
            yield attribute.name, None if value == attribute.off else value


def _read_overrides(
    attributes: Attributes, family: Family, fields: Settings
) -> dict[int, Settings]:
    if _OVERRIDES not in family.layer_attributes or (listed := attributes.get(_OVERRIDES)) is None:
        return {}
    count = fields["num_layers"]
    every = (
        *family.attributes,
        *chain(*family.by_type.values()),
        Attribute("head_dim", "head_dim", int),
    )
    known = {each.name: each for each in every if set(each.fields) & {"head_dim", "num_kv_heads"}}
    wrong = HFError(
        f"{_OVERRIDES} = {quote(listed)}: should map numbers of layers to {' and '.join(known)}"
    )
    if not isinstance(listed, dict) or not all(
        isinstance(changes, dict) for changes in listed.values()
    ):
        raise wrong
    overrides: dict[int, Settings] = {}
    for layer, changes in listed.items():
        if layer not in map(str, range(count)) or not changes.keys() <= known.keys():
            raise wrong
        overrides[int(layer)] = {
            field: read_attribute(known[name], changes, fields)
            for name in changes
            for field in known[name].fields
        }
    return overrides


def _compress_layers(base: Settings, layers: Sequence[Settings]) -> Settings:
    """Returns `base` with a `pattern` or `first_blocks` for `layers`.

    It is the one that compiles the fewest blocks.
    """
    changes = [
        {name: value for name, value in layer.items() if name not in base or base[name] != value}
        for layer in layers
    ]
    if not any(changes):
        return {**base}
    period = next(p for p in range(1, len(changes) + 1) if changes[p:] == changes[:-p])
    rest = changes[: len(changes) % period]
    if period + len(list(groupby(rest))) <= len(list(groupby(changes))):
        return {**base, "pattern": changes[:period]}
    last = len(list(next(iter(groupby(reversed(changes))))[1]))
    return {**base, "first_blocks": changes[:-last], "pattern": changes[-1:]}


def _has_layer_type(types: object, name: str, count: int) -> list[bool]:
    """Returns which of `count` layers has the type `name`; every other layer has full attention.

    Raises:
      HFError: `types` is not a list of these two types, one for each layer.
    """
    if (
        not isinstance(types, list)
        or len(types) != count
        or not set(map(str, types)) <= {_FULL, name}
    ):
        raise HFError(
            f"layer_types = {quote(types)}: should be {_FULL} or {name} for each of {count} layers"
        )
    return [kind == name for kind in types]


def _read_windows(attributes: Attributes, family: Family, count: int) -> list[bool]:
    names = family.layer_attributes
    window = attributes.get("sliding_window", family.default_window)
    is_on = "use_sliding_window" not in names or switch(
        "use_sliding_window", attributes.get("use_sliding_window", False)
    )
    can_be_null = family.window_can_be_null or "use_sliding_window" in names
    types = attributes.get("layer_types")
    only = family.only_layer_type
    if only is not None and types not in ([only] * count, [_FULL] * count):
        raise HFError(
            f"layer_types = {quote(types)}: only {only} is supported, for each of {count} layers"
        )
    if not names & {"sliding_window", _TYPES} or not is_on or (can_be_null and window is None):
        decides = "layer_types" in names and (family.window_can_be_null or not family.window_period)
        if decides and isinstance(types, list) and _SLIDING in types:
            raise HFError(
                f"layer_types has {_SLIDING}, and sliding_window or use_sliding_window says that "
                "none has it"
            )
        return [False] * count
    if not names & {"layer_types", _TYPES}:
        if "max_window_layers" in names and (first := attributes.get("max_window_layers")):
            raise HFError(
                f"max_window_layers = {quote(first)} and use_sliding_window = True: some versions "
                "of transformers have a window to the layers from this number on, others to all "
                "layers; set max_window_layers to 0 for a window in all layers, or "
                "use_sliding_window to false for none"
            )
        return [window is not None] * count
    if types is None:
        return _windows_by_index(attributes, family, count)
    kinds = _has_layer_type(types, _SLIDING, count)
    kinds[-1] &= not family.last_is_global
    period = attributes.get("sliding_window_pattern")
    if (
        period is not None
        and not family.pattern_is_default
        and kinds != _windows_by_index(attributes, family, count)
    ):
        raise HFError(
            f"layer_types and sliding_window_pattern = {quote(period)} contradict each other"
        )
    return kinds


def _check_lengths(attributes: Attributes, names: Collection[str], count: int) -> None:
    """Raises for a list of another length than the layers.

    It does so even where another attribute makes the list needless.
    """
    for name in ("layer_types", "mlp_layer_types"):
        types = attributes.get(name) if name in names else None
        if types is None:
            continue
        if not isinstance(types, list):
            raise HFError(
                f"{name} = {quote(types)}: should be a list with a type for each of {count} layers"
            )
        if len(types) != count:
            raise HFError(f"{name} has {len(types)} types, and there are {count} layers")


def _expanded(attributes: Attributes, family: Family) -> Attributes:
    """Returns attributes in which `layer_types` and `sliding_window` replace `attention_types`."""
    if _TYPES not in family.layer_attributes:
        return attributes
    groups: Any = attributes.get(_TYPES) or [[["global", "local"], 12]]
    try:
        every = (
            _KINDS[kind]
            for kinds, times in groups
            for _ in range(min(times, _MAX_LAYERS))
            for kind in kinds
        )
        types = list(islice(every, _MAX_LAYERS + 1))
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
        first = attributes.get("max_window_layers", family.default_full_layers)
        if type(first) is not int or first < 0:
            raise HFError(f"max_window_layers = {quote(first)}: should be a whole number")
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
    if isinstance(period, str) and period and set(period) <= {"L", "G"}:  # local and global
        return [period[i % len(period)] == "L" and i < count - 1 for i in range(count)]
    period = whole("sliding_window_pattern", family.window_period if period is None else period)
    kinds = [
        (count - 1 - i if family.windows_from_last else i + 1) % period != 0 for i in range(count)
    ]
    return [*kinds[:-1], kinds[-1] and not family.last_is_global]


def _write_windows(layers: Sequence[BlockConfig], family: Family) -> dict[str, object]:
    names = family.layer_attributes
    kinds = [layer.sliding_window is not None for layer in layers]
    window = next(
        (layer.sliding_window for layer in layers if layer.sliding_window is not None), None
    )
    if _TYPES in names:
        named = {theirs: kind for kind, theirs in _KINDS.items()}
        types = [named[_SLIDING if windowed else _FULL] for windowed in kinds]
        return {_TYPES: [[types, 1]], "window_size": window or family.default_window}
    can_be_null = (
        family.window_can_be_null or "layer_types" not in names or "use_sliding_window" in names
    )
    written: dict[str, object] = {
        "sliding_window": window or (None if can_be_null else family.default_window)
    }
    if "use_sliding_window" in names:
        written |= {"use_sliding_window": window is not None}
    if "max_window_layers" in names:
        written |= {"max_window_layers": kinds.index(True) if any(kinds) else 0}
    if "sliding_window_pattern" in names:
        period = kinds.index(False) + 1 if not all(kinds) else len(kinds) + 1
        if kinds == [(i + 1) % period != 0 for i in range(len(kinds))]:
            written |= {"sliding_window_pattern": period}
    by_index = "max_window_layers" in names and family.window_period > 0
    if "layer_types" in names and not (by_index and len(set(kinds)) == 1):
        written |= {"layer_types": [_SLIDING if kind else _FULL for kind in kinds]}
    return written


def _read_rotated(attributes: Attributes, family: Family, windows: Sequence[bool]) -> list[bool]:
    names = family.layer_attributes
    count = len(windows)
    if "position_embedding_type" in names:
        kinds = {"rope": True, "nope": False, None: False}
        return [
            choice("position_embedding_type", attributes.get("position_embedding_type"), kinds)
        ] * count
    name = next((name for name in ("no_rope_layers", "layer_rope_theta") if name in names), None)
    if name is None:
        return [True] * count
    if (listed := attributes.get(name)) is None:
        if name == "layer_rope_theta":
            return _windows_by_index({}, family, count)
        period = whole(_NO_ROPE_PERIOD, attributes.get(_NO_ROPE_PERIOD, _DEFAULT_NO_ROPE_PERIOD))
        return [(i + 1) % period != 0 for i in range(count)]
    if (
        not isinstance(listed, list)
        or len(listed) < count
        or not all(type(item) in (int, float) for item in listed)
    ):
        raise HFError(
            f"{name} = {quote(listed)}: should be a number for each of {count} layers, 0 without a "
            "rotation"
        )
    theta = (
        _read_rope(attributes, family, {}, windowed=False)["rope_theta"]
        if name == "layer_rope_theta"
        else 1
    )
    if wrong := [value for value in listed if value not in (0, theta)]:
        raise HFError(f"{name} holds {quote(wrong[0])}: only 0 and {theta:g} are supported")
    return [bool(value) for value in listed[:count]]


def _write_rotated(layers: Sequence[BlockConfig], family: Family) -> dict[str, object]:
    thetas = [layer.rope_theta or 0 for layer in layers]
    written = {
        "no_rope_layers": [int(bool(theta)) for theta in thetas],
        "layer_rope_theta": thetas,
        "position_embedding_type": "rope" if any(thetas) else "nope",
    }
    return {name: value for name, value in written.items() if name in family.layer_attributes}


def _read_linear(attributes: Attributes, family: Family, count: int) -> list[bool]:
    if _INTERVAL not in family.layer_attributes:
        return [False] * count
    if (types := attributes.get("layer_types")) is None:
        period = whole(_INTERVAL, attributes.get(_INTERVAL, _DEFAULT_INTERVAL))
        return [(i + 1) % period != 0 for i in range(count)]
    return _has_layer_type(types, _LINEAR, count)


def _check_multiple(values: int, keys: int) -> None:
    if values % keys:
        nearest = max(1, round(values / keys)) * keys
        raise HFError(
            f"linear_num_value_heads = {values} is not a multiple of linear_num_key_heads = "
            f"{keys}; the nearest is {nearest}"
        )


def _write_linear(layers: Sequence[BlockConfig]) -> dict[str, object]:
    linear = [bool(layer.delta_value_heads) for layer in layers]
    period = linear.index(False) + 1 if not all(linear) else len(linear) + 1
    written: dict[str, object] = {"layer_types": [_LINEAR if each else _FULL for each in linear]}
    # Some programs read this one alone.
    regular = linear == [(i + 1) % period != 0 for i in range(len(linear))]
    return written | ({_INTERVAL: period} if regular else {})


def _read_sparse(attributes: Attributes, family: Family, count: int) -> list[bool] | None:
    """Returns whether each layer has experts; None if the family does not distinguish layers."""
    names = family.layer_attributes
    first = family.default_dense_layers
    if "mlp_layer_types" in names and (types := attributes.get("mlp_layer_types")) is not None:
        if (
            not isinstance(types, list)
            or len(types) != count
            or not set(map(str, types)) <= {"dense", "sparse"}
        ):
            raise HFError(
                f"mlp_layer_types = {quote(types)}: should be dense or sparse for each of "
                f"{count} layers"
            )
        return [kind == "sparse" for kind in types]
    if "enable_moe_block" in names:
        return [switch("enable_moe_block", attributes.get("enable_moe_block", False))] * count
    if "first_k_dense_replace" in names:
        usual = first
        first = _layer_number(
            "first_k_dense_replace", attributes.get("first_k_dense_replace", first)
        )
        if "mlp_layer_types" in names and first != usual:
            raise HFError(
                f"first_k_dense_replace = {first}, which transformers does not read here; add "
                "mlp_layer_types"
            )
        return [i >= first for i in range(count)]
    if "moe_layer_start_index" in names:
        first = _layer_number(
            "moe_layer_start_index", attributes.get("moe_layer_start_index", first)
        )
        last = attributes.get("moe_layer_end_index", -1)
        last = count - 1 if last == -1 else _layer_number("moe_layer_end_index", last)
        step = whole("moe_layer_interval", attributes.get("moe_layer_interval", 1))
        return [first <= i <= last and (i + 1) % step == 0 for i in range(count)]
    if "decoder_sparse_step" not in names:
        return None
    step = whole("decoder_sparse_step", attributes.get("decoder_sparse_step", 1))
    dense = attributes.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise HFError(
            f"mlp_only_layers = {quote(dense)}: should be a list of layer numbers, from 0"
        )
    without = set(dense)
    return [i not in without and (i + 1) % step == 0 for i in range(count)]


def _layer_number(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise HFError(f"{name} = {quote(value)}: should be a layer number, from 0")
    return value


def _write_sparse(has_experts: Sequence[bool], family: Family) -> dict[str, object]:
    sparse = [i for i, experts in enumerate(has_experts) if experts]
    step = math.gcd(*(i + 1 for i in sparse)) or 1
    count = len(has_experts)
    first = sparse[0] if sparse else count
    written = {
        "mlp_layer_types": ["sparse" if experts else "dense" for experts in has_experts],
        "enable_moe_block": bool(sparse),
        "first_k_dense_replace": first,
        "moe_layer_start_index": first,
        "moe_layer_end_index": sparse[-1] if sparse else count,
        "moe_layer_interval": step,
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in range(step - 1, count, step) if not has_experts[i]],
    }
    return {name: value for name, value in written.items() if name in family.layer_attributes}


def _read_rope(
    attributes: Attributes, family: Family, fields: Settings, *, windowed: bool
) -> Settings:
    """Returns `rope_theta`, `rope_scaling` and the family's `rope_attributes` of blocks.

    The blocks have a window if `windowed`, else none.
    """
    attributes, default_theta = _rope_of_type(attributes, family, windowed=windowed)
    theta_name = family.rope_theta_name
    parameters = _rope_parameters(attributes)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(known for known in _SCALINGS if known in family.rope_kinds)
        raise HFError(
            f"rope_type = {quote(kind)} is not supported; a {family.model_type} can have "
            f"{supported}"
        )
    more = {name for each in family.rope_attributes for name in (each.name, each.alias)}
    for key in parameters:
        known = {*_SCALINGS[kind], *_COMMON_PARAMETERS, *more, *family.rope_ignored}
        if key not in known | {*(_ATTENTION_SCALES if kind == "yarn" else ())}:
            raise HFError(
                f"{truncate(key)} of the rotary embedding {kind!r} is unknown; it may change "
                "the model"
            )
    width = fields.get("rope_head_dim") or fields.get("head_dim", 2)
    part = width / fields.get("head_dim", width) if family.rope_in_head else 1.0
    if _PARTIAL not in more and parameters.get(_PARTIAL, part) != part:
        raise HFError(f"{_PARTIAL} = {quote(parameters[_PARTIAL])}: only {part} is supported")
    found = [parameters.get("rope_theta"), attributes.get("rope_theta"), attributes.get(theta_name)]
    thetas = sorted({positive("rope_theta", value) for value in found if value is not None}) or [
        default_theta
    ]
    if len(thetas) > 1:
        raise HFError(f"rope_theta has two values: {' and '.join(map(str, thetas))}")
    others = _read_rope_attributes(family, parameters, attributes, fields)
    if "proportional" in family.rope_kinds and kind != "proportional":
        others |= {"rotary_fraction": 1.0}  # as transformers does
    if (fraction := others.get("rotary_fraction", 1.0)) > 1:
        raise HFError(f"the rotated part of a head is {fraction}; it should be at most 1")
    (theta,) = thetas
    if kind == "dynamic":
        if not (alpha := parameters.get("alpha")):
            raise HFError(
                "rope_type = 'dynamic' without alpha depends on the length of a text, which is not "
                "supported"
            )
        kind = "default"
        theta = theta * _power("alpha", positive("alpha", alpha), width / max(width - 2, 1))
    scaling = _read_scaling(kind, parameters, {_ORIGINAL: family.original_length, **attributes})
    for problem in (
        rope_problems(width, theta, scaling, fraction) if fields and width % 2 == 0 else ()
    ):
        raise HFError(f"the rotary embedding {kind!r} is invalid: {problem}")
    changed = {
        name: v
        for name, v in asdict(scaling).items()
        if name == "kind" or v != getattr(UNSCALED, name)
    }
    all_dim = parameters.get(_ALL_DIM) if family.scaled_scores and fields else None
    if all_dim and scaling.kind == "yarn" and scaling.factor > 1:
        others |= {
            "query_scale": fields["head_dim"] ** -0.5
            * _mscale(_ALL_DIM, all_dim, scaling.factor) ** 2
        }
    return {"rope_theta": theta, "rope_scaling": changed, **others}


def _rope_of_type(
    attributes: Attributes, family: Family, *, windowed: bool
) -> tuple[Attributes, float]:
    # Selects the attributes of one attention type; also returns the default of its base.
    default_theta = family.rope_theta
    theta_name = family.rope_theta_name
    if not any(attributes.get(name) for name in ("rope_parameters", "rope_scaling", theta_name)):
        attributes = {**attributes, "rope_parameters": {**family.default_rope}}
    elif family.default_rope and not any(
        attributes.get(name) for name in ("rope_parameters", "rope_scaling")
    ):
        raise HFError(
            f"{theta_name} without rope_parameters or rope_scaling: versions of transformers "
            "differ; add one"
        )
    if family.rope_by_type:
        nested = attributes.get("rope_parameters") or {}
        if not isinstance(nested, dict) or not set(nested) <= {_FULL, _SLIDING}:
            raise HFError(f"rope_parameters = {quote(nested)}: should hold {_FULL} and {_SLIDING}")
        one_base = "rope_local_base_freq" not in family.layer_attributes and not nested
        if one_base and attributes.get(theta_name) not in (None, default_theta):
            raise HFError(
                f"{theta_name} = {quote(attributes[theta_name])} without rope_parameters: versions "
                "of transformers differ in layers with a window; give the base of both types in "
                "rope_parameters"
            )
        attributes = {
            **attributes,
            "rope_parameters": nested.get(_SLIDING if windowed else _FULL),
            _ORIGINAL: None,
        }
        if windowed:
            attributes |= {"rope_scaling": None}
        if windowed and "rope_local_base_freq" in family.layer_attributes:
            default_theta = _LOCAL_THETA
            attributes |= {"rope_theta": attributes.get("rope_local_base_freq")}
    return attributes, default_theta


def _read_rope_attributes(
    family: Family, parameters: Attributes, attributes: Attributes, fields: Settings
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source in (parameters, attributes, None):
        for each in family.rope_attributes:
            if each.fields[0] not in found and (
                source is None or name_in_file(each, source) in source
            ):
                found |= dict.fromkeys(each.fields, read_attribute(each, source or {}, fields))
    return found


def _rope_parameters(attributes: Attributes) -> Attributes:
    present = []
    for name in ("rope_parameters", "rope_scaling"):
        value = attributes.get(name)
        if value is not None and not isinstance(value, dict):
            raise HFError(f"{name} = {quote(value)} should be an object")
        present += [value] if value else []
    if len(present) == 2 and present[0] | {"rope_theta": None} != present[1] | {"rope_theta": None}:
        raise HFError(
            "rope_parameters and rope_scaling contradict each other; remove the wrong one"
        )
    return present[0] if present else {}


def _read_scaling(kind: str, parameters: Attributes, attributes: Attributes) -> RopeScaling:
    names = _SCALINGS[kind]
    max_positions = attributes.get(_MAX_POSITIONS)
    settings: dict[str, Any] = {"kind": "none" if kind == "default" else kind}
    defaults = {"beta_fast": UNSCALED.beta_fast, "beta_slow": UNSCALED.beta_slow}
    if kind == "proportional":
        defaults["factor"] = 1.0
    if _ORIGINAL in names:
        lengths = (attributes.get(_ORIGINAL), parameters.get(_ORIGINAL), max_positions)
        if (original := next((length for length in lengths if length is not None), None)) is None:
            raise HFError(f"{_ORIGINAL} of the rotary embedding is missing")
        settings["original_length"] = whole(_ORIGINAL, original)
        if "attention_factor" in names and max_positions is not None:
            defaults["factor"] = whole(_MAX_POSITIONS, max_positions) / settings["original_length"]
    for name in (name for name in _NUMBERS if name in names):
        value = parameters.get(name)
        settings[name] = positive(
            f"{name} of the rotary embedding", defaults.get(name) if value is None else value
        )
    settings |= {name: _factors(name, parameters) for name in _LISTS if name in names}
    if "truncate" in names:
        settings["truncate"] = switch(
            "truncate of the rotary embedding", parameters.get("truncate", True)
        )
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
    scales = [parameters.get(name) for name in _ATTENTION_SCALES]
    if not all(scales):
        return None
    plain, all_dim = (_mscale("mscale", scale, factor) for scale in scales)
    return positive("the attention factor from mscale and mscale_all_dim", plain / all_dim)


def _mscale(name: str, scale: object, factor: float) -> float:
    return 0.1 * positive(name, scale) * math.log(factor) + 1 if factor > 1 else 1.0


def _write_ropes(layers: Sequence[BlockConfig], family: Family) -> dict[str, object]:
    """Returns the older format, which every version reads.

    The newer one is returned if only it can express a scaling.
    """
    rotating = [layer for layer in layers if layer.rope_theta is not None] or layers
    full, sliding = (
        next(
            (layer for layer in rotating if (layer.sliding_window is not None) == windowed),
            rotating[0],
        )
        for windowed in (False, True)
    )
    theta, local_theta = (layer.rope_theta or family.rope_theta for layer in (full, sliding))
    scaling = full.rope_scaling
    parameters = _scaling_parameters(full, family)
    written: dict[str, object] = {family.rope_theta_name: theta, "rope_scaling": parameters or None}
    if not family.rope_by_type or full == sliding:
        written |= dict(
            write_fields([each for each in family.rope_attributes if _is_outside(each)], vars(full))
        )
    max_positions = {}
    if _ORIGINAL in parameters:  # transformers also requires this attribute
        max_positions = {_MAX_POSITIONS: math.ceil(scaling.original_length * scaling.factor)}
    if scaling.kind == "longrope":  # before transformers 5, the factor was max / original positions
        written[_ORIGINAL] = scaling.original_length
    if family.rope_in_head and parameters:  # transformers does not complete the older format
        part = {"rope_theta": theta, _PARTIAL: full.rope_head_dim / full.head_dim}
        return max_positions | {"rope_parameters": parameters | part}
    local = _scaling_parameters(sliding, family)
    default = {"rope_type": "default"}
    if family.default_rope and not parameters:
        return written | {"rope_parameters": {**default, "rope_theta": theta}}
    has_local = "rope_local_base_freq" in family.layer_attributes
    if not family.rope_by_type or (
        full == sliding and not parameters and (has_local or theta == family.rope_theta)
    ):
        return written | max_positions
    if not local and has_local:
        return written | max_positions | {"rope_local_base_freq": local_theta}
    if not local and theta == local_theta == family.rope_theta and not family.rope_attributes:
        return written | max_positions
    nested = {
        name: {
            **default,
            **values,
            "rope_theta": base,
            **dict(write_fields(family.rope_attributes, vars(layer))),
        }
        for name, values, base, layer in (
            (_FULL, parameters, theta, full),
            (_SLIDING, local, local_theta, sliding),
        )
    }
    return {"rope_parameters": nested, **max_positions}


def _is_outside(attribute: Attribute) -> bool:
    """Returns whether an attribute is written outside of `rope_scaling`.

    Every version reads it there.
    """
    return attribute.fields[0] == "rotary_fraction"


def _scaling_parameters(layer: BlockConfig, family: Family) -> dict[str, object]:
    scaling = layer.rope_scaling
    if scaling.kind == "none":
        return {}
    fields = {
        name: "original_length" if name == _ORIGINAL else name for name in _SCALINGS[scaling.kind]
    }
    values = {name: getattr(scaling, field) for name, field in fields.items()}
    written = {
        name: list(value) if name in _LISTS else value
        for name, value in values.items()
        if value is not None
    }
    if family.scaled_scores and scaling.kind == "yarn" and layer.query_scale and scaling.factor > 1:
        # The inverse of reading. Some programs read these two, others attention_factor.
        unit = 0.1 * math.log(scaling.factor)
        scale = math.sqrt(layer.query_scale * layer.head_dim**0.5)
        factor = unit + 1 if scaling.attention_factor is None else scaling.attention_factor
        written |= {
            "mscale": round((factor * scale - 1) / unit, 6),
            _ALL_DIM: round((scale - 1) / unit, 6),
        }
    inside = [each for each in family.rope_attributes if not _is_outside(each)]
    return {"rope_type": scaling.kind, **written, **dict(write_fields(inside, vars(layer)))}
