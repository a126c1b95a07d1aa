"""The samples of a run: the rows of its documents, in an order that depends on nothing but the seed.

Sample `i` is the same row whatever the mesh, the number of processes or the batch size: epoch by epoch, each in its own
order, and of several sources by weight. So the global index of the next sample is all that a run must remember.

A checkpoint holds hashes of what the algorithms do: of the plan of rows, of a mixture's cycle and of what Grain's
shuffle does with a few fixed lengths. A name and a version stand beside each hash, for messages alone. So an upgrade
that changes nothing is no obstacle, and one that changes the order of the samples is never silent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, Literal

import grain

from jaxtp.data import held_out, mixture
from jaxtp.data.corpus import Corpus, CorpusError, Source
from jaxtp.data.documents import Documents
from jaxtp.data.packing import Packed
from jaxtp.data.rows import Concatenated, Rows, Samples
from jaxtp.files import fingerprint

Packing = Literal["documents", "concatenated"]
LongDocuments = Literal["split", "drop", "stop"]
ORDER = "order"
"""Key of what decides the order of the samples in `Data.describe`."""
ROWS, SHUFFLE, MIXTURE, HELD_OUT = "rows", "shuffle", "mixture", "held_out"
"""Its parts: which documents share a row, the order of an epoch, the sources in turn, and the rows of an evaluation."""


@dataclass(frozen=True)
class RowSettings:
    """Settings by which documents become rows."""

    length: int
    """T."""

    vocab_size: int
    """Every token is below it."""

    packing: Packing = "documents"
    """Whole documents, each with a segment of its own, or all tokens one after the other."""

    long_documents: LongDocuments = "split"
    """Handling of a document longer than a row, where they are packed."""


class Data:
    """The samples of a corpus.

    Args:
      corpus: the documents.
      settings: settings by which they become rows.
      seed: seed of the order of the samples to train on; those to evaluate on are always the same.

    Raises:
      CorpusError: there are not enough tokens for one sequence.
      LongDocumentError: a document is too long, where the settings do not allow it.
    """

    def __init__(self, corpus: Corpus, settings: RowSettings, seed: int):
        for source in corpus.sources:
            if (there := source.train.num_tokens) < settings.length:
                raise CorpusError(
                    f"{source.name or corpus.description} has {there:,} {corpus.unit} to train on, less than one "
                    f"sequence of data.sequence_length={settings.length}; use more of them, or at most "
                    f"--data.sequence-length {there}"
                )
        self.corpus = corpus
        self.train_rows = [make_rows(source.train, settings) for source in corpus.sources]
        held_out_of = _distinct(corpus.sources)
        self.validation_rows = [make_rows(source.validation, settings) for source in held_out_of]
        self.weights = [source.weight for source in corpus.sources]
        self.train = shuffled(self.train_rows, self.weights, seed)
        self._validation_weights = [source.weight for source in held_out_of]
        read = (*corpus.sources, *held_out_of)
        for rows, source in zip((*self.train_rows, *self.validation_rows), read, strict=True):
            if not len(rows):
                raise CorpusError(
                    f"{source.name or corpus.description}: every document is longer than "
                    f"data.sequence_length={settings.length}; --data.long-documents split cuts them"
                )

    def epochs(self, samples: int) -> list[float]:
        """Returns how often so many samples go through each source."""
        shares = [weight / sum(self.weights) for weight in self.weights]
        return [samples * share / len(rows) for share, rows in zip(shares, self.train_rows, strict=True)]

    @cached_property  # the loop asks at every save
    def description(self) -> dict[str, Any]:
        """The corpus's description, and what decides the order of its samples; it is alike in all processes of a run.

        Each part of the order is its algorithm's name and version, and a hash of what it does with these data.
        """
        order = {
            ROWS: (self.train_rows[0].algorithm, fingerprint([rows.identity for rows in self.train_rows])),
            SHUFFLE: (f"grain {version('grain')}", shuffle_identity()),
            HELD_OUT: (held_out.ALGORITHM, self._held_out_identity()),
        }
        if len(self.weights) > 1:
            order[MIXTURE] = mixture.ALGORITHM, mixture.Mixture(self.train_rows, self.weights).identity
        parts = {part: {"algorithm": name, "sha256": sha256} for part, (name, sha256) in order.items()}
        return {**self.corpus.describe(), ORDER: parts}

    def _held_out_identity(self) -> str:
        lengths = [len(rows) for rows in self.validation_rows]
        order = held_out.order_identity(lengths, self._validation_weights)
        return fingerprint([order, *(rows.identity for rows in self.validation_rows)])

    def validation(self, batches: int, batch_size: int) -> Samples:
        """Returns at most so many batches of held-out rows, each row once, as `held_out` describes."""
        return held_out.held_out(self.validation_rows, self._validation_weights, batches=batches, batch_size=batch_size)


def _distinct(sources: Sequence[Source]) -> list[Source]:
    """Returns sources that hold out different documents: one for all that share theirs, with their weights' sum."""
    distinct: dict[str, Source] = {}
    for source in sources:
        weight = distinct[source.validation.identity].weight if source.validation.identity in distinct else 0.0
        distinct[source.validation.identity] = replace(source, weight=weight + source.weight)
    return list(distinct.values())


def make_rows(documents: Documents, settings: RowSettings) -> Rows:
    """Returns the rows of documents.

    Raises:
      CorpusError: documents with prompts are to be concatenated.
      LongDocumentError: a document is too long, where the settings do not allow it.
    """
    if settings.packing == "concatenated":
        if documents.has_prompts:
            raise CorpusError(
                f"{documents.place(0)}: data.packing=concatenated does not know where prompts end; instruction data "
                "need --data.packing documents"
            )
        return Concatenated(documents, settings.length, settings.vocab_size)
    return Packed(documents, settings.length, settings.vocab_size, settings.long_documents)


def shuffled(sources: Sequence[Rows], weights: Sequence[float], seed: int) -> Samples:
    """Returns all rows of all sources, endlessly; each epoch of a source in an order of its own."""
    endless = [grain.MapDataset.source(rows).seed(seed).shuffle().repeat() for rows in sources]
    return endless[0] if len(endless) == 1 else grain.MapDataset.source(mixture.Mixture(endless, weights))


@cache
def shuffle_identity() -> str:
    """Returns a hash of how samples are shuffled, in hexadecimal digits: of the same few whatever the data are."""
    found = []
    for length in (7, 1000, 10**6 + 3, 2**31 - 1):
        samples: Any = shuffled([range(length)], [1.0], seed=3)  # type: ignore[list-item]
        found += [int(samples[epoch * length + place * length // 7]) for epoch in range(3) for place in range(7)]
    return fingerprint(found)
