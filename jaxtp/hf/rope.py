"""Rotary embedding as config.json spells it: transformers 5 in `rope_parameters`, older versions in two attributes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from jaxtp.hf.folder import HFError
from jaxtp.hf.values import positive, said, switch, whole
from jaxtp.layers.rope import UNSCALED, RopeScaling
from jaxtp.models.families.family import Family
from jaxtp.reading import shown

_FLAT = frozenset({"rope_parameters", "rope_theta", "rope_scaling", "original_max_position_embeddings"})
ATTRIBUTES: Mapping[str, frozenset[str]] = {
    "never": frozenset(),
    "one": _FLAT,
    "by_window": _FLAT | {"rope_local_base_freq"},
}
"""Read, by the family's kind of rotary embedding."""
FULL, SLIDING = "full_attention", "sliding_attention"
_LOCAL_THETA = 10_000.0
"""Base in layers with a window, if config.json says nothing."""
_BY_KIND: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"}
        | {"mscale", "mscale_all_dim"}
    ),
}
_ALWAYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def read_rope(attributes: Mapping[str, Any], family: Family, *, windowed: bool) -> dict[str, Any]:
    """Returns the fields of a block that say how positions are rotated, as plain values.

    Args:
      attributes: of config.json.
      family: how they are spelled.
      windowed: of layers that have a window, which may rotate otherwise.

    Raises:
      HFError: a kind or parameter that is not known, or two spellings that contradict each other.
    """
    if family.rope == "by_window":
        attributes = _of_layers(attributes, windowed=windowed)
    parameters = _parameters(attributes)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(known for known in _BY_KIND if known in family.rope_kinds)
        raise HFError(f"rope_type = {said(kind)} is not supported; a {family.model_type} can have {supported}")
    for key in parameters:
        if key not in _BY_KIND[kind] | _ALWAYS:
            raise HFError(f"{shown(key)} of the rotary embedding {kind!r} is not understood; it may change the model")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise HFError(f"partial_rotary_factor = {said(parameters['partial_rotary_factor'])}: only 1.0 is supported")
    default = _LOCAL_THETA if windowed and family.rope == "by_window" else family.rope_theta
    scaling = asdict(_scaling(kind, parameters, attributes))
    told = {name: value for name, value in scaling.items() if name == "kind" or value != getattr(UNSCALED, name)}
    return {"rope_theta": _theta(attributes, parameters, default), "rope_scaling": told}


def write_rope(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """The older spelling, which every version reads."""
    if scaling.kind == "none":
        return {"rope_theta": theta, "rope_scaling": None}
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        written |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        written |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    if scaling.kind == "linear":
        return {"rope_theta": theta, "rope_scaling": written}
    written["original_max_position_embeddings"] = scaling.original_length
    longest = math.ceil(scaling.original_length * scaling.factor)  # transformers wants to be told
    return {"rope_theta": theta, "rope_scaling": written, "max_position_embeddings": longest}


def _of_layers(attributes: Mapping[str, Any], *, windowed: bool) -> dict[str, Any]:
    """Returns the attributes as they would be if all layers rotated as those with a window do, or those without."""
    nested = attributes.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not set(nested) <= {FULL, SLIDING}:
        raise HFError(f"rope_parameters = {said(nested)}: should hold {FULL} and {SLIDING}")
    own = {**attributes, "rope_parameters": nested.get(SLIDING if windowed else FULL)}
    return own | {"rope_theta": attributes.get("rope_local_base_freq"), "rope_scaling": None} if windowed else own


def _parameters(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of whichever spelling is there."""
    spelled = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = attributes.get(name)
        if value is not None and not isinstance(value, dict):
            raise HFError(f"{name} = {said(value)} should be an object")
        if value:
            spelled[name] = value
    kinds = {name: {**value, "rope_theta": None} for name, value in spelled.items()}
    if len(kinds) == 2 and kinds["rope_parameters"] != kinds["rope_scaling"] | {"rope_theta": None}:
        raise HFError("rope_parameters and rope_scaling contradict each other; remove the one that does not hold")
    return dict(next(iter(spelled.values()), {}))


def _theta(attributes: Mapping[str, Any], parameters: Mapping[str, Any], default: float) -> float:
    given = {
        positive("rope_theta", value)
        for value in (parameters.get("rope_theta"), attributes.get("rope_theta"))
        if value is not None
    }
    if len(given) > 1:
        raise HFError(f"rope_theta is there twice, as {' and as '.join(map(str, sorted(given)))}")
    return given.pop() if given else default


def _scaling(kind: str, parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> RopeScaling:
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
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=length,
        beta_fast=given("beta_fast", 32.0),
        beta_slow=given("beta_slow", 1.0),
        attention_factor=_attention_factor(parameters, factor),
        truncate=switch("truncate of the rotary embedding", parameters.get("truncate", True)),
    )


def _original_length(parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> int:
    """As transformers 5 looks for it."""
    name = "original_max_position_embeddings"
    for value in (attributes.get(name), parameters.get(name), attributes.get("max_position_embeddings")):
        if value is not None:
            return whole(name, value)
    raise HFError(f"{name} of the rotary embedding is missing")


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float | None:
    """Returns what is given, or follows from two `mscale`s (DeepSeek's form of yarn); None leaves it to the factor."""
    if parameters.get("attention_factor") is not None:
        return positive("attention_factor", parameters["attention_factor"])
    scales = [parameters.get(name) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    over, under = (0.1 * positive("mscale", scale) * math.log(factor) + 1 if factor > 1 else 1.0 for scale in scales)
    return positive("what follows from mscale and mscale_all_dim", over / under)
