"""Sums a model's losses over documents: float32 losses of tokens, added in float64 on the host."""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec
from jaxtp.config.entry import WrongNumbersError
from jaxtp.config.interrupt import Interrupt
from jaxtp.data.rows import SEGMENTS, Row
from jaxtp.generate.decode_model import mesh_context, model_mesh
from jaxtp.mesh import batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.tools.evaluate.inputs import Document, Input, InputError
from jaxtp.tools.evaluate.windows import GROUPS, Window, batches, concatenated, rows, spans


class Scores(NamedTuple):
    """A batch's scores, possibly still being computed."""

    losses: Array
    """Cross-entropy of each label in nats, `[B, T]` float32; 0 for ignored labels."""

    correct: Array
    """Whether the label is the argmax, `[B, T]`."""


class Scorer:
    """Scores batches with a model on its mesh; each batch shape is compiled once.

    `batch_size` is rounded up to a multiple of dp * fsdp.
    """

    def __init__(self, model: Decoder, batch_size: int):
        self._mesh = model_mesh(model)
        self.parts = batch_parts(mesh_sizes(self._mesh))
        self.batch_size = math.ceil(batch_size / self.parts) * self.parts
        self.config = model.config
        graph, self._state = nnx.split(model)

        def scores(state: nnx.State, batch: dict[str, Array]) -> Scores:
            merged: Decoder = nnx.merge(graph, state, copy=True)
            return Scores(*merged.token_losses(batch["inputs"], batch["labels"], segments_BT=batch.get(SEGMENTS)))

        def next_token_logprobs(state: nnx.State, batch: dict[str, Array], last_B: Array) -> tuple[Scores, Array]:
            merged: Decoder = nnx.merge(graph, state, copy=True)
            sequences = merged.sequences(batch["inputs"])
            x_BTD = merged.hidden(batch["inputs"], sequences=sequences)
            logits_BV = merged.logits_at(x_BTD, last_B[:, None]).astype(jnp.float32)
            losses = Scores(*merged.token_losses_of_hidden(x_BTD, batch["labels"]))
            return losses, jax.nn.log_softmax(logits_BV, axis=-1)

        replicated = None if self._mesh is None else NamedSharding(self._mesh, P())  # every process reads all
        self._scores = jax.jit(scores, out_shardings=replicated)
        self._next_token_logprobs = jax.jit(next_token_logprobs, out_shardings=replicated)

    def __call__(self, batch: Row) -> Scores:
        """Returns the scores of `inputs` and `labels` `[B, T]`, with `SEGMENTS` if rows are packed."""
        with mesh_context(self._mesh):
            return self._scores(self._state, self._put_batch(batch))

    def next_token_logprobs(self, batch: Row, last_B: NDArray[np.int32]) -> tuple[Scores, Array]:
        """Returns scores, and next-token log-probabilities `[B, V]` at each row's `last_B`; needs cp=1."""
        with mesh_context(self._mesh):
            return self._next_token_logprobs(self._state, self._put_batch(batch), self._put(last_B, batch_spec()))

    def _put_batch(self, batch: Row) -> dict[str, Array]:
        names = [name for name in ("inputs", "labels", SEGMENTS) if name in batch]
        return {name: self._put(batch[name], batch_spec(None)) for name in names}

    def _put(self, array: NDArray[np.generic], spec: P) -> Array:
        if self._mesh is None:
            return jnp.asarray(array)
        sharding = NamedSharding(self._mesh, spec)
        # Every process has the whole array.
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@dataclass
class Totals:
    """Sums over documents."""

    documents: int = 0
    tokens: int = 0
    """Number of predicted tokens."""
    num_bytes: int = 0
    """Bytes of their text as UTF-8."""
    nats: float = 0.0
    """Sum of cross-entropies."""
    num_correct: int = 0
    """Tokens predicted correctly: the label is the argmax."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy per token, in nats."""
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
        """Bits per byte of text, comparable between tokenizers; None if the tokens have no text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None

    @property
    def accuracy(self) -> float:
        """Fraction of tokens predicted correctly."""
        return self.num_correct / self.tokens

    def add(self, other: "Totals") -> None:
        """Adds other documents' sums."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class Windowing:
    """How to cut documents into windows, and windows into rows."""

    length: int
    """Tokens of a window."""

    stride: int
    """Tokens between the starts of two windows."""

    packing: str
    """As in `EvaluateConfig`."""

    multiple: int = 1
    """Divides the length of each row."""


Group = tuple[str, int]
"""A source, and the document's number of tokens rounded down to a power of two (0 if documents are concatenated)."""


@dataclass
class Measured:
    """Sums of each document group."""

    totals: dict[Group, Totals] = field(default_factory=dict)

    def whole(self) -> Totals:
        """Returns the sums of all documents."""
        return _sum(self.totals.values())

    def by_source(self) -> dict[str, Totals]:
        """Returns each source's sums, in reading order."""
        names = dict.fromkeys(source for source, _ in self.totals)
        return {name: _sum(t for (source, _), t in self.totals.items() if source == name) for name in names}

    def by_length(self) -> dict[int, Totals]:
        """Returns the sums of documents of n to 2n - 1 tokens, by n, ascending."""
        lengths = sorted({length for _, length in self.totals})
        return {each: _sum(t for (_, length), t in self.totals.items() if length == each) for each in lengths}


def measure(
    scorer: Scorer, inputs: Sequence[Input], windowing: Windowing, progress: Callable[[float, Totals], None]
) -> Measured:
    """Measures a model on documents.

    Args:
      inputs: inputs of one name count as one source.
      progress: called after each batch with the number of scored documents, and the sums.

    Raises:
      InputError: no token is predicted.
      WrongNumbersError: a loss is not finite.
    """
    return _Measurement(scorer, windowing, progress).run(inputs)


class _Measurement:
    """Counts documents when read, and their tokens when scored."""

    def __init__(self, scorer: Scorer, windowing: Windowing, progress: Callable[[float, Totals], None]):
        self._scorer, self._windowing, self._progress = scorer, windowing, progress
        self._groups: dict[Group, int] = {}
        self._totals: list[Totals] = []
        self._documents_read = self._tokens_read = self._tokens_scored = 0

    def run(self, inputs: Sequence[Input]) -> Measured:
        windowing = self._windowing
        packed = windowing.packing == "documents"
        all_rows = rows(self._windows(inputs), windowing.length, packed=packed, multiple=windowing.multiple)
        pending: tuple[Row, Scores] | None = None
        # A process that ends during a computation may crash: Ctrl-C, and any error, waits for the batch.
        with Interrupt(signal.SIGINT) as interrupt:
            try:
                # The next batch is packed while the devices compute.
                for batch in batches(all_rows, self._scorer.batch_size, self._scorer.parts):
                    self._add_scores(pending)
                    interrupt.check()
                    pending = batch, self._scorer(batch)
                self._add_scores(pending)
            finally:
                jax.block_until_ready(pending)
        measured = Measured(dict(zip(self._groups, self._totals, strict=True)))
        if not measured.whole().tokens:
            raise InputError("no token to predict: no document has more than one")
        return measured

    def _windows(self, inputs: Sequence[Input]) -> Iterator[Window]:
        length, stride = self._windowing.length, self._windowing.stride
        if self._windowing.packing == "concatenated":
            for window in concatenated(((d.tokens, group) for d, group in self._documents(inputs)), length):
                self._tokens_read += window.counted
                yield window
            return
        for document, group in self._documents(inputs):
            for begin, end, counted in spans(len(document.tokens), document.first, length, stride):
                self._tokens_read += counted
                yield Window(document.tokens[begin:end], counted, group)

    def _documents(self, inputs: Iterable[Input]) -> Iterator[tuple[Document, int]]:
        for each in inputs:
            for document in each.documents():
                whole = self._windowing.packing != "concatenated"
                length = power_of_two(len(document.tokens)) if whole else 0
                group = self._groups.setdefault((each.name, length), len(self._groups))
                if group == len(self._totals):
                    self._totals.append(Totals())
                self._totals[group].add(Totals(documents=1, num_bytes=document.num_bytes))
                self._documents_read += 1
                yield document, group

    def _add_scores(self, pending: tuple[Row, Scores] | None) -> None:
        if pending is None:
            return
        batch, scores = pending
        losses, correct = (np.asarray(each) for each in scores)
        counted = batch[GROUPS] >= 0
        groups, losses = batch[GROUPS][counted], losses[counted]
        if not np.isfinite(losses).all():
            source = list(self._groups)[int(groups[~np.isfinite(losses)][0])][0]
            raise WrongNumbersError(
                f"{source}: the loss of a token is not finite: the weights are damaged, or --dtype float32 is needed"
            )
        count = len(self._totals)
        tokens, num_correct = (np.bincount(groups, weights, count) for weights in (None, correct[counted]))
        nats = np.bincount(groups, losses.astype(np.float64), count)
        for group, totals in enumerate(self._totals):
            sums = Totals(tokens=int(tokens[group]), nats=float(nats[group]), num_correct=round(num_correct[group]))
            totals.add(sums)
        self._tokens_scored += len(groups)
        # Documents are read ahead of the devices, to be packed: those count whose tokens are scored.
        self._progress(self._documents_read * self._tokens_scored / self._tokens_read, _sum(self._totals))


def power_of_two(number: int) -> int:
    """Returns the largest power of two up to `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


def _sum(totals: Iterable[Totals]) -> Totals:
    whole = Totals()
    for each in totals:
        whole.add(each)
    return whole
