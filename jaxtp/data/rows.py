"""Rows of a batch: one sequence each."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtp.data.documents import Documents, Tokens
from jaxtp.entry import UserError
from jaxtp.files import fingerprint

IGNORE = -100
"""A label that does not count, as in `layers/loss.py`."""

SEGMENTS = "segments"

Row = dict[str, NDArray[np.int32]]
"""`inputs` and `labels`, `[T]`: a label is the token that follows, or `IGNORE`. Packed rows also have `SEGMENTS`: 1,
2, ... for their documents in turn, 0 for padding."""

Samples: TypeAlias = "grain.MapDataset[Row]"
"""Rows by index, in any order, that Grain reads ahead."""


class TokenError(UserError):
    """A token that the vocabulary does not have."""


def check_vocabulary(tokens: Tokens, documents: Documents, index: int, vocab_size: int) -> None:
    """Checks that tokens of one document are in the vocabulary.

    Raises:
      TokenError: one is not below `vocab_size`.
    """
    if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise TokenError(
            f"{documents.place(index)}: token {largest} is beyond model.vocab_size={vocab_size}; "
            f"the model needs at least {largest + 1}"
        )


class Rows(Sequence[Row]):
    """Rows of documents.

    Args:
      documents: documents that the rows are made of.
      length: T.
      vocab_size: every token is below it.
    """

    algorithm: str
    """Name and version of how documents become rows."""
    identity: str
    """Hash of the tokens' places in the rows, in hexadecimal digits; not of the tokens."""
    padding = 0.0
    """Share of all positions that hold no token."""
    num_split = 0
    """Number of documents that were cut because they are longer than a row."""
    num_dropped = 0
    """Number of documents that were left out because they are longer than a row."""

    def __init__(self, documents: Documents, length: int, vocab_size: int):
        self._documents, self._length, self._vocab_size = documents, length, vocab_size

    def __getitem__(self, index: SupportsIndex) -> Row:  # type: ignore[override]
        if not 0 <= int(index) < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._row(int(index))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} x {self._length} tokens)"  # Grain prints its sources in errors

    @abstractmethod
    def _row(self, index: int) -> Row:
        """Returns a row that exists."""


class Concatenated(Rows):
    """All tokens one after the other, cut into rows wherever they are full; only the last one is padded.

    Attention crosses from document to document. Each token is an input once.
    """

    algorithm = "concatenated 1"

    def __init__(self, documents: Documents, length: int, vocab_size: int):
        super().__init__(documents, length, vocab_size)
        self.identity = fingerprint([self.algorithm, documents.num_tokens, length])

    def __len__(self) -> int:
        return -(-self._documents.num_tokens // self._length)

    def _row(self, index: int) -> Row:
        start = index * self._length
        tokens = self._documents.tokens(start, min(start + self._length + 1, self._documents.num_tokens))
        if len(tokens) and tokens.max() >= self._vocab_size:
            worst = start + int(tokens.argmax())
            check_vocabulary(tokens, self._documents, self._documents.document_at(worst), self._vocab_size)
        row = empty_row(self._length)
        used = min(len(tokens), self._length)
        row["inputs"][:used] = tokens[:used]
        row["labels"][: len(tokens) - 1] = tokens[1:]
        return row


def empty_row(length: int) -> Row:
    """Returns a row of nothing but padding."""
    return {"inputs": np.zeros(length, np.int32), "labels": np.full(length, IGNORE, np.int32)}
