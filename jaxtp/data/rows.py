"""Rows of a batch: one sequence each."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex, TypeAlias

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtp.config.entry import UserError
from jaxtp.config.files import fingerprint
from jaxtp.data.documents import Documents, Tokens

IGNORE = -100  # A label without a loss, as in `layers/loss.py`

SEGMENTS = "segments"
PAIRS = "pairs"

Row = dict[str, NDArray[np.int32]]
"""`inputs` and `labels`, `[T]`: a label is the next token, or `IGNORE`. Packed rows also have
`SEGMENTS`: 1, 2, ... for their documents, 0 for padding. Rows of preference data also have `PAIRS`:
for the row's pairs i = 1, 2, ..., i in the chosen and -i in the rejected document, with their
prompts; 0 for padding. Scores (`scores.py`) add columns `[T, ...]`, some of float32."""

Samples: TypeAlias = "grain.MapDataset[Row]"  # Rows by index, which Grain reads ahead


class Piece(NamedTuple):
    """Tokens `[start:stop]` of a document, which are inputs of a row.

    The label of the last one is the token at `stop`, if there is one.
    """

    document: int
    start: int
    stop: int


class TokenError(UserError):
    """A token outside the vocabulary."""


def check_vocabulary(tokens: Tokens, documents: Documents, index: int, vocab_size: int) -> None:
    """Raises `TokenError` if a document's token is not below `vocab_size`."""
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise TokenError(
            f"{documents.location(index)}: token {largest} is beyond model.vocab_size={vocab_size};"
            f" the model needs at least {largest + 1}"
        )


class Rows(Sequence[Row]):
    """Rows of `length` tokens, made of documents."""

    algorithm: str  # name and version
    identity: str  # hash of the positions of tokens in the rows, not of the tokens
    padding = 0.0  # fraction of positions without a token
    # Numbers of documents, or of pairs, that were cut and that were left out
    num_split = num_dropped = 0
    num_unlabelled = 0  # number of rows that were left out, because they have no label
    columns: Callable[[int], Row] | None = None  # returns more columns of the row of an index

    def __init__(self, documents: Documents, length: int, vocab_size: int):
        self._documents = documents
        self._length = length
        self._vocab_size = vocab_size

    def __getitem__(self, index: SupportsIndex) -> Row:  # type: ignore[override]
        if not 0 <= int(index) < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self._row(int(index))
        if self.columns is not None:
            row |= self.columns(int(index))
        return row

    @abstractmethod
    def pieces(self, index: int) -> Iterator[Piece]:
        """Yields the parts of documents in a row, in their order."""

    @abstractmethod
    def _row(self, index: int) -> Row: ...


class Concatenated(Rows):
    """All tokens in sequence, cut into rows; only the last row is padded.

    Attention crosses documents. Each token is an input once. The last token is left out if it would
    be alone in a row, because this row would have no label.
    """

    algorithm = "concatenated 1"

    def __init__(self, documents: Documents, length: int, vocab_size: int):
        super().__init__(documents, length, vocab_size)
        rows = -(-documents.num_tokens // length)
        self._num_rows = -(-max(documents.num_tokens - 1, 0) // length)
        self.num_unlabelled = rows - self._num_rows
        left_out = ["without the last row"] if self.num_unlabelled else []
        self.identity = fingerprint([self.algorithm, documents.num_tokens, length, *left_out])

    def __len__(self) -> int:
        return self._num_rows

    def pieces(self, index: int) -> Iterator[Piece]:
        """See `Rows.pieces`."""
        documents = self._documents
        at = index * self._length
        end = min(at + self._length, documents.num_tokens)
        while at < end:
            document = documents.document_at(at)
            first = documents.first_token(document)
            stop = min(end, first + len(documents.document(document)))
            yield Piece(document, at - first, stop - first)
            at = stop

    def _row(self, index: int) -> Row:
        start = index * self._length
        tokens = self._documents.tokens(
            start, min(start + self._length + 1, self._documents.num_tokens)
        )
        document = self._documents.document_at(start + int(tokens.argmax()))
        check_vocabulary(tokens, self._documents, document, self._vocab_size)
        row = empty_row(self._length)
        used = min(len(tokens), self._length)
        row["inputs"][:used] = tokens[:used]
        row["labels"][: len(tokens) - 1] = tokens[1:]
        return row


def empty_row(length: int) -> Row:
    """Returns a row of padding."""
    return {"inputs": np.zeros(length, np.int32), "labels": np.full(length, IGNORE, np.int32)}
