"""Writes a model as a Hugging Face folder, which appears when it is complete."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxtp.checkpoint.checksum import NonFiniteError, describe_not_finite, sums
from jaxtp.checkpoint.logical import named_variables
from jaxtp.config.files import sync_file, sync_folder
from jaxtp.data.tokenizer_files import LONGEST
from jaxtp.hf.config_json import choose_family, write_attributes
from jaxtp.hf.families.family import Layout
from jaxtp.hf.load import Progress
from jaxtp.hf.model_folder import CONFIG, INDEX, WEIGHTS, HFError, read_attributes, read_files
from jaxtp.hf.safetensors import DTYPES, Block, write_file
from jaxtp.hf.tensor_map import TensorPart, group_by_tensor, in_layout, tensor_parts
from jaxtp.layers.parameter import PARAMETERS, DType, padding_of, unpad
from jaxtp.mesh import TP, mesh_sizes
from jaxtp.models.decoder import Decoder

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files to copy with a model; they also say how to prompt it and sample from it."""
FORMAT_DTYPES: Mapping[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def require_finite(variables: Mapping[str, nnx.Variable[Any]]) -> None:
    """Raises `NonFiniteError` before an export if an element is not finite."""
    if counts := sums({name: variable[...] for name, variable in variables.items()}).not_finite():
        raise NonFiniteError(
            f"{describe_not_finite(counts)}; nothing is written. Export an earlier checkpoint, or allow it: "
            "allow_non_finite=True, --allow-non-finite"
        )


class HostGather:
    """Gathers tensors in host memory, one at a time, in the file's layout.

    Caches one layer's kernel of all experts until another parameter or layer is requested.
    """

    def __init__(
        self,
        variables: Mapping[str, nnx.Variable[Any]],
        tensors: Mapping[str, Sequence[TensorPart]],
        dtype: np.dtype,
        progress: Progress | None,
    ):
        self.variables, self.tensors, self.dtype, self.progress = variables, tensors, dtype, progress
        self.held: tuple[tuple[str, int | None], Block] | None = None
        self.done, self.total = 0, sum(num_bytes(parts[0], dtype) for parts in tensors.values())

    def __call__(self, name: str) -> Block:
        """Returns a tensor; every process must call it."""
        parts = self.tensors[name]
        hosts = [self._part(place) for place in parts]
        host = hosts[0] if len(hosts) == 1 else np.concatenate(hosts, axis=-1)
        self.done += num_bytes(parts[0], self.dtype)
        if self.progress is not None:
            self.progress(self.done, self.total)
        return host.swapaxes(-2, -1) if parts[0].transposed else host

    def _part(self, place: TensorPart) -> Block:
        if place.expert is None:
            self.held = None
            return self._gathered(place)
        if self.held is None or self.held[0] != place.target:
            self.held = None  # frees the old kernel before gathering the next
            self.held = place.target, self._gathered(place)
        experts = self.held[1]
        expert: Block = experts[place.expert]
        return expert

    def _gathered(self, place: TensorPart) -> Block:
        variable = self.variables[place.ours]
        array = variable[...]
        mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
        if place.index is not None:
            array = _layer(array, np.int32(place.index))
        whole = array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)
        host: Block = unpad(np.asarray(whole), padding_of(variable), mesh_sizes(mesh)[TP])
        return host.astype(self.dtype, copy=False)


@jax.jit
def _layer(stacked: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False)


def num_bytes(place: TensorPart, dtype: np.dtype) -> int:
    """Returns the bytes of a tensor in the file."""
    return int(np.prod(place.shape)) * dtype.itemsize


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder, renamed to `path` on success and deleted on failure.

    Raises:
      HFError: `path` exists or is not writable.
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
        partial_folder.chmod(0o755)  # mkdtemp's mode is 0o700
        partial_folder.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise HFError(f"{path}: {error.strerror}") from None
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file and flushes it to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        sync_file(file)


def tokenizer_files(source: str | Path | None) -> dict[str, bytes]:
    """Returns a folder's tokenizer files; warns on stderr without a folder."""
    if source is None:
        if jax.process_index() == 0:
            print("no tokenizer is written: tokenizer_from (--tokenizer-from DIR) copies one", file=sys.stderr)
        return {}
    found = read_files(Path(source), TOKENIZER_FILES)
    if not found:
        raise HFError(f"{source}: no tokenizer there: none of {', '.join(TOKENIZER_FILES)}")
    return found


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has tokenizer files."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", LONGEST, "initializer_range", "use_cache")
"""Attributes that our models lack, copied from the folder of the tokenizer."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def save_hf(
    model: Decoder,
    path: str | Path,
    *,
    family: str | None = None,
    tokenizer_from: str | Path | None = None,
    attributes: Mapping[str, Any] | None = None,
    dtype: DType | None = None,
    experts: Layout = "separate",
    max_shard_size: int | str = "5GB",
    allow_non_finite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a model, from any mesh, as a folder that transformers reads.

    Host memory holds one tensor at a time, or one layer's kernel of all experts.

    Args:
      model: without adapters.
      path: a new or empty folder; appears when complete.
      family: `model_type`; by default the first that can represent the model.
      tokenizer_from: source of tokenizer files and special token ids; without it, stderr reports that no tokenizer is
        written.
      attributes: more config.json attributes. Its max_position_embeddings overrides `tokenizer_from`.
      dtype: of the tensors; by default the parameters' dtype. A model loaded in it is equal bit by bit.
      experts: "separate" writes a tensor per expert, as on the Hub; "stacked" one per layer, as in transformers 5.
      max_shard_size: bytes per file, or a string like "5GB"; never splits a tensor.

    Raises:
      NonFiniteError: a weight is not finite, unless `allow_non_finite`.
      HFError: the model has adapters, no family can represent it, or the folder is not writable.
    """
    path, config = Path(path), model.config
    if config.lora.rank:
        raise HFError("the model has adapters; write them by save_peft, or all of it by save_hf(merge_adapters(model))")
    chosen, stored_as = choose_family(config, family), dtype or config.precision.param
    # Without it, transformers uses the family's default, which may exceed the model's vocabulary.
    beside = {"pad_token_id": None, **(attributes or {}), **carried_attributes(tokenizer_from)}
    if attributes and LONGEST in attributes:
        beside[LONGEST] = attributes[LONGEST]
    described = {name: value for name, value in beside.items() if name not in chosen.aliases}
    described |= write_attributes(config, chosen, stored_as)
    variables = named_variables(nnx.state(model, PARAMETERS))
    if not allow_non_finite:
        require_finite(variables)
    tensors = group_by_tensor(tensor_parts(variables, config, chosen, in_layout(experts)))
    shards = _shards(tensors, FORMAT_DTYPES[stored_as], _parse_size(max_shard_size))
    copied = tokenizer_files(tokenizer_from)
    gather = HostGather(variables, tensors, DTYPES[FORMAT_DTYPES[stored_as]], progress)
    if jax.process_index() != 0:
        for name in tensors:  # a gather is collective
            gather(name)
        return
    with atomic_folder(path) as folder:
        for name, layout in shards.items():
            write_file(folder / name, layout, gather)
        if list(shards) != [WEIGHTS]:
            write_json(folder / INDEX, _index(shards))
        write_json(folder / CONFIG, described)
        for file, content in copied.items():
            (folder / file).write_bytes(content)


_Layouts = dict[str, dict[str, tuple[str, tuple[int, ...]]]]


def _shards(tensors: Mapping[str, list[TensorPart]], dtype: str, most: int) -> _Layouts:
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, (place, *_) in tensors.items():
        needed = num_bytes(place, DTYPES[dtype])
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


def carried_attributes(source: str | Path | None) -> dict[str, Any]:
    """Returns config.json attributes that describe no computation, e.g. special tokens."""
    if source is None or not os.path.lexists(Path(source) / CONFIG):
        return {}
    attributes = read_attributes(Path(source))
    return {name: attributes[name] for name in _CARRIED if name in attributes}
