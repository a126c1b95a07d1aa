"""Sliding windows as config.json spells them: always on (Mistral), or by a switch and by layer (Qwen)."""

from collections.abc import Mapping
from typing import Any

from jaxtp.hf.folder import HFError
from jaxtp.hf.values import said, switch, whole
from jaxtp.models.families.family import Family

ATTRIBUTES: Mapping[str, frozenset[str]] = {
    "never": frozenset(),
    "always": frozenset({"sliding_window"}),
    "switched": frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
}
"""Read, by the family's kind of window."""
_DEFAULT, _DEFAULT_LAYERS = 4096, 28
"""What transformers assumes where config.json is silent."""
FULL, SLIDING = "full_attention", "sliding_attention"


def read_window(attributes: Mapping[str, Any], family: Family) -> int | None:
    """The window of every layer, or None.

    Raises:
      HFError: some layers have one and others have not.
    """
    on = {
        "never": lambda: False,
        "always": lambda: True,
        "switched": lambda: switch("use_sliding_window", attributes.get("use_sliding_window", False)),
    }[family.window]()
    window = attributes.get("sliding_window", _DEFAULT) if on else None
    if window is None:
        return None
    layers = _sliding_layers(attributes) if family.window == "switched" else [True]
    if any(layers) and not all(layers):
        raise HFError(
            "a sliding window in some layers and not in others (max_window_layers, layer_types) is not supported; "
            "only in all or in none"
        )
    return whole("sliding_window", window) if all(layers) else None


def write_window(window: int | None, family: Family) -> dict[str, Any]:
    """The attributes of a window in every layer, or in none."""
    if family.window == "never":
        return {}
    written: dict[str, Any] = {"sliding_window": window}
    if family.window == "switched":
        written |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    return written


def _sliding_layers(attributes: Mapping[str, Any]) -> list[bool]:
    count, kinds = whole("num_hidden_layers", attributes.get("num_hidden_layers")), attributes.get("layer_types")
    if kinds is None:
        first = attributes.get("max_window_layers", _DEFAULT_LAYERS)
        if type(first) is not int or first < 0:
            raise HFError(f"max_window_layers = {said(first)}: should be a whole number")
        return [False] * (first > 0) + [True] * (count > first)  # those before it, and those from it on
    if not isinstance(kinds, list) or len(kinds) != count or not set(map(str, kinds)) <= {FULL, SLIDING}:
        raise HFError(f"layer_types = {said(kinds)}: should be {FULL} or {SLIDING} for each of {count} layers")
    return [kind == SLIDING for kind in kinds]
