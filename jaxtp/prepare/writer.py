"""Appends documents to the shards of a split, so that a journal need only know how long each file was."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.manifest import (
    DOCUMENTS,
    OFFSET,
    PROMPT,
    PROMPTS,
    TOKENS,
    DatasetError,
    Shard,
    read_shard,
    shard_file,
)
from jaxtp.files import sha256, sync_file
from jaxtp.prepare.folder import damaged

_BUFFER = 2**20


@dataclass
class Progress:
    """The full shards of a split, and what the open one holds so far."""

    shards: list[Shard] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    longest: int = 0


def parse_progress(record: dict[str, Any], prompts: bool) -> Progress:
    """Returns the progress that a journal records.

    Raises:
      DatasetError, KeyError, TypeError: it is damaged.
    """
    shards = [read_shard(shard, prompts) for shard in record["shards"]]
    counts = [record[name] for name in ("documents", "tokens", "text_bytes", "longest")]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise DatasetError("counts that are none")
    return Progress(shards, *counts)


class SplitWriter:
    """Appends documents to a split.

    Args:
      folder: folder of the dataset.
      split: name of the split.
      dtype: dtype of the tokens.
      prompts: whether the documents have prompts.
      shard_tokens: number of tokens after which a shard is full.
      progress: what was written so far; whatever lies beyond is cut off.

    Raises:
      PrepareError: a file does not have the size that it had.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], prompts: bool, shard_tokens: int, progress: Progress
    ):
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._suffixes = (TOKENS, DOCUMENTS, PROMPTS) if prompts else (TOKENS, DOCUMENTS)
        self.progress = progress
        self._files: dict[str, BinaryIO] = {}
        for index, shard in enumerate(progress.shards):
            for suffix, size in shard.file_sizes(dtype).items():
                path = self._path(index, suffix)
                if not path.exists() or path.stat().st_size != size:
                    raise damaged(path, f"it should have {size:,} bytes")
        if progress.documents:
            self._reopen()

    def append(self, parts: Iterable[NDArray[Any]], prompt: int, text_bytes: int) -> int:
        """Writes one document.

        Args:
          parts: its tokens, one array after the other; not all of them empty.
          prompt: number of tokens that are its prompt.
          text_bytes: its length as UTF-8.

        Returns:
          The number of its tokens.
        """
        if not self._files:
            self._begin()
        length, progress = 0, self.progress
        for part in parts:
            length += len(part)
            self._files[TOKENS].write(part.astype(self._dtype, copy=False).tobytes())
        progress.documents += 1
        progress.tokens += length
        progress.text_bytes += text_bytes
        progress.longest = max(progress.longest, length)
        self._files[DOCUMENTS].write(progress.tokens.to_bytes(OFFSET.itemsize, "little"))
        if PROMPTS in self._suffixes:
            self._files[PROMPTS].write(prompt.to_bytes(PROMPT.itemsize, "little"))
        if progress.tokens >= self._shard_tokens:
            self.end_shard()
        return length

    def save(self) -> None:
        """Brings the open shard to the disk."""
        for file in self._files.values():
            sync_file(file)

    def end_shard(self) -> None:
        """Closes the open shard, if there is one; the next document begins another."""
        if not self._files:
            return
        self.close()
        index, progress = len(self.progress.shards), self.progress
        sums = {suffix: sha256(self._path(index, suffix)) for suffix in self._suffixes}
        shard = Shard(progress.documents, progress.tokens, progress.text_bytes, progress.longest, sums)
        self.progress = Progress([*progress.shards, shard])

    def close(self) -> None:
        """Brings the files to the disk and closes them."""
        try:
            self.save()
        finally:
            files, self._files = self._files, {}
            for file in files.values():
                file.close()

    def files(self) -> set[str]:
        """Returns the names of the files of all shards."""
        count = len(self.progress.shards) + bool(self.progress.documents)
        return {self._path(index, suffix).name for index in range(count) for suffix in self._suffixes}

    def _path(self, shard: int, suffix: str) -> Path:
        return shard_file(self._folder, self._split, shard, suffix)

    def _begin(self) -> None:
        index = len(self.progress.shards)
        for suffix in self._suffixes:
            self._files[suffix] = self._path(index, suffix).open("wb", _BUFFER)
        self._files[DOCUMENTS].write(bytes(OFFSET.itemsize))

    def _reopen(self) -> None:
        progress = self.progress
        shard = Shard(progress.documents, progress.tokens, 0, 0, dict.fromkeys(self._suffixes, ""))
        sizes = shard.file_sizes(self._dtype)
        paths = {suffix: self._path(len(progress.shards), suffix) for suffix in sizes}
        for suffix, size in sizes.items():
            if not paths[suffix].exists() or paths[suffix].stat().st_size < size:
                raise damaged(paths[suffix], "it is shorter than it was")
        for suffix, size in sizes.items():
            file = paths[suffix].open("r+b", _BUFFER)
            file.truncate(size)
            file.seek(size)
            self._files[suffix] = file
