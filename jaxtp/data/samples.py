"""The samples of a run: document rows, in an order that depends only on the seed.

Sample `i` is the same row with any mesh, number of processes and batch size, so a run stores only the next index.

A checkpoint stores hashes of the rows, of a mixture's cycle, and of Grain's shuffle of a few fixed lengths. Names and
versions next to them are for messages. Only an upgrade that changes the order stops a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

import grain

from jaxtp.config.files import fingerprint
from jaxtp.data import mixture
from jaxtp.data.corpus import Corpus, CorpusError, Source
from jaxtp.data.documents import Documents
from jaxtp.data.packing import Packed
from jaxtp.data.rows import Concatenated, Rows, Samples

if TYPE_CHECKING:
    from jaxtp.data.scores import Scores

Packing = Literal["documents", "concatenated"]
LongDocuments = Literal["split", "drop", "stop"]
ORDER = "order"  # Key of the order of the samples in `Data.description`
ROWS, SHUFFLE, MIXTURE, HELD_OUT = "rows", "shuffle", "mixture", "held_out"
"""Its parts: documents to rows, the order of an epoch, the order of sources, and the rows of an evaluation."""


@dataclass(frozen=True)
class RowSettings:
    """How documents become rows of `length` tokens."""

    length: int
    vocab_size: int
    packing: Packing = "documents"
    """Whole documents, each a segment, or all tokens one after the other."""
    long_documents: LongDocuments = "split"
    """For packed documents longer than a row."""


class Data:
    """The samples of a corpus, with `scores` as columns; the seed affects only the training order."""

    def __init__(self, corpus: Corpus, settings: RowSettings, seed: int, scores: "Scores | None" = None):
        for source in corpus.sources:
            if (count := source.train.num_tokens) < settings.length:
                raise CorpusError(
                    f"{source.name or corpus.description} has {count:,} {corpus.unit} to train on, less than one "
                    f"sequence of data.sequence_length={settings.length}; use more of them, or at most "
                    f"--data.sequence-length {count}"
                )
        self.corpus, self.scores = corpus, scores
        self.train_rows = [make_rows(source.train, settings, scores) for source in corpus.sources]
        validation_sources = _distinct(corpus.sources)
        self.validation_rows = [make_rows(source.validation, settings, scores) for source in validation_sources]
        self.weights = [source.weight for source in corpus.sources]
        self.train = shuffled(self.train_rows, self.weights, seed)
        self._validation_weights = [source.weight for source in validation_sources]
        sources = (*corpus.sources, *validation_sources)
        for rows, source in zip((*self.train_rows, *self.validation_rows), sources, strict=True):
            if not len(rows) and rows.num_unlabelled:
                raise CorpusError(
                    f"{source.name or corpus.description}: no sequence of data.sequence_length={settings.length} "
                    f"has a label, since all of its tokens are of prompts ({rows.num_unlabelled:,} sequences); use a "
                    "larger --data.sequence-length, or documents with answers"
                )
            if not len(rows):
                what, fix = "document", "--data.long-documents split cuts them"
                if corpus.has_pairs:
                    what, fix = "pair", "use a larger --data.sequence-length"
                raise CorpusError(
                    f"{source.name or corpus.description}: every {what} is longer than "
                    f"data.sequence_length={settings.length}; {fix}"
                )

    def epochs(self, samples: int) -> list[float]:
        """Returns the epochs of each source in `samples` samples."""
        shares = [weight / sum(self.weights) for weight in self.weights]
        return [samples * share / len(rows) for share, rows in zip(shares, self.train_rows, strict=True)]

    @cached_property  # every save reads it
    def description(self) -> dict[str, object]:
        """The corpus's description, and algorithm and hash of each part of the order."""
        lengths = [len(rows) for rows in self.validation_rows]
        validation_order = mixture.validation_order_identity(lengths, self._validation_weights)
        held_out = fingerprint([validation_order, *(rows.identity for rows in self.validation_rows)])
        order = {
            ROWS: (self.train_rows[0].algorithm, fingerprint([rows.identity for rows in self.train_rows])),
            SHUFFLE: (f"grain {version('grain')}", shuffle_identity()),
            HELD_OUT: (mixture.VALIDATION_ALGORITHM, held_out),
        }
        if len(self.weights) > 1:
            order[MIXTURE] = mixture.ALGORITHM, mixture.Mixture(self.train_rows, self.weights).identity
        parts = {part: {"algorithm": name, "sha256": sha256} for part, (name, sha256) in order.items()}
        scores = {} if self.scores is None else {"scores": self.scores.identity}
        return {**self.corpus.describe(), **scores, ORDER: parts}

    def validation(self, batches: int, batch_size: int) -> Samples:
        """Returns at most `batches` validation batches, each row once."""
        weights = self._validation_weights
        return mixture.validation_samples(self.validation_rows, weights, batches=batches, batch_size=batch_size)


def _distinct(sources: Sequence[Source]) -> list[Source]:
    """Merges sources with equal validation documents."""
    distinct: dict[str, Source] = {}
    for source in sources:
        weight = distinct[source.validation.identity].weight if source.validation.identity in distinct else 0.0
        distinct[source.validation.identity] = replace(source, weight=weight + source.weight)
    return list(distinct.values())


def make_rows(documents: Documents, settings: RowSettings, scores: "Scores | None" = None) -> Rows:
    """Returns the rows of documents, with `scores`; raises `CorpusError`, `LongDocumentError` or `ScoresError`."""
    rows: Rows
    if settings.packing == "concatenated":
        if documents.has_prompts:
            raise CorpusError(
                f"{documents.location(0)}: data.packing=concatenated does not know where prompts end; "
                f"{'pairs' if documents.has_pairs else 'instruction data'} need --data.packing documents"
            )
        rows = Concatenated(documents, settings.length, settings.vocab_size)
    else:
        rows = Packed(documents, settings.length, settings.vocab_size, settings.long_documents)
    if scores is not None:
        scores.add_to(rows, documents, settings)
    return rows


def shuffled(sources: Sequence[Rows], weights: Sequence[float], seed: int) -> Samples:
    """Returns all sources' rows, endlessly; shuffles each epoch anew."""
    endless = [grain.MapDataset.source(rows).seed(seed).shuffle().repeat() for rows in sources]
    return endless[0] if len(endless) == 1 else grain.MapDataset.source(mixture.Mixture(endless, weights))


@cache
def shuffle_identity() -> str:
    """Returns a hash of Grain's shuffles of a few fixed lengths."""
    order: list[int] = []
    for length in (7, 1000, 10**6 + 3, 2**31 - 1):
        samples = shuffled([range(length)], [1.0], seed=3)  # type: ignore[list-item]
        order += [int(samples[epoch * length + place * length // 7]) for epoch in range(3) for place in range(7)]
    return fingerprint(order)
