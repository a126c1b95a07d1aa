"""Writes a model as a Hugging Face folder, which appears when it is complete."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxtp.checkpoint.checksum import NonFiniteError, Sums, describe_not_finite
from jaxtp.checkpoint.logical import Variable, named_variables
from jaxtp.config.entry import say
from jaxtp.config.files import sync_folder, write_atomically
from jaxtp.config.hints import closest
from jaxtp.config.reading import truncate
from jaxtp.data.tokenizer_files import MAX_POSITIONS
from jaxtp.hf.adapters import Factors, factors_by_kernel, merge_layer, tables_with_rows
from jaxtp.hf.config_json import changed_config, choose_family, open_whole, write_attributes
from jaxtp.hf.families.family import Family, Layout
from jaxtp.hf.loading import Progress
from jaxtp.hf.model_folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Attributes,
    HFError,
    MutableAttributes,
    read_attributes,
    read_files,
)
from jaxtp.hf.safetensors import (
    FORMATS,
    Block,
    Shape,
    StoredTensor,
    StoredTensors,
    bytes_of,
    read_header,
    write_file,
)
from jaxtp.hf.tensor_map import (
    Columns,
    Parameters,
    TensorPart,
    TensorParts,
    as_stored,
    constants,
    general_names,
    group_by_tensor,
    tensor_parts,
)
from jaxtp.hf.wrapper import PROCESSOR_FILES, Whole, text_attributes
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import DType, padding_of, unpad
from jaxtp.mesh import TP, mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files to copy with a model: tokenizer, chat template and sampling defaults."""
_COPIED_ATTRIBUTES = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    MAX_POSITIONS,
    "initializer_range",
    "use_cache",
)
"""config.json attributes that `ModelConfig` lacks, copied from the tokenizer's folder."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

Stored = Sequence[TensorPart] | StoredTensor
"""The parts of a tensor, or a tensor to copy from another file."""
# By name
Tensors = Mapping[str, Stored]


def save(
    model: Decoder,
    path: str | Path,
    *,
    family: str | None = None,
    tokenizer_from: str | Path | None = None,
    dtype: DType | None = None,
    experts: Layout | None = None,
    like: str | Path | None = None,
    heads: str | Path | None = None,
    attributes: Attributes | None = None,
    max_shard_size: int | str = "5GB",
    allow_non_finite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a model without adapters, from any mesh, as a folder that transformers reads.

    Host memory holds one tensor at a time, or one layer's kernel of all experts.

    Args:
      path: a new or empty folder; appears when complete.
      family: `model_type`; by default the first that can represent the model.
      tokenizer_from: folder of tokenizer files and special token ids; without it, stderr reports
        that no tokenizer is written.
      dtype: of the tensors; by default the parameters' dtype, which is lossless.
      experts: "separate" writes a tensor per expert, as on the Hub; "stacked" one per layer, as in
        transformers 5. By default as in `like`, else separate.
      like: folder that the model came from. Tensors outside of the text model (vision towers,
        prediction heads) and the configuration are copied from it.
      heads: safetensors file of prediction heads that were trained for this model. They replace the
        tensors of the same names in `like`.
      attributes: more config.json attributes. max_position_embeddings overrides the value from
        `tokenizer_from`.
      max_shard_size: bytes per file, or a string like "5GB"; never splits a tensor.
      allow_non_finite: write weights even if they are not finite.
      progress: called with the bytes written so far, and in total.

    Raises:
      NonFiniteError: a weight is not finite, unless `allow_non_finite`.
      HFError: the model has adapters, no family can represent it, or the folder is not writable.
    """
    config = model.config
    if config.lora.rank:
        raise HFError(
            "the model has adapters; write them by jaxtp.hf.save_adapters, or all of it "
            "by jaxtp.hf.save(jaxtp.merge_adapters(model))"
        )
    dtype = dtype or config.precision.param
    attributes = attributes or {}
    whole = None if like is None else open_whole(Path(like), config)
    text: StoredTensors = {}
    if whole is None:
        if heads is not None:
            raise HFError(f"{heads}: name the folder whose heads these replace by like (--like)")
        chosen = choose_family(config, family)
        written = _new_attributes(config, chosen, dtype, attributes, tokenizer_from)
    else:
        chosen = whole.family
        text = whole.text
        written = changed_config(whole, config.vocab_size, dtype, attributes.get(MAX_POSITIONS))
        if not tokenizer_from and has_tokenizer(whole.folder.path):
            tokenizer_from = whole.folder.path
    variables = named_variables(nnx.state(model))
    parts = tensor_parts(
        variables,
        config,
        chosen,
        experts or "separate",
        # The folder's layout has no say in the layout that is asked for.
        general_names({} if experts else text),
    )
    tensors: dict[str, Stored] = {
        name: as_stored(text.get(name), group) for name, group in group_by_tensor(parts).items()
    }
    tensors |= constants(chosen, config.num_layers, dtype)
    other_files = {CONFIG: json_bytes(written)}
    if whole is not None:
        tensors = {whole.name(name): stored for name, stored in tensors.items()}
        tensors |= _with_heads(whole, heads)
        other_files |= read_files(whole.folder.path, PROCESSOR_FILES)
    files = _shards(tensors, dtype, max_shard_size)
    if len(files) > 1:
        other_files[INDEX] = _index(files, dtype)
    write_folder(
        Path(path),
        variables,
        files,
        other_files,
        dtype,
        tokenizer_from=tokenizer_from,
        allow_non_finite=allow_non_finite,
        progress=progress,
    )


def _with_heads(whole: Whole, file: str | Path | None) -> StoredTensors:
    """Returns the tensors outside of the text model; heads in `file` replace their namesakes."""
    before = {name: whole.other_tensors[name] for name in whole.prediction_heads}
    heads = {} if file is None else read_header(Path(file))
    for name, tensor in heads.items():
        if name not in before:
            close = closest(name, before)
            hint = f"did you mean {close}?" if close else f"it has {len(before)} tensors of heads"
            raise HFError(f"{file}: {whole.folder.path} has no {truncate(name)}; {hint}")
        if tensor.shape != before[name].shape:
            raise HFError(
                f"{file}: {truncate(name)} is {list(tensor.shape)}, and "
                f"{list(before[name].shape)} in {whole.folder.path}"
            )
        if tensor.dtype not in {before[name].dtype, *FORMATS.values()}:
            raise HFError(
                f"{file}: {truncate(name)} is in {tensor.dtype}; write it in {before[name].dtype}"
            )
    names = [name for name in before if name not in heads]
    if names and jax.process_index() == 0:
        say(
            f"{len(names)} tensors that predict further tokens ({names[0]}, ...) are copied: they "
            "were made for the weights before training"
        )
    return {**whole.other_tensors, **heads}


def _new_attributes(
    config: ModelConfig,
    family: Family,
    dtype: DType,
    added: Attributes,
    tokenizer_from: str | Path | None,
) -> MutableAttributes:
    """Returns a whole config.json for a model without a folder to copy from."""
    # Without pad_token_id, transformers uses the family's default, which may exceed the model's
    # vocabulary.
    attributes = {"pad_token_id": None, **added, **copied_attributes(tokenizer_from)}
    if MAX_POSITIONS in added:
        attributes[MAX_POSITIONS] = added[MAX_POSITIONS]
    for attribute in family.attributes:
        attributes.pop(attribute.alias or "", None)
    return attributes | write_attributes(config, family, dtype)


def _index(files: Mapping[str, Tensors], dtype: DType) -> bytes:
    weight_map: dict[str, str] = {}
    total = 0
    for file, tensors in files.items():
        weight_map |= dict.fromkeys(tensors, file)
        total += _total_bytes(tensors, dtype)
    return json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})


def stream_weights(
    model: Decoder,
    *,
    dtype: DType | None = None,
    family: str | None = None,
    experts: Layout = "separate",
) -> Iterator[tuple[str, Block]]:
    """Yields the names and tensors that `save` writes, with any adapters merged.

    This is for an inference engine that follows a model in training. Every process must iterate to
    the end, and gets every tensor, because an engine may be split over hosts. The host, and each
    device, holds one additional tensor, or one layer's kernel of all experts.

    Args:
      dtype, family, experts: see `save`.

    Raises:
      HFError: no family can represent the model.
    """
    config = replace(model.config, lora=LoraConfig())
    dtype = dtype or config.precision.param
    chosen = choose_family(config, family)
    factors = factors_by_kernel(model)
    variables = named_variables(nnx.state(model, nnx.Not(nnx.LoRAParam)))
    variables |= tables_with_rows(model, dtype)
    tensors = group_by_tensor(tensor_parts(variables, config, chosen, experts))
    fixed = constants(chosen, config.num_layers, dtype)
    arrays = gather_tensors(variables, tensors, dtype, factors=factors)
    scalars = ((name, scalar.data()) for name, scalar in fixed.items())
    return chain(zip(tensors, arrays, strict=True), scalars)


def write_folder(
    path: Path,
    variables: Parameters,
    files: Mapping[str, Tensors],
    other_files: Mapping[str, bytes],
    dtype: DType,
    *,
    tokenizer_from: str | Path | None,
    allow_non_finite: bool,
    progress: Progress | None,
) -> None:
    """Writes safetensors `files`, other files and the tokenizer files.

    Every process must call it.
    """
    values = {name: variable[...] for name, variable in variables.items()}
    if not allow_non_finite and (counts := Sums(values).not_finite()):
        raise NonFiniteError(
            f"{describe_not_finite(counts)}; nothing is written. Export an earlier checkpoint, or "
            "allow it: allow_non_finite=True, --allow-non-finite"
        )
    tokenizer_files = _tokenizer_files(tokenizer_from)
    gathered: dict[str, Sequence[TensorPart]] = {}
    for group in files.values():
        for name, parts in group.items():
            if not isinstance(parts, StoredTensor):
                gathered[name] = parts
    arrays = gather_tensors(variables, gathered, dtype, progress)
    if jax.process_index() != 0:
        # All processes must take part in each gather.
        for _ in arrays:
            pass
        return
    with atomic_folder(path) as folder:
        for file, group in files.items():
            header = {name: _format_and_shape(stored, dtype) for name, stored in group.items()}
            write_file(folder / file, header, partial(_data, group, arrays))
        write_files(folder, {**other_files, **tokenizer_files})


def _format_and_shape(tensor: Stored, dtype: DType) -> tuple[str, Shape]:
    if isinstance(tensor, StoredTensor):
        return tensor.dtype, tensor.shape
    return FORMATS[_dtype_in_file(tensor[0], dtype)], tensor[0].stored_shape


def _dtype_in_file(part: TensorPart, dtype: DType) -> DType:
    return "float32" if part.float32 else dtype


def _data(tensors: Tensors, arrays: Iterator[Block], name: str) -> Block:
    tensor = tensors[name]
    return tensor.data() if isinstance(tensor, StoredTensor) else next(arrays)


def gather_tensors(
    variables: Parameters,
    tensors: TensorParts,
    dtype: DType,
    progress: Progress | None = None,
    factors: Mapping[str, Factors] = MappingProxyType({}),
) -> Iterator[Block]:
    """Yields each tensor whole, as in the file, with `factors` merged.

    Every process must iterate to the end.
    """
    last: dict[tuple[str, int | None], Block] = {}

    def part_on_host(part: TensorPart) -> Block:
        # The experts of a layer are gathered at once.
        if part.target not in last:
            # Frees the previous kernel before the next is gathered.
            last.clear()
            dtype_in_file = _dtype_in_file(part, dtype)
            merged = factors.get(part.path, ())
            last[part.target] = _gather(variables[part.path], part.index, dtype_in_file, merged)
        array = last[part.target]
        array = np.atleast_1d(array if part.expert is None else array[part.expert])
        # Other tensors may hold columns before and after these.
        return array[..., max(0, -part.first) : part.ordered_shape[-1] - part.first]

    total = _total_bytes(tensors, dtype)
    written = 0
    for parts in tensors.values():
        written += _num_bytes(parts, dtype)
        if progress is not None:
            progress(written, total)
        part = parts[0]
        array = part_on_host(part)
        if len(parts) > 1 or part.columns is not None or array.shape != part.ordered_shape:
            array = _join(parts, map(part_on_host, parts), array.dtype)
        if part.transposed:
            array = array.swapaxes(-2, -1)
        if part.experts_last:
            array = np.moveaxis(array, 0, -1)
        yield array.reshape(part.stored_shape)


def _join(parts: Sequence[TensorPart], arrays: Iterable[Block], dtype: np.dtype) -> Block:
    """Returns a whole tensor in jaxtp's order of dims; columns without a part are zero."""
    joined = np.zeros(parts[0].ordered_shape, dtype)
    for part, array in zip(parts, arrays, strict=True):
        columns: slice | Columns = slice(part.first, part.first + array.shape[-1])
        if part.columns is not None:
            columns = part.columns
        rows = joined
        if array.ndim > 1:
            rows = joined[..., part.inner : part.inner + array.shape[-2], :]
        rows[..., columns] = array
    return joined


def _gather(
    variable: Variable, index: int | None, dtype: DType, factors: Factors | tuple[()]
) -> Block:
    array = variable[...]
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    # A copy, because a JAX array keeps the NumPy array that was read from it.
    array = array.copy() if index is None else _layer(array, np.int32(index), factors, dtype)
    if not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    host: Block = unpad(np.asarray(array), padding_of(variable), mesh_sizes(mesh)[TP])
    return host.astype(jnp.dtype(dtype), copy=False)


@partial(jax.jit, static_argnums=3)
def _layer(stacked: Array, index: Array, factors: Factors | tuple[()], dtype: DType) -> Array:
    at_index = partial(jax.lax.dynamic_index_in_dim, index=index, axis=0, keepdims=False)
    if not factors:
        return at_index(stacked)
    a, b, scale = factors
    return merge_layer(at_index(stacked), at_index(a), at_index(b), scale, dtype)


def _num_bytes(tensor: Stored, dtype: DType) -> int:
    return bytes_of(*_format_and_shape(tensor, dtype))


def _total_bytes(tensors: Tensors, dtype: DType) -> int:
    return sum(_num_bytes(tensor, dtype) for tensor in tensors.values())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `path` (new or empty) unless there is an error."""
    partial_folder = None
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise HFError(f"{path} already exists; name a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not by `mkdtemp`, whose folder is private: this one has the mode that the user's umask
        # gives.
        partial_folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        partial_folder.mkdir()
        yield partial_folder
        partial_folder.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise HFError(f"{path}: {error.strerror}") from None
    finally:
        if partial_folder is not None:
            shutil.rmtree(partial_folder, ignore_errors=True)


def json_bytes(value: Attributes) -> bytes:
    """Returns a JSON file's content."""
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files and flushes them to disk."""
    for name, content in contents.items():
        write_atomically(folder / name, content)


def _tokenizer_files(source: str | Path | None) -> dict[str, bytes]:
    if source is None:
        if jax.process_index() == 0:
            say("no tokenizer is written: tokenizer_from (--tokenizer-from DIR) copies one")
        return {}
    files = read_files(Path(source), TOKENIZER_FILES)
    if not files:
        raise HFError(f"{source}: no tokenizer files there: none of {', '.join(TOKENIZER_FILES)}")
    return files


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has tokenizer files."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _shards(tensors: Tensors, dtype: DType, max_size: int | str) -> dict[str, Tensors]:
    match = re.fullmatch(r"(\d{1,12}) ?(KB|MB|GB)?", str(max_size))
    if match is None or not int(match[1]):
        raise HFError(
            f"max_shard_size = {max_size!r}: should be a number of bytes, or a size such as 5GB"
        )
    limit = int(match[1]) * _UNITS.get(match[2], 1)
    groups: list[dict[str, Stored]] = [{}]
    group_bytes = 0
    for name, parts in tensors.items():
        tensor_bytes = _num_bytes(parts, dtype)
        if groups[-1] and group_bytes + tensor_bytes > limit:
            groups.append({})
            group_bytes = 0
        groups[-1][name] = parts
        group_bytes += tensor_bytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    count = len(groups)
    return {
        f"model-{i:05}-of-{count:05}.safetensors": group for i, group in enumerate(groups, start=1)
    }


def copied_attributes(source: str | Path | None) -> MutableAttributes:
    """Returns a folder's config.json attributes without effect on outputs, e.g. special tokens."""
    if source is None or not os.path.lexists(Path(source) / CONFIG):
        return {}
    stored = read_attributes(Path(source))
    attributes = {**stored, **text_attributes(stored)}
    return {name: attributes[name] for name in _COPIED_ATTRIBUTES if name in attributes}
