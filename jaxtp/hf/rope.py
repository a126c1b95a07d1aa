"""Rotary embedding as config.json spells it: transformers 5 in `rope_parameters`, older versions in two attributes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from jaxtp.hf.folder import HFError
from jaxtp.hf.values import positive, said, switch, whole
from jaxtp.layers.rope import UNSCALED, RopeScaling, rope_problems
from jaxtp.models.families.family import Family
from jaxtp.reading import shown

_ORIGINAL = "original_max_position_embeddings"
_FLAT = frozenset({"rope_parameters", "rope_theta", "rope_scaling", _ORIGINAL})
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
    "llama3": frozenset({"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"}
    ),
    "longrope": frozenset({"factor", _ORIGINAL, "short_factor", "long_factor", "attention_factor"}),
}
_ALWAYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def read_rope(attributes: Mapping[str, Any], family: Family, head_dim: int, *, windowed: bool) -> dict[str, Any]:
    """Returns the fields of a block that say how positions are rotated, as plain values.

    Args:
      attributes: of config.json.
      family: how they are spelled.
      head_dim: width of a head.
      windowed: of layers that have a window, which may rotate otherwise.

    Raises:
      HFError: a kind or parameter that is not known, a value that cannot be, or spellings that contradict each other.
    """
    if family.rope == "by_window":
        attributes = _of_layers(attributes, windowed=windowed)
    parameters = _parameters(attributes)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(known for known in _BY_KIND if known in family.rope_kinds)
        raise HFError(f"rope_type = {said(kind)} is not supported; a {family.model_type} can have {supported}")
    for key in parameters:
        if key not in _BY_KIND[kind] | _ALWAYS:
            raise HFError(f"{shown(key)} of the rotary embedding {kind!r} is not understood; it may change the model")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise HFError(f"partial_rotary_factor = {said(parameters['partial_rotary_factor'])}: only 1.0 is supported")
    default = _LOCAL_THETA if windowed and family.rope == "by_window" else family.rope_theta
    theta = _theta(attributes, parameters, default)
    scaling = _scaling(kind, parameters, {_ORIGINAL: family.original_length, **attributes})
    for problem in rope_problems(head_dim, theta, scaling):
        raise HFError(f"the rotary embedding {kind!r} cannot be: {problem}")
    told = {name: v for name, v in asdict(scaling).items() if name == "kind" or v != getattr(UNSCALED, name)}
    return {"rope_theta": theta, "rope_scaling": told}


def write_rope(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """Returns the older spelling, which every version reads.

    Before transformers 5, longrope was told the original length beside max_position_embeddings and took their quotient
    for the factor.
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
    longest = math.ceil(scaling.original_length * scaling.factor)  # transformers wants to be told
    beside = {_ORIGINAL: scaling.original_length} if scaling.kind == "longrope" else {}
    return {"rope_theta": theta, "rope_scaling": written, "max_position_embeddings": longest, **beside}


def _of_layers(attributes: Mapping[str, Any], *, windowed: bool) -> dict[str, Any]:
    """Returns the attributes as they would be if all layers rotated as those with a window do, or those without."""
    nested = attributes.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not set(nested) <= {FULL, SLIDING}:
        raise HFError(f"rope_parameters = {said(nested)}: should hold {FULL} and {SLIDING}")
    own = {**attributes, "rope_parameters": nested.get(SLIDING if windowed else FULL), _ORIGINAL: None}
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


def _original_length(parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> int:
    """As transformers 5 looks for it."""
    for value in (attributes.get(_ORIGINAL), parameters.get(_ORIGINAL), attributes.get("max_position_embeddings")):
        if value is not None:
            return whole(_ORIGINAL, value)
    raise HFError(f"{_ORIGINAL} of the rotary embedding is missing")


def _factors(name: str, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the factors of each frequency."""
    found = parameters.get(name)
    if not isinstance(found, list):
        raise HFError(f"{name} of the rotary embedding = {said(found)}: should be a list of numbers")
    return tuple(positive(f"{name}[{i}] of the rotary embedding", factor) for i, factor in enumerate(found))


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float | None:
    """Returns what is given, or follows from two `mscale`s (DeepSeek's form of yarn); None leaves it to the factor."""
    if parameters.get("attention_factor") is not None:
        return positive("attention_factor", parameters["attention_factor"])
    scales = [parameters.get(name) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    over, under = (0.1 * positive("mscale", scale) * math.log(factor) + 1 if factor > 1 else 1.0 for scale in scales)
    return positive("what follows from mscale and mscale_all_dim", over / under)
