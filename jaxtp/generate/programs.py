"""A generator's compiled programs.

One reads prompt tokens, the other decodes several tokens per call.

Both end by sampling, so logits never leave the devices. Each program updates its donated KV cache
in place. A call returns the cache before its tokens are computed, so an interrupt while waiting for
tokens loses nothing. Wait for them before the next call: virtual CPU devices can deadlock with
several programs in flight.

A decode call runs until all rows have ended; if a prompt is waiting, until the first row has.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec, constrain, device_view
from jaxtp.generate.decode_model import DecodeModel, has_states
from jaxtp.generate.sampling import GenerationSettings, propose, sample
from jaxtp.layers.cache import DROPPED, LAYER_SPEC, KVCaches, NewTokens

Ints = NDArray[np.int32] | Array

# Maximum steps of one call
MAX_STEPS = 32


@dataclass(frozen=True)
class Shape:
    """The size of a KV cache: rows on all devices (divisible by dp * fsdp), and tokens per row."""

    rows: int
    slots: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTokens:
    """Prompt tokens to read, packed into one sequence for each of the P parts of the batch.

    C is the length of a sequence, R the number of rows of a part.
    """

    ids: Ints
    """`[P, C]`."""
    rows: Ints
    """Row of each token within its part, `[P, C]`; -1 for padding."""
    positions: Ints
    """Position of each token in its row, `[P, C]`."""
    last: Ints
    """Index of each row's last prompt token, `[P, R]`; -1 if another call reads it."""
    continued: bool = field(metadata={"static": True})
    """Whether a sequence begins with a row that has cached tokens."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowArrays:
    """The state of each row on the host, `[rows]` each."""

    tokens: Ints
    """The last sampled token, not yet in the cache."""
    lengths: Ints
    """Number of tokens in the cache; while a prompt is read, the length of the prompt."""
    left: Ints
    """Number of tokens still to be generated; 0 for an idle row."""
    seeds: NDArray[np.uint32] | Array
    history: Ints | None = None
    """All tokens, `[rows, slots]`; -1 after the last. None without repetition penalty and
    speculation."""


Sampled = tuple[Array, Array, Array]
"""Tokens (-1 for none) and log-probabilities, `[MAX_STEPS * width or 1, rows]`, and the number of
valid lines; may not be computed yet."""
_Carry = tuple[Array, KVCaches, Array | None, Array, Array, Array, Array, Array]


class Programs:
    """The programs for one cache shape and sampling settings, each compiled on first use.

    Args:
      num_ids: number of tokens that may be sampled.
    """

    def __init__(
        self,
        model: DecodeModel,
        mesh: Mesh,
        shape: Shape,
        settings: GenerationSettings,
        num_ids: int,
        end_ids: frozenset[int],
    ):
        self.shape = shape
        self.compile_seconds = 0.0
        self._penalises = settings.repetition_penalty != 1
        self.width = 1 + settings.speculate
        self.needs_history = self._penalises or self.width > 1
        self.has_states = has_states(model, mesh)
        self._mesh = mesh
        self._end_ids = sorted(end_ids)
        self._sample = partial(sample, settings=settings, num_ids=num_ids)
        self._graph, self.weights = nnx.split(model)
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    @property
    def read_lengths(self) -> list[int]:
        """Sequence lengths with a compiled read program."""
        return [key[1] for key in self._compiled if isinstance(key, tuple)]

    def empty(self) -> KVCaches:
        """Returns an empty KV cache."""
        return self._program("empty", self._empty)(self.weights)

    def read(
        self, caches: KVCaches, packed: PackedTokens, rows: RowArrays
    ) -> tuple[KVCaches, Sampled]:
        """Reads prompt tokens, and samples the first new token of each row whose prompt ends."""
        key = ("read", packed.ids.shape[1], packed.continued)
        return self._program(key, self._read, caches, packed, rows)(
            self.weights, caches, packed, rows
        )

    def decode(
        self, caches: KVCaches, rows: RowArrays, steps: int, *, waiting: bool
    ) -> tuple[KVCaches, Sampled]:
        """Decodes `steps` (at most `MAX_STEPS`) times up to `width` tokens of each row.

        `waiting`: a prompt waits.
        """
        arguments = caches, rows, np.int32(steps), np.bool_(waiting)
        return self._program("decode", self._decode, *arguments)(self.weights, *arguments)

    def copy(self, caches: KVCaches, sources: Ints) -> KVCaches:
        """Copies rows; `sources` `[rows]` counts within the part; -1 copies none."""
        return jax.block_until_ready(self.compiled_copy(caches)(self.weights, caches, sources))

    def compiled_decode(self, caches: KVCaches) -> jax.stages.Compiled:
        """Returns the compiled decode program; `caches` may be abstract."""
        zeros = np.zeros(self.shape.rows, np.int32)
        history = (
            np.zeros((self.shape.rows, self.shape.slots), np.int32) if self.needs_history else None
        )
        rows = RowArrays(zeros, zeros, zeros, zeros.astype(np.uint32), history)
        return self._program("decode", self._decode, caches, rows, np.int32(1), np.bool_(False))

    def compiled_copy(self, caches: KVCaches) -> jax.stages.Compiled:
        """Returns the compiled program that copies rows; `caches` may be abstract."""
        return self._program("copy", self._copy, caches, np.zeros(self.shape.rows, np.int32))

    def _read(
        self, model: DecodeModel, caches: KVCaches, packed: PackedTokens, rows: RowArrays
    ) -> tuple[KVCaches, Sampled]:
        new = NewTokens(jnp.asarray(packed.positions), jnp.asarray(packed.rows), packed.continued)
        x_PCD, caches = model(jnp.asarray(packed.ids), caches, new)
        logits_BV = constrain(model.logits_at(x_PCD, jnp.asarray(packed.last)), batch_spec(None))
        seen_BV = self._seen(model, rows.history, jnp.asarray(rows.tokens)[:, None])
        tokens_B, logprobs_B = self._sample(
            logits_BV, seen_BV, jnp.asarray(rows.seeds), jnp.asarray(rows.lengths)
        )
        return caches, (tokens_B[None], logprobs_B[None], jnp.int32(1))

    def _decode(
        self,
        model: DecodeModel,
        caches: KVCaches,
        rows: RowArrays,
        max_steps: Array,
        waiting: Array,
    ) -> tuple[KVCaches, Sampled]:
        was_active_B = rows.left > 0
        end_ids = jnp.array(self._end_ids, jnp.int32)
        width = self.width
        ahead_T = jnp.arange(self.width)

        def unfinished(carry: _Carry) -> Array:
            step, *_, left_B, _, _ = carry
            none_ended = jnp.all((left_B > 0) == was_active_B)
            return (step < max_steps) & jnp.any(left_B > 0) & (none_ended | ~waiting)

        def decode_step(carry: _Carry) -> _Carry:
            step, caches, history_BS, tokens_B, lengths_B, left_B, tokens, logprobs = carry
            ids_BT = tokens_B[:, None]
            if history_BS is not None and width > 1:
                ids_BT = jax.vmap(partial(propose, count=width - 1))(history_BS, lengths_B)
            wanted_BT = ahead_T < left_B[:, None]
            next_BT = lengths_B[:, None] + 1 + ahead_T
            new = NewTokens(constrain(jnp.where(wanted_BT, next_BT - 1, DROPPED), batch_spec(None)))
            x_BTD, caches = model(ids_BT, caches, new)
            logits = constrain(
                model.logits_of_hidden(x_BTD).reshape(ids_BT.size, -1), batch_spec(None)
            )
            seen = self._seen(model, history_BS, ids_BT)
            seeds = jnp.repeat(jnp.asarray(rows.seeds), width)
            sampled_BT, logprobs_BT = (
                x.reshape(ids_BT.shape) for x in self._sample(logits, seen, seeds, next_BT.ravel())
            )
            ended_BT = jnp.any(sampled_BT[..., None] == end_ids, axis=2)
            # A token is kept if all before it equal their proposals and are no end.
            stops_BT = (sampled_BT[:, :-1] != ids_BT[:, 1:]) | ended_BT[:, :-1]
            kept_BT = wanted_BT & (jnp.cumsum(jnp.pad(stops_BT, ((0, 0), (1, 0))), axis=1) == 0)
            count_B = jnp.sum(kept_BT, axis=1)
            tokens_B = jnp.take_along_axis(
                sampled_BT, jnp.maximum(count_B - 1, 0)[:, None], axis=1
            )[:, 0]
            if history_BS is not None:
                places = jnp.where(kept_BT, next_BT, DROPPED)
                history_BS = history_BS.at[jnp.arange(count_B.size)[:, None], places].set(
                    sampled_BT, mode="drop"
                )
            left_B = jnp.where(jnp.any(ended_BT & kept_BT, axis=1), 0, left_B - count_B)
            tokens = tokens.at[step].set(jnp.where(kept_BT, sampled_BT, -1).T)
            logprobs = logprobs.at[step].set(logprobs_BT.T)
            return (
                step + 1,
                caches,
                history_BS,
                tokens_B,
                lengths_B + count_B,
                left_B,
                tokens,
                logprobs,
            )

        tokens = jnp.zeros((MAX_STEPS, width, self.shape.rows), jnp.int32)
        history, *state = jax.tree.map(
            jnp.asarray, (rows.history, rows.tokens, rows.lengths, rows.left)
        )
        carry = jnp.int32(0), caches, history, *state, tokens, tokens.astype(jnp.float32)
        steps, caches, *_, tokens, logprobs = lax.while_loop(unfinished, decode_step, carry)
        # Each process reads them; XLA would split what a loop returns, though `sample` replicates
        # each step's.
        tokens, logprobs = (
            constrain(x.reshape(-1, self.shape.rows), P()) for x in (tokens, logprobs)
        )
        return caches, (tokens, logprobs, steps * width)

    def _seen(self, model: DecodeModel, history_BS: Ints | None, ids_BT: Array) -> Array | None:
        # Whether a row has a token, up to each of `ids_BT`: [B * T, V].
        if history_BS is None or not self._penalises:
            return None
        rows = len(history_BS)
        size = model.config.vocab_size
        ids_BS = jnp.where(history_BS < 0, size, history_BS)
        seen_BV = (
            jnp.zeros((rows, size), bool)
            .at[jnp.arange(rows)[:, None], ids_BS]
            .set(True, mode="drop")
        )
        seen_BTV = seen_BV[:, None] | (
            jnp.cumsum(ids_BT[..., None] == jnp.arange(size), axis=1) > 0
        )
        return constrain(seen_BTV.reshape(ids_BT.size, size), batch_spec(None))

    def _copy(self, model: DecodeModel, caches: KVCaches, sources: Array) -> KVCaches:
        def copy(caches: KVCaches, sources: Array) -> KVCaches:
            def copy_row(row: Array, caches: KVCaches) -> KVCaches:
                source = jnp.where(sources[row] < 0, row, sources[row])
                one = lambda x: lax.dynamic_index_in_dim(x, source, x.ndim - 4)  # noqa: E731
                return jax.tree.map(
                    lambda x: lax.dynamic_update_index_in_dim(x, one(x), row, x.ndim - 4), caches
                )

            # Copies are made row by row, so that no second cache is made.
            return lax.fori_loop(0, sources.size, copy_row, caches)

        specs = jax.tree.map(lambda x: P(*(None,) * (x.ndim - 4), *LAYER_SPEC), caches)
        return device_view(copy, "copy", (specs, batch_spec()), specs)(caches, sources)

    def _empty(self, model: DecodeModel) -> KVCaches:
        return model.empty(self.shape.rows, self.shape.slots)

    def _program(
        self, key: Hashable, function: Callable[..., object], *arguments: object
    ) -> jax.stages.Compiled:
        def program(weights: nnx.State, *arguments: object) -> object:
            return function(nnx.merge(self._graph, weights), *arguments)

        if key not in self._compiled:
            started = time.perf_counter()
            types = jax.tree.map(self._abstract, arguments)
            with jax.set_mesh(self._mesh):
                # The program donates the KV cache.
                jitted = jax.jit(program, donate_argnums=1 if arguments else ())
                self._compiled[key] = jitted.lower(self.weights, *types).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    def _abstract(
        self, array: Array | jax.ShapeDtypeStruct | NDArray[np.generic]
    ) -> jax.ShapeDtypeStruct:
        if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return jax.ShapeDtypeStruct(
            np.shape(array), array.dtype, sharding=NamedSharding(self._mesh, P())
        )
