"""Memory-mapped token datasets, written by `jaxtp prepare`.

Version 1 of the format is a folder:

- `dataset.json`: the manifest (`manifest.py`), written last and atomically; without it the folder
  is unfinished.
- `tokenizer.json`: the tokenizer in Hugging Face format; absent for bytes.
- For each split (`train`, `validation`) shards, numbered from 0:
  - `train-00000.tokens`: the concatenated documents, little-endian uint8 for a vocabulary of up to
    256, uint16 up to 65,536, else uint32. Each document starts with the manifest's prefix, if any,
    and ends with its end token, if any.
  - `train-00000.documents`: little-endian uint64 `[n + 1]`: document i spans tokens [entry i, entry
    i + 1). The first entry is 0, the last the number of tokens; no document is empty or split over
    shards.
  - `train-00000.prompts`, only for instruction data: little-endian uint32 `[n]`, the number of
    prompt tokens at the start of each document.
  - `train-00000.origins`, absent from older datasets: little-endian uint64 `[n]`. Entry // 2^36 is
    the index of the document's input, and entry % 2^36 the number of its line or row, from 1.
- `inputs.jsonl`: path, bytes and modification time of each input.

Version 2 is preference data, with `"pairs": true` in its manifest. Document 2i is the chosen and
document 2i + 1 the rejected answer to a prompt. Each of them starts with the prompt, and both are
in one shard.
"""

import hashlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtp.config.files import sha256
from jaxtp.config.reading import inside, open_regular, truncate
from jaxtp.data.documents import Documents, Tokens
from jaxtp.data.manifest import (
    DOCUMENTS,
    INPUTS,
    MAX_ITEMS,
    ORIGIN,
    ORIGINS,
    PROMPT,
    PROMPTS,
    TOKENIZER,
    TOKENS,
    DatasetError,
    Input,
    Manifest,
    TokenizerInfo,
    file_sizes,
    read_inputs,
    read_manifest,
    shard_file,
)

_BLOCK = 2**20  # Number of offsets that are checked together


class Split(Documents):
    """The documents of one split.

    Files are mapped on first use, so memory does not grow with the data. Threads may share a split;
    unpickling maps its files again.
    """

    def __init__(self, folder: Path, name: str, manifest: Manifest):
        shards = manifest.splits[name].shards
        self._folder = folder
        self._name = name
        self._named = manifest.arguments.get("inputs")
        self._shards = shards
        documents = [shard.documents for shard in shards]
        tokens = [shard.tokens for shard in shards]
        super().__init__(documents, tokens)
        self._dtype = manifest.tokenizer.dtype
        self.has_prompts = manifest.prompts
        self.has_pairs = manifest.pairs
        self._vocab_size = manifest.tokenizer.vocab_size
        self._maps: dict[tuple[int, str], Tokens] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_maps": {}}

    @cached_property
    def identity(self) -> str:
        """The sha256 of the shards' checksums, without origins, which training does not read."""
        sums = hashlib.sha256()
        for shard in self._shards:
            for suffix in sorted(shard.sha256.keys() - {ORIGINS}):
                sums.update(shard.sha256[suffix].encode())
        return sums.hexdigest()

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Yields `Documents.lengths`, after a check of the offsets."""
        for index in range(len(self._shards)):
            for problem in self._offset_problems(index):
                raise DatasetError(
                    f"{problem}: damaged dataset; jaxtp prepare --verify {self._folder}"
                )
            yield np.diff(self._array(index, DOCUMENTS))

    def problems(self) -> Iterator[str]:
        """Reads all files; yields every difference from the manifest."""
        for index, shard in enumerate(self._shards):
            for suffix, expected in shard.sha256.items():
                yield from verify_sum(shard_file(self._folder, self._name, index, suffix), expected)
            if (max_id := int(self._array(index, TOKENS).max())) >= self._vocab_size:
                tokens = shard_file(self._folder, self._name, index, TOKENS)
                yield f"{tokens}: id {max_id} is beyond the vocabulary of {self._vocab_size}"
            yield from self._offset_problems(index)

    def _offset_problems(self, index: int) -> Iterator[str]:
        path = shard_file(self._folder, self._name, index, DOCUMENTS)
        shard = self._shards[index]
        offsets = self._array(index, DOCUMENTS)
        longest = 0
        # A file may have more offsets than memory holds.
        for start in range(0, len(offsets) - 1, _BLOCK):
            lengths = np.diff(offsets[start : start + _BLOCK + 1])
            if offsets[0] != 0 or lengths.min() < 1:
                yield f"{path}: the offsets do not ascend from 0"
                return
            longest = max(longest, int(lengths.max()))
        if offsets[-1] != shard.tokens:
            yield f"{path}: the last offset is {offsets[-1]} of {shard.tokens} tokens"
        if longest != shard.longest:
            yield (
                f"{path}: the longest document has {longest} tokens, and {shard.longest} in the "
                "manifest"
            )

    def location(self, index: int) -> str:
        """Returns e.g. `data/x/train-00003.tokens, document 17`."""
        shard, row = self._locate(index)
        return f"{shard_file(self._folder, self._name, shard, TOKENS)}, document {row}"

    def origin(self, index: int) -> tuple[str, int | None]:
        """Overrides `Documents.origin`; raises `DatasetError` if the dataset has no origins."""
        shard, row = self._locate(index)
        if ORIGINS not in self._shards[shard].sha256:
            inputs = "INPUT"
            if isinstance(self._named, list):
                inputs = shlex.join(map(str, self._named))
            raise DatasetError(
                f"{self._folder} was prepared by an older version, which kept no lines of "
                "documents; the command that made it adds them, and changes no token, with "
                f"--overwrite: jaxtp prepare {truncate(inputs, 300)} --out {self._folder} "
                "--overwrite, and its other flags"
            )
        source, line = divmod(int(self._array(shard, ORIGINS)[row]), MAX_ITEMS)
        if source >= len(self._inputs):
            raise DatasetError(f"{self._folder / INPUTS}: damaged: it has no input {source}")
        return self._inputs[source].path, line

    @cached_property
    def _inputs(self) -> list[Input]:
        try:
            return read_inputs(self._folder)
        except OSError as error:
            raise DatasetError(f"{self._folder / INPUTS}: {error.strerror}") from None

    def _array(self, shard: int, suffix: str) -> Tokens:
        array = self._maps.get((shard, suffix))
        if array is None:
            path = shard_file(self._folder, self._name, shard, suffix)
            try:
                # Reads offsets as signed integers, because NumPy promotes uint64 and an index to
                # float64.
                dtypes: dict[str, np.dtype[np.integer]]
                dtypes = {
                    TOKENS: self._dtype,
                    DOCUMENTS: np.dtype("<i8"),
                    PROMPTS: PROMPT,
                    ORIGINS: ORIGIN,
                }
                array = np.memmap(path, dtypes[suffix], mode="r").view(np.ndarray)
            except (OSError, ValueError) as error:
                # ValueError: the file is empty, or its size is not a multiple of the dtype's.
                raise DatasetError(f"{path}: damaged dataset: {error}") from None
            self._maps[shard, suffix] = array  # two threads may map a file: both maps are equal
        return array


@dataclass(frozen=True)
class Dataset:
    """An opened dataset."""

    folder: Path
    tokenizer: TokenizerInfo
    splits: dict[str, "Split"]


def open_dataset(folder: Path) -> Dataset:
    """Opens a dataset; checks the manifest and the sizes of all files, but not the data."""
    manifest = read_manifest(folder)
    splits = {}
    dtype = manifest.tokenizer.dtype
    for name, record in manifest.splits.items():
        splits[name] = Split(folder, name, manifest)
        for index, shard in enumerate(record.shards):
            sizes = file_sizes(shard.documents, shard.tokens, dtype)
            for suffix in shard.sha256:
                require_size(shard_file(folder, name, index, suffix), sizes[suffix])
    return Dataset(folder, manifest.tokenizer, splits)


def require_size(path: Path, expected: int) -> None:
    """Raises `DatasetError` unless a file of an untrusted folder is regular and of this size."""
    try:
        with open_regular(inside(path.parent, path.name)) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DatasetError(f"{path}: damaged: {error.strerror}") from None
    if size != expected:
        how = "cut short" if size < expected else "too long"
        raise DatasetError(f"{path}: damaged: {how}: {size:,} bytes of {expected:,}")


def verify(dataset: Dataset) -> Iterator[str]:
    """Reads a whole dataset; yields every difference from its manifest."""
    if dataset.tokenizer.sha256 is not None:
        yield from verify_sum(dataset.folder / TOKENIZER, dataset.tokenizer.sha256)
    for split in dataset.splits.values():
        yield from split.problems()


def verify_sum(path: Path, expected: str) -> Iterator[str]:
    """Yields a problem if a file does not match its sha256."""
    try:
        checksum = sha256(path)
    except OSError as error:
        yield f"{path}: {error.strerror}"
        return
    if checksum != expected:
        yield f"{path}: its sha256 is {checksum[:12]}, and {truncate(expected, 12)} in the manifest"
