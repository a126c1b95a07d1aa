"""The compiled programs of an evaluation: the loss of each label, and where asked for what comes after a row."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec
from jaxtp.data.rows import SEGMENTS, Row
from jaxtp.generate.programs import mesh_of, within
from jaxtp.mesh import batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder


class Scores(NamedTuple):
    """The scores of a batch, perhaps not computed yet."""

    losses: Array
    """Cross-entropy of each label in nats, `[B, T]` float32; 0 where a label does not count."""

    likeliest: Array
    """Whether no other token is likelier than the label, `[B, T]`."""


class Scorer:
    """Scores batches with a model, on the mesh that it was built on; each shape of a batch is compiled once.

    Args:
      model: the model.
      batch_size: number of rows of a batch, rounded up to a multiple of dp * fsdp.
    """

    def __init__(self, model: Decoder, batch_size: int):
        self._mesh = mesh_of(model)
        self.parts = batch_parts(mesh_sizes(self._mesh))
        self.batch_size = math.ceil(batch_size / self.parts) * self.parts
        self.config = model.config
        graph, self._state = nnx.split(model)

        def scores(state: nnx.State, batch: Row) -> Scores:
            merged: Decoder = nnx.merge(graph, state, copy=True)
            given: Any = batch
            return Scores(*merged.token_losses(given["inputs"], given["labels"], segments_BT=given.get(SEGMENTS)))

        def following(state: nnx.State, batch: Row, last: Array) -> tuple[Scores, Array]:
            merged: Decoder = nnx.merge(graph, state, copy=True)
            given: Any = batch
            sequences = merged.sequences(given["inputs"])
            x_BTD = merged.hidden(given["inputs"], sequences=sequences)
            found = Scores(*merged.token_losses_of_hidden(x_BTD, given["labels"]))
            logits = merged.logits_at(x_BTD, last[:, None]).astype(jnp.float32)
            return found, jax.nn.log_softmax(logits, axis=-1)

        everywhere = None if self._mesh is None else NamedSharding(self._mesh, P())  # every process reads all
        self._scores = jax.jit(scores, out_shardings=everywhere)
        self._following = jax.jit(following, out_shardings=everywhere)

    def __call__(self, batch: Row) -> Scores:
        """Returns the scores of a batch `[B, T]`: `inputs`, `labels`, and `SEGMENTS` if rows have some."""
        with within(self._mesh):
            return self._scores(self._state, self._on_mesh(batch))

    def following(self, batch: Row, last: NDArray[np.int32]) -> tuple[Scores, Array]:
        """Returns the scores of a batch, and the log-probability of each token after one of each row, `[B, V]`.

        cp has to be 1.

        Args:
          batch: `inputs` and `labels`.
          last: position in each row, `[B]`.
        """
        with within(self._mesh):
            return self._following(self._state, self._on_mesh(batch), self._placed(last, batch_spec()))

    def _on_mesh(self, batch: Row) -> dict[str, Array]:
        names = [name for name in ("inputs", "labels", SEGMENTS) if name in batch]
        return {name: self._placed(batch[name], batch_spec(None)) for name in names}

    def _placed(self, array: NDArray[Any], spec: P) -> Array:
        """Returns an array on the mesh; each process has the whole of it, and puts its devices' rows there."""
        if self._mesh is None:
            return jnp.asarray(array)
        sharding = NamedSharding(self._mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
