"""Layers that differ as config.json spells it: which have a sliding window, and with it another rotary embedding."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxtp.hf.folder import HFError
from jaxtp.hf.rope import FULL, SLIDING, read_rope, write_rope
from jaxtp.hf.values import said, switch, whole
from jaxtp.models.config import BlockConfig, ModelConfig
from jaxtp.models.families.family import Family

ATTRIBUTES: Mapping[str, frozenset[str]] = {
    "never": frozenset(),
    "always": frozenset({"sliding_window"}),
    "switched": frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
    "alternate": frozenset({"sliding_window", "layer_types"}),
    "periodic": frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
}
"""Read, by the family's kind of window."""
_DEFAULT, _DEFAULT_LAYERS = 4096, 28
"""Values that transformers assumes where config.json is silent."""
_PERIODS = {"alternate": 2, "periodic": 6}
_MOST = 1024
"""Layers of a model whose layers differ."""

Settings = Mapping[str, Any]
"""Fields of `BlockConfig` in which layers differ, as plain values."""


def read_layers(attributes: Mapping[str, Any], family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that hold for all layers, and how some differ.

    Args:
      attributes: of config.json.
      family: how they are spelled.
      fields: what has been read from others.

    Raises:
      HFError: values that cannot be, spellings that contradict each other, or too many layers.
    """
    count = fields["num_layers"]
    full, sliding = (
        {} if family.rope == "never" else read_rope(attributes, family, fields["head_dim"], windowed=windowed)
        for windowed in (False, True)
    )
    kinds = _sliding(attributes, family, count)
    window = whole("sliding_window", attributes.get("sliding_window", _DEFAULT)) if any(kinds) else None
    settings = [{"sliding_window": None, **full}, {"sliding_window": window, **sliding}]
    if family.scale_by_layer and switch(family.scale_by_layer, attributes.get(family.scale_by_layer, False)):
        scale = fields["query_scale"] or fields["head_dim"] ** -0.5
        base = settings[kinds[0]]
        return composed(base, [{**base, "query_scale": scale / i} for i in range(1, _few(count) + 1)])
    if len(set(kinds)) == 1:
        return settings[kinds[0]]
    return composed(settings[False], [settings[kind] for kind in kinds])


def composed(base: Settings, layers: Sequence[Settings]) -> dict[str, Any]:
    """Returns `base`, and the `pattern` or `first_blocks` that give each layer its settings, with fewer to compile."""
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
    """Returns the attributes that say how layers differ, and which positions a model sees and how it rotates them."""
    layers = list(config.layers())
    written = {**_write_windows(layers, family), **_write_ropes(layers, family)}
    if family.scale_by_layer is not None:
        first, *others = (layer.query_scale for layer in layers)
        by_layer = bool(others) and first is not None and others[0] == first / 2
        written |= {family.scale_by_layer: by_layer}
    return written


def _runs(changes: Sequence[Settings]) -> int:
    return len(list(groupby(changes)))


def _sliding(attributes: Mapping[str, Any], family: Family, count: int) -> Sequence[bool]:
    """Returns for each layer whether it has a window; for layers that cannot differ one answer."""
    types = attributes.get("layer_types") if "layer_types" in ATTRIBUTES[family.window] else None
    if family.window in ("never", "always"):
        return [family.window == "always" and attributes.get("sliding_window", _DEFAULT) is not None]
    if family.window == "switched" and (
        not switch("use_sliding_window", attributes.get("use_sliding_window", False))
        or attributes.get("sliding_window", _DEFAULT) is None
    ):
        return [False]
    if types is None:
        return _by_number(attributes, family, count)
    if not isinstance(types, list) or len(types) != count or not set(map(str, types)) <= {FULL, SLIDING}:
        raise HFError(f"layer_types = {said(types)}: should be {FULL} or {SLIDING} for each of {count} layers")
    kinds = [kind == SLIDING for kind in types]
    period = attributes.get("sliding_window_pattern")
    if period is not None and kinds != _by_number(attributes, family, count):
        raise HFError(f"layer_types and sliding_window_pattern = {said(period)} contradict each other")
    return [*kinds[:1]] if len(set(kinds)) == 1 else kinds[: _few(count)]


def _by_number(attributes: Mapping[str, Any], family: Family, count: int) -> Sequence[bool]:
    if family.window == "switched":
        first = attributes.get("max_window_layers", _DEFAULT_LAYERS)
        if type(first) is not int or first < 0:
            raise HFError(f"max_window_layers = {said(first)}: should be a whole number")
        return [first < count] if first in (0, count) or first > count else [i >= first for i in range(_few(count))]
    period, hidden = attributes.get("sliding_window_pattern"), attributes.get("_sliding_window_pattern")
    if period is None and hidden not in (None, _PERIODS[family.window]) and "layer_types" not in attributes:
        raise HFError(f"_sliding_window_pattern = {said(hidden)} without layer_types: add them, one for each layer")
    period = whole("sliding_window_pattern", _PERIODS[family.window] if period is None else period)
    return [(i + 1) % period != 0 for i in range(_few(count))]


def _few(count: int) -> int:
    """Returns the number of layers.

    Raises:
      HFError: there are more than can differ.
    """
    if count > _MOST:
        raise HFError(f"num_hidden_layers = {count}: of a model whose layers differ, at most {_MOST:,} are supported")
    return count


def _write_windows(layers: Sequence[BlockConfig], family: Family) -> dict[str, Any]:
    windows = [layer.sliding_window for layer in layers]
    window = next((window for window in windows if window is not None), None)
    kinds = [window is not None for window in windows]
    if family.window == "never":
        return {}
    written: dict[str, Any] = {"sliding_window": window}
    if family.window == "always":
        return written
    if family.window == "switched":
        first = kinds.index(True) if any(kinds) else 0
        written |= {"use_sliding_window": window is not None, "max_window_layers": first}
    if family.window == "periodic":
        period = kinds.index(False) + 1 if not all(kinds) else len(kinds) + 1
        if kinds == [(i + 1) % period != 0 for i in range(len(kinds))]:
            written |= {"sliding_window_pattern": period}
    if family.window != "switched" or len(set(kinds)) > 1:
        written |= {"layer_types": [SLIDING if kind else FULL for kind in kinds]}
    return written


def _write_ropes(layers: Sequence[BlockConfig], family: Family) -> dict[str, Any]:
    if family.rope == "never":
        return {}
    full, sliding = (
        next((layer for layer in layers if (layer.sliding_window is not None) == windowed), layers[0])
        for windowed in (False, True)
    )
    written = write_rope(full.rope_theta or family.rope_theta, full.rope_scaling)
    if family.rope == "one":
        return written
    theta = sliding.rope_theta or family.rope_theta
    if sliding.rope_scaling.kind == "none":
        return {**written, "rope_local_base_freq": theta}
    nested = {FULL: _as_parameters(written), SLIDING: _as_parameters(write_rope(theta, sliding.rope_scaling))}
    return {"rope_parameters": nested, **{key: value for key, value in written.items() if key.startswith("max_")}}


def _as_parameters(written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rotary embedding as transformers 5 spells it."""
    return {"rope_type": "default", **(written["rope_scaling"] or {}), "rope_theta": written["rope_theta"]}
