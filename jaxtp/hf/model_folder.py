"""Reads an untrusted Hugging Face folder: config.json, and safetensors in one or several files.

Nothing in the folder is executed, and pickles are never opened. Weights may be links to any file,
since they are parsed only as safetensors. Other files may be copied or printed, so they must be in
the folder or the hub's cache (`models--.../blobs/`).
"""

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from jaxtp.config import reading
from jaxtp.config.reading import MAX_JSON, first_lines, parse_json, read_bytes, truncate
from jaxtp.config.schema import ConfigError, missing_model
from jaxtp.hf.safetensors import HFError as HFError
from jaxtp.hf.safetensors import StoredTensor, StoredTensors, read_header, with_scales

T = TypeVar("T")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# In bytes; the largest tokenizers have about 50 million.
_MAX_COPIED = 2**28
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
_WRAPPER = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of the names of tensors that torch.compile, FSDP and activation checkpointing add before
any module."""
# DistributedDataParallel adds this before the whole name.
_PARALLEL = "module."
# Default of weight_block_size
_FP8_BLOCK = (128, 128)
_MAX_LISTED = 10
"""Maximum number of problems in a message."""
Attributes = Mapping[str, object]
"""The JSON object in a configuration file."""
MutableAttributes = dict[str, object]


@dataclass(frozen=True)
class Folder:
    """A model's folder, without its weights."""

    path: Path
    attributes: Attributes
    tensors: StoredTensors
    notes: tuple[str, ...] = ()
    """Messages about the choice of files and names, to print where the weights are loaded."""


def open_folder(path: Path) -> Folder:
    """Reads config.json and all weight headers."""
    attributes = read_attributes(path)
    tensors, notes = _read_headers(path)
    tensors, renamed = without_wrappers(tensors)
    if any(tensor.dtype in ("F8_E4M3", "U8") for tensor in tensors.values()):
        tensors = with_scales(tensors, _block_shape(attributes.get("quantization_config")))
    return Folder(path, attributes, tensors, (*notes, *renamed))


def _block_shape(quantization: object) -> tuple[int, int]:
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if block is None:
        return _FP8_BLOCK
    if not isinstance(block, list) or len(block) != 2:
        raise HFError(f"weight_block_size = {quote(block)}: should be two sizes")
    return whole("weight_block_size", block[0]), whole("weight_block_size", block[1])


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
    return "; ".join(first_lines(problems, _MAX_LISTED))


def join_names(names: Sequence[str], max_listed: int) -> str:
    """Returns the first names, and the number of other names."""
    return ", ".join(truncate(name, 200) for name in first_lines(names, max_listed))


def read_attributes(
    path: Path, name: str = CONFIG, kind: str = "Hugging Face format"
) -> dict[str, Any]:
    """Reads a folder's configuration; raises `HFError` if it is missing or damaged."""
    if not os.path.lexists(path / name):
        reason = explain_gguf(path)
        if reason is None and path.is_dir():
            reason = f"no {name}; a folder in {kind} has one"
        elif reason is None:
            problem = "not a folder" if path.exists() else "no such folder"
            reason = problem + missing_model(path)
        raise HFError(f"{path}: {reason}")
    return read_json(path, name)


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Returns the contents of `names` that exist.

    Refuses large files and links out of the folder.
    """
    return {
        name: _read(folder, name, _MAX_COPIED) for name in names if os.path.lexists(folder / name)
    }


def _read(folder: Path, name: str, max_bytes: int) -> bytes:
    try:
        return read_bytes(reading.inside(folder, name), max_bytes)
    except OSError as error:
        raise HFError(f"{folder / name}: {error.strerror}") from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Reads a JSON object."""
    content = _read(folder, name, MAX_JSON)
    try:
        return parse_json(content, str(folder / name))
    except ValueError as error:
        raise HFError(str(error)) from None


def _read_headers(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns the folder's tensors, and notes on files and copies that are not read."""
    has_whole = os.path.lexists(path / WEIGHTS)
    leftover = []
    if os.path.lexists(path / INDEX):
        weight_map = _read_weight_map(path)
        shards = list(dict.fromkeys(weight_map.values()))
        if not has_whole or any(os.path.lexists(path / shard) for shard in shards):
            tensors, notes = _read_indexed(path, weight_map, shards)
            return tensors, [*_unread(path, shards, INDEX), *notes]
        leftover = [f"{INDEX} is not read: none of the files that it lists is there"]
    if has_whole:
        return read_header(path / WEIGHTS), [*leftover, *_unread(path, [WEIGHTS], WEIGHTS)]
    if any(_SHARD.fullmatch(file.name) for file in path.iterdir()):
        raise HFError(
            f"{path}: the weights are in several files, and {INDEX}, which maps tensors to files, "
            "is missing"
        )
    reason = (
        explain_pickle(path, "transformers")
        or explain_gguf(path)
        or f"neither {WEIGHTS} nor {INDEX} is there"
    )
    raise HFError(f"{path}: {reason}")


def _unread(path: Path, read: Collection[str], source: str) -> list[str]:
    unread = sorted(file.name for file in path.glob("*.safetensors") if file.name not in read)
    if not unread:
        return []
    names = join_names(unread, _MAX_LISTED)
    return [f"the weights are read as {source} has them; not read: {names}"]


def without_wrappers(
    tensors: StoredTensors,
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Removes what PyTorch's wrappers of modules add to the names of tensors.

    Returns the tensors by their plain names, and notes on what was removed.
    """
    plain = {name: _WRAPPER.sub("", name) for name in tensors}
    removed = set(chain.from_iterable(map(_WRAPPER.findall, tensors)))
    # A module of the model may be called `module`, but not one that holds all others.
    while plain and all(bare.startswith(_PARALLEL) for bare in plain.values()):
        plain = {name: bare.removeprefix(_PARALLEL) for name, bare in plain.items()}
        removed.add(_PARALLEL)
    if not removed:
        return dict(tensors), []
    wrappers = " and ".join(map(repr, sorted(removed)))
    unwrapped: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        bare = plain[name]
        if bare in unwrapped:
            same = [truncate(other, 200) for other in tensors if plain[other] == bare]
            raise HFError(
                f"{tensor.file}: {' and '.join(same)} are the same tensor except for {wrappers}; "
                "remove one"
            )
        unwrapped[bare] = replace(tensor, name=bare)
    return unwrapped, [
        f"{wrappers} in the names of tensors is removed: a wrapper of PyTorch added it"
    ]


def explain_gguf(path: Path) -> str | None:
    """Explains why a GGUF file, or the one in a folder, is not read; None if there is none."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    names = [truncate(file.name) for file in files if file.suffix.lower() == ".gguf"]
    if not names:
        return None
    return (
        f"{names[0]} is GGUF, which jaxtp does not read; download the model that it was made "
        "from, in safetensors, or convert it by transformers: from_pretrained(FOLDER, "
        f"gguf_file={names[0]!r}).save_pretrained(NEW)"
    )


def explain_pickle(path: Path, library: str) -> str | None:
    """Explains why a folder's pickle is not loaded; None if there is none.

    `library` can convert it.
    """
    pickles = sorted(file.name for file in path.glob("*") if file.suffix in _PICKLES)
    if not pickles:
        return None
    return (
        f"{pickles[0]} is a pickle, which can run any code when it is opened, so jaxtp never opens "
        f"it; if you trust it, convert it to safetensors by save_pretrained(folder) of {library}"
    )


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or set(map(type, weight_map.values())) != {str}:
        raise HFError(f"{path / INDEX}: weight_map should map the name of each tensor to its file")
    for name in dict.fromkeys(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise HFError(
                f"{path / INDEX}: {truncate(name)!r} is not a safetensors file; no other is opened"
            )
        if name != Path(name).name or "\\" in name or not name.isprintable():
            raise HFError(
                f"{path / INDEX}: '{truncate(name)}' is not the name of a file in the folder"
            )
    return weight_map


def _read_indexed(
    path: Path, weight_map: Mapping[str, str], shards: Iterable[str]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns each tensor from the shard that the index names.

    Also returns notes on copies in other shards.
    """
    tensors: dict[str, StoredTensor] = {}
    copies: list[str] = []
    for shard in shards:
        for name, tensor in read_header(path / shard).items():
            if name not in weight_map:
                raise HFError(
                    f"{path / shard}: holds {truncate(name)}, which {INDEX} does not list"
                )
            if weight_map[name] == shard:
                tensors[name] = tensor
            else:
                copies.append(f"{name} in {shard}")
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise HFError(
            f"{path / weight_map[missing[0]]}: lacks {truncate(missing[0])}, which {INDEX} lists "
            f"there ({len(missing)} missing)"
        )
    if not copies:
        return tensors, []
    return tensors, [
        f"{INDEX} lists another file for {join_names(copies, 1)}; this copy is not read"
    ]


def whole(name: str, value: object) -> int:
    """Checks an integer in [1, 2^31)."""
    if type(value) is not int or not 1 <= value < 2**31:
        raise HFError(f"{name} = {quote(value)}: should be a whole number from 1 to 2,147,483,647")
    return value


def positive(name: str, value: object) -> float:
    """Checks a number above 0."""
    # An integer may be larger than any float.
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= sys.float_info.max
    ):
        return float(value)
    raise HFError(f"{name} = {quote(value)}: should be a number above 0")


def plain_number(value: float) -> float:
    """Returns a whole number as an int, as most programs write it."""
    return int(value) if value.is_integer() else value


def switch(name: str, value: object) -> bool:
    """Checks true or false."""
    if not isinstance(value, bool):
        raise HFError(f"{name} = {quote(value)}: should be true or false")
    return value


def choice(name: str, value: object, choices: Mapping[Any, T]) -> T:
    """Returns `choices[value]`, or raises."""
    # True equals 1, so types are compared too; a list is not hashable.
    for supported, result in choices.items():
        if type(value) is type(supported) and value == supported:
            return result
    raise HFError(f"{name} = {quote(value)} is not supported; {', '.join(map(str, choices))} are")


READ = {int: whole, float: positive, bool: switch}
"""Functions that check and return a value, by its type."""


def quote(value: object, none: str = "missing") -> str:
    """Quotes a value in a message."""
    return none if value is None else truncate(repr(value))
