"""Reads and writes parts of config.json: rotary embeddings, windows, experts, and layers that differ in them.

transformers 5 writes rotary embeddings in `rope_parameters`, older versions in `rope_theta` and `rope_scaling`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from jaxtp.config.reading import shown
from jaxtp.hf.families.family import Family, Rope, Window
from jaxtp.hf.model_folder import Attributes, HFError, positive, quote, switch, whole
from jaxtp.layers.rope import UNSCALED, RopeScaling, rope_problems
from jaxtp.models.config import BlockConfig, ModelConfig

_ORIGINAL = "original_max_position_embeddings"
_FLAT = frozenset({"rope_parameters", "rope_theta", "rope_scaling", _ORIGINAL})
ROPE_ATTRIBUTES: Mapping[Rope, frozenset[str]] = {
    Rope.NEVER: frozenset(),
    Rope.ONE: _FLAT,
    Rope.BY_WINDOW: _FLAT | {"rope_local_base_freq"},
}
FULL, SLIDING = "full_attention", "sliding_attention"
_LOCAL_THETA = 10_000.0
"""Default base in layers with a window."""
_ROPE_PARAMETERS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"}
    ),
    "longrope": frozenset({"factor", _ORIGINAL, "short_factor", "long_factor", "attention_factor"}),
}
_COMMON_PARAMETERS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def read_rope(attributes: Attributes, family: Family, head_dim: int, *, windowed: bool) -> dict[str, Any]:
    """Returns plain `rope_theta` and `rope_scaling` of a block with or without a window."""
    if family.rope == Rope.BY_WINDOW:
        attributes = _with_rope_of(attributes, windowed=windowed)
    parameters = _parameters(attributes)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(known for known in _ROPE_PARAMETERS if known in family.rope_kinds)
        raise HFError(f"rope_type = {quote(kind)} is not supported; a {family.model_type} can have {supported}")
    for key in parameters:
        if key not in _ROPE_PARAMETERS[kind] | _COMMON_PARAMETERS:
            raise HFError(f"{shown(key)} of the rotary embedding {kind!r} is not understood; it may change the model")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise HFError(f"partial_rotary_factor = {quote(parameters['partial_rotary_factor'])}: only 1.0 is supported")
    default = _LOCAL_THETA if windowed and family.rope == Rope.BY_WINDOW else family.rope_theta
    theta = _theta(attributes, parameters, default)
    scaling = _scaling(kind, parameters, {_ORIGINAL: family.original_length, **attributes})
    for problem in rope_problems(head_dim, theta, scaling):
        raise HFError(f"the rotary embedding {kind!r} cannot be: {problem}")
    changed = {name: v for name, v in asdict(scaling).items() if name == "kind" or v != getattr(UNSCALED, name)}
    return {"rope_theta": theta, "rope_scaling": changed}


def write_rope(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """Returns the older spelling, which every version reads.

    Before transformers 5, longrope computed its factor as max_position_embeddings / original_max_position_embeddings.
    """
    if scaling.kind == "none":
        return {"rope_theta": theta, "rope_scaling": None}
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        written |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    if scaling.kind == "longrope":
        written |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    if scaling.kind in ("yarn", "longrope") and scaling.attention_factor is not None:
        written |= {"attention_factor": scaling.attention_factor}
    if scaling.kind == "linear":
        return {"rope_theta": theta, "rope_scaling": written}
    written[_ORIGINAL] = scaling.original_length
    longest = math.ceil(scaling.original_length * scaling.factor)  # transformers requires it
    beside = {_ORIGINAL: scaling.original_length} if scaling.kind == "longrope" else {}
    return {"rope_theta": theta, "rope_scaling": written, "max_position_embeddings": longest, **beside}


def _with_rope_of(attributes: Attributes, *, windowed: bool) -> dict[str, Any]:
    nested = attributes.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not set(nested) <= {FULL, SLIDING}:
        raise HFError(f"rope_parameters = {quote(nested)}: should hold {FULL} and {SLIDING}")
    result = {**attributes, "rope_parameters": nested.get(SLIDING if windowed else FULL), _ORIGINAL: None}
    return result | {"rope_theta": attributes.get("rope_local_base_freq"), "rope_scaling": None} if windowed else result


def _parameters(attributes: Attributes) -> dict[str, Any]:
    spelled = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = attributes.get(name)
        if value is not None and not isinstance(value, dict):
            raise HFError(f"{name} = {quote(value)} should be an object")
        if value:
            spelled[name] = value
    kinds = {name: {**value, "rope_theta": None} for name, value in spelled.items()}
    if len(kinds) == 2 and kinds["rope_parameters"] != kinds["rope_scaling"] | {"rope_theta": None}:
        raise HFError("rope_parameters and rope_scaling contradict each other; remove the one that does not hold")
    return dict(next(iter(spelled.values()), {}))


def _theta(attributes: Attributes, parameters: Attributes, default: float) -> float:
    given = {
        positive("rope_theta", value)
        for value in (parameters.get("rope_theta"), attributes.get("rope_theta"))
        if value is not None
    }
    if len(given) > 1:
        raise HFError(f"rope_theta is there twice, as {' and as '.join(map(str, sorted(given)))}")
    return given.pop() if given else default


def _scaling(kind: str, parameters: Attributes, attributes: Attributes) -> RopeScaling:
    if kind == "default":
        return RopeScaling()
    given: Callable[[str, float | None], float] = lambda name, default: positive(  # noqa: E731
        f"{name} of the rotary embedding", default if parameters.get(name) is None else parameters[name]
    )
    if kind == "linear":
        return RopeScaling(kind="linear", factor=given("factor", None))
    length = _original_length(parameters, attributes)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=given("factor", None),
            original_length=length,
            low_freq_factor=given("low_freq_factor", None),
            high_freq_factor=given("high_freq_factor", None),
        )
    longest = attributes.get("max_position_embeddings")
    factor = given("factor", None if longest is None else whole("max_position_embeddings", longest) / length)
    if kind == "longrope":
        attention = parameters.get("attention_factor")
        return RopeScaling(
            kind="longrope",
            factor=factor,
            original_length=length,
            attention_factor=None if attention is None else positive("attention_factor", attention),
            short_factor=_factors("short_factor", parameters),
            long_factor=_factors("long_factor", parameters),
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=length,
        beta_fast=given("beta_fast", 32.0),
        beta_slow=given("beta_slow", 1.0),
        attention_factor=_attention_factor(parameters, factor),
        truncate=switch("truncate of the rotary embedding", parameters.get("truncate", True)),
    )


def _original_length(parameters: Attributes, attributes: Attributes) -> int:
    for value in (attributes.get(_ORIGINAL), parameters.get(_ORIGINAL), attributes.get("max_position_embeddings")):
        if value is not None:
            return whole(_ORIGINAL, value)
    raise HFError(f"{_ORIGINAL} of the rotary embedding is missing")


def _factors(name: str, parameters: Attributes) -> tuple[float, ...]:
    found = parameters.get(name)
    if not isinstance(found, list):
        raise HFError(f"{name} of the rotary embedding = {quote(found)}: should be a list of numbers")
    return tuple(positive(f"{name}[{i}] of the rotary embedding", factor) for i, factor in enumerate(found))


def _attention_factor(parameters: Attributes, factor: float) -> float | None:
    if parameters.get("attention_factor") is not None:
        return positive("attention_factor", parameters["attention_factor"])
    scales = [parameters.get(name) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    over, under = (0.1 * positive("mscale", scale) * math.log(factor) + 1 if factor > 1 else 1.0 for scale in scales)
    return positive("what follows from mscale and mscale_all_dim", over / under)


WINDOW_ATTRIBUTES: Mapping[Window, frozenset[str]] = {
    Window.NEVER: frozenset(),
    Window.ALWAYS: frozenset({"sliding_window"}),
    Window.SWITCHED: frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
    Window.SWITCHED_FOR_ALL: frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
    Window.ALTERNATE: frozenset({"sliding_window", "layer_types"}),
    Window.PERIODIC: frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
}
DENSE_LAYERS = frozenset({"mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size"})
"""Read for families that mix dense and MoE layers."""
_DEFAULT_LAYERS, _DEFAULT_EXPERT_WIDTH = 28, 768
"""Defaults of transformers."""
_PERIODS = {Window.ALTERNATE: 2, Window.PERIODIC: 6}
_MAX_LAYERS = 1024
"""Most layers of a model whose layers differ."""

Settings = Mapping[str, Any]
"""Fields of `BlockConfig` that differ between layers, as plain values."""


def read_layers(attributes: Attributes, family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `ModelConfig` fields for all layers, and a `pattern` or `first_blocks` if layers differ.

    `fields` come from other attributes. Raises for invalid or contradicting values.
    """
    count = fields["num_layers"]
    full, sliding = (
        {} if family.rope == Rope.NEVER else read_rope(attributes, family, fields["head_dim"], windowed=windowed)
        for windowed in (False, True)
    )
    kinds = _has_window(attributes, family, count)
    window = whole("sliding_window", _window(attributes, family)) if any(kinds) else None
    windows = [{"sliding_window": None, **full}, {"sliding_window": window, **sliding}]
    if family.scale_by_layer and switch(family.scale_by_layer, attributes.get(family.scale_by_layer, False)):
        scale = fields["query_scale"] or fields["head_dim"] ** -0.5
        base = windows[kinds[0]]
        return compress_layers(base, [{**base, "query_scale": scale / i} for i in range(1, _check_count(count) + 1)])
    sparse = _sparse(attributes, count) if family.dense_layers else [False]
    mlps = _mlps(attributes, fields) if family.dense_layers else [{}]
    if len(set(kinds)) == len(set(sparse)) == 1:
        return {**windows[kinds[0]], **mlps[sparse[0]]}
    each = zip(_for_each(kinds, count), _for_each(sparse, count), strict=True)
    base = {**windows[all(kinds)], **mlps[any(sparse)]}
    return compress_layers(base, [{**windows[kind], **mlps[has]} for kind, has in each])


def compress_layers(base: Settings, layers: Sequence[Settings]) -> dict[str, Any]:
    """Returns `base` with the `pattern` or `first_blocks` for `layers` that compiles the fewest blocks."""
    changes = [
        {name: value for name, value in layer.items() if name not in base or base[name] != value} for layer in layers
    ]
    period = next(p for p in range(1, len(changes) + 1) if changes[p:] == changes[:-p])
    rest = changes[: len(changes) % period]
    if period + _runs(rest) <= _runs(changes):
        return {**base, "pattern": changes[:period]}
    last = len(list(next(iter(groupby(reversed(changes))))[1]))
    return {**base, "first_blocks": changes[:-last], "pattern": changes[-1:]}


def write_layers(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the attributes for layer differences, windows and rotary embeddings."""
    layers = list(config.layers())
    written = {**_write_windows(layers, family), **_write_ropes(layers, family)}
    if family.scale_by_layer is not None:
        first, *others = (layer.query_scale for layer in layers)
        by_layer = bool(others) and first is not None and others[0] == first / 2
        written |= {family.scale_by_layer: by_layer}
    return written | (_write_experts(layers) if family.dense_layers else {})


def _runs(changes: Sequence[Settings]) -> int:
    return len(list(groupby(changes)))


def _has_window(attributes: Attributes, family: Family, count: int) -> Sequence[bool]:
    types = attributes.get("layer_types") if "layer_types" in WINDOW_ATTRIBUTES[family.window] else None
    if family.window in (Window.NEVER, Window.ALWAYS):
        return [family.window == Window.ALWAYS and _window(attributes, family) is not None]
    if family.window in (Window.SWITCHED, Window.SWITCHED_FOR_ALL) and (
        not switch("use_sliding_window", attributes.get("use_sliding_window", False))
        or _window(attributes, family) is None
    ):
        return [False]
    if family.window == Window.SWITCHED_FOR_ALL:
        return [_check_all_sliding(attributes)]
    if types is None:
        return _windows_by_index(attributes, family, count)
    if not isinstance(types, list) or len(types) != count or not set(map(str, types)) <= {FULL, SLIDING}:
        raise HFError(f"layer_types = {quote(types)}: should be {FULL} or {SLIDING} for each of {count} layers")
    kinds = [kind == SLIDING for kind in types]
    period = attributes.get("sliding_window_pattern")
    if period is not None and kinds != _windows_by_index(attributes, family, count):
        raise HFError(f"layer_types and sliding_window_pattern = {quote(period)} contradict each other")
    return [*kinds[:1]] if len(set(kinds)) == 1 else kinds[: _check_count(count)]


def _window(attributes: Attributes, family: Family) -> Any:
    return attributes.get("sliding_window", family.default_window)


def _check_all_sliding(attributes: Attributes) -> bool:
    if first := attributes.get("max_window_layers"):
        raise HFError(
            f"max_window_layers = {quote(first)} and use_sliding_window = True: some versions of transformers have a "
            "window in the layers from that one on, others in all; set max_window_layers to 0 for a window in all, or "
            "use_sliding_window to false for none"
        )
    return True


def _sparse(attributes: Attributes, count: int) -> Sequence[bool]:
    step = whole("decoder_sparse_step", attributes.get("decoder_sparse_step", 1))
    dense = attributes.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise HFError(f"mlp_only_layers = {quote(dense)}: should be a list of the numbers of layers, the first is 0")
    if step == 1 and min(dense, default=count) >= count:
        return [True]
    without = set(dense)
    return [i not in without and (i + 1) % step == 0 for i in range(_check_count(count))]


def _mlps(attributes: Attributes, fields: Mapping[str, Any]) -> Sequence[Settings]:
    width = attributes.get("moe_intermediate_size", _DEFAULT_EXPERT_WIDTH)
    with_experts = {"num_experts": fields["num_experts"], "d_ff": whole("moe_intermediate_size", width)}
    return {"num_experts": 0, "d_ff": fields["d_ff"]}, with_experts


def _for_each(kinds: Sequence[bool], count: int) -> Sequence[bool]:
    return kinds if len(kinds) == count else list(kinds) * count


def _windows_by_index(attributes: Attributes, family: Family, count: int) -> Sequence[bool]:
    if family.window == Window.SWITCHED:
        first = attributes.get("max_window_layers", _DEFAULT_LAYERS)
        if type(first) is not int or first < 0:
            raise HFError(f"max_window_layers = {quote(first)}: should be a whole number")
        return (
            [first < count]
            if first in (0, count) or first > count
            else [i >= first for i in range(_check_count(count))]
        )
    period, hidden = attributes.get("sliding_window_pattern"), attributes.get("_sliding_window_pattern")
    if period is None and hidden not in (None, _PERIODS[family.window]) and "layer_types" not in attributes:
        raise HFError(f"_sliding_window_pattern = {quote(hidden)} without layer_types: add them, one for each layer")
    period = whole("sliding_window_pattern", _PERIODS[family.window] if period is None else period)
    return [(i + 1) % period != 0 for i in range(_check_count(count))]


def _check_count(count: int) -> int:
    if count > _MAX_LAYERS:
        raise HFError(
            f"num_hidden_layers = {count}: of a model whose layers differ, at most {_MAX_LAYERS:,} are supported"
        )
    return count


def _write_windows(layers: Sequence[BlockConfig], family: Family) -> dict[str, Any]:
    windows = [layer.sliding_window for layer in layers]
    window = next((window for window in windows if window is not None), None)
    kinds = [window is not None for window in windows]
    if family.window == Window.NEVER:
        return {}
    written: dict[str, Any] = {"sliding_window": window}
    if family.window == Window.ALWAYS:
        return written
    if family.window in (Window.SWITCHED, Window.SWITCHED_FOR_ALL):
        first = kinds.index(True) if any(kinds) else 0
        written |= {"use_sliding_window": window is not None, "max_window_layers": first}
    if family.window == Window.PERIODIC:
        period = kinds.index(False) + 1 if not all(kinds) else len(kinds) + 1
        if kinds == [(i + 1) % period != 0 for i in range(len(kinds))]:
            written |= {"sliding_window_pattern": period}
    if "layer_types" in WINDOW_ATTRIBUTES[family.window] and (family.window != Window.SWITCHED or len(set(kinds)) > 1):
        written |= {"layer_types": [SLIDING if kind else FULL for kind in kinds]}
    return written


def _write_experts(layers: Sequence[BlockConfig]) -> dict[str, Any]:
    widths = {bool(layer.num_experts): layer.d_ff for layer in reversed(layers)}
    sparse = [i for i, layer in enumerate(layers) if layer.num_experts]
    step = math.gcd(*(i + 1 for i in sparse)) or 1
    return {
        "moe_intermediate_size": widths.get(True, _DEFAULT_EXPERT_WIDTH),
        "intermediate_size": widths.get(False, layers[0].d_ff),
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in range(step - 1, len(layers), step) if i not in set(sparse)],
    }


def _write_ropes(layers: Sequence[BlockConfig], family: Family) -> dict[str, Any]:
    if family.rope == Rope.NEVER:
        return {}
    full, sliding = (
        next((layer for layer in layers if (layer.sliding_window is not None) == windowed), layers[0])
        for windowed in (False, True)
    )
    written = write_rope(full.rope_theta or family.rope_theta, full.rope_scaling)
    if family.rope == Rope.ONE:
        return written
    theta = sliding.rope_theta or family.rope_theta
    if sliding.rope_scaling.kind == "none":
        return {**written, "rope_local_base_freq": theta}
    nested = {FULL: _as_parameters(written), SLIDING: _as_parameters(write_rope(theta, sliding.rope_scaling))}
    return {"rope_parameters": nested, **{key: value for key, value in written.items() if key.startswith("max_")}}


def _as_parameters(written: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", **(written["rope_scaling"] or {}), "rope_theta": written["rope_theta"]}
