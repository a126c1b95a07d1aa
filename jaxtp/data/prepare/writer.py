"""Appends documents to a split's shards, and hashes to the file of seen documents.

Files only grow, so the journal needs only their lengths.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from jaxtp.config.files import sha256, sync_file
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import DOCUMENTS, OFFSET, PROMPT, PROMPTS, TOKENS, Count, Shard, TokenizerInfo, shard_file
from jaxtp.data.prepare.readers import PrepareError

_BUFFER = 2**20
_DIGEST = 16
"""Stored bytes of each hash: two of 10^12 documents collide with a probability of 10^-14."""


def damaged(path: Path, how: str) -> PrepareError:
    """Returns the error for a dataset that cannot be resumed."""
    return PrepareError(f"{path}: damaged, so the command cannot go on: {how}; --overwrite starts afresh")


@dataclass
class Progress:
    """A split's full shards, and the open shard's content."""

    shards: list[Shard] = field(default_factory=list)
    documents: Count = 0
    tokens: Count = 0
    text_bytes: Count = 0
    longest: Count = 0


class SplitWriter:
    """Appends documents to a split, first cut to `progress`."""

    def __init__(
        self, folder: Path, split: str, tokenizer: TokenizerInfo, prompts: bool, shard_tokens: int, progress: Progress
    ):
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, tokenizer.dtype, shard_tokens
        self._suffixes = (TOKENS, DOCUMENTS, PROMPTS) if prompts else (TOKENS, DOCUMENTS)
        self.progress = progress
        self._files: dict[str, BinaryIO] = {}
        for index, shard in enumerate(progress.shards):
            for suffix, size in shard.file_sizes(self._dtype).items():
                path = self._path(index, suffix)
                if not path.exists() or path.stat().st_size != size:
                    raise damaged(path, f"it should have {size:,} bytes")
        if progress.documents:
            self._reopen(self._shard(dict.fromkeys(self._suffixes, "")).file_sizes(self._dtype))

    def append(self, parts: Iterable[Tokens], prompt: int, text_bytes: int) -> int:
        """Writes a document with a nonempty part; returns its number of tokens."""
        if not self._files:
            for suffix in self._suffixes:
                self._files[suffix] = self._path(len(self.progress.shards), suffix).open("wb", _BUFFER)
            self._files[DOCUMENTS].write(bytes(OFFSET.itemsize))
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
        """Flushes the open shard to disk."""
        for file in self._files.values():
            sync_file(file)

    def end_shard(self) -> None:
        """Closes the open shard, if any."""
        if self._files:
            self.close()
            paths = {suffix: self._path(len(self.progress.shards), suffix) for suffix in self._suffixes}
            shard = self._shard({suffix: sha256(path) for suffix, path in paths.items()})
            self.progress = Progress([*self.progress.shards, shard])

    def close(self) -> None:
        """Flushes the files to disk and closes them."""
        try:
            self.save()
        finally:
            files, self._files = self._files, {}
            for file in files.values():
                file.close()

    def files(self) -> set[str]:
        """Returns the file names of all shards."""
        count = len(self.progress.shards) + bool(self.progress.documents)
        return {self._path(index, suffix).name for index in range(count) for suffix in self._suffixes}

    def _path(self, shard: int, suffix: str) -> Path:
        return shard_file(self._folder, self._split, shard, suffix)

    def _shard(self, sums: dict[str, str]) -> Shard:
        progress = self.progress
        return Shard(progress.documents, progress.tokens, progress.text_bytes, progress.longest, sums)

    def _reopen(self, sizes: dict[str, int]) -> None:
        paths = {suffix: self._path(len(self.progress.shards), suffix) for suffix in sizes}
        for suffix, path in paths.items():
            if not path.exists() or path.stat().st_size < sizes[suffix]:
                raise damaged(path, "it is shorter than it was")
        for suffix, path in paths.items():
            file = self._files[suffix] = path.open("r+b", _BUFFER)
            file.truncate(sizes[suffix])
            file.seek(sizes[suffix])


class Seen:
    """Document hashes, in memory and in a file cut to `count` hashes."""

    def __init__(self, path: Path, count: int):
        self._file = path.open("a+b")
        self._file.seek(0)
        content = self._file.read(count * _DIGEST)
        if len(content) < count * _DIGEST:
            self._file.close()
            raise damaged(path, "it is shorter than it was")
        self._file.truncate(len(content))
        self._digests = {content[i : i + _DIGEST] for i in range(0, len(content), _DIGEST)}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digest: bytes) -> bool:
        """Adds a hash; returns whether it is new."""
        short = digest[:_DIGEST]
        if short in self._digests:
            return False
        self._digests.add(short)
        self._file.write(short)
        return True

    def save(self) -> None:
        """Flushes the file to disk."""
        sync_file(self._file)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
