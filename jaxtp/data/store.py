"""Datasets of tokens on disk, memory-mapped; `jaxtp prepare` writes them.

The format, version 1. A dataset is a folder:

- `dataset.json`: the manifest, written last and atomically; without it the folder is unfinished. JSON: the format's
  version; of the tokenizer its kind, the sha256 of its file, the vocabulary size, the id of the end token and those of
  the prefix; whether documents have prompts; for each split its totals and shards; of each shard its documents, tokens,
  bytes of text, longest document and the sha256 of its files; what was left out and why; the inputs and arguments.
- `tokenizer.json`: the tokenizer in the format of Hugging Face; not there for bytes.
- For each split (`train`, `validation`) shards, numbered from 0, in order:
  - `train-00000.tokens`: the documents one after the other, little-endian uint8 for a vocabulary of up to 256, uint16
    up to 65,536, else uint32. A document begins with the prefix and ends in the end token, if there are such.
  - `train-00000.documents`: little-endian uint64 `[n + 1]`: document i of the n is the tokens from entry i up to entry
    i + 1. The first entry is 0, the last the number of tokens, and no document is empty or straddles shards.
  - `train-00000.prompts`, of instruction data only: little-endian uint32 `[n]`: how many tokens at the beginning of a
    document are prompt.
- `inputs.jsonl`: what was read (path, bytes, time of modification), for `jaxtp prepare` alone.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.documents import Documents
from jaxtp.data.manifest import (
    DOCUMENTS,
    OFFSET,
    PROMPT,
    PROMPTS,
    TOKENIZER,
    TOKENS,
    DatasetError,
    Shard,
    TokenizerInfo,
    read_manifest,
    shard_file,
)
from jaxtp.files import sha256

__all__ = ["Dataset", "DatasetError", "Split", "open_dataset", "verify"]

_BLOCK = 2**22
"""Number of entries of a file that `verify` holds in memory at a time."""


@dataclass(frozen=True)
class Dataset:
    """An opened dataset."""

    folder: Path
    tokenizer: TokenizerInfo
    splits: dict[str, "Split"]


def open_dataset(folder: Path) -> Dataset:
    """Opens a dataset: checks the manifest, and that every file has the size that it says; reads no data.

    Raises:
      DatasetError: an unfinished, damaged or foreign folder; the message names the file.
    """
    manifest = read_manifest(folder)
    splits, dtype = {}, manifest.tokenizer.dtype
    for name, shards in manifest.splits.items():
        splits[name] = Split(folder, name, shards, dtype, manifest.prompts)
        for index, shard in enumerate(shards):
            for suffix, size in shard.file_sizes(dtype).items():
                _require_size(shard_file(folder, name, index, suffix), size)
    return Dataset(folder, manifest.tokenizer, splits)


def _require_size(path: Path, expected: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DatasetError(f"{path}: damaged dataset: {error.strerror}") from None
    if found != expected:
        how = "cut short" if found < expected else "too long"
        raise DatasetError(f"{path}: damaged dataset: {how}: {found:,} bytes of {expected:,}")


class Split(Documents):
    """The documents of one split, in order, over all its shards.

    Nothing is read before it is asked for, and what is read stays the operating system's to drop: memory does not grow
    with the data. Any number of threads may read; a pickled split opens its files anew.
    """

    def __init__(self, folder: Path, name: str, shards: tuple[Shard, ...], dtype: np.dtype[Any], has_prompts: bool):
        super().__init__([shard.documents for shard in shards], [shard.tokens for shard in shards], dtype)
        self.has_prompts = has_prompts
        self._folder, self._name, self._shards = folder, name, shards
        self.longest = max((shard.longest for shard in shards), default=0)
        """Number of tokens of the longest document."""
        self._maps: dict[tuple[int, str], NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def __repr__(self) -> str:
        return f"Split({self._folder / self._name}: {self.num_documents} documents, {self.num_tokens} tokens)"

    @property
    def num_text_bytes(self) -> int:
        """Bytes of the documents as UTF-8: what a loss per byte divides by."""
        return sum(shard.text_bytes for shard in self._shards)

    @cached_property
    def identity(self) -> str:
        """The sha256 of the shards' checksums: another one is other data."""
        sums = "".join(shard.sha256[suffix] for shard in self._shards for suffix in sorted(shard.sha256))
        return hashlib.sha256(sums.encode()).hexdigest()

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Yields the number of tokens of each document, an array for each shard.

        Raises:
          DatasetError: the offsets are not those of the manifest's documents.
        """
        for index, shard in enumerate(self._shards):
            for problem in _verify_offsets(shard_file(self._folder, self._name, index, DOCUMENTS), shard):
                raise DatasetError(f"{problem}: damaged dataset; jaxtp prepare --verify {self._folder}")
            yield np.diff(self._array(index, DOCUMENTS))

    def place(self, index: int) -> str:
        """Returns where a document lies, for messages: `data/x/train-00003.tokens, document 17`."""
        shard, row = self._locate(index)
        return f"{shard_file(self._folder, self._name, shard, TOKENS)}, document {row}"

    def _array(self, shard: int, suffix: str) -> NDArray[Any]:
        """Returns a file as an array; two threads that come first both map it, and either map will do."""
        found = self._maps.get((shard, suffix))
        if found is None:
            path = shard_file(self._folder, self._name, shard, suffix)
            try:
                # Offsets as signed integers: numpy would make float64 of uint64 and an index together.
                dtypes = {TOKENS: self._dtype, DOCUMENTS: np.dtype("<i8"), PROMPTS: PROMPT}
                found = np.memmap(path, dtypes[suffix], mode="r").view(np.ndarray)
            except (OSError, ValueError) as error:  # a ValueError for an empty file or one whose size is no multiple
                raise DatasetError(f"{path}: damaged dataset: {error}") from None
            self._maps[shard, suffix] = found
        return found


def verify(dataset: Dataset) -> Iterator[str]:
    """Reads all of a dataset, a few MB at a time; yields what is not as it was written."""
    tokenizer = dataset.tokenizer
    if tokenizer.sha256 is not None:
        yield from _verify_sum(dataset.folder / TOKENIZER, tokenizer.sha256)
    for name, split in dataset.splits.items():
        for index, shard in enumerate(split._shards):
            for suffix, expected in shard.sha256.items():
                yield from _verify_sum(shard_file(dataset.folder, name, index, suffix), expected)
            tokens = shard_file(dataset.folder, name, index, TOKENS)
            most = max((int(block.max()) for block in _blocks(tokens, tokenizer.dtype)), default=0)
            if most >= tokenizer.vocab_size:
                yield f"{tokens}: id {most} is beyond the vocabulary of {tokenizer.vocab_size}"
            yield from _verify_offsets(shard_file(dataset.folder, name, index, DOCUMENTS), shard)


def _verify_sum(path: Path, expected: str) -> Iterator[str]:
    try:
        found = sha256(path)
    except OSError as error:
        yield f"{path}: {error.strerror}"
        return
    if found != expected:
        yield f"{path}: its sha256 is {found[:12]}, and was {expected[:12]}"


def _verify_offsets(path: Path, shard: Shard) -> Iterator[str]:
    """Yields what is wrong with offsets, which ascend from 0 to the number of tokens, or with the longest document."""
    last, longest = np.zeros(1, np.int64), 0
    for number, block in enumerate(_blocks(path, OFFSET)):
        offsets = block.view(np.int64)
        lengths = np.diff(offsets, prepend=last if number else offsets[:1])[0 if number else 1 :]
        if (number == 0 and offsets[0] != 0) or (lengths.size and lengths.min() < 1):
            yield f"{path}: the offsets do not ascend from 0"
            return
        last, longest = offsets[-1:], max(longest, int(lengths.max(initial=0)))
    if int(last[0]) != shard.tokens:
        yield f"{path}: the last offset is {int(last[0])} of {shard.tokens} tokens"
    if longest != shard.longest:
        yield f"{path}: the longest document has {longest} tokens, and had {shard.longest}"


def _blocks(path: Path, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yields a file in pieces; nothing where it cannot be read, which `_verify_sum` has reported."""
    try:
        with path.open("rb") as file:
            while (block := np.fromfile(file, dtype, _BLOCK)).size:
                yield block
    except OSError:
        return
