"""What every source of training data is: documents of tokens, one after the other, read where they lie."""

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]


class Documents(Protocol):
    """Documents of token ids, such as a split of a prepared dataset (`data/store.py`)."""

    @property
    def num_documents(self) -> int:
        """How many there are."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that the loss counts: without prompts, and without first tokens, which follow nothing."""

    @property
    def has_prompts(self) -> bool:
        """Whether the first tokens of a document may be a prompt, which the loss leaves out."""

    @property
    def identity(self) -> str:
        """A hash of the contents, in hexadecimal digits."""

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Tokens of each document, in order, in parts of any size."""

    def document(self, index: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Tokens `start` to `stop` of a document."""

    def prompt_length(self, index: int) -> int:
        """Tokens of a document that are its prompt."""

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens `start` to `stop` of all documents one after the other."""

    def document_at(self, position: int) -> int:
        """The document that holds a position of them."""

    def place(self, index: int) -> str:
        """Where a document is, for messages."""


class InMemory:
    """Documents that are one array.

    Args:
      tokens: `[num_tokens]`, of all documents.
      lengths: tokens of each.
      source: where they are from, for messages.
    """

    has_prompts = False

    def __init__(self, tokens: Tokens, lengths: NDArray[np.int64], source: str):
        self._tokens = tokens
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._source = source
        self.num_documents = len(lengths)
        self.num_tokens = len(tokens)
        self.num_loss_tokens = len(tokens) - len(lengths)
        self.identity = hashlib.sha256(tokens.tobytes() + self._offsets.tobytes()).hexdigest()

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Tokens of each document."""
        yield np.diff(self._offsets)

    def document(self, index: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Tokens `start` to `stop` of a document."""
        first, last = int(self._offsets[index]), int(self._offsets[index + 1])
        return self._tokens[first + start : last if stop is None else min(first + stop, last)]

    def prompt_length(self, index: int) -> int:
        """None of them has a prompt."""
        return 0

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens `start` to `stop` of all documents one after the other."""
        return self._tokens[start:stop]

    def document_at(self, position: int) -> int:
        """The document that holds a position of them."""
        return int(np.searchsorted(self._offsets, position, side="right")) - 1

    def place(self, index: int) -> str:
        """Where a document is, for messages."""
        return f"{self._source}, document {index}"
