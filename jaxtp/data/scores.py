"""Scores of a dataset's tokens by a model, which `jaxtp score` writes.

Losses that need a reference model or a teacher read them.

Version 1 of the format is a folder:

- `scores.json`: `Record`, written last and atomically; without it the folder is unfinished.
- For each shard of the dataset, files aligned with its `.tokens`, little-endian:
  - `train-00000.log_probs`: float32 `[tokens]`, the log-probability of the label at each token;
  - or the k most probable next tokens, descending: `train-00000.top_ids`, uint16 `[tokens, k]` for
    a vocabulary of up to 65,536, else uint32, and `train-00000.top_log_probs`, float32
    `[tokens, k]`.
  Tokens without a label, such as a document's last or a prompt's, and tokens in no row have zeros.
- `unfinished.json`: a `Journal`, until `scores.json` exists.

The folder may come from anyone: it names no paths of files, and all sizes are checked before files
are mapped.
"""

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from jaxtp.config.entry import UserError
from jaxtp.config.files import fingerprint
from jaxtp.config.reading import MAX_JSON, inside, read_bytes, truncate
from jaxtp.config.schema import differences, nearest_file
from jaxtp.data.documents import Documents
from jaxtp.data.manifest import SPLITS, Count, DatasetError, TokenizerInfo, parse, shard_file
from jaxtp.data.rows import IGNORE, Place, Row, Rows
from jaxtp.data.samples import LongDocuments, Packing, RowSettings
from jaxtp.data.store import size_of, verify_sum

LOG_PROBS = "log_probs"
TOP_IDS = "top_ids"
TOP_LOG_PROBS = "top_log_probs"
"""Columns of a row, and suffixes of files."""
SCORES = "scores.json"
JOURNAL = "unfinished.json"
_MAX_LOG_PROB = 1e-3  # a log-probability is at most 0, up to rounding

Text = Annotated[str, Field(max_length=2**12)]
T = TypeVar("T")
Numbers: TypeAlias = NDArray[np.integer] | NDArray[np.floating]


class ScoresError(UserError):
    """Scores are missing, unfinished or damaged, or do not fit a run."""


@dataclass(frozen=True)
class Scored:
    """A scored split."""

    documents: str  # `Documents.identity`
    rows: str  # `Rows.identity`
    shards: tuple[Mapping[str, str], ...]  # The sha256 of each file, by suffix; empty in a journal


@dataclass(frozen=True)
class Record:
    """Content of `scores.json`."""

    format: Literal[1]
    model: Text  # A description, for messages
    model_sha256: Text  # Identity of the weights, as in checkpoints of adapters
    dtype: Text  # The dtype of the computation
    dataset: Text  # Folder of the dataset, for messages
    tokenizer: Text
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]  # Number of tokens of the model
    top_k: Annotated[int, Field(ge=1, le=2**20)] | None  # None for log-probabilities of the labels
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sequence_length: Count
    packing: Packing
    long_documents: LongDocuments
    splits: dict[str, Scored]

    def __post_init__(self) -> None:
        for name, split in self.splits.items():
            if name not in SPLITS:
                raise ScoresError(f"unknown split {truncate(repr(name))}")
            if any(sums and sums.keys() != self.layout.keys() for sums in split.shards):
                raise ScoresError(
                    f"a shard of {name} has other files than {', '.join(self.layout)}"
                )

    @property
    def layout(self) -> dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]:
        """The files of a shard, by suffix: the dtype, and the shape for each token."""
        number = np.dtype("<f4")
        if self.top_k is None:
            return {LOG_PROBS: (number, ())}
        ids = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")
        return {TOP_IDS: (ids, (self.top_k,)), TOP_LOG_PROBS: (number, (self.top_k,))}

    def sizes(self, folder: Path, split: str, shard_tokens: Sequence[int]) -> dict[Path, int]:
        """Returns the size in bytes of each file of a split."""
        sizes: dict[Path, int] = {}
        for shard, tokens in enumerate(shard_tokens):
            for suffix, (dtype, shape) in self.layout.items():
                path = shard_file(folder, split, shard, suffix)
                sizes[path] = tokens * math.prod(shape) * dtype.itemsize
        return sizes


@dataclass(frozen=True)
class Journal:
    """Content of `unfinished.json`."""

    record: Record
    arguments: tuple[str, ...]  # The command's arguments, for a message
    rows: dict[str, Count]  # Number of rows of each split whose scores are on disk


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The scores that a run needs, to write the command that makes them."""

    dataset: Path | None = None  # None if it is not known
    model: Path | None = None
    labels_only: bool = False  # the loss reads log-probabilities of the labels, and no other tokens

    def command(
        self,
        rows: RowSettings,
        *,
        out: Path | None = None,
        top_k: int | None = None,
        temperature: float = 1.0,
    ) -> str:
        """Returns a command of `jaxtp score`; unknown paths are words in capitals."""
        dataset = shlex.quote(str(self.dataset or "DATASET"))
        model = shlex.quote(str(self.model or "MODEL"))
        folder = shlex.quote(str(out or "FOLDER"))
        flags = [f"jaxtp score {dataset} --model {model} --out {folder}"]
        if top_k is not None and not self.labels_only:
            flags.append(f"--top-k {top_k}")
        flags.append(f"--data.sequence-length {rows.length}")
        if rows.packing != "documents":
            flags.append(f"--data.packing {rows.packing}")
        if rows.long_documents != "split":
            flags.append(f"--data.long-documents {rows.long_documents}")
        if temperature != 1:
            flags.append(f"--temperature {temperature:g}")
        return " ".join(flags)


class Scores:
    """An opened folder of scores."""

    def __init__(self, folder: Path, record: Record, needs: Wanted = Wanted()):
        self.folder = folder
        self.record = record
        self.needs = needs
        self.identity = fingerprint(asdict(record)["splits"])

    def check(self, tokenizer: TokenizerInfo, settings: RowSettings) -> None:
        """Raises `ScoresError` if the scores are for another tokenizer or other rows."""
        record = self.record
        if record.tokenizer != tokenizer.name:
            raise ScoresError(
                f"data.scores={self.folder} has scores for tokenizer "
                f"{truncate(record.tokenizer[:12])}, and the data "
                f"were made with tokenizer {tokenizer.name[:12]}; score these data: "
                f"{self.command()}"
            )
        stored = {
            name: getattr(record, name) for name in ("sequence_length", "packing", "long_documents")
        }
        requested = {
            "sequence_length": settings.length,
            "packing": settings.packing,
            "long_documents": settings.long_documents,
        }
        if changed := differences(stored, requested, "data."):
            raise ScoresError(
                f"data.scores={self.folder} was made with other rows (there -> here): "
                f"{'; '.join(changed)}; use its settings, or score again: {self.command(settings)}"
            )

    def describe(self) -> str:
        """Describes the scores and their model."""
        top_k = self.record.top_k
        content = "log-probabilities" if top_k is None else f"{top_k} most probable tokens"
        return f"{self.folder}: {content} by {truncate(self.record.model)}, in {self.record.dtype}"

    def command(self, settings: RowSettings | None = None, temperature: float | None = None) -> str:
        """Returns a command that makes such scores, by default with the same rows and
        temperature."""
        record = self.record
        rows = settings
        if rows is None:
            rows = RowSettings(
                record.sequence_length, record.vocab_size, record.packing, record.long_documents
            )
        divisor = record.temperature if temperature is None else temperature
        return self.needs.command(
            rows, out=free_folder(self.folder), top_k=record.top_k, temperature=divisor
        )

    def add_to(self, rows: Rows, documents: Documents, settings: RowSettings) -> None:
        """Adds the scores as columns to rows.

        Raises `ScoresError` if the scores belong to other rows, or files have wrong sizes.
        """
        splits = {split.documents: (name, split) for name, split in self.record.splits.items()}
        if documents.identity not in splits:
            raise ScoresError(
                f"data.scores={self.folder} has scores of {truncate(self.record.dataset)}, and not "
                f"of the documents in {documents.location(0).rpartition(',')[0]}; all data of a "
                f"run need to be one dataset, scored by: {self.command(settings)}"
            )
        name, split = splits[documents.identity]
        if split.rows != rows.identity or len(split.shards) != len(documents.shard_sizes):
            raise ScoresError(
                f"data.scores={self.folder} was made with other rows of {name}, by another version "
                f"of jaxtp; score again: {self.command(settings)}"
            )
        for path, expected in self.record.sizes(self.folder, name, documents.shard_sizes).items():
            if (size := _size_of(path)) != expected:
                raise ScoresError(f"{path}: damaged scores: {size:,} bytes of {expected:,}")
        rows.add_columns = _Columns(self.folder, name, self.record, settings.vocab_size)


class _Columns:
    """Adds the scores of a split to rows (`Rows.add_columns`).

    Files are mapped on first use, as in `store.Split`.
    """

    def __init__(self, folder: Path, split: str, record: Record, vocab_size: int):
        self._file = partial(shard_file, folder, split)
        self._layout = record.layout
        self._vocab_size = vocab_size
        self._maps: dict[tuple[int, str], Numbers] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_maps": {}}

    def __call__(self, row: Row, places: Iterator[Place]) -> None:
        labels = row["labels"]
        parts = list(places)
        for suffix, (_, shape) in self._layout.items():
            is_ids = suffix == TOP_IDS
            column = np.zeros((len(labels), *shape), np.int64 if is_ids else np.float32)
            for at, shard, part in parts:
                column[at] = self._map(shard, suffix)[part]
            column[labels == IGNORE] = 0
            for problem in _problems(column, self._vocab_size, "model.vocab_size="):
                raise ScoresError(
                    f"{self._file(parts[0][1], suffix)}: {problem}; jaxtp score --verify checks "
                    "a folder"
                )
            row[suffix] = column.astype(np.int32) if is_ids else column  # type: ignore[assignment]

    def _map(self, shard: int, suffix: str) -> Numbers:
        array = self._maps.get((shard, suffix))
        if array is None:
            dtype, shape = self._layout[suffix]
            mapped = np.memmap(self._file(shard, suffix), dtype, mode="r")
            array = mapped.view(np.ndarray).reshape(-1, *shape)
            self._maps[shard, suffix] = array
        return array


def free_folder(path: Path) -> Path:
    """Returns the path, with a number at its end if there is a folder of this name already."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([path], numbered) if not folder.exists())


def open_scores(folder: Path, needs: Wanted = Wanted()) -> Scores:
    """Opens finished scores, and reads only `scores.json`; raises `ScoresError`."""
    if not folder.is_dir():
        raise ScoresError(
            f"{folder}: no such folder of scores{nearest_file(folder)}; jaxtp score makes one"
        )
    if (record := _read(folder / SCORES, Record)) is not None:
        if not all(all(split.shards) for split in record.splits.values()):
            raise ScoresError(f"{folder / SCORES}: damaged: a shard without files")
        return Scores(folder, record, needs)
    if (journal := read_journal(folder)) is not None:
        command = truncate(shlex.join(["jaxtp", "score", *journal.arguments]), 1000)
        raise ScoresError(f"{folder} has unfinished scores; this command finishes them: {command}")
    raise ScoresError(f"{folder} has no {SCORES}: it is not a folder of jaxtp score")


def read_journal(folder: Path) -> Journal | None:
    """Reads the journal of unfinished scores, if there is one; raises `ScoresError`."""
    return _read(folder / JOURNAL, Journal)


def _read(path: Path, schema: type[T]) -> T | None:
    try:
        return parse(schema, read_bytes(inside(path.parent, path.name), MAX_JSON))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ScoresError(f"{path}: {error.strerror}") from None
    except DatasetError as error:
        raise ScoresError(f"{path}: {error}") from None


def _size_of(path: Path) -> int:
    try:
        return size_of(path)
    except OSError as error:
        raise ScoresError(f"{path}: damaged scores: {error.strerror}") from None


def verify(scores: Scores) -> Iterator[str]:
    """Reads all files; yields differences from `scores.json`, and numbers that are not scores."""
    for name, split in scores.record.splits.items():
        for shard, sums in enumerate(split.shards):
            for suffix, expected in sums.items():
                path = shard_file(scores.folder, name, shard, suffix)
                dtype, shape = scores.record.layout[suffix]
                try:
                    size = _size_of(path)
                except ScoresError as error:
                    yield str(error)
                    continue
                if not size or size % (math.prod(shape) * dtype.itemsize):
                    yield f"{path}: cut short"
                elif problems := list(verify_sum(path, expected)):
                    yield from problems
                else:
                    array = np.memmap(path, dtype, mode="r")
                    vocab_size = scores.record.vocab_size
                    for problem in _problems(array, vocab_size, "the vocabulary of "):
                        yield f"{path}: {problem}"


def _problems(numbers: Numbers, vocab_size: int, setting: str) -> Iterator[str]:
    # Yields why numbers are not ids or log-probabilities.
    highest = numbers.max()
    if numbers.dtype.kind in "iu":
        if highest >= vocab_size:
            yield f"id {highest} is beyond {setting}{vocab_size}"
        return
    lowest = numbers.min()
    if not (np.isfinite(lowest) and highest < _MAX_LOG_PROB):
        yield f"log-probabilities from {lowest} to {highest}"
