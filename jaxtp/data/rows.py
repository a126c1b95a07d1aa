"""Rows of a batch: what one sequence of it is made of."""

from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtp.data.documents import Documents, Tokens
from jaxtp.entry import UserError

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
    """Checks tokens of one document.

    Raises:
      TokenError: one is not below `vocab_size`.
    """
    if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise TokenError(
            f"{documents.place(index)}: token {largest} is beyond model.vocab_size={vocab_size}; "
            f"the model needs at least {largest + 1}"
        )


class Concatenated(Sequence[Row]):
    """All tokens one after the other, cut into rows wherever they are full; only the last one is padded.

    Attention crosses from document to document. Each token is an input once.

    Args:
      documents: where the tokens are.
      length: T.
      vocab_size: every token is below it.
    """

    padding = 0.0
    num_split = 0
    num_dropped = 0

    def __init__(self, documents: Documents, length: int, vocab_size: int):
        self._documents = documents
        self._length = length
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return -(-self._documents.num_tokens // self._length)

    def __getitem__(self, index: SupportsIndex) -> Row:  # type: ignore[override]
        if not 0 <= int(index) < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = int(index) * self._length
        tokens = self._documents.tokens(start, min(start + self._length + 1, self._documents.num_tokens))
        if len(tokens) and tokens.max() >= self._vocab_size:
            worst = start + int(tokens.argmax())
            check_vocabulary(tokens, self._documents, self._documents.document_at(worst), self._vocab_size)
        row = empty_row(self._length)
        used = min(len(tokens), self._length)
        row["inputs"][:used] = tokens[:used]
        row["labels"][: len(tokens) - 1] = tokens[1:]
        return row

    def __repr__(self) -> str:
        return f"Concatenated({len(self)} x {self._length} tokens)"  # Grain prints its sources in errors


def empty_row(length: int) -> Row:
    """Nothing but padding."""
    return {"inputs": np.zeros(length, np.int32), "labels": np.full(length, IGNORE, np.int32)}
