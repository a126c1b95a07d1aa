"""Token embedding and output head, both split by vocabulary over tp.

A look-up either gathers the table shard `[V/tp, D/fsdp]` over fsdp, or gathers the ids over fsdp,
looks them up in the shard and exchanges the results; the table's gradient then needs no sum over
fsdp. For Llama 3 8B over fsdp 8 the exchange sends 118 MB per step over fsdp instead of 2,758 MB.
"""

from dataclasses import dataclass
from functools import partial

import chex
import jax.numpy as jnp
from flax import nnx
from jax import Array
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
    own_part,
    token_spec,
)
from jaxtp.config.schema import ConfigError, short_repr
from jaxtp.layers.context import LocalShape
from jaxtp.layers.linear import LayerContext, default_kernel_init
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import (
    PaddedDim,
    Precision,
    Variable,
    check_sizes,
    parameter,
    spec_of,
)
from jaxtp.layers.transport import activation_spec, sequence_dim
from jaxtp.mesh import BATCH, STORAGE, TP, current_mesh, mesh_sizes, parts

TABLE_SPEC = P(TP, STORAGE)
BIAS_SPEC = P(TP)
EMBEDDING = "vocab_parallel_embedding"

CHUNK_SIZE = 2048
"""Default of `HeadConfig.chunk_size`. Each chunk reads and writes the table's float32 gradient: for
2048 tokens, at the peak rates of an H100, this takes a fifth of the time of their products."""


@dataclass(frozen=True)
class HeadConfig:
    """How hidden states become logits."""

    __repr__ = short_repr

    vocab_size: int  # without padding
    context: LayerContext = LayerContext()

    scale: float = 1.0  # multiplies each logit
    softcap: float | None = None  # squashes each logit l to `softcap * tanh(l / softcap)`
    temperature: float = 1.0  # divides each logit, after the softcap
    # Tokens on a device whose logits exist at a time in a loss (`layers/loss.py`)
    chunk_size: int = CHUNK_SIZE
    # The table's spec, which `mark_unreduced` changes, as it does the bias's
    table_spec: P = TABLE_SPEC
    bias_spec: P = BIAS_SPEC

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature}: it divides the logits and should be above 0, "
                "such as 1"
            )

    def finish(self, logits: Array) -> Array:
        """Scales and caps logits, and divides them by the temperature."""
        # Factors of 1 are not multiplied: they would be operations of the program.
        if self.scale != 1:
            logits *= self.scale
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        return logits if self.temperature == 1 else logits / self.temperature


def vocabulary_table(
    vocab_size: int,
    features: int,
    precision: Precision,
    rngs: nnx.Rngs,
) -> nnx.Param[Array]:
    """Returns a table `[V, D]`, V padded to a multiple of tp, stored as `P(TP, STORAGE)`."""
    check_sizes("vocabulary table", vocab_size=vocab_size, features=features)
    table = default_kernel_init(rngs.params(), (vocab_size, features), precision.param)
    padding = ((-2, PaddedDim((vocab_size,))),)
    return parameter("vocabulary table", table, TABLE_SPEC, padding=padding)


class _Table(nnx.Module):
    """A table `[V, D]`, of which adapters may replace all rows, or those of some tokens."""

    def __init__(self, vocab_size: int, features: int, lora: LoraConfig):
        self.tokens = lora.tokens
        rows = None
        if lora.rank and lora.tables:
            zeros = jnp.zeros((vocab_size, features), lora.dtype)
            padding = ((-2, PaddedDim((vocab_size,))),)
            rows = parameter("token rows", zeros, TABLE_SPEC, kind=nnx.LoRAParam, padding=padding)
        elif lora.rank and lora.tokens:
            zeros = jnp.zeros((len(lora.tokens), features), lora.dtype)
            rows = parameter("token rows", zeros, P(None, STORAGE), kind=nnx.LoRAParam)
        self.token_rows = rows

    def with_rows(self, table: Variable) -> tuple[Array, P]:
        """Returns the whole table, `[V padded, D]`, and its spec."""
        spec = spec_of(table)
        if self.token_rows is None:
            return jnp.asarray(table[...]), spec
        rows_spec = spec_of(self.token_rows)
        if not self.tokens:
            return jnp.asarray(self.token_rows[...]), rows_spec
        # `mark_unreduced` may have changed the spec of the rows.
        whole_spec = P(TP, *rows_spec[1:])

        def put(shard: Array, rows: Array) -> Array:
            index = jnp.array(self.tokens) - axis_index(TP) * len(shard)
            # Rows of other devices are beyond the shard, where a negative index is not.
            index = jnp.where(index < 0, len(shard), index)
            return shard.at[index].set(rows.astype(shard.dtype), mode="drop")

        view = device_view(put, EMBEDDING, (spec, rows_spec), whole_spec)
        return view(table[...], self.token_rows[...]), whole_spec


class VocabParallelEmbedding(_Table):
    """Token embedding, split over tp by vocabulary.

    `scale` multiplies every vector, rounded to the compute dtype (Gemma: sqrt(D)).
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        context: LayerContext = LayerContext(),
        *,
        scale: float | None = None,
        lora: LoraConfig = LoraConfig(),
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab_size, features, lora)
        self.vocab_size = vocab_size
        self.features = features
        self.scale = scale
        self.sequence_parallel = context.sequence_parallel
        self.precision = context.precision
        self.embedding = vocabulary_table(vocab_size, features, self.precision, rngs)

    def __call__(self, ids_BT: Array) -> Array:
        """Looks up ids `[B, T]`, `0 <= id < V`: `[B, T, D]` in the compute dtype."""
        chex.assert_rank(ids_BT, 2)
        chex.assert_type(ids_BT, int)
        split_dim = sequence_dim(self.sequence_parallel, ids_BT.shape)
        out_spec = activation_spec(split_dim)
        check_divides(EMBEDDING, ids_BT.shape, P(*out_spec[:2]))
        rows = ids_BT.shape[0] // axis_size(*BATCH)
        length = ids_BT.shape[1]
        shape = LocalShape(sizes=mesh_sizes(current_mesh()), rows=rows, length=length)
        look_up = partial(self._look_up, split_dim, self.exchanges(shape))
        table, spec = self.with_rows(self.embedding)
        view = device_view(look_up, EMBEDDING, (token_spec(), spec), out_specs=out_spec)
        return view(ids_BT, table)

    def _look_up(self, split_dim: int | None, exchanges: bool, ids: Array, shard: Array) -> Array:
        # Read as float32, so that gradients of a frequent token accumulate in float32. XLA fuses
        # the cast. The table is [V/tp, D], or [V/tp, D/fsdp] for an exchange.
        table = self.precision.load(shard, 1, accumulate="float32", gathered=not exchanges)
        # The ids are [B/(dp*fsdp), T/cp].
        if exchanges:
            ids = all_gather(ids, *STORAGE)  # [B*cp/dp, T/cp]
        num_ids = len(table)
        index = ids - axis_index(TP) * num_ids
        is_local = (index >= 0) & (index < num_ids)
        rows = jnp.take(table, jnp.where(is_local, index, 0), axis=0)
        rows = jnp.where(is_local[..., None], rows, 0)
        rows = leave_parallel(rows.astype(self.precision.compute), split_dim)
        if exchanges:  # after the sum over tp, which leaves less to move
            rows = all_to_all(rows, *STORAGE, split=0, join=2)
        if self.scale is not None:
            rows *= jnp.asarray(self.scale, rows.dtype)
        return rows

    def exchanges(self, shape: LocalShape) -> bool:
        """Returns whether exchanging results over fsdp moves less than gathering the table."""
        shards = parts(shape.sizes, STORAGE)
        compute = jnp.dtype(self.precision.compute).itemsize
        reduce = jnp.dtype(self.precision.reduce).itemsize
        # The table is gathered in the compute dtype, and its gradient scattered in the reduction
        # dtype. An exchange gathers int32 ids, and moves looked-up rows and their gradients. A
        # device sends (shards - 1)/shards of each.
        num_ids = PaddedDim((self.vocab_size,)).local(shape.tp)
        table = self.features * num_ids * (compute + reduce)
        ids = 4 * shards * shape.tokens
        rows = 2 * self.features * shape.between(self.sequence_parallel) * compute
        return shards > 1 and ids + rows < table


class LearnedPositions(nnx.Module):
    """A learned vector per position (GPT-2).

    The table `[num_positions, D]` is stored as `P(None, STORAGE)`.
    """

    def __init__(
        self,
        num_positions: int,
        features: int,
        context: LayerContext = LayerContext(),
        *,
        rngs: nnx.Rngs,
    ):
        check_sizes("LearnedPositions", num_positions=num_positions, features=features)
        self.num_positions = num_positions
        self.features = features
        self.sequence_parallel = context.sequence_parallel
        self.precision = context.precision
        table = default_kernel_init(rngs.params(), (num_positions, features), self.precision.param)
        self.table = parameter("positions", table, P(None, STORAGE))

    def __call__(self, positions_BT: Array) -> Array:
        """Looks up positions `[B, T]`: `[B, T, D]` in the compute dtype.

        Padding may exceed the table.
        """
        split_dim = sequence_dim(self.sequence_parallel, positions_BT.shape)

        def look_up(positions: Array, shard: Array) -> Array:
            differs = split_dim is not None  # devices of a tp group have other positions
            table = self.precision.load(shard, 1, accumulate="float32", used_by_all_tp=differs)
            # Positions are sliced here, or XLA would also split their computation.
            if split_dim is not None:
                positions = own_part(positions, TP, split_dim)
            vectors = jnp.take(table, positions, axis=0, mode="clip")
            return vectors.astype(self.precision.compute)

        in_specs = (token_spec(), spec_of(self.table))
        view = device_view(look_up, "learned_positions", in_specs, activation_spec(split_dim))
        return view(positions_BT, self.table[...])


class VocabParallelHead(_Table):
    """The output projection `[V, D]` and its bias `[V]`, if any.

    The projection is None if `tied` to the embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        context: LayerContext = LayerContext(),
        *,
        use_bias: bool = False,
        tied: bool = False,
        lora: LoraConfig = LoraConfig(),
        rngs: nnx.Rngs,
    ):
        super().__init__(vocab_size, features, LoraConfig() if tied else lora)
        precision = context.precision
        self.kernel = None if tied else vocabulary_table(vocab_size, features, precision, rngs)
        padding = ((-1, PaddedDim((vocab_size,))),)
        zeros = jnp.zeros(vocab_size, precision.param)
        self.bias = parameter("bias", zeros, BIAS_SPEC, padding=padding) if use_bias else None


def vocab_parallel_logits(
    x_BTD: Array,
    table_VD: Array,
    head: HeadConfig,
    bias_V: Array | None = None,
    /,
) -> Array:
    """Returns logits `[B, T, V]` in `precision.logits`.

    The table is the (tied) embedding or head, `[V padded, D]`.
    """
    precision = head.context.precision
    split_dim = sequence_dim(head.context.sequence_parallel, x_BTD.shape)

    def project(x: Array, shard: Array, bias: Array | None) -> Array:
        x = enter_parallel(x.astype(precision.compute), split_dim)  # [b, T/cp, D]
        table = precision.load(shard, 1)  # [V/tp, D]
        y = jnp.einsum("...td,vd->...tv", x, table, preferred_element_type=precision.logits)
        if bias is not None:
            y += precision.load(bias, None, accumulate=precision.logits)
        return y

    in_specs = (activation_spec(split_dim), head.table_spec, head.bias_spec)
    run = device_view(project, "vocab_parallel_logits", in_specs, token_spec(TP))
    logits = run(x_BTD, table_VD, bias_V)
    return head.finish(logits[..., : head.vocab_size])
