"""config.json into a `ModelConfig`, and back."""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtp import config as configuration
from jaxtp.hf import layers, rope
from jaxtp.hf.folder import CONFIG, HFError, open_folder, read_attributes
from jaxtp.hf.names import dtypes
from jaxtp.hf.values import READ, choice, said, whole
from jaxtp.layers.experts import ExpertsConfig
from jaxtp.layers.mlp import MLPConfig
from jaxtp.models.config import ModelConfig, architecture
from jaxtp.models.families import FAMILIES
from jaxtp.models.families.family import Attribute, Family, says_nothing
from jaxtp.reading import shown

_LISTED = 10
"""Attributes in a message."""
_TOLD = ("hidden_act", "attention_dropout")
"""Attributes that can have one value, and are written."""


_OF_EXPERTS = {
    field.name: field.default for field in dataclasses.fields(ExpertsConfig) if not hasattr(MLPConfig, field.name)
}
"""The settings of a layer's experts, with their defaults."""
_MAX_LOST = 4
"""Settings in a message that a family cannot have."""


def read_config(path: str | Path, ignore_config: Collection[str] = ()) -> ModelConfig:
    """The model that the config.json of a folder in Hugging Face format describes.

    Args:
      path: the folder.
      ignore_config: attributes that are not understood and are known to say nothing of what the model computes.

    Raises:
      HFError: a family that is not supported, or an attribute that is not understood; the message names it.
    """
    folder = Path(path)
    return model_config(read_attributes(folder), str(folder / CONFIG), ignore_config)


def stored_dtype(path: str | Path) -> str | None:
    """The dtype of a model, such as bfloat16, as its config.json or else its weights say; None if neither does.

    Raises:
      HFError: as `read_config`.
    """
    folder = Path(path)
    attributes = read_attributes(folder)
    said = attributes.get("dtype") or attributes.get("torch_dtype")
    if isinstance(said, str):
        return said
    try:
        stored = dtypes(open_folder(folder).tensors, family_of(attributes, str(folder / CONFIG)))
    except HFError:
        return None
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(stored.pop()) if len(stored) == 1 else None


def family_of(attributes: Mapping[str, Any], source: str) -> Family:
    """The family that `model_type` names.

    Raises:
      HFError: it names none of those that are supported.
    """
    model_type = attributes.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        wrong = f"model_type = {said(model_type)} is not supported" if model_type else "model_type is missing"
        raise HFError(f"{source}: {wrong}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def model_config(attributes: Mapping[str, Any], source: str, ignore_config: Collection[str] = ()) -> ModelConfig:
    """The model that attributes describe.

    Args:
      attributes: of config.json.
      source: where they are from, for messages.
      ignore_config: as `read_config`.

    Raises:
      HFError: as `read_config`.
    """
    family, given = family_of(attributes, source), attributes
    try:
        attributes = _by_their_names(attributes, family)
    except HFError as error:
        raise HFError(f"{source}: {error}") from None
    problems = [*_not_ignored(attributes, family, ignore_config), *_not_understood(attributes, family, ignore_config)]
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise HFError(f"{source}: {'; '.join([*problems[:_LISTED], *more])}")
    try:
        fields = _fields(attributes, family)
    except HFError as error:
        raise HFError(f"{source}: {_as_spelled(str(error), given, family)}") from None
    try:
        return configuration.validate(ModelConfig, fields, source=f"{source} describes a model that cannot be")
    except configuration.ConfigError as error:
        raise HFError(str(error)) from None


def write_attributes(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    """The attributes of config.json that describe a model, spelled so that every version of transformers reads them.

    Args:
      config: the model.
      family: of which it is.
      dtype: of the stored tensors, as PyTorch calls it.

    Raises:
      HFError: models of that family cannot be like this one.
    """
    written = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **dict(_written(config, family)),
        **({"head_dim": config.head_dim} if family.head_dim else {}),
        **{name: family.required[name] for name in _TOLD if name in family.required},
        **layers.write_layers(config, family),
        "torch_dtype": dtype,
    }
    try:
        read = _described(model_config(written, "config.json"))
    except HFError as error:
        raise HFError(f"a {family.model_type} cannot be this model: {error}") from None
    if lost := configuration.differences(_described(config), read, "model."):
        more = f"; and {len(lost) - _MAX_LOST} more" if len(lost) > _MAX_LOST else ""
        found = "; ".join(shown(line) for line in lost[:_MAX_LOST]) + more
        raise HFError(f"a {family.model_type} cannot be this model (it has -> it would become): {found}")
    return written


def _written(config: ModelConfig, family: Family) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that are read one by one; one that cannot say what the model is says its default."""
    config = _uniform(config)
    for attribute in reversed(family.attributes):  # the first of a name holds
        value = getattr(config, attribute.fields[0])
        if isinstance(attribute.kind, Mapping):
            spelled = (theirs for theirs, ours in attribute.kind.items() if ours == value)
            yield attribute.name, next(spelled, attribute.default)
        elif value is not None and attribute.power != 1:
            number = round(value ** (1 / attribute.power), 6)
            yield attribute.name, int(number) if number.is_integer() else number
        elif value is not None or attribute.can_be_null:
            yield attribute.name, value


def _uniform(config: ModelConfig) -> ModelConfig:
    """Returns the model with the settings that all of its blocks have, and those of experts that some have."""
    blocks = config.block_kinds()
    sparse = next((block for block in blocks if block.num_experts), blocks[0])
    names = [field.name for field in dataclasses.fields(config.block())]
    agreed = [name for name in names if len({repr(getattr(block, name)) for block in blocks}) == 1]
    return dataclasses.replace(config, **{name: getattr(sparse, name) for name in {*agreed, *_OF_EXPERTS}})


def _described(config: ModelConfig) -> dict[str, Any]:
    """Returns what a model is as plain values: equal for two that list the settings of their blocks in other ways."""
    found = {name: value for name, value in architecture(config).items() if name not in ("first_blocks", "pattern")}
    plain = {block: configuration.to_plain(block) for _, _, block in config.kinds()}
    for block, settings in plain.items():  # those of experts mean nothing where there are none
        settings |= {} if block.num_experts else _OF_EXPERTS
    own = next(iter(plain.values()))
    if len(plain) > 1:
        every = {name: [plain[block][name] for block in config.layers()] for name in own}
        own = {name: found if any(value != found[0] for value in found) else found[0] for name, found in every.items()}
    return found | {name: value for name, value in own.items() if name in found}


def choose_family(config: ModelConfig, name: str | None) -> Family:
    """The family of that name, or the first that can be this model.

    Raises:
      HFError: none can, or there is none of that name.
    """
    if name is not None:
        return family_of({"model_type": name}, "--family")
    reasons = []
    of_experts = [family for family in FAMILIES.values() if _has_experts(family)]
    for family in of_experts if config.most_experts else FAMILIES.values():
        try:
            write_attributes(config, family, "float32")
        except HFError as error:
            reasons.append(str(error))
        else:
            return family
    raise HFError("no family can be this model:\n" + "\n".join(f"  {reason}" for reason in reasons))


def _has_experts(family: Family) -> bool:
    return any("num_experts" in attribute.fields for attribute in family.attributes)


def _not_understood(attributes: Mapping[str, Any], family: Family, ignored: Collection[str]) -> Iterator[str]:
    """Every attribute that stops an import."""
    known = _read_attributes(family)
    for name, value in attributes.items():
        if name in family.required:
            only = family.required[name]
            if value != only and not (value is None and only is False):
                yield f"{name} = {said(value)} is not supported, only {only!r}: it is known to change the model"
        elif not (name in known or name in ignored or says_nothing(name, value, family)):
            yield (
                f"the attribute {shown(name)} = {said(value)} of a {family.model_type} is not understood, and taken "
                "for one that could change the model; if you know that it says nothing of what the model computes, "
                f"pass over it by --ignore-config {shlex.quote(shown(name))}"
            )
    if attributes.get("architectures") not in (None, [family.architecture]):
        yield f"architectures = {said(attributes['architectures'])} is not supported, only {family.architecture}"


def _not_ignored(attributes: Mapping[str, Any], family: Family, ignored: Collection[str]) -> Iterator[str]:
    """Yields the mistakes in the names of attributes to pass over."""
    for name in ignored:
        if name in family.required or name in _read_attributes(family) or name == "architectures":
            yield f"--ignore-config {shown(name)}: it is known to change the model, and cannot be passed over"
        elif name not in attributes:
            close = difflib.get_close_matches(name, attributes, n=1)
            hint = f"; did you mean {shown(close[0])}?" if close else ""
            yield f"--ignore-config {shown(name)}: there is no such attribute{hint}"


def _read_attributes(family: Family) -> frozenset[str]:
    """Names of the attributes that a model of a family follows from."""
    own = {attribute.name for attribute in family.attributes} | ({"head_dim"} if family.head_dim else set())
    by_layer = {family.scale_by_layer} if family.scale_by_layer is not None else set()
    dense = layers.DENSE_LAYERS if family.dense_layers else frozenset()
    return rope.ATTRIBUTES[family.rope] | layers.ATTRIBUTES[family.window] | own | by_layer | dense | {"model_type"}


def _by_their_names(attributes: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the attributes without other names for them.

    Raises:
      HFError: one is there by two names, with two values.
    """
    found = dict(attributes)
    for alias, name in family.aliases.items():
        if alias in found and found.setdefault(name, found[alias]) != found.pop(alias):
            raise HFError(
                f"{alias} = {said(attributes[alias])} and {name} = {said(attributes[name])} are one attribute of a "
                f"{family.model_type}"
            )
    return found


def _as_spelled(message: str, attributes: Mapping[str, Any], family: Family) -> str:
    """Returns a message with the names that attributes have where they are from."""
    for alias, name in family.aliases.items():
        if alias in attributes and name not in attributes:
            message = re.sub(rf"\b{name}\b", alias, message)
    return message


def _fields(attributes: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that the attributes come to."""
    fields = dict(family.always)
    for attribute in family.attributes:
        fields |= dict.fromkeys(attribute.fields, _read(attributes, attribute))
    fields["head_dim"] = _head_dim(attributes, family, fields)
    _check_experts(family, fields)
    return fields | layers.read_layers(attributes, family, fields)


def _check_experts(family: Family, fields: Mapping[str, Any]) -> None:
    most, chosen = fields.get("num_experts"), fields.get("experts_per_token", 0)
    if most is not None and chosen > most:
        names = {field: attribute.name for attribute in family.attributes for field in attribute.fields}
        raise HFError(
            f"{names['experts_per_token']} = {chosen}: should be at most {names['num_experts']}, which is {most}"
        )


def _read(attributes: Mapping[str, Any], attribute: Attribute) -> Any:
    """Returns what fields have by an attribute."""
    name, value = attribute.name, attributes.get(attribute.name, attribute.default)
    if value is None and attribute.other is not None:
        value = attributes.get(attribute.other)
        value = value * attribute.times if type(value) is int else value
    if isinstance(attribute.kind, Mapping):
        return choice(name, value, attribute.kind)
    if value is None and attribute.can_be_null:
        return None
    number = READ[attribute.kind](name, value)
    return number if attribute.power == 1 else number**attribute.power


def _head_dim(attributes: Mapping[str, Any], family: Family, fields: Mapping[str, Any]) -> int:
    given = attributes.get("head_dim") if family.head_dim else None
    if given is not None or family.default_head_dim is not None:
        return whole("head_dim", family.default_head_dim if given is None else given)
    if fields["d_model"] % fields["num_heads"]:
        raise HFError(
            f"hidden_size = {fields['d_model']} is not divisible by num_attention_heads = {fields['num_heads']}, and "
            "there is no head_dim"
        )
    return int(fields["d_model"] // fields["num_heads"])
