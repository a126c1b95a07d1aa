"""Scores of a dataset's tokens by a model, which `jaxtp score` writes.

Losses that need a reference model or a teacher read them.

Version 2 of the format is a folder:

- `scores.json`: `Record`, replaced atomically as the rows are scored; with checksums, all of them
  are.
- `train.scores` and `validation.scores`: an array `[rows, T]` of little-endian records, in the
  order of a run's rows. A record has `log_probs`, float32, the log-probability of the label; or
  `top_ids`, uint16 `[k]` for a vocabulary of up to 65,536, else uint32, the most probable next
  tokens, descending, and then `top_log_probs`, float32 `[k]`. Positions without a label, such as a
  document's last token, a prompt's and padding, have zeros.

The folder may come from anyone: it names no paths of files, and all sizes are checked before files
are mapped.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from jaxtp.config.files import fingerprint
from jaxtp.config.reading import MAX_JSON, inside, read_bytes, truncate
from jaxtp.config.schema import differences, nearest_file
from jaxtp.data.documents import Documents
from jaxtp.data.manifest import SPLITS, Count, DatasetError, parse
from jaxtp.data.rows import Row, Rows
from jaxtp.data.samples import LongDocuments, Packing, RowSettings
from jaxtp.data.store import require_size

LOG_PROBS = "log_probs"
TOP_IDS = "top_ids"
TOP_LOG_PROBS = "top_log_probs"
"""Columns of a row, and fields of a record."""
SCORES = "scores.json"
_MAX_LOG_PROB = 1e-3  # a log-probability is at most 0, up to rounding

Text = Annotated[str, Field(max_length=2**12)]
Size = Annotated[int, Field(ge=1, le=2**60)]
Numbers: TypeAlias = NDArray[np.void]


@dataclass(frozen=True)
class Scored:
    """A scored split."""

    documents: str  # `Documents.identity`
    rows: str  # `Rows.identity`
    num_rows: Size


@dataclass(frozen=True)
class Record:
    """Content of `scores.json`."""

    format: Literal[2]
    model: Text  # A description, for messages
    model_sha256: Text  # Identity of the weights, as in checkpoints of adapters
    dtype: Text  # The dtype of the computation
    dataset: Text  # Folder of the dataset, for messages
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]  # Number of tokens of the model
    top_k: Annotated[int, Field(ge=1, le=2**20)] | None  # None for log-probabilities of the labels
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sequence_length: Size
    packing: Packing
    long_documents: LongDocuments
    splits: dict[str, Scored]
    finished: dict[str, Count] = field(default_factory=dict)
    """Number of rows of each split whose scores are on disk."""
    sha256: dict[str, str] = field(default_factory=dict)
    """The sha256 of each split's file; empty until all rows are finished."""

    def __post_init__(self) -> None:
        for name in self.splits:
            if name not in SPLITS:
                raise DatasetError(f"unknown split {truncate(repr(name))}")
        if self.sha256 and self.sha256.keys() != self.splits.keys():
            raise DatasetError("the checksums are of other splits")

    @property
    def fields(self) -> np.dtype[np.void]:
        """The columns at a position."""
        if self.top_k is None:
            return np.dtype([(LOG_PROBS, "<f4")])
        ids = "<u2" if self.vocab_size <= 2**16 else "<u4"
        shape = (self.top_k,)
        return np.dtype([(TOP_IDS, ids, shape), (TOP_LOG_PROBS, "<f4", shape)])

    def num_bytes(self, rows: int) -> int:
        """Returns the size of rows in a file."""
        return rows * self.sequence_length * self.fields.itemsize


class Scores:
    """An opened folder of scores."""

    def __init__(self, folder: Path, record: Record):
        self.folder = folder
        self.record = record
        self.again = "jaxtp score"
        """The command for scores that fit, which errors show."""
        self.identity = fingerprint(record.sha256)

    def check(self, settings: RowSettings) -> None:
        """Raises `DatasetError` if the scores are for other rows."""
        requested = {
            "sequence_length": settings.length,
            "packing": settings.packing,
            "long_documents": settings.long_documents,
        }
        stored = {name: getattr(self.record, name) for name in requested}
        if changed := differences(stored, requested, "data."):
            raise DatasetError(
                f"data.scores={self.folder} was made with other rows (there -> here): "
                f"{'; '.join(changed)}; use its settings, or score again: {self.again}"
            )

    def describe(self) -> str:
        """Describes the scores and their model."""
        top_k = self.record.top_k
        content = "log-probabilities" if top_k is None else f"{top_k} most probable tokens"
        return f"{self.folder}: {content} by {truncate(self.record.model)}, in {self.record.dtype}"

    def add_to(self, rows: Rows, documents: Documents, settings: RowSettings) -> None:
        """Adds the scores as columns to rows.

        Raises `DatasetError` if the scores belong to other rows, or a file has a wrong size.
        """
        splits = {split.documents: (name, split) for name, split in self.record.splits.items()}
        if documents.identity not in splits:
            raise DatasetError(
                f"data.scores={self.folder} has scores of {truncate(self.record.dataset)}, and not "
                f"of the documents in {documents.location(0).rpartition(',')[0]}; all data of a "
                f"run need to be one dataset, scored by: {self.again}"
            )
        name, split = splits[documents.identity]
        if split.rows != rows.identity or split.num_rows != len(rows):
            raise DatasetError(
                f"data.scores={self.folder} was made with other rows of {name}, by another version "
                f"of jaxtp; score again: {self.again}"
            )
        rows.columns = _Columns(self, name, settings.vocab_size)


class _Columns:
    """Reads the scores of a row (`Rows.columns`).

    The file is mapped on first use, as in `store.Split`.
    """

    def __init__(self, scores: Scores, split: str, vocab_size: int):
        record = scores.record
        num_rows = record.splits[split].num_rows
        self._path = scores_file(scores.folder, split)
        self._fields = record.fields
        self._shape = num_rows, record.sequence_length
        self._vocab_size = vocab_size
        self._array: Numbers | None = None
        require_size(self._path, record.num_bytes(num_rows))

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_array": None}

    def __call__(self, index: int) -> Row:
        if self._array is None:
            mapped = np.memmap(self._path, self._fields, mode="r", shape=self._shape)
            self._array = mapped.view(np.ndarray)
        columns: Row = {}
        for name in self._fields.names or ():
            numbers = self._array[index][name]
            self._check(name, numbers)
            columns[name] = numbers.astype(np.int32 if name == TOP_IDS else np.float32)
        return columns

    def _check(self, name: str, numbers: NDArray[Any]) -> None:
        lowest = numbers.min()
        highest = numbers.max()
        if name == TOP_IDS:
            if highest >= self._vocab_size:
                raise DatasetError(
                    f"{self._path}: id {highest} is beyond model.vocab_size={self._vocab_size}"
                )
        elif not (np.isfinite(lowest) and highest < _MAX_LOG_PROB):
            raise DatasetError(
                f"{self._path}: log-probabilities from {lowest} to {highest}; if its sha256 is "
                f"not that in {SCORES}, the file is damaged"
            )


def scores_file(folder: Path, split: str) -> Path:
    """Returns the path of a split's scores."""
    return folder / f"{split}.scores"


def open_scores(folder: Path) -> Scores:
    """Opens finished scores, and reads only `scores.json`; raises `DatasetError`."""
    if not folder.is_dir():
        raise DatasetError(
            f"{folder}: no such folder of scores{nearest_file(folder)}; jaxtp score makes one"
        )
    record = read_record(folder)
    if record is None:
        raise DatasetError(f"{folder} has no {SCORES}: it is not a folder of jaxtp score")
    if not record.sha256:
        raise DatasetError(
            f"{folder} has unfinished scores, which the same jaxtp score command finishes"
        )
    return Scores(folder, record)


def read_record(folder: Path) -> Record | None:
    """Reads `scores.json`, if there is one; raises `DatasetError`."""
    try:
        return parse(Record, read_bytes(inside(folder, SCORES), MAX_JSON))
    except FileNotFoundError:
        return None
    except (OSError, DatasetError) as error:
        problem = getattr(error, "strerror", None) or error
        raise DatasetError(
            f"{folder / SCORES}: {problem}; score the data again, into another --out"
        ) from None
