"""A generator's compiled programs: one reads prompt tokens, the other decodes several tokens per call.

Both end by sampling, so logits never leave the devices. Each program updates its donated KV cache in place. A call
returns its state before its tokens are computed, so an interrupt while waiting for them loses nothing. No other call
may run before then: virtual CPU devices can deadlock with several programs in flight.

A decode call runs until all rows have ended, or the first if a prompt is waiting.
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

from jaxtp.collectives import batch_spec, constrain
from jaxtp.generate.decode_model import DecodeModel, mesh_context
from jaxtp.generate.sampling import GenerationSettings, sample
from jaxtp.layers.cache import KVCaches, NewTokens

Ints = NDArray[np.int32] | Array

MAX_STEPS = 32
"""Maximum number of tokens of a row that one call decodes."""


@dataclass(frozen=True)
class Shape:
    """The size of a KV cache: rows on all devices (divisible by dp * fsdp), and tokens per row."""

    rows: int
    slots: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Arrays that stay on the devices between calls."""

    caches: KVCaches
    """The KV cache."""
    seen: Array | None = None
    """Whether a row has a token, `[rows, V]`; None without a repetition penalty."""


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
    """Index in the sequence of the last prompt token of each row, `[P, R]`; -1 if it is not there."""
    continued: bool = field(metadata={"static": True})
    """Whether a sequence begins with tokens of a row that has others in the cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowArrays:
    """The state of each row on the host, `[rows]` each."""

    tokens: Ints
    """The last sampled token, not yet in the cache."""
    lengths: Ints
    """Number of tokens in the cache; for a prompt that is being read, its whole length."""
    left: Ints
    """Number of tokens still to be generated; 0 for an idle row."""
    seeds: NDArray[np.uint32] | Array


StepTokens = tuple[list[list[int]], list[list[float]]]
"""Tokens and their log-probabilities, of each row at each step."""


@dataclass(frozen=True)
class SampledTokens:
    """Pending tokens and log-probabilities, `[MAX_STEPS or 1, rows]`; only the first `steps` are valid."""

    tokens: Array
    logprobs: Array
    steps: Array | int

    def wait(self) -> StepTokens:
        """Returns the tokens when they are computed."""
        steps = int(self.steps)
        return np.asarray(self.tokens)[:steps].tolist(), np.asarray(self.logprobs)[:steps].tolist()


_Carry = tuple[Array, State, Array, Array, Array, Array, Array]


class Programs:
    """The programs for one cache shape and sampling settings, each compiled on first use.

    Args:
      num_ids: number of tokens that may be sampled.
      end_ids: tokens that end a text.
    """

    def __init__(
        self,
        model: DecodeModel,
        mesh: Mesh | None,
        shape: Shape,
        settings: GenerationSettings,
        num_ids: int,
        end_ids: frozenset[int],
    ):
        self.shape, self.compile_seconds = shape, 0.0
        self._mesh, self._config = mesh, model.config
        self._end_ids = sorted(end_ids)
        self._penalises = settings.repetition_penalty != 1
        self._sample = partial(sample, settings=settings, num_ids=num_ids)
        self._graph, self._weights = nnx.split(model)
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    @property
    def read_lengths(self) -> list[int]:
        """Sequence lengths with a compiled read program."""
        return [key[1] for key in self._compiled if isinstance(key, tuple)]

    def state(self, caches: KVCaches | None = None) -> State:
        """Returns the state with `caches`, by default an empty KV cache."""
        if caches is None:
            caches = self._program("empty", self._empty)(self._weights)
        if not self._penalises:
            return State(caches)
        seen = np.zeros((self.shape.rows, self._config.vocab_size), np.bool_)
        return State(caches, jax.device_put(seen, self._sharding(batch_spec(None))))

    def add_prompts(self, state: State, prompts: dict[int, NDArray[np.int32]]) -> State:
        """Marks prompt tokens, by row, as seen; only the repetition penalty needs it."""
        if state.seen is None or not prompts:
            return state
        is_new, seen = np.zeros(self.shape.rows, np.bool_), np.zeros(state.seen.shape, np.bool_)
        for row, ids in prompts.items():
            is_new[row], seen[row, ids] = True, True
        with mesh_context(self._mesh):
            return State(state.caches, _replace_rows(state.seen, seen, is_new))

    def read(self, state: State, packed: PackedTokens, rows: RowArrays) -> tuple[State, SampledTokens]:
        """Reads prompt tokens; samples the first token of each row whose prompt ends.

        The state is donated. The tokens of a row must be read in order.
        """
        key = ("read", packed.ids.shape[1], packed.continued)
        program = self._program(key, self._read, state, packed, rows)
        state, tokens, logprobs = program(self._weights, state, packed, rows)
        return state, SampledTokens(tokens, logprobs, 1)

    def decode(self, state: State, rows: RowArrays, steps: int, *, waiting: bool) -> tuple[State, SampledTokens]:
        """Decodes up to `steps` (at most `MAX_STEPS`) tokens of each row; donates the state.

        Args:
          waiting: return as soon as a row has ended, for a waiting prompt.
        """
        limits = np.int32(steps), np.bool_(waiting)
        program = self._program("decode", self._decode, state, rows, *limits)
        state, *sampled = program(self._weights, state, rows, *limits)
        return state, SampledTokens(*sampled)

    def compiled_decode(self, state: State) -> jax.stages.Compiled:
        """Returns the compiled decode program; arrays may be abstract."""
        zeros = np.zeros(self.shape.rows, np.int32)
        rows = RowArrays(zeros, zeros, zeros, zeros.astype(np.uint32))
        return self._program("decode", self._decode, state, rows, np.int32(1), np.bool_(False))

    def _read(
        self, model: DecodeModel, state: State, packed: PackedTokens, rows: RowArrays
    ) -> tuple[State, Array, Array]:
        last_PR = jnp.asarray(packed.last)
        new = NewTokens(jnp.asarray(packed.positions), jnp.asarray(packed.rows), packed.continued)
        x_PCD, caches = model(jnp.asarray(packed.ids), state.caches, new)
        logits_BV = constrain(model.logits_at(x_PCD, last_PR), batch_spec(None))
        seeds_B, lengths_B = jnp.asarray(rows.seeds), jnp.asarray(rows.lengths)
        tokens_B, logprobs_B, seen = self._sample(logits_BV, state.seen, seeds_B, lengths_B)
        if state.seen is not None and seen is not None:  # only rows whose prompt has ended got a token
            ended_B = last_PR.reshape(-1) >= 0
            seen = constrain(jnp.where(ended_B[:, None], seen, state.seen), batch_spec(None))
        return State(caches, seen), tokens_B[None], logprobs_B[None]

    def _decode(
        self, model: DecodeModel, state: State, rows: RowArrays, max_steps: Array, waiting: Array
    ) -> tuple[State, Array, Array, Array]:
        was_active_B, end_ids = rows.left > 0, jnp.array(self._end_ids, jnp.int32)

        def unfinished(carry: _Carry) -> Array:
            step, *_, left_B, _, _ = carry
            none_ended = jnp.all((left_B > 0) == was_active_B)
            return (step < max_steps) & jnp.any(left_B > 0) & (none_ended | ~waiting)

        def decode_step(carry: _Carry) -> _Carry:
            step, state, tokens_B, lengths_B, left_B, tokens, logprobs = carry
            active_B = left_B > 0
            positions_B = jnp.where(active_B, lengths_B, self.shape.slots)  # out of range: inactive rows write nothing
            new = NewTokens(constrain(positions_B[:, None], batch_spec(None)))
            x_B1D, caches = model(tokens_B[:, None], state.caches, new)
            lengths_B = lengths_B + active_B
            logits_BV = constrain(model.logits_of_hidden(x_B1D)[:, 0], batch_spec(None))
            tokens_B, logprobs_B, seen = self._sample(logits_BV, state.seen, jnp.asarray(rows.seeds), lengths_B)
            ended_B = jnp.any(tokens_B[:, None] == end_ids, axis=1)
            left_B = jnp.where(active_B & ~ended_B, left_B - 1, 0)
            tokens, logprobs = tokens.at[step].set(tokens_B), logprobs.at[step].set(logprobs_B)
            return step + 1, State(caches, seen), tokens_B, lengths_B, left_B, tokens, logprobs

        tokens = jnp.zeros((MAX_STEPS, self.shape.rows), jnp.int32)
        tokens_B, lengths_B, left_B = (jnp.asarray(x) for x in (rows.tokens, rows.lengths, rows.left))
        carry = (jnp.int32(0), state, tokens_B, lengths_B, left_B, tokens, tokens.astype(jnp.float32))
        steps, state, *_, tokens, logprobs = lax.while_loop(unfinished, decode_step, carry)
        return state, tokens, logprobs, steps

    def _empty(self, model: DecodeModel) -> KVCaches:
        return model.empty(self.shape.rows, self.shape.slots)

    def _program(self, key: Hashable, function: Callable[..., object], *arguments: object) -> jax.stages.Compiled:
        def program(weights: nnx.State, *arguments: object) -> object:
            return function(nnx.merge(self._graph, weights), *arguments)

        if key not in self._compiled:
            started, types = time.perf_counter(), jax.tree.map(self._abstract, arguments)
            with mesh_context(self._mesh):
                jitted = jax.jit(program, donate_argnums=1 if arguments else ())  # donates the state
                self._compiled[key] = jitted.lower(self._weights, *types).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    def _abstract(self, array: Array | jax.ShapeDtypeStruct | NDArray[np.generic]) -> jax.ShapeDtypeStruct:
        if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return jax.ShapeDtypeStruct(np.shape(array), array.dtype, sharding=self._sharding(P()))

    def _sharding(self, spec: P) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, spec)


@partial(jax.jit, donate_argnums=0)
def _replace_rows(old: Array, new: Array, is_new: Array) -> Array:
    return constrain(jnp.where(is_new[:, None], new, old), batch_spec(None))
