"""Models whose folder holds more than a text model: a vision tower, a projector, prediction heads.

An import does not read such tensors. An export copies them byte for byte, and keeps config.json
except for what training changed, if the folder that the model came from still exists.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxtp.config.reading import truncate
from jaxtp.hf.families import WRAPPERS
from jaxtp.hf.families.family import LAYER, TEXT_PREFIXES, Family
from jaxtp.hf.model_folder import Attributes, Folder, HFError, quote
from jaxtp.hf.safetensors import StoredTensor, StoredTensors

HEAD = "head.kernel"
TABLE = "embedding.embedding"
TEXT = "text_config"
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of image, video and audio processors."""
_SHARED = ("tie_word_embeddings", "quantization_config")
"""Attributes of a text model that may be outside of `text_config`, where they have precedence, as
in transformers."""

_NOT_OF_TEXT = {"model_type", "vision_config"}
"""Attributes that are not the text model's where it has no `text_config`."""


def text_attributes(attributes: Attributes) -> dict[str, Any]:
    """Returns the text model's part of config.json.

    Raises `HFError` if a multimodal model lacks it.
    """
    wrapper = WRAPPERS.get(str(attributes.get("model_type")))
    if wrapper is None:
        return dict(attributes)
    text = attributes.get(TEXT)
    if wrapper.can_be_flat and TEXT not in attributes:
        text = {name: attributes[name] for name in attributes.keys() - _NOT_OF_TEXT}
    if not isinstance(text, dict):
        raise HFError(
            f"{TEXT} = {quote(text)}: a {wrapper.model_type} describes its text model there"
        )
    shared = {name: attributes[name] for name in _SHARED if name in attributes}
    architectures = attributes.get("architectures")
    return {
        "model_type": wrapper.text_types[0],
        **text,
        **shared,
        "architectures": architectures,
    }


def is_part(family: Family) -> bool:
    """Returns whether the folders of a family may hold more than the text model."""
    return family.wrapper is not None or family.later_layers or bool(family.other_tensors)


def full_names(
    stored: StoredTensors, family: Family, num_layers: int | None = None
) -> StoredTensors:
    """Returns the text model's tensors by the names in the family's table.

    A file may lack the family's prefix. A text model that transformers extracted from a multimodal
    folder has the names of that folder. Raises `HFError` if a multimodal file mixes names, or has
    no text model.
    """
    head = name_of(HEAD, family)
    table = name_of(TABLE, family)
    bare = table.removeprefix(family.prefix)
    has_prefix = table in stored
    wrapped = family.wrapper is not None or (
        not has_prefix and any(prefix + bare in stored for prefix in dict(TEXT_PREFIXES))
    )
    full_names = {name: name for name in stored}
    if wrapped:
        prefix, head_prefix = _prefixes(stored, family)
        full_names = {name: _unwrapped(name, prefix, head_prefix, family) for name in stored}
    elif not has_prefix and bare in stored:
        full_names = {name: family.prefix + name for name in stored}
        full_names[head] = head
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        full_name = full_names[name]
        if _is_other(name, full_name, family, num_layers):
            continue
        other = tensors.setdefault(full_name, tensor)
        is_bare = wrapped and prefix != family.prefix and name == full_name
        is_bare &= name.startswith(family.prefix)
        if other is not tensor or is_bare:
            names = " and ".join(map(truncate, sorted({other.name, name})))
            raise HFError(f"{names}: the names of text tensors begin in two ways")
    return tensors


def require_prediction_heads(folder: Folder, family: Family, num_layers: int) -> None:
    """Raises `HFError` for layers past the last prediction head."""
    if not family.later_layers:
        return
    heads = folder.attributes.get("num_nextn_predict_layers", 1)
    last = num_layers + (heads if type(heads) is int else 0)
    for name in folder.tensors:
        match = re.search(r"\.layers\.(\d{1,9})\.", name)
        if match is not None and int(match[1]) >= last:
            raise HFError(
                f"num_hidden_layers = {num_layers} and num_nextn_predict_layers = {quote(heads)}, "
                f"and the file has {truncate(name)}"
            )


def name_of(path: str, family: Family) -> str:
    """Returns the file name of a parameter that every family has once."""
    return next(tensor.name for tensor in family.tensors if tensor.path == path)


def layer_pattern(family: Family) -> re.Pattern[str]:
    """Returns the pattern that full names of layers' tensors begin with; it captures the number."""
    in_layer = next(tensor.name for tensor in family.tensors if LAYER in tensor.name)
    return re.compile(rf"{re.escape(in_layer.partition(LAYER)[0])}(\d{{1,9}})\.")


def _prefixes(stored: StoredTensors, family: Family) -> tuple[str, str]:
    """Returns the entry of `TEXT_PREFIXES` that matches the text model's names.

    Qwen2-VL's have the family's own prefix.
    """
    examples: dict[tuple[str, str], str] = {}
    table = name_of(TABLE, family)
    if table in stored:
        examples[family.prefix, ""] = table
    for name in stored:
        for prefixes in TEXT_PREFIXES:
            if name.startswith(prefixes[0]):
                examples.setdefault(prefixes, truncate(name))
    if len(examples) > 1:
        names = " and ".join(examples.values())
        raise HFError(f"{names}: the names of text tensors begin in two ways")
    if not examples:
        beginnings = " or ".join(dict(TEXT_PREFIXES))
        raise HFError(f"no tensor's name begins with {beginnings}: no text model")
    return next(iter(examples))


def _unwrapped(name: str, prefix: str, head_prefix: str, family: Family) -> str:
    if name.startswith(prefix):
        # transformers writes Kimi K2.5's layers as blocks, which only its tower has on the Hub.
        return family.prefix + re.sub(r"^blocks\.", "layers.", name.removeprefix(prefix))
    bare = name.removeprefix(head_prefix)
    return bare if name.startswith(head_prefix) and bare.startswith("lm_head.") else name


def _is_other(name: str, full_name: str, family: Family, num_layers: int | None) -> bool:
    """Returns whether a tensor is outside the text model or belongs to a prediction head."""
    outside = () if family.wrapper is None else family.wrapper.other_tensors
    if name == full_name and name.removeprefix("model.").startswith(outside):
        return True
    if full_name.startswith(family.other_tensors):
        return True
    if not family.later_layers or num_layers is None:
        return False
    match = layer_pattern(family).match(full_name)
    return match is not None and int(match[1]) >= num_layers


@dataclass(frozen=True)
class Whole:
    """The folder that a text model came from."""

    folder: Folder
    family: Family
    text: StoredTensors
    """The text model's tensors, by their names in the family's table."""

    @property
    def other_tensors(self) -> StoredTensors:
        """Tensors that an export copies, by their names in the folder."""
        text = {tensor.name for tensor in self.text.values()}
        return {name: tensor for name, tensor in self.folder.tensors.items() if name not in text}

    @property
    def prediction_heads(self) -> list[str]:
        """Names of tensors that predict further tokens."""
        outside = () if self.family.wrapper is None else self.family.wrapper.other_tensors
        names = self.other_tensors
        return [name for name in names if not name.removeprefix("model.").startswith(outside)]

    def name(self, full_name: str) -> str:
        """Returns the name in this folder of a tensor in the family's table."""
        if self.family.wrapper is None:
            return full_name
        if full_name in self.text:
            return self.text[full_name].name
        prefix, head_prefix = self._prefixes
        if full_name.startswith(self.family.prefix):
            return prefix + full_name.removeprefix(self.family.prefix)
        return head_prefix + full_name

    @cached_property
    def _prefixes(self) -> tuple[str, str]:
        return _prefixes(self.folder.tensors, self.family)

    def attributes(self, changes: Attributes) -> dict[str, Any]:
        """Returns config.json with changes of the text model's attributes."""
        attributes = dict[str, Any](self.folder.attributes)
        attributes.pop("quantization_config", None)
        # An export has no Python files.
        attributes.pop("auto_map", None)
        if self.family.wrapper is None or TEXT not in attributes:
            return {**attributes, **changes}
        text = dict[str, Any](attributes[TEXT])
        text.pop("quantization_config", None)
        return {**attributes, TEXT: {**text, **changes}}
