"""The manifest of a dataset: `dataset.json`, which `jaxtp prepare` writes and `jaxtp.data.store` reads."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxtp.entry import UserError

FORMAT = 1
MANIFEST = "dataset.json"
TOKENIZER = "tokenizer.json"
TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)

TOKENS, DOCUMENTS, PROMPTS = "tokens", "documents", "prompts"
"""Suffixes of a shard's files."""
OFFSET = np.dtype("<u8")
PROMPT = np.dtype("<u4")

BYTES, HUGGING_FACE = "bytes", "huggingface"
"""Kinds of tokenizer."""
_MAX_VOCAB_SIZE = 2**32

T = TypeVar("T")


class DatasetError(UserError):
    """A folder that is no dataset, or an unfinished or damaged one."""


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that made the tokens."""

    kind: str
    """`bytes`, or `huggingface` for a `tokenizer.json`."""

    sha256: str | None
    """The sha256 of `tokenizer.json`; None for bytes."""

    vocab_size: int
    """Every id is below it."""

    eos_id: int | None
    """The token that ends each document; None where none does."""

    prefix: tuple[int, ...] = ()
    """The tokens that each document begins with, such as that of the beginning of a text."""

    @property
    def name(self) -> str:
        """A name that no other tokenizer has."""
        return self.sha256 or self.kind

    @property
    def end_ids(self) -> frozenset[int]:
        """The token that ends each document, as a set that is empty where none does."""
        return frozenset() if self.eos_id is None else frozenset((self.eos_id,))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the tokens on disk: the smallest that holds every id."""
        size = self.vocab_size
        return np.dtype("<u1" if size <= 2**8 else "<u2" if size <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """Sizes and checksums of one shard."""

    documents: int
    tokens: int
    text_bytes: int
    """Bytes of the documents as UTF-8, before tokenization."""
    longest: int
    """Number of tokens of the longest document."""
    sha256: Mapping[str, str]
    """The sha256 of each file, by suffix."""

    def file_sizes(self, dtype: np.dtype[Any]) -> dict[str, int]:
        """Returns the bytes of each file, by suffix."""
        sizes = {
            TOKENS: self.tokens * dtype.itemsize,
            DOCUMENTS: (self.documents + 1) * OFFSET.itemsize,
            PROMPTS: self.documents * PROMPT.itemsize,
        }
        return {suffix: sizes[suffix] for suffix in self.sha256}


@dataclass(frozen=True)
class Manifest:
    """Content of `dataset.json`."""

    tokenizer: TokenizerInfo
    splits: Mapping[str, tuple[Shard, ...]]
    prompts: bool = False
    """Whether the documents are instruction data: each with the length of its prompt."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of files, rows or documents that were left out, by reason."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `jaxtp prepare`."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Number of files that were read, and their bytes."""

    def to_json(self) -> str:
        """Returns the text of `dataset.json`; the same dataset gives the same text."""
        record = asdict(self)
        record["splits"] = {n: totals(shards) | {"shards": record["splits"][n]} for n, shards in self.splits.items()}
        order = ("tokenizer", "prompts", "splits", "skipped", "inputs", "arguments")
        return json.dumps({"format": FORMAT, **{key: record[key] for key in order}}, indent=1) + "\n"


def shard_file(folder: Path, split: str, shard: int, suffix: str) -> Path:
    """Returns the path of a shard's file: `folder/train-00003.tokens`."""
    return folder / f"{split}-{shard:05}.{suffix}"


def totals(shards: tuple[Shard, ...]) -> dict[str, int]:
    """Returns the sizes of a split, from those of its shards."""
    sums = {name: sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens", "text_bytes")}
    return {**sums, "longest": max((shard.longest for shard in shards), default=0)}


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `dataset.json`; looks at no other file.

    Raises:
      DatasetError: it is missing, unreadable, of another format, or does not add up.
    """
    path = folder / MANIFEST
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DatasetError(_not_there(folder)) from None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: damaged: not JSON: {error}") from None
    try:
        return _manifest(record)
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from None


def _not_there(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder; make a dataset there by jaxtp prepare INPUT --out {folder}"
    if not folder.is_dir():
        return f"{folder} is not a folder; name the one that jaxtp prepare was given as --out"
    return (
        f"{folder} has no {MANIFEST}: it is not a dataset, or an unfinished one, "
        "which the command that began it goes on with"
    )


def _manifest(record: Any) -> Manifest:
    found = _take(record, "format", int)
    if found != FORMAT:
        raise DatasetError(f"format {found}; this version of jaxtp reads format {FORMAT}")
    tokenizer = read_tokenizer_info(_take(record, "tokenizer", dict))
    prompts = _take(record, "prompts", bool)
    splits = {name: _split(name, value, prompts) for name, value in _take(record, "splits", dict).items()}
    others = (_take(record, key, dict) for key in ("skipped", "arguments", "inputs"))
    return Manifest(tokenizer, splits, prompts, *others)


def read_tokenizer_info(record: Any) -> TokenizerInfo:
    """Returns a tokenizer that `dataclasses.asdict` wrote; datasets that are older than prefixes have none.

    Raises:
      DatasetError: it is none.
    """
    kind, size = _take(record, "kind", str), _count(record, "vocab_size", _MAX_VOCAB_SIZE)
    eos = None if record.get("eos_id") is None else _count(record, "eos_id", size - 1)
    if kind not in (BYTES, HUGGING_FACE):
        raise DatasetError(f"damaged: tokenizer kind {kind!r} is neither {BYTES} nor {HUGGING_FACE}")
    prefix = record.get("prefix", [])
    if not isinstance(prefix, list) or not all(type(token) is int and 0 <= token < size for token in prefix):
        raise DatasetError(f"damaged: prefix = {prefix}")
    return TokenizerInfo(kind, None if kind == BYTES else _take(record, "sha256", str), size, eos, tuple(prefix))


def _split(name: str, record: Any, prompts: bool) -> tuple[Shard, ...]:
    if name not in SPLITS:
        raise DatasetError(f"damaged: unknown split {name!r}")
    shards = tuple(read_shard(shard, prompts) for shard in _take(record, "shards", list))
    for key, value in totals(shards).items():
        if _count(record, key) != value:
            raise DatasetError(f"damaged: {key} of {name} are not those of its shards")
    return shards


def read_shard(record: Any, prompts: bool) -> Shard:
    """Returns a shard that `dataclasses.asdict` wrote.

    Raises:
      DatasetError: it is none.
    """
    sha256 = _take(record, "sha256", dict)
    if set(sha256) != {TOKENS, DOCUMENTS, *([PROMPTS] if prompts else [])}:
        raise DatasetError(f"damaged: a shard of the files {', '.join(sha256) or 'none'}")
    counts = {name: _count(record, name) for name in ("documents", "tokens", "text_bytes", "longest")}
    shard = Shard(**counts, sha256={suffix: _take(sha256, suffix, str) for suffix in sha256})
    if not 1 <= shard.documents <= shard.tokens or not 1 <= shard.longest <= shard.tokens:
        raise DatasetError(f"damaged: a shard of {shard.documents} documents and {shard.tokens} tokens")
    return shard


def _count(record: Any, key: str, most: int = 2**60) -> int:
    value = _take(record, key, int)
    if not 0 <= value <= most:
        raise DatasetError(f"damaged: {key} = {value}")
    return value


def _take(record: Any, key: str, kind: type[T]) -> T:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DatasetError(f"damaged: {key!r} is missing or not of type {kind.__name__}")
    return value
