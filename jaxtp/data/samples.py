"""The samples of a run: document rows, in an order that depends only on the seed.

Sample `i` is the same row with any mesh, number of processes and batch size, so a run stores only
the next index.

A checkpoint stores hashes of the rows, of a mixture's cycle, and of Grain's shuffle of a few fixed
lengths, so only an upgrade that changes the order stops a run. The names and versions next to the
hashes are for messages.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from itertools import accumulate, pairwise
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
"""Keys of the parts of the order: documents in rows, rows in an epoch, sources in a mixture, and
rows in an evaluation."""
_HASHED_PLACES = 1000  # Number of places in the order of an evaluation that its hash covers


@dataclass(frozen=True)
class RowSettings:
    """How documents become rows of `length` tokens."""

    length: int
    vocab_size: int
    packing: Packing = "documents"
    """`documents` packs whole documents as segments; `concatenated` joins all tokens."""
    long_documents: LongDocuments = "split"
    """Treatment of packed documents that are longer than a row."""


class Data:
    """The samples of a corpus, with `scores` as columns.

    The seed affects only the training order.
    """

    def __init__(
        self, corpus: Corpus, settings: RowSettings, seed: int, scores: "Scores | None" = None
    ):
        self.corpus = corpus
        self.scores = scores
        # First checks all sources, because packing takes long.
        for source in corpus.sources:
            count = source.train.num_tokens
            if count < settings.length:
                raise CorpusError(
                    f"{source.name} has {count:,} {corpus.unit} to train on, less than one "
                    f"sequence of data.sequence_length={settings.length}; use more of them, or at "
                    f"most --data.sequence-length {count}"
                )

        def rows_of(documents: Documents, name: str) -> Rows:
            rows = make_rows(documents, settings, scores)
            _require_rows(rows, name, corpus, settings)
            return rows

        self.weights = [source.weight for source in corpus.sources]
        self.train_rows = [
            rows_of(source.train, f"{source.name}, to train on") for source in corpus.sources
        ]
        name = f"{corpus.description}, to evaluate on"
        distinct = _distinct(corpus.sources)
        self.validation_rows = [rows_of(documents, name) for documents, _ in distinct]
        self._validation_weights = [weight for _, weight in distinct]
        self.train = shuffled(self.train_rows, self.weights, seed)
        self._seed = seed

    def origin(self, sample: int) -> tuple[int, int]:
        """Returns the source of a training sample, and its row there."""
        ends, numbers = self._numbers
        number = int(numbers[sample])  # type: ignore[call-overload]
        source = bisect_right(ends, number) - 1
        return source, number - ends[source]

    @cached_property
    def _numbers(self) -> tuple[list[int], Samples]:
        # The samples as numbers of rows, and the first number of each source. The order depends
        # only on how many rows there are.
        ends = [*accumulate(map(len, self.train_rows), initial=0)]
        rows = [range(*bounds) for bounds in pairwise(ends)]
        return ends, shuffled(rows, self.weights, self._seed)  # type: ignore[arg-type]

    def epochs(self, samples: int) -> list[float]:
        """Returns how many epochs of each source are in `samples` samples."""
        total = sum(self.weights)
        return [
            samples * (weight / total) / len(rows)
            for weight, rows in zip(self.weights, self.train_rows, strict=True)
        ]

    @cached_property  # every save reads it
    def description(self) -> dict[str, object]:
        """The description of the corpus, and the algorithm and hash of each part of the order."""
        identity = fingerprint([rows.identity for rows in self.train_rows])
        order = {
            ROWS: _part_of_order(self.train_rows[0].algorithm, identity),
            SHUFFLE: shuffle_description(),
        }
        if self.validation_rows:
            lengths = list(map(len, self.validation_rows))
            places = mixture.validation_order(lengths, self._validation_weights, _HASHED_PLACES)
            hashes = [rows.identity for rows in self.validation_rows]
            identity = fingerprint([fingerprint(places.tolist()), *hashes])
            order[HELD_OUT] = _part_of_order(mixture.VALIDATION_ALGORITHM, identity)
        if len(self.weights) > 1:
            identity = mixture.Mixture(self.train_rows, self.weights).identity
            order[MIXTURE] = _part_of_order(mixture.ALGORITHM, identity)
        description = self.corpus.describe()
        if self.scores is not None:
            description["scores"] = self.scores.identity
        return {**description, ORDER: order}

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


def _part_of_order(algorithm: str, sha256: str) -> dict[str, str]:
    return {"algorithm": algorithm, "sha256": sha256}


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

    Raises `CorpusError`, `LongDocumentError` or `DatasetError`.
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
    """Returns all sources' rows, endlessly; shuffles each epoch differently."""
    endless = [grain.MapDataset.source(rows).seed(seed).shuffle().repeat() for rows in sources]
    if len(endless) == 1:
        return endless[0]
    return grain.MapDataset.source(mixture.Mixture(endless, weights))


@cache
def shuffle_description() -> dict[str, str]:
    """Returns Grain's version, and a hash of its shuffles of a few fixed lengths."""
    order: list[int] = []
    for length in (7, 1000, 10**6 + 3, 2**31 - 1):
        samples = shuffled([range(length)], [1.0], seed=3)  # type: ignore[list-item]
        for epoch in range(3):
            order += [int(samples[epoch * length + i * length // 7]) for i in range(7)]
    return _part_of_order(f"grain {version('grain')}", fingerprint(order))
