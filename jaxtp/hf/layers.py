"""Layers that differ as config.json spells it: a sliding window, with it another rotary embedding; experts or none."""

import math
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
    "switched_for_all": frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
    "alternate": frozenset({"sliding_window", "layer_types"}),
    "periodic": frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
}
"""Read, by the family's kind of window."""
DENSE_LAYERS = frozenset({"mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size"})
"""Read of a family that can have layers without experts beside those that have some."""
_DEFAULT_LAYERS, _DEFAULT_EXPERT_WIDTH = 28, 768
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
    window = whole("sliding_window", _window(attributes, family)) if any(kinds) else None
    windows = [{"sliding_window": None, **full}, {"sliding_window": window, **sliding}]
    if family.scale_by_layer and switch(family.scale_by_layer, attributes.get(family.scale_by_layer, False)):
        scale = fields["query_scale"] or fields["head_dim"] ** -0.5
        base = windows[kinds[0]]
        return composed(base, [{**base, "query_scale": scale / i} for i in range(1, _few(count) + 1)])
    sparse = _sparse(attributes, count) if family.dense_layers else [False]
    mlps = _mlps(attributes, fields) if family.dense_layers else [{}]
    if len(set(kinds)) == len(set(sparse)) == 1:
        return {**windows[kinds[0]], **mlps[sparse[0]]}
    each = zip(_for_each(kinds, count), _for_each(sparse, count), strict=True)
    base = {**windows[all(kinds)], **mlps[any(sparse)]}
    return composed(base, [{**windows[kind], **mlps[has]} for kind, has in each])


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
    return written | (_write_experts(layers) if family.dense_layers else {})


def _runs(changes: Sequence[Settings]) -> int:
    return len(list(groupby(changes)))


def _sliding(attributes: Mapping[str, Any], family: Family, count: int) -> Sequence[bool]:
    """Returns for each layer whether it has a window; for layers that cannot differ one answer."""
    types = attributes.get("layer_types") if "layer_types" in ATTRIBUTES[family.window] else None
    if family.window in ("never", "always"):
        return [family.window == "always" and _window(attributes, family) is not None]
    if family.window.startswith("switched") and (
        not switch("use_sliding_window", attributes.get("use_sliding_window", False))
        or _window(attributes, family) is None
    ):
        return [False]
    if family.window == "switched_for_all":
        return [_in_all(attributes)]
    if types is None:
        return _by_number(attributes, family, count)
    if not isinstance(types, list) or len(types) != count or not set(map(str, types)) <= {FULL, SLIDING}:
        raise HFError(f"layer_types = {said(types)}: should be {FULL} or {SLIDING} for each of {count} layers")
    kinds = [kind == SLIDING for kind in types]
    period = attributes.get("sliding_window_pattern")
    if period is not None and kinds != _by_number(attributes, family, count):
        raise HFError(f"layer_types and sliding_window_pattern = {said(period)} contradict each other")
    return [*kinds[:1]] if len(set(kinds)) == 1 else kinds[: _few(count)]


def _window(attributes: Mapping[str, Any], family: Family) -> Any:
    return attributes.get("sliding_window", family.default_window)


def _in_all(attributes: Mapping[str, Any]) -> bool:
    """Returns true.

    Raises:
      HFError: for older versions of transformers, the first layers have no window.
    """
    if first := attributes.get("max_window_layers"):
        raise HFError(
            f"max_window_layers = {said(first)} and use_sliding_window = True: some versions of transformers have a "
            "window in the layers from that one on, others in all; set max_window_layers to 0 for a window in all, or "
            "use_sliding_window to false for none"
        )
    return True


def _sparse(attributes: Mapping[str, Any], count: int) -> Sequence[bool]:
    """Returns for each layer whether it has experts; for layers that do not differ one answer."""
    step = whole("decoder_sparse_step", attributes.get("decoder_sparse_step", 1))
    dense = attributes.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise HFError(f"mlp_only_layers = {said(dense)}: should be a list of the numbers of layers, the first is 0")
    if step == 1 and min(dense, default=count) >= count:
        return [True]
    without = set(dense)
    return [i not in without and (i + 1) % step == 0 for i in range(_few(count))]


def _mlps(attributes: Mapping[str, Any], fields: Mapping[str, Any]) -> Sequence[Settings]:
    """Returns the settings of a layer without experts, and of one with them."""
    width = attributes.get("moe_intermediate_size", _DEFAULT_EXPERT_WIDTH)
    with_experts = {"num_experts": fields["num_experts"], "d_ff": whole("moe_intermediate_size", width)}
    return {"num_experts": 0, "d_ff": fields["d_ff"]}, with_experts


def _for_each(kinds: Sequence[bool], count: int) -> Sequence[bool]:
    return kinds if len(kinds) == count else list(kinds) * count


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
    if family.window.startswith("switched"):
        first = kinds.index(True) if any(kinds) else 0
        written |= {"use_sliding_window": window is not None, "max_window_layers": first}
    if family.window == "periodic":
        period = kinds.index(False) + 1 if not all(kinds) else len(kinds) + 1
        if kinds == [(i + 1) % period != 0 for i in range(len(kinds))]:
            written |= {"sliding_window_pattern": period}
    if "layer_types" in ATTRIBUTES[family.window] and (family.window != "switched" or len(set(kinds)) > 1):
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
