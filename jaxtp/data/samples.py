"""The samples of a run: document rows, in an order that depends only on the seed.

Sample `i` is the same row with any mesh, number of processes and batch size, so a run stores only
the next index.

A checkpoint stores hashes of the rows, of a mixture's cycle, and of Grain's shuffle of a few fixed
lengths. Names and versions next to them are for messages. Only an upgrade that changes the order
stops a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
ROWS = "rows"
SHUFFLE = "shuffle"
MIXTURE = "mixture"
HELD_OUT = "held_out"
"""Its parts: documents to rows, the order of an epoch, the order of sources, and the rows of an
evaluation."""


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
    """The samples of a corpus, with `scores` as columns.

    The seed affects only the training order.
    """

    def __init__(
        self, corpus: Corpus, settings: RowSettings, seed: int, scores: "Scores | None" = None
    ):
        for source in corpus.sources:
            if (count := source.train.num_tokens) < settings.length:
                raise CorpusError(
                    f"{source.name or corpus.description} has {count:,} {corpus.unit} to train on, "
                    f"less than one sequence of data.sequence_length={settings.length}; use more "
                    f"of them, or at most --data.sequence-length {count}"
                )
        self.corpus = corpus
        self.scores = scores
        self.train_rows = [make_rows(source.train, settings, scores) for source in corpus.sources]
        held_out = _distinct(corpus.sources)
        self.validation_rows = [make_rows(documents, settings, scores) for documents, _ in held_out]
        for source, rows in zip(corpus.sources, self.train_rows, strict=True):
            _require_rows(
                rows, f"{source.name or corpus.description}, to train on", corpus, settings
            )
        for rows in self.validation_rows:
            _require_rows(rows, f"{corpus.description}, to evaluate on", corpus, settings)
        self.weights = [source.weight for source in corpus.sources]
        self._validation_weights = [weight for _, weight in held_out]
        self.train = shuffled(self.train_rows, self.weights, seed)

    def epochs(self, samples: int) -> list[float]:
        """Returns the epochs of each source in `samples` samples."""
        shares = [weight / sum(self.weights) for weight in self.weights]
        return [
            samples * share / len(rows) for share, rows in zip(shares, self.train_rows, strict=True)
        ]

    @cached_property  # every save reads it
    def description(self) -> dict[str, object]:
        """The corpus's description, and algorithm and hash of each part of the order."""
        order = {
            ROWS: (
                self.train_rows[0].algorithm,
                fingerprint([rows.identity for rows in self.train_rows]),
            ),
            SHUFFLE: (f"grain {version('grain')}", shuffle_identity()),
        }
        if self.validation_rows:
            order[HELD_OUT] = mixture.VALIDATION_ALGORITHM, self._validation_identity()
        if len(self.weights) > 1:
            order[MIXTURE] = (
                mixture.ALGORITHM,
                mixture.Mixture(self.train_rows, self.weights).identity,
            )
        parts = {
            part: {"algorithm": name, "sha256": sha256} for part, (name, sha256) in order.items()
        }
        scores = {} if self.scores is None else {"scores": self.scores.identity}
        return {**self.corpus.describe(), **scores, ORDER: parts}

    def _validation_identity(self) -> str:
        lengths = [len(rows) for rows in self.validation_rows]
        order = mixture.validation_order_identity(lengths, self._validation_weights)
        return fingerprint([order, *(rows.identity for rows in self.validation_rows)])

    def validation(self, batches: int, batch_size: int) -> "Samples | None":
        """Returns at most `batches` validation batches, each row once.

        Returns None if no source has validation data.
        """
        if not self.validation_rows:
            return None
        weights = self._validation_weights
        return mixture.validation_samples(
            self.validation_rows, weights, batches=batches, batch_size=batch_size
        )


def _distinct(sources: Sequence[Source]) -> list[tuple[Documents, float]]:
    """Returns the distinct documents to evaluate on.

    The weight of documents is the sum over the sources that have them.
    """
    distinct: dict[str, tuple[Documents, float]] = {}
    for source in sources:
        if source.validation is None:
            continue
        _, weight = distinct.get(source.validation.identity, (None, 0.0))
        distinct[source.validation.identity] = source.validation, weight + source.weight
    return list(distinct.values())


def _require_rows(rows: Rows, name: str, corpus: Corpus, settings: RowSettings) -> None:
    if len(rows):
        return
    if rows.num_unlabelled:
        raise CorpusError(
            f"{name}: no sequence of data.sequence_length={settings.length} has a label, since all "
            f"of its tokens are of prompts ({rows.num_unlabelled:,} sequences); use a larger "
            "--data.sequence-length, or documents with answers"
        )
    unit = "document"
    fix = "--data.long-documents split cuts them"
    if corpus.has_pairs:
        unit = "pair"
        fix = "use a larger --data.sequence-length"
    raise CorpusError(
        f"{name}: every {unit} is longer than data.sequence_length={settings.length}; {fix}"
    )


def make_rows(documents: Documents, settings: RowSettings, scores: "Scores | None" = None) -> Rows:
    """Returns the rows of documents, with `scores`.

    Raises `CorpusError`, `LongDocumentError` or `ScoresError`.
    """
    rows: Rows
    if settings.packing == "concatenated":
        if documents.has_prompts:
            raise CorpusError(
                f"{documents.location(0)}: data.packing=concatenated does not know where prompts "
                f"end; {'pairs' if documents.has_pairs else 'instruction data'} need "
                "--data.packing documents"
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
    if len(endless) == 1:
        return endless[0]
    return grain.MapDataset.source(mixture.Mixture(endless, weights))


@cache
def shuffle_identity() -> str:
    """Returns a hash of Grain's shuffles of a few fixed lengths."""
    order: list[int] = []
    for length in (7, 1000, 10**6 + 3, 2**31 - 1):
        samples = shuffled([range(length)], [1.0], seed=3)  # type: ignore[list-item]
        for epoch in range(3):
            order += [int(samples[epoch * length + i * length // 7]) for i in range(7)]
    return fingerprint(order)
