"""A model on a mesh into a folder in Hugging Face format: config.json, sharded safetensors with their index."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.safetensors import DTYPES, write_file
from jaxtp.hf.attributes import choose_family, write_attributes
from jaxtp.hf.folder import CONFIG, INDEX, WEIGHTS, HFError, read_attributes
from jaxtp.hf.load import Progress
from jaxtp.hf.names import Place, by_tensor, in_layout, places
from jaxtp.hf.writing import SPELLED, Gathered, appearing, num_bytes, tokenizer_files, write_json
from jaxtp.layers.parameter import DType
from jaxtp.models.decoder import Decoder
from jaxtp.models.families.family import Layout

_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range", "use_cache")
"""Attributes that our models lack, taken from where the tokenizer is from."""
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
    progress: Progress | None = None,
) -> None:
    """Writes a model, from any mesh, as transformers and others read it.

    The folder appears when all of it is on the disk. A tensor at a time is gathered in host memory, or what one layer's
    experts have of a kernel.

    Args:
      model: the model.
      path: a folder that is not there yet, or is empty.
      family: `model_type`; by default the first of the supported ones that can be this model.
      tokenizer_from: a folder whose tokenizer files are copied, with the ids of special tokens in its config.json.
      attributes: others for config.json, such as max_position_embeddings, where nothing else says them.
      dtype: of the tensors; by default that of the parameters. What was loaded in it comes out bit by bit.
      experts: "separate" has a tensor for each expert, as checkpoints on the Hub do and other programs expect;
        "stacked" one for all experts of a layer, as transformers 5 has them in memory.
      max_shard_size: bytes in a file, or such as "5GB"; a tensor is never split.
      progress: called as bytes are written.

    Raises:
      HFError: it has adapters, no family can be this model, or the folder cannot be written.
    """
    path, config = Path(path), model.config
    if config.lora.rank:
        raise HFError("the model has adapters; write them by save_peft, or all of it by save_hf(merge_adapters(model))")
    chosen, stored_as = choose_family(config, family), dtype or config.precision.param
    # Without it, transformers takes a family's own, which may be an id that the model lacks.
    beside = {"pad_token_id": None, **(attributes or {}), **carried(tokenizer_from)}
    described = {name: value for name, value in beside.items() if name not in chosen.aliases}
    described |= write_attributes(config, chosen, stored_as)
    copied = {} if tokenizer_from is None else tokenizer_files(Path(tokenizer_from))
    variables = named_variables(nnx.state(model, nnx.Param))
    tensors = by_tensor(places(variables, config, chosen, in_layout(experts)))
    shards = _shards(tensors, SPELLED[stored_as], _parse_size(max_shard_size))
    gather = Gathered(variables, tensors, DTYPES[SPELLED[stored_as]], progress)
    if jax.process_index() != 0:
        for name in tensors:  # what the first process writes is gathered by all
            gather(name)
        return
    with appearing(path) as folder:
        for name, layout in shards.items():
            write_file(folder / name, layout, gather)
        if list(shards) != [WEIGHTS]:
            write_json(folder / INDEX, _index(shards))
        write_json(folder / CONFIG, described)
        for file, content in copied.items():
            (folder / file).write_bytes(content)


_Layouts = dict[str, dict[str, tuple[str, tuple[int, ...]]]]


def _shards(tensors: Mapping[str, list[Place]], dtype: str, most: int) -> _Layouts:
    """Returns the tensors of each file: as many as fit, in their order."""
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


def carried(source: str | Path | None) -> dict[str, Any]:
    """Returns the attributes of a folder's config.json that describe no computation, such as ids of special tokens."""
    if source is None or not os.path.lexists(Path(source) / CONFIG):
        return {}
    attributes = read_attributes(Path(source))
    return {name: attributes[name] for name in _CARRIED if name in attributes}
