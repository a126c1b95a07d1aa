"""Reads an untrusted Hugging Face folder: config.json, and safetensors in one file or several with an index.

Nothing in it is executed; pickles are never opened. Weights may be links to any file, since they are parsed only as
safetensors. Other files may be copied or printed: they must be in the folder or the hub's cache (`models--.../blobs/`).
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxtp.config import reading
from jaxtp.config.reading import MAX_JSON, parse_json, read_bytes, truncate
from jaxtp.config.schema import ConfigError, missing_model
from jaxtp.hf.safetensors import HFError as HFError
from jaxtp.hf.safetensors import StoredTensor, read_header, with_scales

T = TypeVar("T")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_COPIED = 2**28  # Bytes; the largest tokenizers have about 50 million
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
_FP8_BLOCK = (128, 128)  # Default of weight_block_size
_LISTED = 10  # Maximum number of problems in a message
Attributes = Mapping[str, object]  # The JSON object in a configuration file


@dataclass(frozen=True)
class Folder:
    """A model's folder, without its weights."""

    path: Path
    attributes: Attributes
    tensors: Mapping[str, StoredTensor]


def open_folder(path: Path) -> Folder:
    """Reads config.json and all weight headers."""
    attributes, tensors = read_attributes(path), _read_headers(path)
    if any(tensor.dtype in ("F8_E4M3", "U8") for tensor in tensors.values()):
        tensors = with_scales(tensors, _block_shape(attributes.get("quantization_config")))
    return Folder(path, attributes, tensors)


def _block_shape(quantization: object) -> tuple[int, int]:
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if block is None:
        return _FP8_BLOCK
    if not isinstance(block, list) or len(block) != len(_FP8_BLOCK):
        raise HFError(f"weight_block_size = {quote(block)}: should be two sizes")
    height, width = (whole("weight_block_size", size) for size in block)
    return height, width


@contextmanager
def prefix_errors(source: Path | str) -> Iterator[None]:
    """Raises errors as `HFError`, with the name of the folder or file before the message."""
    try:
        yield
    except (ConfigError, HFError) as error:
        text = str(error)
        raise HFError(text if text.startswith(str(source)) else f"{source}: {text}") from None


def join_problems(problems: list[str]) -> str:
    """Returns the first problems in one message."""
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    return "; ".join([*problems[:_LISTED], *more])


def read_attributes(path: Path, name: str = CONFIG, kind: str = "Hugging Face format") -> dict[str, Any]:
    """Reads a folder's configuration; raises `HFError` if it is missing or damaged."""
    if not path.is_dir():
        problem = "not a folder" if path.exists() else "no such folder"
        raise HFError(f"{path}: {problem}{missing_model(path)}")
    if not os.path.lexists(path / name):
        raise HFError(f"{path}: no {name}; a folder in {kind} has one")
    return read_json(path, name)


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Returns the contents of `names` that exist; refuses large files and links out of the folder."""
    return {name: _read(folder, name, _MAX_COPIED) for name in names if os.path.lexists(folder / name)}


def _read(folder: Path, name: str, most: int) -> bytes:
    try:
        return read_bytes(reading.inside(folder, name), most)
    except OSError as error:
        raise HFError(f"{folder / name}: {error.strerror}") from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Reads a JSON object."""
    content = _read(folder, name, MAX_JSON)
    try:
        return parse_json(content, str(folder / name))
    except ValueError as error:
        raise HFError(str(error)) from None


def _read_headers(path: Path) -> dict[str, StoredTensor]:
    if os.path.lexists(path / WEIGHTS):
        return read_header(path / WEIGHTS)
    if os.path.lexists(path / INDEX):
        return _read_indexed(path, read_json(path, INDEX).get("weight_map"))
    if any(_SHARD.fullmatch(file.name) for file in path.iterdir()):
        raise HFError(f"{path}: the weights are in several files, and {INDEX}, which maps tensors to files, is missing")
    reason = explain_pickle(path, "transformers") or f"neither {WEIGHTS} nor {INDEX} is there"
    raise HFError(f"{path}: {reason}")


def explain_pickle(path: Path, library: str) -> str | None:
    """Returns why a folder's pickle is not loaded; `library` converts it. None without a pickle."""
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if not pickles:
        return None
    return (
        f"{pickles[0]} is a pickle, which can run any code when it is opened, so jaxtp never opens it; if you "
        f"trust it, convert it to safetensors by save_pretrained(folder) of {library}"
    )


def _read_indexed(path: Path, weight_map: object) -> dict[str, StoredTensor]:
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise HFError(f"{path / INDEX}: weight_map should map the name of each tensor to its file")
    if not weight_map:
        raise HFError(f"{path / INDEX}: weight_map is empty")
    tensors: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise HFError(f"{path / INDEX}: {truncate(name)!r} is not a safetensors file; no other is opened")
        if name != Path(name).name or "\\" in name or not name.isprintable():
            raise HFError(f"{path / INDEX}: '{truncate(name)}' is not the name of a file in the folder")
        header = read_header(path / name)
        for tensor in header:
            if weight_map.get(tensor) != name:
                raise HFError(f"{path / name}: holds {truncate(tensor)}, which {INDEX} does not list there")
        tensors |= header
    if missing := [tensor for tensor in weight_map if tensor not in tensors]:
        file, name = weight_map[missing[0]], truncate(missing[0])
        raise HFError(f"{path / file}: lacks {name}, which {INDEX} lists there ({len(missing)} missing)")
    return tensors


def whole(name: str, value: object) -> int:
    """Checks an integer in [1, 2^31)."""
    if type(value) is not int or not 1 <= value < 2**31:
        raise HFError(f"{name} = {quote(value)}: should be a whole number from 1 to 2,147,483,647")
    return value


def positive(name: str, value: object) -> float:
    """Checks a number above 0."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise HFError(f"{name} = {quote(value)}: should be a number above 0")
    return number


def switch(name: str, value: object) -> bool:
    """Checks true or false."""
    if not isinstance(value, bool):
        raise HFError(f"{name} = {quote(value)}: should be true or false")
    return value


def choice(name: str, value: object, choices: Mapping[Any, T]) -> T:
    """Returns `choices[value]`, or raises."""
    for known, ours in choices.items():
        if type(value) is type(known) and value == known:
            return ours
    raise HFError(f"{name} = {quote(value)} is not supported; {', '.join(map(str, choices))} are")


READ = {int: whole, float: positive, bool: switch}
"""Functions that check and return a value, by its type."""


def quote(value: object, none: str = "missing") -> str:
    """Quotes a value in a message."""
    return none if value is None else truncate(repr(value))
