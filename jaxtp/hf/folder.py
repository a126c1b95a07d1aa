"""A folder in Hugging Face format: config.json, and safetensors in one file or in several with an index.

Nothing in it is trusted or run. Names in an index are those of files beside it; a link may lead to another place in
the folder or, in a cache of the hub (`models--.../snapshots/...`), into the `blobs` beside it; pickles are never
opened.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtp.checkpoint.safetensors import SafetensorsError, StoredTensor, parse_json, read_header
from jaxtp.config import nearest_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_JSON = 100_000_000
"""Bytes; the index of the largest models has a few million."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


class HFError(ValueError):
    """A folder that cannot be imported, or a model that cannot be exported; the message says why."""


@dataclass(frozen=True)
class Folder:
    """What is there, read but for the weights."""

    path: Path
    attributes: Mapping[str, Any]
    """Of config.json."""
    tensors: Mapping[str, StoredTensor]
    """By name."""


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
        raise HFError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}{nearest_file(path)}")
    if not (path / CONFIG).exists() and not (path / CONFIG).is_symlink():
        raise HFError(f"{path}: no {CONFIG}; a folder in Hugging Face format has one, with model_type in it")
    return _read_json(path, CONFIG)


def inside(folder: Path, name: str) -> Path:
    """The file of that name in a folder.

    Raises:
      HFError: it is not a plain name, leads out of the folder, or is no regular file.
    """
    if name != Path(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise HFError(f"{folder}: {name[:200]!r} is not the plain name of a file in the folder")
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise HFError(f"{path}: a link that leads nowhere ({error})") from None
    if not (real.is_relative_to(home) or _is_blob(real, home)):
        raise HFError(f"{path} is a link to {real}, outside of the folder; copy the file into it")
    if not real.exists():
        raise HFError(f"{path}: no such file")
    if not real.is_file():
        raise HFError(f"{path}: not a regular file")
    return path


def _is_blob(real: Path, home: Path) -> bool:
    """Whether a file is where the hub's cache keeps those that the folder of a snapshot links to."""
    return home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = inside(folder, name)
    try:
        if path.stat().st_size > _MAX_JSON:
            raise HFError(f"{path}: {path.stat().st_size:,} bytes, too many to be what its name says")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise HFError(f"{path}: {error.strerror}") from None
    except SafetensorsError as error:
        raise HFError(str(error)) from None


def _tensors(path: Path) -> dict[str, StoredTensor]:
    if (path / WEIGHTS).exists() or (path / WEIGHTS).is_symlink():
        return read_header(inside(path, WEIGHTS))
    if (path / INDEX).exists() or (path / INDEX).is_symlink():
        return _indexed(path, _read_json(path, INDEX).get("weight_map"))
    raise HFError(f"{path}: {_why_no_weights(path)}")


def _why_no_weights(path: Path) -> str:
    if any(_SHARD.fullmatch(file.name) for file in path.iterdir()):
        return f"the weights are in several files, and {INDEX}, which says what is where, is missing"
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can run any code when it is opened, and is never opened here; convert it "
            "to safetensors where you trust it: save_pretrained(folder) of transformers does"
        )
    return f"neither {WEIGHTS} nor {INDEX} is there"


def _indexed(path: Path, weight_map: Any) -> dict[str, StoredTensor]:
    """The tensors of all files that an index names, each of which must hold those that the index says."""
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise HFError(f"{path / INDEX}: weight_map should say for each tensor in which file it is")
    if not weight_map:
        raise HFError(f"{path / INDEX}: weight_map is empty")
    found: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise HFError(f"{path / INDEX}: {name[:200]!r} is not a safetensors file; no other is opened")
        held = read_header(inside(path, name))
        for tensor in held:
            if weight_map.get(tensor) != name:
                raise HFError(f"{path / name}: holds {tensor}, which {INDEX} does not say")
        found |= held
    missing = [tensor for tensor in weight_map if tensor not in found]
    if missing:
        file = weight_map[missing[0]]
        raise HFError(f"{path / file}: does not hold {missing[0]}, which {INDEX} says it does ({len(missing)} missing)")
    return found
