"""The compiled programs of a generator: one reads tokens of prompts, the other makes tokens, several in one call.

Both end by choosing tokens, so that logits never leave the devices. The memory is donated to each program, which
writes into it in place. What the host has to say of the rows (tokens, lengths, seeds) are a few numbers, given with
each call. A call returns before its tokens are there, with the state: who is interrupted while waiting for them still
has it. There must be no other call before they are, for virtual CPU devices can hang where many programs are under
way.

The host decides by numbers, the devices by tokens. A call makes tokens until all rows have ended, or until one has
ended whose place is wanted.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec, constrain
from jaxtp.generate.sampling import sample
from jaxtp.generate.settings import GenerationSettings
from jaxtp.layers.cache import LAYER_SPEC, Memories, NewTokens
from jaxtp.models.decoder import Ends
from jaxtp.models.reader import Reader

Ids = NDArray[np.int32]

MAX_STEPS = 32
"""Most tokens of a row that one call makes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a memory."""

    rows: int
    """Number of sequences on all devices together; divisible by dp * fsdp."""

    slots: int
    """Number of tokens that a row can have at most."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Arrays that the devices hold between calls."""

    memories: Memories

    seen: Array | None = None
    """Whether a row has a token, `[rows, V]`; None where no setting asks for it."""


@dataclass(frozen=True)
class Packed:
    """Tokens of prompts to read, in one sequence for each part of the batch, and what the host knows of the rows.

    P is the number of parts, C the length of a sequence, R the rows of a part.
    """

    ids: Ids
    """`[P, C]`."""

    rows: Ids
    """Row of each token among those of its part, `[P, C]`; -1 for padding."""

    positions: Ids
    """Position of each token in its row, `[P, C]`."""

    last: Ids
    """Where in the sequence the last token of a row's prompt is, `[P, R]`; -1 where it is not in it."""

    continued: bool
    """Whether a sequence begins with tokens of a row that has others before them."""


@dataclass(frozen=True)
class Rows:
    """Numbers that the host knows of the rows, `[rows]` each."""

    tokens: Ids
    """Token of a row that has been chosen last, and is to be read."""

    lengths: Ids
    """Number of tokens of a row that have been read."""

    left: Ids
    """Number of tokens that are still to be chosen; 0 for a row that makes none."""

    seeds: NDArray[np.uint32]


Made = tuple[list[list[int]], list[list[float]]]
"""Tokens and their log-probabilities, of each row for each step."""


@dataclass(frozen=True)
class Chosen:
    """Tokens that are being chosen, and their log-probabilities, `[steps, rows]` each."""

    tokens: Array
    logprobs: Array
    steps: Array | int
    """Number of steps that were made; what is in later ones means nothing."""

    def wait(self) -> Made:
        """Returns them, step by step, once they are computed."""
        steps = int(self.steps)
        return np.asarray(self.tokens)[:steps].tolist(), np.asarray(self.logprobs)[:steps].tolist()


class Programs:
    """The programs for one shape of memory and one way to choose, each compiled when it is first needed.

    Args:
      reader: the model.
      mesh: the mesh of it; None without one.
      shape: the sizes.
      settings: say how tokens are chosen.
      num_ids: number of ids that have a meaning.
      end_ids: tokens that end a text.
    """

    def __init__(
        self,
        reader: Reader,
        mesh: Mesh | None,
        shape: Shape,
        settings: GenerationSettings,
        num_ids: int,
        end_ids: frozenset[int],
    ):
        self.shape, self.compile_seconds = shape, 0.0
        self._mesh, self._config = mesh, reader.config
        self._end_ids = sorted(end_ids)
        self._penalises = settings.repetition_penalty != 1
        self._sample = partial(sample, settings=settings, num_ids=num_ids)
        self._graph, self._weights = nnx.split(reader)
        self._compiled: dict[Any, Any] = {}

    @property
    def lengths(self) -> list[int]:
        """Lengths of the sequences for which a program that reads is compiled."""
        return [key[1] for key in self._compiled if key[0] == "read"]

    def state(self, memories: Memories | None = None) -> State:
        """Returns the state of rows, empty or with a memory."""
        if memories is None:
            memories = self._program("empty", self._empty)(self._weights)
        if not self._penalises:
            return State(memories)
        seen = np.zeros((self.shape.rows, self._config.vocab_size), np.bool_)
        return State(memories, jax.device_put(seen, self._sharding(batch_spec(None))))

    def note(self, state: State, prompts: dict[int, Ids]) -> State:
        """Returns the state with the tokens of prompts, by row, where repetition is penalised."""
        if state.seen is None or not prompts:
            return state
        fresh, seen = np.zeros(self.shape.rows, np.bool_), np.zeros(state.seen.shape, np.bool_)
        for row, ids in prompts.items():
            fresh[row], seen[row, ids] = True, True
        with within(self._mesh):
            return State(state.memories, _noted(state.seen, seen, fresh))

    def read(self, state: State, packed: Packed, rows: Rows) -> tuple[State, Chosen]:
        """Reads tokens of prompts, and chooses the first token of each row whose prompt ends among them.

        Args:
          state: the state, donated.
          packed: the tokens; none of a row may be read before those before it.
          rows: seeds, and the lengths of prompts.
        """
        key = ("read", packed.ids.shape[1], packed.continued)
        arrays = packed.ids, packed.rows, packed.positions, packed.last, rows.lengths, rows.seeds
        function = partial(self._read, packed.continued)
        state, tokens, logprobs = self._program(key, function, state, *arrays)(self._weights, state, *arrays)
        return state, Chosen(tokens, logprobs, 1)

    def decode(self, state: State, rows: Rows, steps: int, *, waiting: bool) -> tuple[State, Chosen]:
        """Makes tokens until all rows have ended.

        Args:
          state: the state, donated.
          rows: the rows.
          steps: tokens of a row after which it comes back, at most `MAX_STEPS`.
          waiting: come back as soon as a row has ended, for its place is wanted.
        """
        arrays = self._decoding(rows, steps, waiting=waiting)
        state, *made = self._program("decode", self._decode, state, *arrays)(self._weights, state, *arrays)
        return state, Chosen(*made)

    def compiled_decode(self, state: State) -> Any:
        """Returns the compiled program that makes tokens; the state and the model's arrays may be abstract."""
        none = np.zeros(self.shape.rows, np.int32)
        arrays = self._decoding(Rows(none, none, none, none.astype(np.uint32)), 1, waiting=False)
        return self._program("decode", self._decode, state, *arrays)

    def _decoding(self, rows: Rows, steps: int, *, waiting: bool) -> tuple[Any, ...]:
        return rows.tokens, rows.lengths, rows.left, rows.seeds, np.int32(steps), np.bool_(waiting)

    def _read(
        self,
        continued: bool,
        reader: Reader,
        state: State,
        ids_PC: Array,
        rows_PC: Array,
        positions_PC: Array,
        last_PR: Array,
        lengths_B: Array,
        seeds_B: Array,
    ) -> tuple[State, Array, Array]:
        x_PCD, memories = reader(ids_PC, state.memories, NewTokens(positions_PC, rows_PC, continued))
        logits_BV = constrain(reader.logits_at(x_PCD, last_PR), batch_spec(None))
        tokens_B, logprobs_B, seen = self._sample(logits_BV, state.seen, seeds_B, lengths_B)
        if state.seen is not None and seen is not None:  # of those whose prompt has ended
            ended_B = last_PR.reshape(-1) >= 0
            seen = constrain(jnp.where(ended_B[:, None], seen, state.seen), batch_spec(None))
        return State(memories, seen), tokens_B[None], logprobs_B[None]

    def _decode(
        self,
        reader: Reader,
        state: State,
        tokens_B: Array,
        lengths_B: Array,
        left_B: Array,
        seeds_B: Array,
        steps: Array,
        waiting: Array,
    ) -> tuple[Any, ...]:
        active_B, ends = left_B > 0, jnp.array(self._end_ids, jnp.int32)

        def goes_on(carry: tuple[Any, ...]) -> Array:
            step, *_, left_B, _, _ = carry
            full = jnp.all((left_B > 0) == active_B)
            return (step < steps) & jnp.any(left_B > 0) & (full | ~waiting)

        def make(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, state, tokens_B, lengths_B, left_B, made, logprobs = carry
            going_B = left_B > 0
            places_B = jnp.where(going_B, lengths_B, self.shape.slots)  # a row that has ended writes nothing
            new = NewTokens(constrain(places_B[:, None], batch_spec(None)))
            x_B1D, memories = reader(tokens_B[:, None], state.memories, new)
            lengths_B = lengths_B + going_B
            logits_BV = constrain(reader.logits_of_hidden(x_B1D)[:, 0], batch_spec(None))
            tokens_B, logprobs_B, seen = self._sample(logits_BV, state.seen, seeds_B, lengths_B)
            ended_B = jnp.any(tokens_B[:, None] == ends, axis=1)
            left_B = jnp.where(going_B & ~ended_B, left_B - 1, 0)
            made, logprobs = made.at[step].set(tokens_B), logprobs.at[step].set(logprobs_B)
            return step + 1, State(memories, seen), tokens_B, lengths_B, left_B, made, logprobs

        made = jnp.zeros((MAX_STEPS, self.shape.rows), jnp.int32)
        begin = (jnp.int32(0), state, tokens_B, lengths_B, left_B, made, made.astype(jnp.float32))
        done, state, *_, made, logprobs = lax.while_loop(goes_on, make, begin)
        return state, made, logprobs, done

    def _empty(self, reader: Reader) -> Memories:
        return reader.empty(self.shape.rows, self.shape.slots)

    def _program(self, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the program of a function of the model and some arguments, compiled when it is first asked for.

        A state, which comes first, is donated.
        """
        if key not in self._compiled:
            started = time.perf_counter()
            self._compiled[key] = self._compile(function, arguments)
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    def _compile(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        def program(weights: nnx.State, *arguments: Any) -> Any:
            return function(nnx.merge(self._graph, weights), *arguments)

        types = jax.tree.map(self._type, arguments)
        with within(self._mesh):
            jitted = jax.jit(program, donate_argnums=1 if arguments else ())
            return jitted.lower(self._weights, *types).compile()

    def _type(self, array: Any) -> jax.ShapeDtypeStruct:
        """Returns the type to compile with; arrays of the host go to every device."""
        if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return jax.ShapeDtypeStruct(np.shape(array), array.dtype, sharding=self._sharding(P()))

    def _sharding(self, spec: P) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, spec)


@partial(jax.jit, donate_argnums=0)
def _noted(seen: Array, given: Array, fresh: Array) -> Array:
    return constrain(jnp.where(fresh[:, None], given, seen), batch_spec(None))


def same_choice(settings: GenerationSettings) -> GenerationSettings:
    """Returns what of some settings a program depends on."""
    return dataclasses.replace(settings, max_tokens=1, seed=0, stop=())


def grown(memories: Memories, slots: int, mesh: Mesh | None) -> Memories:
    """Returns a memory with more slots, donated."""
    sharding = None if mesh is None else NamedSharding(mesh, LAYER_SPEC)

    def grow(memories: Memories) -> Memories:
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0))), memories)

    larger: Memories = jax.jit(grow, out_shardings=sharding)(memories)
    return larger


def memory_bytes(reader: Reader, mesh: Mesh | None, shape: Shape) -> int:
    """Returns the bytes of keys and values on each device."""
    with within(mesh):
        memories = jax.eval_shape(lambda: reader.empty(shape.rows, shape.slots))
    arrays = jax.tree.leaves(memories)
    shards = (a.shape if mesh is None else NamedSharding(mesh, LAYER_SPEC).shard_shape(a.shape) for a in arrays)
    return sum(math.prod(shard) * array.dtype.itemsize for shard, array in zip(shards, arrays, strict=True))


def within(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Returns a context in which the mesh is current, if there is one."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def mesh_of(model: Ends) -> Mesh | None:
    """Returns the mesh that a model was built on, or None."""
    sharding = jnp.asarray(model.norm.scale[...]).sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) else None  # type: ignore[return-value]
