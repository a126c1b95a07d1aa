"""Models whose folder holds more than the text model.

Examples are a vision tower, a projector, and prediction heads.

Such tensors are not read. An export copies them byte for byte, and keeps config.json but for what
training changed, if the folder that the model came from is still there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxtp.config.reading import truncate
from jaxtp.hf.families import WRAPPERS
from jaxtp.hf.families.family import LAYER, TEXT_PREFIXES, Family
from jaxtp.hf.model_folder import Attributes, Folder, HFError, quote, read_files
from jaxtp.hf.safetensors import StoredTensor

HEAD = "head.kernel"
TABLE = "embedding.embedding"
TEXT = "text_config"
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_SHARED = ("tie_word_embeddings", "quantization_config")
"""Attributes of a text model that may be outside of `text_config`, where they have precedence, as
in transformers."""
Tensors = Mapping[str, StoredTensor]


def text_attributes(attributes: Attributes) -> dict[str, Any]:
    """Returns the text model's part of config.json.

    Raises `HFError` if a multimodal model lacks it.
    """
    if (wrapper := WRAPPERS.get(str(attributes.get("model_type")))) is None:
        return dict(attributes)
    text = attributes.get(TEXT)
    if not isinstance(text, dict):
        raise HFError(
            f"{TEXT} = {quote(text)}: a {wrapper.model_type} describes its text model there"
        )
    if attributes.get("architectures") not in (None, [wrapper.architecture]):
        raise HFError(
            f"architectures = {quote(attributes['architectures'])} is not supported, only "
            f"{wrapper.architecture}"
        )
    shared = {name: attributes[name] for name in _SHARED if name in attributes}
    return {"model_type": wrapper.text_types[0], **text, **shared, "architectures": None}


def is_part(family: Family) -> bool:
    """Returns whether the folders of a family may hold more than the text model."""
    return family.wrapper is not None or family.later_layers or bool(family.others)


def full_names(stored: Tensors, family: Family, num_layers: int | None = None) -> Tensors:
    """Returns the text model's tensors by the names in the family's table.

    Some files lack its prefix.

    A text model that transformers took out of a multimodal folder has the names of that folder.
    Raises `HFError` if a multimodal file mixes names, or has none of the text model.
    """
    head, table = (name_of(ours, family) for ours in (HEAD, TABLE))
    names = {name: name for name in stored}
    bare = table.removeprefix(family.prefix)
    wrapped = family.wrapper is not None or (
        table not in stored and TEXT_PREFIXES[1][0] + bare in stored
    )
    if wrapped:
        before, before_head = _prefixes(stored, family)
        names = {name: _unwrapped(name, before, before_head, family) for name in stored}
    elif table not in stored and bare in stored:
        names = {name: name if name == head else family.prefix + name for name in stored}
    full: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if _is_other(name, names[name], family, num_layers):
            continue
        other = full.setdefault(names[name], tensor)
        is_bare = wrapped and name == names[name] and name.startswith(family.prefix)
        if other is not tensor or is_bare:
            both = " and ".join(truncate(each) for each in sorted({other.name, name}))
            raise HFError(f"{both}: the names of text tensors begin in two ways")
    return full


def require_prediction_heads(folder: Folder, family: Family, num_layers: int) -> None:
    """Raises `HFError` for layers past the last prediction head."""
    if not family.later_layers:
        return
    heads = folder.attributes.get("num_nextn_predict_layers", 1)
    last = num_layers + (heads if type(heads) is int else 0)
    layers = {
        int(found[1]): name
        for name in folder.tensors
        if (found := re.search(r"\.layers\.(\d{1,9})\.", name))
    }
    if layers and (most := max(layers)) >= last:
        raise HFError(
            f"num_hidden_layers = {num_layers} and num_nextn_predict_layers = {quote(heads)}, and "
            f"the file has {truncate(layers[most])}"
        )


def name_of(ours: str, family: Family) -> str:
    """Returns the file name of a parameter that every family has once."""
    return next(tensor.theirs for tensor in family.tensors if tensor.ours == ours)


def _prefixes(stored: Tensors, family: Family) -> tuple[str, str]:
    found = {form: name for form in TEXT_PREFIXES for name in stored if name.startswith(form[0])}
    if len(found) == 2:
        raise HFError(
            f"{' and '.join(map(truncate, found.values()))}: the names of text tensors begin in "
            "two ways"
        )
    if not found:
        raise HFError(
            f"no tensor's name begins with {' or '.join(form[0] for form in TEXT_PREFIXES)}: no "
            "text model"
        )
    return next(iter(found))


def _unwrapped(name: str, before: str, before_head: str, family: Family) -> str:
    if name.startswith(before):
        return family.prefix + name.removeprefix(before)
    bare = name.removeprefix(before_head)
    return bare if name.startswith(before_head) and bare.startswith("lm_head.") else name


def _is_other(name: str, full: str, family: Family, num_layers: int | None) -> bool:
    if (
        family.wrapper is not None
        and name == full
        and name.removeprefix("model.").startswith(family.wrapper.others)
    ):
        return True
    numbered = next(
        tensor.theirs.partition(LAYER)[0] for tensor in family.tensors if LAYER in tensor.theirs
    )
    layer = (
        re.match(rf"{re.escape(numbered)}(\d{{1,9}})\.", full)
        if family.later_layers and num_layers
        else None
    )
    return full.startswith(family.others) or (
        layer is not None and int(layer[1]) >= (num_layers or 0)
    )


@dataclass(frozen=True)
class Whole:
    """The folder that a text model came from."""

    folder: Folder
    family: Family
    text: Tensors
    """The text model's tensors, by their names in the family's table."""

    @property
    def others(self) -> Tensors:
        """Tensors that an export copies, by their names in the folder."""
        text = {tensor.name for tensor in self.text.values()}
        return {name: tensor for name, tensor in self.folder.tensors.items() if name not in text}

    def name(self, theirs: str) -> str:
        """Returns the name in this folder of a tensor in the family's table."""
        if self.family.wrapper is None:
            return theirs
        before, before_head = self._forms
        if theirs.startswith(self.family.prefix):
            return before + theirs.removeprefix(self.family.prefix)
        return before_head + theirs

    @cached_property
    def _forms(self) -> tuple[str, str]:
        return _prefixes(self.folder.tensors, self.family)

    def attributes(self, changes: Attributes) -> dict[str, Any]:
        """Returns config.json with changes of the text model's attributes."""
        gone = ("quantization_config", "auto_map")  # an export has no Python files
        kept = {name: value for name, value in self.folder.attributes.items() if name not in gone}
        if self.family.wrapper is None:
            return {**kept, **changes}
        text = dict[str, Any](kept[TEXT])  # type: ignore[call-overload]
        text.pop("quantization_config", None)
        return {**kept, TEXT: {**text, **changes}}

    def files(self) -> dict[str, bytes]:
        """Returns the files of its processors."""
        return read_files(self.folder.path, PROCESSOR_FILES)
