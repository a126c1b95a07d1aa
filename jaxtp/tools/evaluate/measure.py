"""Sums a model's losses over documents: float32 losses of tokens, added in float64 on the host."""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from jaxtp.config.entry import Interrupt, NumericsError
from jaxtp.data.rows import SEGMENTS, Row
from jaxtp.generate.decode_model import mesh_context, model_mesh
from jaxtp.mesh import CP, batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.tools.evaluate.inputs import Input, InputError
from jaxtp.tools.evaluate.windows import GROUPS, Window, batches, rows, spans

MAX_EXPONENT = 700.0
"""`math.exp` overflows a little above."""


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
        sizes = mesh_sizes(self._mesh)
        self.parts, self.sequence_parts = batch_parts(sizes), sizes[CP]
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

    def numbers(self) -> dict[str, float | None]:
        """Returns all numbers by name; None for one that is undefined or infinite."""
        numbers: dict[str, float | None] = dict.fromkeys(("loss", "perplexity", "bits_per_byte", "accuracy"))
        if self.tokens:
            numbers["loss"] = self.loss
            numbers["perplexity"] = math.exp(self.loss) if self.loss < MAX_EXPONENT else None
            numbers["bits_per_byte"] = self.nats / math.log(2) / self.num_bytes if self.num_bytes else None
            numbers["accuracy"] = self.num_correct / self.tokens
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.num_bytes, **numbers}

    def add(self, other: "Totals") -> None:
        """Adds other documents' sums."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


Group = tuple[str, int]
"""A source, and the document's number of tokens rounded down to a power of two."""


class Measured:
    """Sums of each group of documents.

    Documents count when they are read, and their tokens when they are scored: reading is ahead of the devices.
    """

    def __init__(self) -> None:
        self.totals: dict[Group, Totals] = {}
        self._tokens_read = 0

    def documents_scored(self) -> float:
        """Returns roughly the number of documents whose tokens are scored."""
        whole = self.whole()
        return whole.documents * whole.tokens / self._tokens_read

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

    def windows(self, inputs: Iterable[Input], length: int, stride: int) -> Iterator[Window]:
        """Yields the windows of documents, and counts the documents."""
        groups: dict[Group, int] = {}
        for source in inputs:
            for document in source.documents():
                key = source.name, power_of_two(len(document.tokens))
                group = groups.setdefault(key, len(groups))
                self.totals.setdefault(key, Totals()).add(Totals(documents=1, num_bytes=document.num_bytes))
                for begin, end, counted in spans(len(document.tokens), document.first, length, stride):
                    self._tokens_read += counted
                    yield Window(document.tokens[begin:end], counted, group)

    def add_scores(self, batch: Row, scores: Scores) -> None:
        """Adds the losses of a batch; raises `NumericsError` if one is not finite."""
        losses, correct = (np.asarray(each) for each in scores)
        counted = batch[GROUPS] >= 0
        groups, losses = batch[GROUPS][counted], losses[counted]
        if not np.isfinite(losses).all():
            source, _ = list(self.totals)[int(groups[~np.isfinite(losses)][0])]
            raise NumericsError(
                f"{source}: the loss of a token is not finite: the weights are damaged, or --dtype float32 is needed"
            )
        tokens, num_correct = (np.bincount(groups, weights, len(self.totals)) for weights in (None, correct[counted]))
        nats = np.bincount(groups, losses.astype(np.float64), len(self.totals))
        for group, totals in enumerate(self.totals.values()):
            totals.add(
                Totals(tokens=int(tokens[group]), nats=float(nats[group]), num_correct=round(num_correct[group]))
            )


def measure(
    scorer: Scorer, inputs: Sequence[Input], length: int, stride: int, progress: Callable[[Measured], None]
) -> Measured:
    """Measures a model on documents.

    Args:
      inputs: inputs of one name count as one source.
      length: tokens of a window.
      stride: tokens between the starts of two windows.
      progress: called after each batch.

    Raises:
      InputError: no token is predicted.
      NumericsError: a loss is not finite.
    """
    measured = Measured()
    packed = rows(measured.windows(inputs, length, stride), length, scorer.sequence_parts)
    pending: tuple[Row, Scores] | None = None

    def add_pending() -> None:
        if pending is not None:
            measured.add_scores(*pending)
            progress(measured)

    # A process that ends during a computation may crash: Ctrl-C, and any error, waits for the batch.
    with Interrupt(signal.SIGINT) as interrupt:
        try:
            # The next batch is packed while the devices compute.
            for batch in batches(packed, scorer.batch_size, scorer.parts):
                add_pending()
                interrupt.check()
                pending = batch, scorer(batch)
            add_pending()
        finally:
            jax.block_until_ready(pending)
    if not measured.whole().tokens:
        raise InputError("no token to predict: no document has more than one")
    return measured


def power_of_two(number: int) -> int:
    """Returns the largest power of two up to `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


def _sum(totals: Iterable[Totals]) -> Totals:
    whole = Totals()
    for each in totals:
        whole.add(each)
    return whole
