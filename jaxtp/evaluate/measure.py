"""Measures documents: sums of their tokens' losses, in float64 on the host, by source and length of document."""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from numpy.typing import NDArray

from jaxtp.data.rows import Row
from jaxtp.entry import WrongNumbersError
from jaxtp.evaluate.config import CONCATENATED, DOCUMENTS
from jaxtp.evaluate.inputs import Document, Input, InputError
from jaxtp.evaluate.scoring import Scorer, Scores
from jaxtp.evaluate.windows import GROUPS, Window, batches, concatenated, rows, spans
from jaxtp.interrupt import Interrupt


@dataclass
class Totals:
    """Sums over some documents."""

    documents: int = 0
    tokens: int = 0
    """Number of tokens that were predicted."""
    num_bytes: int = 0
    """Bytes, as UTF-8, of the text of these tokens."""
    nats: float = 0.0
    """Sum of their cross-entropies."""
    likeliest: int = 0
    """Number of them than which no other token was likelier."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of text, which can be compared between tokenizers; None where tokens stand for no text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None

    @property
    def accuracy(self) -> float:
        """Share of the tokens than which no other was likelier."""
        return self.likeliest / self.tokens

    def add(self, other: "Totals") -> None:
        """Adds the sums of other documents."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class Reading:
    """How documents are read."""

    length: int
    """T."""

    stride: int
    """Tokens between the beginnings of two windows."""

    packing: str
    """As `EvaluateConfig.packing` has it."""

    multiple: int = 1
    """Divides the length of each row."""


Bucket = tuple[str, int]
"""A source, and the power of two that the number of tokens of a document reaches, 0 where that is not asked for."""


@dataclass
class Measured:
    """The sums of what was measured."""

    totals: dict[Bucket, Totals] = field(default_factory=dict)

    def whole(self) -> Totals:
        """Returns the sums of all documents."""
        return _sum(self.totals.values())

    def by_source(self) -> dict[str, Totals]:
        """Returns the sums of each source, in the order of reading."""
        names = dict.fromkeys(source for source, _ in self.totals)
        return {name: _sum(t for (source, _), t in self.totals.items() if source == name) for name in names}

    def by_length(self) -> dict[int, Totals]:
        """Returns the sums of documents of n to 2n - 1 tokens, by n, ascending."""
        lengths = sorted({length for _, length in self.totals})
        return {each: _sum(t for (_, length), t in self.totals.items() if length == each) for each in lengths}


def measure(
    scorer: Scorer, inputs: Sequence[Input], reading: Reading, progress: Callable[[int, Totals], None]
) -> Measured:
    """Returns what a model's losses are on the documents of some inputs.

    Args:
      scorer: scores batches.
      inputs: documents; those of one name count as one source.
      reading: how they are read.
      progress: called after each batch with the bytes of text that have been read, and the sums so far.

    Raises:
      InputError: no token is predicted.
      WrongNumbersError: a loss is not finite.
    """
    return _Measurement(scorer, reading, progress).run(inputs)


class _Measurement:
    """One measurement; documents are counted where they are read, their tokens where these are scored."""

    def __init__(self, scorer: Scorer, reading: Reading, progress: Callable[[int, Totals], None]):
        self._scorer, self._reading, self._progress = scorer, reading, progress
        self._buckets: dict[Bucket, int] = {}
        self._totals: list[Totals] = []
        self._read = self._to_score = self._scored = 0

    def run(self, inputs: Sequence[Input]) -> Measured:
        reading = self._reading
        packed = reading.packing == DOCUMENTS
        made = rows(self._windows(inputs), reading.length, packed=packed, multiple=reading.multiple)
        pending: tuple[Row, Scores] | None = None
        # A process that ends while its devices compute may crash: Ctrl-C, and any error, waits for the batch.
        with Interrupt(signal.SIGINT) as interrupt:
            try:
                for batch in batches(made, self._scorer.batch_size, self._scorer.parts):  # made while devices compute
                    self._count(pending)
                    interrupt.check()
                    pending = batch, self._scorer(batch)
                self._count(pending)
            finally:
                jax.block_until_ready(pending)
        measured = Measured(dict(zip(self._buckets, self._totals, strict=True)))
        if not measured.whole().tokens:
            raise InputError("no token can be predicted: no document has more than one")
        return measured

    def _windows(self, inputs: Sequence[Input]) -> Iterator[Window]:
        reading = self._reading
        if reading.packing == CONCATENATED:
            for window in concatenated(((d.tokens, group) for d, group in self._documents(inputs)), reading.length):
                self._to_score += window.counted
                yield window
            return
        for document, group in self._documents(inputs):
            for begin, end, counted in spans(len(document.tokens), document.first, reading.length, reading.stride):
                self._to_score += counted
                yield Window(document.tokens[begin:end], counted, group)

    def _documents(self, inputs: Iterable[Input]) -> Iterator[tuple[Document, int]]:
        for each in inputs:
            for document in each.documents():
                length = 0 if self._reading.packing == CONCATENATED else power_of_two(len(document.tokens))
                group = self._buckets.setdefault((each.name, length), len(self._buckets))
                if group == len(self._totals):
                    self._totals.append(Totals())
                self._totals[group].add(Totals(documents=1, num_bytes=document.num_bytes))
                self._read += document.size
                yield document, group

    def _count(self, pending: tuple[Row, Scores] | None) -> None:
        """Adds the sums of a batch, once it is computed."""
        if pending is None:
            return
        batch, scores = pending
        groups = batch[GROUPS]
        losses, likeliest = (np.asarray(each) for each in scores)
        counted = groups >= 0
        if not np.isfinite(losses[counted]).all():
            worst = groups[counted][~np.isfinite(losses[counted])][0]
            source = list(self._buckets)[int(worst)][0]
            raise WrongNumbersError(
                f"{source}: the loss of a token is not finite: the weights are damaged, or --dtype float32 is needed"
            )
        found = [_by_group(groups[counted], each[counted], len(self._totals)) for each in (losses, likeliest)]
        for group, tokens in enumerate(np.bincount(groups[counted], minlength=len(self._totals)).tolist()):
            sums = Totals(tokens=tokens, nats=float(found[0][group]), likeliest=round(float(found[1][group])))
            self._totals[group].add(sums)
        self._scored += int(counted.sum())
        # Documents are read ahead of the devices, to be packed: of their bytes those count whose tokens are scored.
        self._progress(self._read * self._scored // self._to_score, _sum(self._totals))


def power_of_two(number: int) -> int:
    """Returns the largest power of two that is no more than a number, 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


def _by_group(groups: NDArray[np.int32], values: NDArray[np.generic], count: int) -> NDArray[np.float64]:
    """Returns the sum of the values of each group, in float64."""
    return np.bincount(groups, values.astype(np.float64), count).astype(np.float64)


def _sum(totals: Iterable[Totals]) -> Totals:
    whole = Totals()
    for each in totals:
        whole.add(each)
    return whole
