"""A model on a mesh into a folder in Hugging Face format: config.json, sharded safetensors with their index."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.safetensors import DTYPES, Block, write_file
from jaxtp.files import sync_file, sync_folder
from jaxtp.hf.attributes import choose_family, write_attributes
from jaxtp.hf.folder import CONFIG, INDEX, WEIGHTS, HFError, inside, read_attributes
from jaxtp.hf.load import Progress
from jaxtp.hf.names import Place, places
from jaxtp.layers.parameter import logical_shape
from jaxtp.models.decoder import Decoder

DType = Literal["float32", "bfloat16", "float16"]
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Copied with a model, if they are there: also how it is prompted and sampled from."""
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range", "use_cache")
"""Attributes that our models lack, taken from where the tokenizer is from."""
_SPELLED: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def save_hf(
    model: Decoder,
    path: str | Path,
    *,
    family: str | None = None,
    tokenizer_from: str | Path | None = None,
    dtype: DType | None = None,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> None:
    """Writes a model, from any mesh, as transformers and others read it.

    The folder appears when all of it is on the disk. A tensor at a time is gathered in host memory.

    Args:
      model: the model.
      path: a folder that is not there yet, or is empty.
      family: `model_type`; by default the first of the supported ones that can be this model.
      tokenizer_from: a folder whose tokenizer files are copied, with the ids of special tokens in its config.json.
      dtype: of the tensors; by default that of the parameters. What was loaded in it comes out bit by bit.
      max_shard_size: bytes in a file, or such as "5GB"; a tensor is never split.
      progress: called as bytes are written.

    Raises:
      HFError: no family can be this model, or the folder cannot be written.
    """
    path, config = Path(path), model.config
    chosen, stored_as = choose_family(config, family), dtype or config.precision.param
    attributes = write_attributes(config, chosen, stored_as) | _carried(tokenizer_from)
    copied = [] if tokenizer_from is None else _tokenizer_files(Path(tokenizer_from))
    variables = named_variables(nnx.state(model, nnx.Param))
    tensors = {place.theirs: place for place in places(variables, chosen)}
    shards = _shards(tensors, _SPELLED[stored_as], _parse_size(max_shard_size))
    gather = _Gathered(variables, tensors, DTYPES[_SPELLED[stored_as]], progress)
    if jax.process_index() != 0:
        for name in tensors:  # what the first process writes is gathered by all
            gather(name)
        return
    with _appearing(path) as folder:
        for name, layout in shards.items():
            write_file(folder / name, layout, gather)
        if list(shards) != [WEIGHTS]:
            _write_json(folder / INDEX, _index(shards))
        _write_json(folder / CONFIG, attributes)
        for file in copied:
            shutil.copyfile(file, folder / file.name)


class _Gathered:
    """Tensors as the file has them, each on the host when it is asked for."""

    def __init__(
        self,
        variables: Mapping[str, nnx.Variable[Any]],
        tensors: Mapping[str, Place],
        dtype: np.dtype,
        progress: Progress | None,
    ):
        self.variables, self.tensors, self.dtype, self.progress = variables, tensors, dtype, progress
        self.done, self.total = 0, sum(_bytes(place, dtype) for place in tensors.values())

    def __call__(self, name: str) -> Block:
        place = self.tensors[name]
        variable = self.variables[place.ours]
        array, logical = variable[...], logical_shape(variable)
        if place.layer is not None:
            array, logical = _layer(array, np.int32(place.layer)), logical[1:]
        whole = array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)
        host = np.asarray(whole)[tuple(slice(size) for size in logical)].astype(self.dtype, copy=False)
        self.done += _bytes(place, self.dtype)
        if self.progress is not None:
            self.progress(self.done, self.total)
        return host.T if place.transposed else host


@jax.jit
def _layer(stacked: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False)


def _bytes(place: Place, dtype: np.dtype) -> int:
    return int(np.prod(place.shape)) * dtype.itemsize


_Layouts = dict[str, dict[str, tuple[str, tuple[int, ...]]]]


def _shards(tensors: Mapping[str, Place], dtype: str, most: int) -> _Layouts:
    """What each file holds: as many tensors as fit, in their order."""
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, place in tensors.items():
        needed = _bytes(place, DTYPES[dtype])
        if groups[-1] and size + needed > most:
            groups.append({})
            size = 0
        groups[-1][name] = (dtype, place.shape)
        size += needed
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, start=1)}


def _index(shards: _Layouts) -> dict[str, Any]:
    layouts = [layout for group in shards.values() for layout in group.values()]
    total = sum(int(np.prod(shape)) * DTYPES[dtype].itemsize for dtype, shape in layouts)
    weight_map = {name: file for file, group in shards.items() for name in group}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _parse_size(size: int | str) -> int:
    match = re.fullmatch(r"(\d{1,12}) ?(KB|MB|GB)?", str(size))
    if match is None or not int(match[1]):
        raise HFError(f"max_shard_size = {size!r}: should be a number of bytes, or such as 5GB or 500MB")
    return int(match[1]) * _UNITS.get(match[2], 1)


def _carried(source: str | Path | None) -> dict[str, Any]:
    """Ids of special tokens and the like, if the folder has a model's config.json."""
    if source is None or not (Path(source) / CONFIG).exists():
        return {}
    attributes = read_attributes(Path(source))
    return {name: attributes[name] for name in _CARRIED if name in attributes}


def _tokenizer_files(source: Path) -> list[Path]:
    found = [inside(source, name) for name in TOKENIZER_FILES if (source / name).exists()]
    if not found:
        raise HFError(f"{source}: no tokenizer there: none of {', '.join(TOKENIZER_FILES)}")
    return found


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when the block ends well, and vanishes otherwise.

    Raises:
      HFError: there is something at `path`, or it cannot be written.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise HFError(f"{path} is there already; name a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise HFError(f"{path}: {error.strerror}") from None
    try:
        yield partial_folder
        partial_folder.chmod(0o755)  # mkdtemp's is the owner's alone
        partial_folder.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise HFError(f"{path}: {error.strerror}") from None
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        sync_file(file)
