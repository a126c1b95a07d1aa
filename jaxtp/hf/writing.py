"""Helps to write a folder: tensors are gathered one at a time, and the folder appears when it is complete."""

import json
import shutil
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

from jaxtp.checkpoint.safetensors import Block
from jaxtp.files import sync_file, sync_folder
from jaxtp.hf.folder import HFError, read_files
from jaxtp.hf.load import Progress
from jaxtp.hf.names import Place
from jaxtp.layers.parameter import DType, cut, padding_of
from jaxtp.mesh import TP, mesh_sizes

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files to copy with a model, if they are there; they also say how it is prompted and sampled from."""
SPELLED: Mapping[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Gathered:
    """Gathers tensors on the host, each as the file has it, when it is asked for.

    All experts of a layer are gathered at once, and held until another parameter or layer is asked for.
    """

    def __init__(
        self,
        variables: Mapping[str, nnx.Variable[Any]],
        tensors: Mapping[str, Sequence[Place]],
        dtype: np.dtype,
        progress: Progress | None,
    ):
        self.variables, self.tensors, self.dtype, self.progress = variables, tensors, dtype, progress
        self.held: tuple[tuple[str, int | None], Block] | None = None
        self.done, self.total = 0, sum(num_bytes(parts[0], dtype) for parts in tensors.values())

    def __call__(self, name: str) -> Block:
        """Returns the tensor of that name; every process must call it."""
        parts = self.tensors[name]
        hosts = [self._part(place) for place in parts]
        host = hosts[0] if len(hosts) == 1 else np.concatenate(hosts, axis=-1)
        self.done += num_bytes(parts[0], self.dtype)
        if self.progress is not None:
            self.progress(self.done, self.total)
        return host.swapaxes(-2, -1) if parts[0].transposed else host

    def _part(self, place: Place) -> Block:
        if place.expert is None:
            self.held = None
            return self._gathered(place)
        if self.held is None or self.held[0] != place.target:
            self.held = None  # so that two are never there
            self.held = place.target, self._gathered(place)
        experts = self.held[1]
        expert: Block = experts[place.expert]
        return expert

    def _gathered(self, place: Place) -> Block:
        """Returns a parameter, or a layer of it."""
        variable = self.variables[place.ours]
        array = variable[...]
        mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
        if place.index is not None:
            array = _layer(array, np.int32(place.index))
        whole = array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)
        host: Block = cut(np.asarray(whole), padding_of(variable), mesh_sizes(mesh)[TP])
        return host.astype(self.dtype, copy=False)


@jax.jit
def _layer(stacked: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False)


def num_bytes(place: Place, dtype: np.dtype) -> int:
    """Returns the bytes of a tensor in the file."""
    return int(np.prod(place.shape)) * dtype.itemsize


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yields a folder to write into, which becomes `path` when the block ends well, and vanishes otherwise.

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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object, and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        sync_file(file)


def tokenizer_files(source: Path) -> dict[str, bytes]:
    """Returns the content of the tokenizer's files in a folder, by name.

    Raises:
      HFError: there are none, or one cannot be read or is a link out of the folder.
    """
    found = read_files(source, TOKENIZER_FILES)
    if not found:
        raise HFError(f"{source}: no tokenizer there: none of {', '.join(TOKENIZER_FILES)}")
    return found


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has files of a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)
