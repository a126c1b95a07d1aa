"""The manifest of a dataset, `dataset.json`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from jaxtp.config.entry import UserError
from jaxtp.config.hints import dotted
from jaxtp.config.reading import MAX_JSON, inside, read_bytes, truncate

FORMAT = 1
FORMAT_OF_PAIRS = 2  # Makes older versions refuse a dataset of pairs, which they would read as text
MANIFEST = "dataset.json"
TOKENIZER = "tokenizer.json"
TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)

TOKENS = "tokens"
DOCUMENTS = "documents"
PROMPTS = "prompts"
ORIGINS = "origins"  # Suffixes of a shard's files
OFFSET = np.dtype("<u8")
PROMPT = np.dtype("<u4")
ORIGIN = np.dtype("<u8")
MAX_ITEMS = 2**36
"""An origin is the index of an input times `MAX_ITEMS`, plus the number of a line in it."""
INPUTS = "inputs.jsonl"
MAX_INPUTS = 2**30  # Maximum bytes of the list of inputs

BYTES: Final = "bytes"
HUGGING_FACE: Final = "huggingface"  # Kinds of tokenizers

Count = Annotated[int, Field(ge=0, le=2**60)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
T = TypeVar("T")


class DatasetError(UserError):
    """A folder is not a dataset, or the dataset is unfinished or damaged."""


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that made the tokens."""

    kind: Literal["bytes", "huggingface"]
    sha256: str | None  # The sha256 of `tokenizer.json`; None for bytes
    vocab_size: Annotated[int, Field(ge=0, le=2**32)]
    eos_id: TokenId | None  # The token that ends each document, if one does
    prefix: tuple[TokenId, ...] = ()  # The tokens that each document starts with, such as BOS

    def __post_init__(self) -> None:
        for token in (*self.end_ids, *self.prefix):
            if token >= self.vocab_size:
                raise DatasetError(f"token {token} is beyond vocab_size = {self.vocab_size}")
        if (self.sha256 is None) != (self.kind == BYTES):
            raise DatasetError(f"tokenizer {self.kind} with sha256 = {self.sha256}")

    @property
    def name(self) -> str:
        """A unique name: the sha256, or `bytes`."""
        return self.sha256 or self.kind

    @property
    def end_ids(self) -> frozenset[int]:
        """The end token, as a set."""
        return frozenset() if self.eos_id is None else frozenset((self.eos_id,))

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest dtype that holds every id; files have this dtype."""
        dtype: np.dtype[np.unsignedinteger] = np.min_scalar_type(max(self.vocab_size - 1, 0))
        return dtype.newbyteorder("<")


@dataclass(frozen=True)
class Input:
    """A line of `inputs.jsonl`."""

    path: str
    bytes: int
    modified: int


@dataclass(frozen=True)
class Shard:
    """Sizes and checksums of one shard."""

    documents: Count
    tokens: Count
    text_bytes: Count  # bytes of the documents as UTF-8, before tokenization
    longest: Count  # number of tokens of the longest document
    sha256: Mapping[str, str]  # checksum of each file, by suffix

    def __post_init__(self) -> None:
        if not 1 <= self.documents <= self.tokens or not 1 <= self.longest <= self.tokens:
            raise DatasetError(f"a shard has {self.documents} documents and {self.tokens} tokens")


def totals(shards: Iterable[Shard]) -> dict[str, int]:
    """Returns the sizes of a split."""
    sums = {"documents": 0, "tokens": 0, "text_bytes": 0, "longest": 0}
    for shard in shards:
        sums["documents"] += shard.documents
        sums["tokens"] += shard.tokens
        sums["text_bytes"] += shard.text_bytes
        sums["longest"] = max(sums["longest"], shard.longest)
    return sums


@dataclass(frozen=True)
class SplitRecord:
    """The shards of a split, and their `totals`."""

    documents: Count
    tokens: Count
    text_bytes: Count
    longest: Count
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """Content of `dataset.json`, in this order after its `format`."""

    tokenizer: TokenizerInfo
    prompts: bool  # whether each document has the length of its prompt (instruction data)
    splits: dict[str, SplitRecord]
    skipped: dict[str, int]  # number of files, rows or documents that were left out, by reason
    inputs: dict[str, int]  # number of input files, and their bytes
    arguments: dict[str, object]  # settings of `jaxtp prepare`
    pairs: bool = False
    """Whether documents 2i and 2i + 1 are the chosen and the rejected answer to a prompt; written
    only if true."""

    def __post_init__(self) -> None:
        if self.pairs and not self.prompts:
            raise DatasetError("pairs without prompts")
        suffixes = {TOKENS, DOCUMENTS}
        if self.prompts:
            suffixes.add(PROMPTS)
        for name, split in self.splits.items():
            if name not in SPLITS:
                raise DatasetError(f"unknown split {name!r}")
            for shard in split.shards:
                if shard.sha256.keys() - {ORIGINS} != suffixes:
                    raise DatasetError(f"a shard has the files {', '.join(shard.sha256) or 'none'}")
                if self.pairs and shard.documents % 2:
                    raise DatasetError(f"a shard of pairs has {shard.documents} documents")
            for key, value in totals(split.shards).items():
                if getattr(split, key) != value:
                    raise DatasetError(f"{key} of {name} does not match its shards")

    def to_json(self) -> str:
        """Returns the text of `dataset.json`; deterministic."""
        record = {"format": FORMAT_OF_PAIRS if self.pairs else FORMAT, **asdict(self)}
        if not self.pairs:
            del record["pairs"]
        return json.dumps(record, indent=1) + "\n"


def file_sizes(documents: int, tokens: int, dtype: np.dtype[np.unsignedinteger]) -> dict[str, int]:
    """Returns the sizes in bytes of a shard's files, by suffix."""
    return {
        TOKENS: tokens * dtype.itemsize,
        DOCUMENTS: (documents + 1) * OFFSET.itemsize,
        PROMPTS: documents * PROMPT.itemsize,
        ORIGINS: documents * ORIGIN.itemsize,
    }


def shard_file(folder: Path, split: str, shard: int, suffix: str) -> Path:
    """Returns the path of a file, such as `folder/train-00003.tokens`."""
    return folder / f"{split}-{shard:05}.{suffix}"


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `dataset.json` alone; raises `DatasetError`."""
    path = folder / MANIFEST
    try:
        content = read_bytes(inside(folder, MANIFEST), MAX_JSON)
        record = json.loads(content.decode())
    except (FileNotFoundError, NotADirectoryError):
        raise DatasetError(_missing(folder)) from None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: damaged: not JSON: {error}") from None
    try:
        version = record.get("format") if isinstance(record, dict) else None
        if type(version) is int and version not in (FORMAT, FORMAT_OF_PAIRS):
            raise DatasetError(
                f"format {version}; this version of jaxtp reads formats {FORMAT} and "
                f"{FORMAT_OF_PAIRS}"
            )
        manifest = parse(Manifest, content)
        if manifest.pairs != (version == FORMAT_OF_PAIRS):
            raise DatasetError(
                f"damaged: format {version} {'with' if manifest.pairs else 'without'} pairs"
            )
        return manifest
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from None


def read_inputs(folder: Path) -> list[Input]:
    """Reads `inputs.jsonl`; raises `OSError` or `DatasetError`."""
    lines = read_bytes(folder / INPUTS, MAX_INPUTS).splitlines()
    return parse(list[Input], b"[%b]" % b",".join(lines))


def _missing(folder: Path) -> str:
    if not folder.exists():
        return (
            f"{folder}: no such folder; make a dataset there by jaxtp prepare INPUT --out {folder}"
        )
    if not folder.is_dir():
        return f"{folder} is not a folder; name the --out folder of jaxtp prepare"
    return (
        f"{folder} has no {MANIFEST}: it is not a dataset, or an unfinished one, which the same "
        "jaxtp prepare command finishes"
    )


def parse(schema: type[T], content: bytes) -> T:
    """Parses JSON into a dataclass with strict types; raises `DatasetError`."""
    try:
        return TypeAdapter(schema).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = dotted(first["loc"]) or "the file"
        if first["type"] not in ("missing", "value_error"):
            name += f" = {truncate(repr(first['input']))}"
        raise DatasetError(
            f"damaged: {name}: {first['msg'].removeprefix('Value error, ')}"
        ) from None
