"""Documents of tokens: the interface of all training data."""

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.manifest import DOCUMENTS, PROMPTS, TOKENS

Tokens = NDArray[np.integer]


class Documents(ABC):
    """Documents in shards, such as a split of a dataset (`data/store.py`)."""

    has_prompts = False  # whether documents may start with a prompt, which the loss ignores
    # Whether documents 2i and 2i + 1 are the chosen and rejected answer to a prompt, in one shard
    has_pairs = False

    def __init__(self, num_documents: Sequence[int], num_tokens: Sequence[int]):
        # The first document and the first token of each shard, and the totals at the end.
        self._first_document = list(accumulate(num_documents, initial=0))
        self._first_token = list(accumulate(num_tokens, initial=0))
        self.num_documents = self._first_document[-1]
        self.num_tokens = self._first_token[-1]

    @property
    @abstractmethod
    def identity(self) -> str:
        """Hash of the contents, in hexadecimal."""

    @abstractmethod
    def location(self, index: int) -> str:
        """Returns the place of a document, such as `data/x/train-00003.tokens, document 17`."""

    def origin(self, index: int) -> tuple[str, int | None]:
        """Returns the file of a document, and the number of its line or row there, from 1; or its
        location and None."""
        return self.location(index), None

    @abstractmethod
    def _array(self, shard: int, suffix: str) -> Tokens:
        """Returns a shard's tokens, its offsets (the first token of each document), or its
        prompts."""

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens, without prompts and the first token of each document."""
        if not self.has_prompts:
            return self.num_tokens - self.num_documents
        count = 0
        for lengths, prompts in zip(self.lengths(), self.prompt_lengths(), strict=True):
            count += int(np.maximum(lengths - np.maximum(prompts, 1), 0).sum())
        return count

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Yields the lengths of documents in tokens, an array per shard."""
        for shard in range(len(self._first_token) - 1):
            yield np.diff(self._array(shard, DOCUMENTS))

    def prompt_lengths(self) -> Iterator[Tokens]:
        """Yields the numbers of prompt tokens of documents, an array per shard."""
        for shard, (first, end) in enumerate(pairwise(self._first_document)):
            if self.has_prompts:
                yield self._array(shard, PROMPTS)
            else:
                yield np.zeros(end - first, np.int64)

    def document(self, index: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Returns tokens `[start:stop]` (nonnegative), a view of the shard."""
        shard, row = self._locate(index)
        first, last = self._array(shard, DOCUMENTS)[row : row + 2].tolist()
        if stop is not None:
            last = min(last, first + stop)
        return self._array(shard, TOKENS)[first + start : last]

    def prompt_length(self, index: int) -> int:
        """Returns the number of prompt tokens."""
        if not self.has_prompts:
            return 0
        shard, row = self._locate(index)
        return int(self._array(shard, PROMPTS)[row])

    def tokens(self, start: int, stop: int) -> Tokens:
        """Returns a range of all tokens, which is not empty."""
        parts = []
        shard = bisect_right(self._first_token, start) - 1
        while start < stop:
            first = self._first_token[shard]
            end = min(stop, self._first_token[shard + 1])
            parts.append(self._array(shard, TOKENS)[start - first : end - first])
            shard += 1
            start = end
        return np.concatenate(parts)

    def document_at(self, position: int) -> int:
        """Returns the index of the document at a token position."""
        shard = bisect_right(self._first_token, position) - 1
        offsets = self._array(shard, DOCUMENTS)
        row = np.searchsorted(offsets, position - self._first_token[shard], side="right") - 1
        return self._first_document[shard] + int(row)

    def first_token(self, index: int) -> int:
        """Returns the position of a document's first token among all tokens."""
        shard, row = self._locate(index)
        return self._first_token[shard] + int(self._array(shard, DOCUMENTS)[row])

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        shard = bisect_right(self._first_document, index) - 1
        return shard, index - self._first_document[shard]


class InMemory(Documents):
    """Documents in one array.

    Args:
      lengths: number of tokens of each document.
      source: the documents' name in messages.
      prompts: number of prompt tokens of each document.
    """

    def __init__(
        self,
        tokens: Tokens,
        lengths: NDArray[np.int64],
        source: str,
        prompts: NDArray[np.int64] | None = None,
    ):
        super().__init__([len(lengths)], [len(tokens)])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._arrays: dict[str, Tokens] = {TOKENS: tokens, DOCUMENTS: offsets}
        if prompts is not None:
            self._arrays[PROMPTS] = prompts
            self.has_prompts = True
        self._source = source

    @cached_property
    def identity(self) -> str:
        """The sha256 of all arrays."""
        digest = hashlib.sha256()
        for array in self._arrays.values():
            digest.update(array.tobytes())
        return digest.hexdigest()

    def location(self, index: int) -> str:
        """Returns the source and the index."""
        return f"{self._source}, document {index}"

    def _array(self, shard: int, suffix: str) -> Tokens:
        return self._arrays[suffix]
