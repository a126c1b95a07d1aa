"""A folder in Hugging Face format: config.json, and safetensors in one file or in several with an index.

Nothing in it is trusted or run. Names in an index are those of files beside it; pickles are never opened. Weights may
be links to wherever the big disk is: they are read as safetensors or not at all. Any other file, which may be copied or
shown, is in the folder or a blob of the hub's cache (`models--.../blobs/...`).
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtp import reading
from jaxtp.checkpoint.safetensors import SafetensorsError, StoredTensor, read_header
from jaxtp.config import nearest_file
from jaxtp.entry import UserError
from jaxtp.reading import MAX_JSON, parse_json, read_bytes, shown

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_COPIED = 2**28
"""Bytes; the largest tokenizers have some 50 million."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


class HFError(UserError):
    """A folder that cannot be imported, or a model that cannot be exported; the message says why."""


@dataclass(frozen=True)
class Folder:
    """The content of a folder, read but for the weights."""

    path: Path
    attributes: Mapping[str, Any]
    """Attributes of config.json."""
    tensors: Mapping[str, StoredTensor]
    """By name."""


_DOWNLOAD = "; hf download NAME --local-dir FOLDER makes one"


def open_folder(path: Path) -> Folder:
    """Reads config.json and the headers of all weights.

    Raises:
      HFError: something is missing, damaged, or outside of the folder.
    """
    attributes = read_attributes(path)
    try:
        return Folder(path, attributes, _tensors(path))
    except SafetensorsError as error:
        raise HFError(str(error)) from None


def read_attributes(path: Path) -> dict[str, Any]:
    """The attributes in config.json.

    Raises:
      HFError: there is none, or it is damaged.
    """
    if not path.is_dir():
        raise HFError(
            f"{path}: {'not a folder' if path.exists() else 'no such folder'}{nearest_file(path) or _DOWNLOAD}"
        )
    if not os.path.lexists(path / CONFIG):
        raise HFError(f"{path}: no {CONFIG}; a folder in Hugging Face format has one, with model_type in it")
    return read_json(path, CONFIG)


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Returns the content of each of those files that is in a folder, by name.

    Raises:
      HFError: one is a link out of the folder, no regular file, or too large.
    """
    return {name: _read(folder, name, _MAX_COPIED) for name in names if os.path.lexists(folder / name)}


def _read(folder: Path, name: str, most: int) -> bytes:
    try:
        return read_bytes(reading.inside(folder, name), most)
    except OSError as error:
        raise HFError(f"{folder / name}: {error.strerror}") from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns the object in a file of a folder.

    Raises:
      HFError: it is a link out of the folder, no regular file, too large, or no JSON.
    """
    try:
        return parse_json(_read(folder, name, MAX_JSON), str(folder / name))
    except HFError:
        raise
    except ValueError as error:
        raise HFError(str(error)) from None


def _tensors(path: Path) -> dict[str, StoredTensor]:
    if os.path.lexists(path / WEIGHTS):
        return read_header(path / WEIGHTS)
    if os.path.lexists(path / INDEX):
        return _indexed(path, read_json(path, INDEX).get("weight_map"))
    raise HFError(f"{path}: {_why_no_weights(path)}")


def _why_no_weights(path: Path) -> str:
    if any(_SHARD.fullmatch(file.name) for file in path.iterdir()):
        return f"the weights are in several files, and {INDEX}, which says what is where, is missing"
    return refused_pickle(path, "transformers") or f"neither {WEIGHTS} nor {INDEX} is there"


def refused_pickle(path: Path, library: str) -> str | None:
    """Returns why nothing is loaded from a pickle in a folder, None where there is none.

    Args:
      path: the folder.
      library: one whose save_pretrained writes safetensors instead.
    """
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if not pickles:
        return None
    return (
        f"{pickles[0]} is a pickle, which can run any code when it is opened, and is never opened here; convert it to "
        f"safetensors where you trust it: save_pretrained(folder) of {library} does"
    )


def _indexed(path: Path, weight_map: Any) -> dict[str, StoredTensor]:
    """The tensors of all files that an index names, each of which must hold those that the index says."""
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise HFError(f"{path / INDEX}: weight_map should say for each tensor in which file it is")
    if not weight_map:
        raise HFError(f"{path / INDEX}: weight_map is empty")
    found: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise HFError(f"{path / INDEX}: {shown(name)!r} is not a safetensors file; no other is opened")
        if name != Path(name).name or "\\" in name or not name.isprintable():
            raise HFError(f"{path / INDEX}: '{shown(name)}' is not the plain name of a file in the folder")
        held = read_header(path / name)
        for tensor in held:
            if weight_map.get(tensor) != name:
                raise HFError(f"{path / name}: holds {shown(tensor)}, which {INDEX} does not say")
        found |= held
    missing = [tensor for tensor in weight_map if tensor not in found]
    if missing:
        file, name = weight_map[missing[0]], shown(missing[0])
        raise HFError(f"{path / file}: does not hold {name}, which {INDEX} says it does ({len(missing)} missing)")
    return found
