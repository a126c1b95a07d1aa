"""Token embedding and output head, both split by vocabulary over tp.

A vocabulary that tp does not divide is padded to the next multiple when the table is created. Padded rows are
zero, are never looked up, and are masked out of the softmax, so that their gradient is zero and they stay zero.

The table `[V/tp, D/fsdp]` of a device need not be gathered over fsdp to look up: every device can look up the tokens of
all devices along fsdp in its own columns, and then they exchange what they found. That moves activations instead of a
table and of its gradient, whose sum over fsdp is then already made. `VocabParallelEmbedding` does what moves less: the
forward pass and the declared costs ask one function, which compares what the two ways declare. For Llama 3 8B over fsdp
8 a step sends 118 MB over fsdp for the embedding instead of 2,758.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    check_divides,
    device_view,
    enter_parallel,
    leave_parallel,
    token_spec,
)
from jaxtp.communication import ALL_GATHER, ALL_TO_ALL, Collective
from jaxtp.layers.activations import SequenceParallel, activation_spec, sequence_dim
from jaxtp.layers.costs import INT32, Cost, Moves, Share, Weight, bytes_sent, itemsize, leave
from jaxtp.layers.linear import default_kernel_init
from jaxtp.layers.parameter import Precision, Split, check_sizes, parameter, spec_of
from jaxtp.mesh import BATCH, STORAGE, TP, current_mesh, mesh_sizes, parts

TABLE_SPEC = P(TP, STORAGE)
EMBEDDING = "vocab_parallel_embedding"


def table_weight(
    module: str, vocab_size: int, features: int, precision: Precision, *, gathered: bool = True, tied: bool = False
) -> Weight:
    """Returns a table, loaded once; gathered over fsdp, or as it is stored. A tied one is another layer's too."""
    size, split = vocab_size * features, Split((vocab_size,))
    shared: dict[str, Any] = {"precision": precision, "again": False, "gathered": gathered, "tied": tied}
    return Weight(module=module, size=size, split=split, **shared)


def softcapped(x: Array, cap: float | None) -> Array:
    """Returns `cap * tanh(x / cap)`, or `x` without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def vocabulary_table(
    vocab_size: int, features: int, precision: Precision, init: Initializer, rngs: nnx.Rngs
) -> nnx.Param[Array]:
    """A table `[V, D]`, padded to a multiple of tp in V, stored split by `P(TP, STORAGE)`."""
    check_sizes("vocabulary table", vocab_size=vocab_size, features=features)
    table = init(rngs.params(), (vocab_size, features), precision.param)
    return parameter("vocabulary table", table, TABLE_SPEC, padding=((-2, Split((vocab_size,))),))


class VocabParallelEmbedding(nnx.Module):
    """A table of which each tp device holds the rows of its part of the vocabulary.

    Args:
      vocab_size: V; any size.
      features: D.
      scale: multiplies every vector, rounded to the compute dtype (Gemma: the root of D).
      sequence_parallel: the result leaves split over tp along the sequence.
      precision: the dtypes.
      embedding_init: initialiser of the table.
      rngs: source of the `params` key.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        scale: float | None = None,
        sequence_parallel: SequenceParallel = False,
        precision: Precision = Precision(),
        embedding_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        self.vocab_size, self.features, self.scale = vocab_size, features, scale
        self.sequence_parallel = sequence_parallel
        self.precision = precision
        self.embedding = vocabulary_table(vocab_size, features, precision, embedding_init, rngs)

    def __call__(self, ids_BT: Array) -> Array:
        """Looks up `[B, T]` integer ids, `0 <= id < V`: `[B, T, D]` in the compute dtype."""
        chex.assert_rank(ids_BT, 2)
        chex.assert_type(ids_BT, int)
        sequence = sequence_dim(self.sequence_parallel, ids_BT.shape)
        out = activation_spec(sequence)
        check_divides(EMBEDDING, ids_BT.shape, P(*out[:2]))
        rows, length = ids_BT.shape[0] // axis_size(*BATCH), ids_BT.shape[1]
        exchanges = self._exchanges(Share(sizes=mesh_sizes(current_mesh()), rows=rows, length=length))
        look_up = device_view(
            partial(self._look_up, sequence, exchanges),
            EMBEDDING,
            in_specs=(token_spec(), spec_of(self.embedding)),
            out_specs=out,
        )
        return look_up(ids_BT, self.embedding[...])

    def _look_up(self, sequence: int | None, exchanges: bool, ids: Array, shard: Array) -> Array:
        # Read as float32: the gradient of a token that occurs often is summed in it. XLA fuses the cast.
        table = self.precision.load(shard, 1, accumulate="float32", gathered=not exchanges)  # [V/tp, D or D/fsdp]
        ids = all_gather(ids, *STORAGE) if exchanges else ids  # [B/(dp*fsdp), T/cp], or [B*cp/dp, T/cp]
        local = ids - axis_index(TP) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(mine, local, 0), axis=0)
        rows = jnp.where(mine[..., None], rows, 0).astype(self.precision.compute)
        rows = leave_parallel(rows, sequence)
        if exchanges:  # after the sum over tp, which leaves less to move: rows for D/(fsdp*cp)
            rows = all_to_all(rows, *STORAGE, split=0, join=2)
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)

    def costs(self, share: Share) -> Iterator[Cost]:
        """Yields what it costs to look up."""
        split = share.is_split(self.sequence_parallel)
        yield from self._loading(share, exchanges=self._exchanges(share))
        size = share.tokens * self.features * itemsize(self.precision.compute)
        yield from leave(EMBEDDING, share, size, split=split, again=False)

    def _exchanges(self, share: Share) -> bool:
        """Returns whether an exchange over fsdp moves less than the table does, in training."""
        trained = replace(share, training=True, frozen=False)  # a forward pass does not know what comes after it
        gather, exchange = (bytes_sent(self._loading(trained, exchanges=way), trained) for way in (False, True))
        return exchange < gather

    def _loading(self, share: Share, *, exchanges: bool) -> Iterator[Cost]:
        """Yields what it costs to have the table, or to exchange what is found in its parts."""
        yield table_weight(EMBEDDING, self.vocab_size, self.features, self.precision, gathered=not exchanges)
        if exchanges:
            shards = parts(share.sizes, STORAGE)
            ids = Collective(ALL_GATHER, STORAGE, shards, shards * share.tokens * INT32, EMBEDDING)
            found = share.between(self.sequence_parallel) * self.features * itemsize(self.precision.compute)
            yield Moves(ids, 1)
            backward = share.training and not share.frozen
            yield Moves(Collective(ALL_TO_ALL, STORAGE, shards, found, EMBEDDING), 1 + backward)


class LearnedPositions(nnx.Module):
    """A vector for each position, added to the embedding (GPT-2).

    Args:
      num_positions: how many there are.
      features: D.
      sequence_parallel: the result is split over tp along the sequence.
      precision: the dtypes.
      rngs: source of the `params` key.

    The table `[positions, D]` is stored split by `P(None, STORAGE)`.
    """

    def __init__(
        self,
        num_positions: int,
        features: int,
        *,
        sequence_parallel: SequenceParallel = False,
        precision: Precision = Precision(),
        rngs: nnx.Rngs,
    ):
        check_sizes("LearnedPositions", num_positions=num_positions, features=features)
        self.num_positions, self.features = num_positions, features
        self.sequence_parallel = sequence_parallel
        self.precision = precision
        table = default_kernel_init(rngs.params(), (num_positions, features), precision.param)
        self.table = parameter("positions", table, P(None, STORAGE))

    def __call__(self, positions_BT: Array) -> Array:
        """Looks up `[B, T]` positions: `[B, T, D]` in the compute dtype; padding may be at those without a vector."""
        sequence = sequence_dim(self.sequence_parallel, positions_BT.shape)
        activation = activation_spec(sequence)

        def look_up(positions: Array, shard: Array) -> Array:
            table = self.precision.load(shard, 1, accumulate="float32", used_by_all_tp=sequence is not None)
            if sequence is not None:  # here, or XLA would split the way in which positions are counted
                length = positions.shape[sequence] // axis_size(TP)
                positions = jax.lax.dynamic_slice_in_dim(positions, axis_index(TP) * length, length, sequence)
            return jnp.take(table, positions, axis=0, mode="clip").astype(self.precision.compute)

        in_specs = (token_spec(), spec_of(self.table))
        view = device_view(look_up, "learned_positions", in_specs=in_specs, out_specs=activation)
        return view(positions_BT, self.table[...])

    def costs(self, share: Share) -> Iterator[Cost]:
        """Yields what it costs to look up."""
        yield Weight(
            module="learned_positions",
            size=self.num_positions * self.features,
            precision=self.precision,
            tp=False,
            used_by_all_tp=share.is_split(self.sequence_parallel),
            again=False,
        )


class VocabParallelHead(nnx.Module):
    """The output projection `[V, D]`, for a model whose head is not tied to its embedding.

    Args: as `VocabParallelEmbedding`.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        precision: Precision = Precision(),
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        self.kernel = vocabulary_table(vocab_size, features, precision, kernel_init, rngs)


def vocab_parallel_logits(
    x_BTD: Array,
    table_VD: Array,
    vocab_size: int,
    *,
    softcap: float | None = None,
    sequence_parallel: SequenceParallel = False,
    precision: Precision = Precision(),
) -> Array:
    """Returns logits `[B, T, V]` in `precision.logits`, from a table that may be padded.

    Args:
      x_BTD: final hidden states `[B, T, D]`.
      table_VD: the (tied) embedding or head, `[V padded, D]`.
      vocab_size: V.
      softcap: squashes each logit l to `softcap * tanh(l / softcap)`.
      sequence_parallel: the input is split over tp along the sequence.
      precision: the dtypes.
    """

    sequence = sequence_dim(sequence_parallel, x_BTD.shape)

    def project(x: Array, shard: Array) -> Array:
        x = enter_parallel(x.astype(precision.compute), sequence)
        return jnp.einsum("...td,vd->...tv", x, precision.load(shard, 1), preferred_element_type=precision.logits)

    activation = activation_spec(sequence)
    run = device_view(project, "vocab_parallel_logits", in_specs=(activation, TABLE_SPEC), out_specs=token_spec(TP))
    return softcapped(run(x_BTD, table_VD)[..., :vocab_size], softcap)
