"""The manifest of a dataset, `dataset.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from jaxtp.config.entry import UserError
from jaxtp.config.reading import truncate

FORMAT = 1
MANIFEST = "dataset.json"
TOKENIZER = "tokenizer.json"
TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)

TOKENS, DOCUMENTS, PROMPTS = "tokens", "documents", "prompts"
"""Suffixes of a shard's files."""
OFFSET = np.dtype("<u8")
PROMPT = np.dtype("<u4")

BYTES: Final = "bytes"
HUGGING_FACE: Final = "huggingface"
"""Kinds of tokenizers."""

Count = Annotated[int, Field(ge=0, le=2**60)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
T = TypeVar("T")


class DatasetError(UserError):
    """A folder is no dataset, or the dataset is unfinished or damaged."""


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that made the tokens."""

    kind: Literal["bytes", "huggingface"]
    sha256: str | None
    """The sha256 of `tokenizer.json`; None for bytes."""
    vocab_size: Annotated[int, Field(ge=0, le=2**32)]
    eos_id: TokenId | None
    """The token that ends each document, if one does."""
    prefix: tuple[TokenId, ...] = ()
    """The tokens that each document starts with, such as BOS."""

    @property
    def name(self) -> str:
        """A unique name."""
        return self.sha256 or self.kind

    @property
    def end_ids(self) -> frozenset[int]:
        """The end token, as a set."""
        return frozenset() if self.eos_id is None else frozenset((self.eos_id,))

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest dtype for every id, used on disk."""
        size = self.vocab_size
        return np.dtype("<u1" if size <= 2**8 else "<u2" if size <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """Sizes and checksums of one shard."""

    documents: Count
    tokens: Count
    text_bytes: Count
    """Bytes of the documents as UTF-8, before tokenization."""
    longest: Count
    """Number of tokens of the longest document."""
    sha256: Mapping[str, str]
    """Checksum of each file, by suffix."""

    def file_sizes(self, dtype: np.dtype[np.unsignedinteger]) -> dict[str, int]:
        """Returns file sizes in bytes, by suffix."""
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
    """Whether each document has the length of its prompt (instruction data)."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of files, rows or documents that were left out, by reason."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Settings of `jaxtp prepare`."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Number of input files, and their bytes."""

    def to_json(self) -> str:
        """Returns the text of `dataset.json`; deterministic."""
        record = asdict(self)
        record["splits"] = {n: totals(shards) | {"shards": record["splits"][n]} for n, shards in self.splits.items()}
        order = ("tokenizer", "prompts", "splits", "skipped", "inputs", "arguments")
        return json.dumps({"format": FORMAT, **{key: record[key] for key in order}}, indent=1) + "\n"


@dataclass(frozen=True)
class _Split:
    documents: Count
    tokens: Count
    text_bytes: Count
    longest: Count
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class _Record:
    tokenizer: TokenizerInfo
    splits: dict[str, _Split]
    prompts: bool
    skipped: dict[str, int]
    arguments: dict[str, object]
    inputs: dict[str, int]


def shard_file(folder: Path, split: str, shard: int, suffix: str) -> Path:
    """Returns e.g. `folder/train-00003.tokens`."""
    return folder / f"{split}-{shard:05}.{suffix}"


def totals(shards: tuple[Shard, ...]) -> dict[str, int]:
    """Returns the sizes of a split."""
    sums = {name: sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens", "text_bytes")}
    return {**sums, "longest": max((shard.longest for shard in shards), default=0)}


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks only `dataset.json`.

    Raises:
      DatasetError: the manifest is missing, unreadable, inconsistent or in another format.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        record = json.loads(content.decode())
    except (FileNotFoundError, NotADirectoryError):
        raise DatasetError(_missing(folder)) from None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: damaged: not JSON: {error}") from None
    try:
        if isinstance(record, dict) and type(version := record.get("format")) is int and version != FORMAT:
            raise DatasetError(f"format {version}; this version of jaxtp reads format {FORMAT}")
        return _manifest(parse(_Record, content))
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from None


def _missing(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder; make a dataset there by jaxtp prepare INPUT --out {folder}"
    if not folder.is_dir():
        return f"{folder} is not a folder; name the one that jaxtp prepare was given as --out"
    return (
        f"{folder} has no {MANIFEST}: it is not a dataset, or an unfinished one, which the same jaxtp prepare command "
        "finishes"
    )


def parse(schema: type[T], content: bytes) -> T:
    """Parses JSON into a dataclass with strict types.

    Raises:
      DatasetError: a value is missing, out of range or of another type.
    """
    try:
        return TypeAdapter(schema).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"])) or "the file"
        value = "" if first["type"] == "missing" else f" = {truncate(repr(first['input']))}"
        raise DatasetError(f"damaged: {name}{value}: {first['msg']}") from None


def _manifest(record: _Record) -> Manifest:
    check_tokenizer(record.tokenizer)
    for name, split in record.splits.items():
        if name not in SPLITS:
            raise DatasetError(f"damaged: unknown split {name!r}")
        for shard in split.shards:
            check_shard(shard, record.prompts)
        for key, value in totals(split.shards).items():
            if getattr(split, key) != value:
                raise DatasetError(f"damaged: {key} of {name} are not those of its shards")
    splits = {name: split.shards for name, split in record.splits.items()}
    return Manifest(record.tokenizer, splits, record.prompts, record.skipped, record.arguments, record.inputs)


def check_tokenizer(info: TokenizerInfo) -> None:
    """Raises `DatasetError` for ids beyond the vocabulary or a missing checksum."""
    for token in (*info.end_ids, *info.prefix):
        if token >= info.vocab_size:
            raise DatasetError(f"damaged: token {token} is beyond vocab_size = {info.vocab_size}")
    if (info.sha256 is None) != (info.kind == BYTES):
        raise DatasetError(f"damaged: tokenizer {info.kind} with sha256 = {info.sha256}")


def check_shard(shard: Shard, prompts: bool) -> None:
    """Raises `DatasetError` for unexpected files or impossible sizes."""
    if set(shard.sha256) != {TOKENS, DOCUMENTS, *([PROMPTS] if prompts else [])}:
        raise DatasetError(f"damaged: a shard of the files {', '.join(shard.sha256) or 'none'}")
    if not 1 <= shard.documents <= shard.tokens or not 1 <= shard.longest <= shard.tokens:
        raise DatasetError(f"damaged: a shard of {shard.documents} documents and {shard.tokens} tokens")
