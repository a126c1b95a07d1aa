"""Sums a model's losses over documents: float32 token losses, added in float64 on the host.

Documents are cut into windows, and windows share rows. A window is at most T + 1 consecutive
tokens: all but the last are read, and all but the first are predicted from earlier tokens in the
window. A token that overlapping windows predict twice counts the first time. So each token counts
once, except a document's first token or its prompt.
"""

import itertools
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
from jaxtp.config.entry import NumericsError
from jaxtp.config.schema import ConfigError
from jaxtp.data.packing import pack
from jaxtp.data.rows import SEGMENTS, Row, empty_row
from jaxtp.generate.decode_model import model_mesh
from jaxtp.generate.loading import pipeline
from jaxtp.generate.request import Ids
from jaxtp.layers.loss import IGNORE, vocab_parallel_statistics
from jaxtp.mesh import CP, batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.tools.evaluate.inputs import Input

MAX_EXPONENT = 700.0  # `math.exp` overflows above 709
POOL_TOKENS = 2**20
"""Number of tokens whose windows are packed together. It does not depend on the batch size, so
packing is reproducible."""
MIN_ROW = 64  # Shortest length of a row


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a document."""

    tokens: Ids  # 2 to T + 1 tokens
    counted: int  # number of counted tokens, which are the last ones; never the first token


def spans(num_tokens: int, first: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields a document's windows: begin, end, and the number of counted tokens, the last ones.

    Args:
      first: index of the first counted token, at least 1.
      length: T.
      stride: tokens between the starts of two windows, at most T.
    """
    next_token = max(first, 1)
    begin = 0
    while next_token < num_tokens:
        end = min(begin + length + 1, num_tokens)
        if end > next_token:
            yield begin, end, end - next_token
            next_token = end
        begin += stride


def rows(windows: Iterable[Window], length: int, multiple: int = 1) -> Iterator[Row]:
    """Yields rows `[T]` of `inputs`, `labels` and `SEGMENTS`, which windows share.

    A row is shorter than T if it holds all windows; `multiple` divides T and each row's length.
    """
    for pool in _pools(windows):
        sizes = np.array([len(window.tokens) - 1 for window in pool], np.int64)
        room = row_length(int(sizes.sum()), length, multiple)
        order, counts = pack(np.arange(len(pool))[:, None], sizes, room)
        ends = np.cumsum(counts)
        for first, last in zip(ends - counts, ends, strict=True):
            yield _row([pool[index] for index in order[first:last, 0]], room)


def row_length(size: int, length: int, multiple: int = 1) -> int:
    """Returns the length of a row for `size` tokens.

    The length is a power of two, rounded up to `multiple`, and at most T.
    """
    power = max(MIN_ROW, 1 << (size - 1).bit_length())
    return min(-(-power // multiple) * multiple, length)


def batches(rows: Iterable[Row], size: int, multiple: int = 1) -> Iterator[Row]:
    """Yields batches `[B, T]` of successive rows of equal length; empty rows fill the last.

    Args:
      size: B, or less for a length with fewer rows; each length has one B.
      multiple: divides B.
    """
    for _, same_length in itertools.groupby(rows, lambda row: len(row["inputs"])):
        count = 0
        while batch := list(itertools.islice(same_length, size)):
            count = count or math.ceil(len(batch) / multiple) * multiple
            batch += [_empty_row(len(batch[0]["inputs"]))] * (count - len(batch))
            yield jax.tree.map(lambda *arrays: np.stack(arrays), *batch)


class Scores(NamedTuple):
    """A batch's scores, possibly still being computed."""

    losses: Array  # cross-entropy of each label in nats, `[B, T]` float32; 0 for ignored labels
    correct: Array  # whether the label is the argmax, `[B, T]`


class Scorer:
    """Scores batches with a model on its mesh; each batch shape is compiled once.

    `batch_size` is rounded up to a multiple of dp * fsdp.
    """

    def __init__(self, model: Decoder, batch_size: int):
        self._mesh = model_mesh(model)
        sizes = mesh_sizes(self._mesh)
        self.parts = batch_parts(sizes)
        self.sequence_parts = sizes[CP]
        self.batch_size = math.ceil(batch_size / self.parts) * self.parts
        graph, self._state = nnx.split(model)

        def scores(
            state: nnx.State, batch: dict[str, Array], last_B: Array | None
        ) -> tuple[Scores, Array | None]:
            merged: Decoder = nnx.merge(graph, state, copy=True)
            sequences = merged.sequences(batch["inputs"], segments=batch.get(SEGMENTS))
            x_BTD = merged.hidden(batch["inputs"], sequences=sequences)
            labels_BT = sequences.local_tokens(batch["labels"])
            statistics = vocab_parallel_statistics(x_BTD, merged.projection(), labels_BT)
            counted_BT = labels_BT != IGNORE
            losses_BT = jnp.where(counted_BT, statistics.log_normaliser - statistics.label_logit, 0)
            correct_BT = counted_BT & (statistics.label_logit >= statistics.highest)
            result = Scores(sequences.natural(losses_BT), sequences.natural(correct_BT))
            if last_B is None:
                return result, None
            logits_BV = merged.logits_at(sequences.natural(x_BTD), last_B[:, None]).astype(
                jnp.float32
            )
            return result, jax.nn.log_softmax(logits_BV, axis=-1)

        # Replicated, so that every process can read all scores.
        self._scores = jax.jit(scores, out_shardings=NamedSharding(self._mesh, P()))

    def __call__(self, batch: Row) -> Scores:
        """Returns the scores of `inputs` and `labels` `[B, T]`; packed rows have `SEGMENTS`."""
        with jax.set_mesh(self._mesh):
            return self._scores(self._state, self._put_batch(batch), None)[0]

    def next_token_logprobs(self, batch: Row, last_B: Ids) -> tuple[Scores, Array]:
        """Returns scores, and next-token log-probabilities `[B, V]` at each row's `last_B`."""
        last = self._put(last_B, batch_spec())
        with jax.set_mesh(self._mesh):
            return self._scores(self._state, self._put_batch(batch), last)

    def _put_batch(self, batch: Row) -> dict[str, Array]:
        return {name: self._put(array, batch_spec(None)) for name, array in batch.items()}

    def _put(self, array: NDArray[np.generic], spec: P) -> Array:
        sharding = NamedSharding(self._mesh, spec)
        # Every process has the whole array.
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@dataclass
class Measured:
    """Sums over documents.

    A document counts when it is read; its tokens count later, when the devices have scored them.
    """

    documents: int = 0
    tokens: int = 0  # number of predicted tokens
    num_bytes: int = 0  # bytes of their text as UTF-8
    nats: float = 0.0  # sum of cross-entropies
    num_correct: int = 0  # tokens predicted correctly: the label is the argmax
    tokens_read: int = 0  # tokens to predict in the documents that were read

    @property
    def loss(self) -> float:
        """Mean cross-entropy per token, in nats."""
        return self.nats / self.tokens

    def numbers(self) -> dict[str, float | None]:
        """Returns all numbers by name; None for one that is undefined or infinite."""
        numbers: dict[str, float | None] = {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "loss": self.loss,
            "perplexity": None,
            "bits_per_byte": None,
            "accuracy": self.num_correct / self.tokens,
        }
        if self.loss < MAX_EXPONENT:
            numbers["perplexity"] = math.exp(self.loss)
        if self.num_bytes:
            numbers["bits_per_byte"] = self.nats / math.log(2) / self.num_bytes
        return numbers

    def windows(self, inputs: Iterable[Input], length: int, stride: int) -> Iterator[Window]:
        """Yields the windows of documents, and counts the documents."""
        for source in inputs:
            for document in source.documents():
                self.documents += 1
                self.num_bytes += document.num_bytes
                windows = spans(len(document.tokens), document.first, length, stride)
                for begin, end, counted in windows:
                    self.tokens_read += counted
                    yield Window(document.tokens[begin:end], counted)

    def add_scores(self, batch: Row, scores: Scores) -> None:
        """Adds the losses of a batch; raises `NumericsError` if one is not finite."""
        losses = np.asarray(scores.losses, np.float64)
        if not np.isfinite(losses).all():
            raise NumericsError(
                "the loss of a token is not finite: the weights are damaged, or --dtype float32 is "
                "needed"
            )
        self.tokens += int(np.count_nonzero(batch["labels"] != IGNORE))
        self.nats += float(losses.sum())
        self.num_correct += int(np.count_nonzero(scores.correct))


def measure(
    scorer: Scorer,
    inputs: Sequence[Input],
    length: int,
    stride: int,
    progress: Callable[[Measured], None],
) -> Measured:
    """Measures a model on documents.

    Args:
      length, stride: as in `spans`.
      progress: called after each batch.

    Raises:
      ConfigError: no token is predicted.
      NumericsError: a loss is not finite.
    """
    measured = Measured()
    packed = rows(measured.windows(inputs, length, stride), length, scorer.sequence_parts)
    packed_batches = batches(packed, scorer.batch_size, scorer.parts)
    for batch, scores in pipeline(packed_batches, scorer, signal.SIGINT):
        measured.add_scores(batch, scores)
        progress(measured)
    if not measured.tokens:
        raise ConfigError("no token to predict: no document has more than one")
    return measured


def _pools(windows: Iterable[Window]) -> Iterator[list[Window]]:
    pool: list[Window] = []
    tokens = 0
    for window in windows:
        pool.append(window)
        tokens += len(window.tokens)
        if tokens >= POOL_TOKENS:
            yield pool
            pool = []
            tokens = 0
    if pool:
        yield pool


def _empty_row(length: int) -> Row:
    return {**empty_row(length), SEGMENTS: np.zeros(length, np.int32)}


def _row(windows: Iterable[Window], length: int) -> Row:
    row = _empty_row(length)
    start = 0
    for segment, window in enumerate(windows, start=1):
        end = start + len(window.tokens) - 1
        row["inputs"][start:end] = window.tokens[:-1]
        row[SEGMENTS][start:end] = segment
        counted = slice(end - window.counted, end)
        row["labels"][counted] = window.tokens[-window.counted :]
        start = end
    return row
