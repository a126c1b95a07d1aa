"""Reads and writes config.json attributes that may differ between layers: rotary embeddings, windows, experts.

transformers 5 writes rotary embeddings in `rope_parameters`, older versions in `rope_theta` and `rope_scaling`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from jaxtp.config.reading import truncate
from jaxtp.hf.families.family import SCALE_BY_LAYER, Family
from jaxtp.hf.model_folder import Attributes, HFError, positive, quote, switch, whole
from jaxtp.layers.rope import UNSCALED, RopeScaling, rope_problems
from jaxtp.models.config import BlockConfig, ModelConfig

_ORIGINAL, _MAX_POSITIONS = "original_max_position_embeddings", "max_position_embeddings"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate", _ORIGINAL),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL),
}
"""Parameters of each kind of rotary embedding."""
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_LISTS = ("short_factor", "long_factor")
_ATTENTION_SCALES = ("mscale", "mscale_all_dim")
"""Parameters of YaRN that an export never writes."""
_COMMON_PARAMETERS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_LOCAL_THETA = 10_000.0
"""Default of rope_local_base_freq."""
_DEFAULT_LAYERS, _DEFAULT_EXPERT_WIDTH = 28, 768
"""Defaults of transformers."""
_MAX_LAYERS = 1024

Settings = Mapping[str, Any]
"""Plain values of fields of `ModelConfig` or `BlockConfig`."""


def read_layers(attributes: Attributes, family: Family, fields: Settings) -> Settings:
    """Returns `ModelConfig` fields for all layers, and a `pattern` or `first_blocks` if layers differ.

    `fields` come from other attributes. Raises for invalid or contradicting values.
    """
    names = family.layer_attributes
    if (count := fields["num_layers"]) > _MAX_LAYERS:
        raise HFError(f"num_hidden_layers = {count}: at most {_MAX_LAYERS:,} are supported")
    full, sliding = (
        _read_rope(attributes, family, fields["head_dim"], windowed=windowed) if "rope_theta" in names else {}
        for windowed in (False, True)
    )
    kinds = _read_windows(attributes, family, count)
    window = whole("sliding_window", attributes.get("sliding_window", family.default_window)) if any(kinds) else None
    windows: Sequence[Settings] = ({"sliding_window": None, **full}, {"sliding_window": window, **sliding})
    sparse, mlps = [False] * count, list[Settings]([{}])
    if "decoder_sparse_step" in names:
        sparse = _read_sparse(attributes, count)
        width = whole("moe_intermediate_size", attributes.get("moe_intermediate_size", _DEFAULT_EXPERT_WIDTH))
        mlps = [
            {"num_experts": 0, "d_ff": fields["d_ff"]},
            {"num_experts": fields["num_experts"], "d_ff": width},
        ]
    layers = [{**windows[windowed], **mlps[has_experts]} for windowed, has_experts in zip(kinds, sparse, strict=True)]
    if SCALE_BY_LAYER in names and switch(SCALE_BY_LAYER, attributes.get(SCALE_BY_LAYER, False)):
        scale = fields["query_scale"] or fields["head_dim"] ** -0.5
        layers = [{**layer, "query_scale": scale / i} for i, layer in enumerate(layers, start=1)]
    return _compress_layers({**windows[all(kinds)], **mlps[any(sparse)]}, layers)


def write_layers(config: ModelConfig, family: Family) -> dict[str, object]:
    """Returns the family's `layer_attributes`."""
    names, layers = family.layer_attributes, list(config.layers())
    written = {
        **({"head_dim": config.head_dim} if "head_dim" in names else {}),
        **(_write_windows(layers, family) if "sliding_window" in names else {}),
        **(_write_ropes(layers, family) if "rope_theta" in names else {}),
        **(_write_experts(layers) if "decoder_sparse_step" in names else {}),
    }
    if SCALE_BY_LAYER in names:
        first, *others = (layer.query_scale for layer in layers)
        written[SCALE_BY_LAYER] = bool(others) and first is not None and others[0] == first / 2
    return written


def _compress_layers(base: Settings, layers: Sequence[Settings]) -> Settings:
    """Returns `base` with the `pattern` or `first_blocks` for `layers` that compiles the fewest blocks."""
    changes = [
        {name: value for name, value in layer.items() if name not in base or base[name] != value} for layer in layers
    ]
    if not any(changes):
        return {**base}
    period = next(p for p in range(1, len(changes) + 1) if changes[p:] == changes[:-p])
    rest = changes[: len(changes) % period]
    if period + len(list(groupby(rest))) <= len(list(groupby(changes))):
        return {**base, "pattern": changes[:period]}
    last = len(list(next(iter(groupby(reversed(changes))))[1]))
    return {**base, "first_blocks": changes[:-last], "pattern": changes[-1:]}


def _read_windows(attributes: Attributes, family: Family, count: int) -> list[bool]:
    """Returns whether each layer has a window."""
    names, window = family.layer_attributes, attributes.get("sliding_window", family.default_window)
    is_on = "use_sliding_window" not in names or switch(
        "use_sliding_window", attributes.get("use_sliding_window", False)
    )
    if "sliding_window" not in names or not is_on or ("use_sliding_window" in names and window is None):
        return [False] * count
    if "layer_types" not in names:
        if "max_window_layers" in names and (first := attributes.get("max_window_layers")):
            raise HFError(
                f"max_window_layers = {quote(first)} and use_sliding_window = True: some versions of transformers have "
                "a window to the layers from this number on, others to all layers; set max_window_layers to 0 for a "
                "window in all layers, or use_sliding_window to false for none"
            )
        return [window is not None] * count
    if (types := attributes.get("layer_types")) is None:
        return _windows_by_index(attributes, family, count)
    if not isinstance(types, list) or len(types) != count or not set(map(str, types)) <= {_FULL, _SLIDING}:
        raise HFError(f"layer_types = {quote(types)}: should be {_FULL} or {_SLIDING} for each of {count} layers")
    kinds = [kind == _SLIDING for kind in types]
    period = attributes.get("sliding_window_pattern")
    if period is not None and kinds != _windows_by_index(attributes, family, count):
        raise HFError(f"layer_types and sliding_window_pattern = {quote(period)} contradict each other")
    return kinds


def _windows_by_index(attributes: Attributes, family: Family, count: int) -> list[bool]:
    if "max_window_layers" in family.layer_attributes:
        first = attributes.get("max_window_layers", _DEFAULT_LAYERS)
        if type(first) is not int or first < 0:
            raise HFError(f"max_window_layers = {quote(first)}: should be a whole number")
        return [i >= first for i in range(count)]
    period, hidden = attributes.get("sliding_window_pattern"), attributes.get("_sliding_window_pattern")
    if period is None and hidden not in (None, family.window_period) and "layer_types" not in attributes:
        raise HFError(f"_sliding_window_pattern = {quote(hidden)} without layer_types: add them, one for each layer")
    period = whole("sliding_window_pattern", family.window_period if period is None else period)
    return [(i + 1) % period != 0 for i in range(count)]


def _write_windows(layers: Sequence[BlockConfig], family: Family) -> dict[str, object]:
    names, kinds = family.layer_attributes, [layer.sliding_window is not None for layer in layers]
    window = next((layer.sliding_window for layer in layers if layer.sliding_window is not None), None)
    written: dict[str, object] = {"sliding_window": window}
    if "use_sliding_window" in names:
        first = kinds.index(True) if any(kinds) else 0
        written |= {"use_sliding_window": window is not None, "max_window_layers": first}
    if "sliding_window_pattern" in names:
        period = kinds.index(False) + 1 if not all(kinds) else len(kinds) + 1
        if kinds == [(i + 1) % period != 0 for i in range(len(kinds))]:
            written |= {"sliding_window_pattern": period}
    if "layer_types" in names and ("max_window_layers" not in names or len(set(kinds)) > 1):
        written |= {"layer_types": [_SLIDING if kind else _FULL for kind in kinds]}
    return written


def _read_sparse(attributes: Attributes, count: int) -> list[bool]:
    """Returns whether each layer has experts."""
    step = whole("decoder_sparse_step", attributes.get("decoder_sparse_step", 1))
    dense = attributes.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise HFError(f"mlp_only_layers = {quote(dense)}: should be a list of layer numbers, from 0")
    without = set(dense)
    return [i not in without and (i + 1) % step == 0 for i in range(count)]


def _write_experts(layers: Sequence[BlockConfig]) -> dict[str, object]:
    widths = {bool(layer.num_experts): layer.d_ff for layer in reversed(layers)}
    sparse = [i for i, layer in enumerate(layers) if layer.num_experts]
    step = math.gcd(*(i + 1 for i in sparse)) or 1
    return {
        "moe_intermediate_size": widths.get(True, _DEFAULT_EXPERT_WIDTH),
        "intermediate_size": widths.get(False, layers[0].d_ff),
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in range(step - 1, len(layers), step) if i not in set(sparse)],
    }


def _read_rope(attributes: Attributes, family: Family, head_dim: int, *, windowed: bool) -> Settings:
    """Returns `rope_theta` and `rope_scaling` of blocks with or without a window."""
    default_theta = family.rope_theta
    if "rope_local_base_freq" in family.layer_attributes:
        nested = attributes.get("rope_parameters") or {}
        if not isinstance(nested, dict) or not set(nested) <= {_FULL, _SLIDING}:
            raise HFError(f"rope_parameters = {quote(nested)}: should hold {_FULL} and {_SLIDING}")
        attributes = {**attributes, "rope_parameters": nested.get(_SLIDING if windowed else _FULL), _ORIGINAL: None}
        if windowed:
            default_theta = _LOCAL_THETA
            attributes |= {"rope_theta": attributes.get("rope_local_base_freq"), "rope_scaling": None}
    parameters = _rope_parameters(attributes)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(known for known in _SCALINGS if known in family.rope_kinds)
        raise HFError(f"rope_type = {quote(kind)} is not supported; a {family.model_type} can have {supported}")
    for key in parameters:
        if key not in {*_SCALINGS[kind], *_COMMON_PARAMETERS, *(_ATTENTION_SCALES if kind == "yarn" else ())}:
            raise HFError(f"{truncate(key)} of the rotary embedding {kind!r} is unknown; it may change the model")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise HFError(f"partial_rotary_factor = {quote(parameters['partial_rotary_factor'])}: only 1.0 is supported")
    values = [source["rope_theta"] for source in (parameters, attributes) if source.get("rope_theta") is not None]
    thetas = sorted({positive("rope_theta", value) for value in values}) or [default_theta]
    if len(thetas) > 1:
        raise HFError(f"rope_theta has two values: {' and '.join(map(str, thetas))}")
    scaling = _read_scaling(kind, parameters, {_ORIGINAL: family.original_length, **attributes})
    for problem in rope_problems(head_dim, thetas[0], scaling):
        raise HFError(f"the rotary embedding {kind!r} is invalid: {problem}")
    changed = {name: v for name, v in asdict(scaling).items() if name == "kind" or v != getattr(UNSCALED, name)}
    return {"rope_theta": thetas[0], "rope_scaling": changed}


def _rope_parameters(attributes: Attributes) -> Attributes:
    present = []
    for name in ("rope_parameters", "rope_scaling"):
        value = attributes.get(name)
        if value is not None and not isinstance(value, dict):
            raise HFError(f"{name} = {quote(value)} should be an object")
        present += [value] if value else []
    if len(present) == 2 and present[0] | {"rope_theta": None} != present[1] | {"rope_theta": None}:
        raise HFError("rope_parameters and rope_scaling contradict each other; remove the wrong one")
    return present[0] if present else {}


def _read_scaling(kind: str, parameters: Attributes, attributes: Attributes) -> RopeScaling:
    names, max_positions = _SCALINGS[kind], attributes.get(_MAX_POSITIONS)
    settings: dict[str, Any] = {"kind": "none" if kind == "default" else kind}
    defaults = {"beta_fast": UNSCALED.beta_fast, "beta_slow": UNSCALED.beta_slow}
    if _ORIGINAL in names:
        lengths = (attributes.get(_ORIGINAL), parameters.get(_ORIGINAL), max_positions)
        if (original := next((length for length in lengths if length is not None), None)) is None:
            raise HFError(f"{_ORIGINAL} of the rotary embedding is missing")
        settings["original_length"] = whole(_ORIGINAL, original)
        if "attention_factor" in names and max_positions is not None:
            defaults["factor"] = whole(_MAX_POSITIONS, max_positions) / settings["original_length"]
    for name in (name for name in _NUMBERS if name in names):
        value = parameters.get(name)
        settings[name] = positive(f"{name} of the rotary embedding", defaults.get(name) if value is None else value)
    settings |= {name: _factors(name, parameters) for name in _LISTS if name in names}
    if "truncate" in names:
        settings["truncate"] = switch("truncate of the rotary embedding", parameters.get("truncate", True))
    if "attention_factor" in names:
        settings["attention_factor"] = _attention_factor(parameters, settings["factor"])
    return RopeScaling(**settings)


def _factors(name: str, parameters: Attributes) -> tuple[float, ...]:
    values = parameters.get(name)
    if not isinstance(values, list):
        raise HFError(f"{name} of the rotary embedding = {quote(values)}: should be a list of numbers")
    return tuple(positive(f"{name}[{i}] of the rotary embedding", factor) for i, factor in enumerate(values))


def _attention_factor(parameters: Attributes, factor: float) -> float | None:
    if parameters.get("attention_factor") is not None:
        return positive("attention_factor", parameters["attention_factor"])
    scales = [parameters.get(name) for name in _ATTENTION_SCALES]
    if not all(scales):
        return None
    plain, all_dim = (0.1 * positive("mscale", scale) * math.log(factor) + 1 if factor > 1 else 1.0 for scale in scales)
    return positive("the attention factor from mscale and mscale_all_dim", plain / all_dim)


def _write_ropes(layers: Sequence[BlockConfig], family: Family) -> dict[str, object]:
    """Returns the older format, which every version reads, unless only the newer one can express a scaling."""
    full, sliding = (
        next((layer for layer in layers if (layer.sliding_window is not None) == windowed), layers[0])
        for windowed in (False, True)
    )
    theta, local_theta = (layer.rope_theta or family.rope_theta for layer in (full, sliding))
    scaling, parameters = full.rope_scaling, _scaling_parameters(full.rope_scaling)
    written: dict[str, object] = {"rope_theta": theta, "rope_scaling": parameters or None}
    max_positions = {}
    if _ORIGINAL in parameters:  # transformers also requires this attribute
        max_positions = {_MAX_POSITIONS: math.ceil(scaling.original_length * scaling.factor)}
    if scaling.kind == "longrope":  # before transformers 5, the factor was max / original positions
        written[_ORIGINAL] = scaling.original_length
    if "rope_local_base_freq" not in family.layer_attributes:
        return written | max_positions
    if sliding.rope_scaling.kind == "none":
        return written | max_positions | {"rope_local_base_freq": local_theta}
    default = {"rope_type": "default"}
    local = {**default, **_scaling_parameters(sliding.rope_scaling), "rope_theta": local_theta}
    nested = {_FULL: {**default, **parameters, "rope_theta": theta}, _SLIDING: local}
    return {"rope_parameters": nested, **max_positions}


def _scaling_parameters(scaling: RopeScaling) -> dict[str, object]:
    if scaling.kind == "none":
        return {}
    fields = {name: "original_length" if name == _ORIGINAL else name for name in _SCALINGS[scaling.kind]}
    values = {name: getattr(scaling, field) for name, field in fields.items()}
    written = {name: list(value) if name in _LISTS else value for name, value in values.items() if value is not None}
    return {"rope_type": scaling.kind, **written}
