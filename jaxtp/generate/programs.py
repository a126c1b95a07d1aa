"""A generator's compiled programs: one reads prompt tokens, one decodes several tokens per call.

Both end by sampling, so logits never leave the devices. Each program updates its donated KV cache
in place. A call returns the cache before its tokens are computed, so an interrupt while waiting for
tokens loses nothing. Wait for the tokens before the next call: virtual CPU devices can deadlock
with several programs in flight.

A decode call runs until all rows have ended; if a prompt is waiting, until the first row has.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, ShapeDtypeStruct, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec, constrain, device_view
from jaxtp.generate.decode_model import DecodeModel, cache_bytes, has_states
from jaxtp.generate.sampling import Settings, sample
from jaxtp.layers.cache import DROPPED, LAYER_SPEC, KVCaches, NewTokens

Ints = Any
"""Integers: NumPy arrays on the host, which the programs see as arrays of JAX."""

# Maximum steps of one call
MAX_STEPS = 32


@dataclass(frozen=True)
class Shape:
    """The size of a KV cache: rows of all devices, divisible by their dp, and tokens per row."""

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
    seeds: Ints


Sampled = tuple[Array, Array, Array]
"""Tokens and log-probabilities, `[MAX_STEPS or 1, rows]`, and the number of valid lines; may not be
computed yet. Rows whose text has ended have undefined values."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Decoding:
    """The variables of the decoding loop; B is the number of rows."""

    step: Array
    caches: KVCaches
    last: Array
    """The last sampled token of each row, `[B]`."""
    lengths: Array
    """Number of tokens in the cache, `[B]`."""
    left: Array
    """Number of tokens still to be generated, `[B]`."""
    tokens: Array
    """Sampled tokens of all steps, `[MAX_STEPS, B]`."""
    logprobs: Array
    """Their log-probabilities."""


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
        settings: Settings,
        num_ids: int,
        end_ids: frozenset[int],
    ):
        self.shape = shape
        self.compile_seconds = 0.0
        self.has_states = has_states(model, mesh)
        # Counted once: it traces every layer.
        self.cache_bytes = cache_bytes(model, mesh, shape.rows, shape.slots)
        self._mesh = mesh
        self._end_ids = np.array(sorted(end_ids), np.int32)
        self._sample = partial(sample, settings=settings, num_ids=num_ids)
        self._graph, state = nnx.split(model)
        # A list, as JAX flattens the variables of a state one by one, in Python, in each call.
        self.weights, self._structure = jax.tree.flatten(state)
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    @property
    def read_lengths(self) -> list[int]:
        """Sequence lengths with a compiled read program."""
        return [key[1] for key in self._compiled if isinstance(key, tuple)]

    def empty(self) -> KVCaches:
        """Returns an empty KV cache."""
        empty = lambda model: model.empty(self.shape.rows, self.shape.slots)  # noqa: E731
        return self._program("empty", empty)(self.weights)

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
        """Decodes up to `steps` (at most `MAX_STEPS`) tokens of each row.

        `waiting` tells whether a prompt waits for a row.
        """
        arguments = caches, rows, np.int32(steps), np.bool_(waiting)
        return self._program("decode", self._decode, *arguments)(self.weights, *arguments)

    def copy(self, caches: KVCaches, sources: Ints) -> KVCaches:
        """Copies rows; `sources` `[rows]` counts within the part; -1 copies none."""
        return jax.block_until_ready(self.compiled_copy(caches)(self.weights, caches, sources))

    def compiled_decode(self, caches: KVCaches) -> jax.stages.Compiled:
        """Returns the compiled decode program; `caches` may be abstract."""
        zeros = np.zeros(self.shape.rows, np.int32)
        rows = RowArrays(zeros, zeros, zeros, zeros.astype(np.uint32))
        return self._program("decode", self._decode, caches, rows, np.int32(1), np.bool_(False))

    def compiled_copy(self, caches: KVCaches) -> jax.stages.Compiled:
        """Returns the compiled program that copies rows; `caches` may be abstract."""
        return self._program("copy", self._copy, caches, np.zeros(self.shape.rows, np.int32))

    def _read(
        self, model: DecodeModel, caches: KVCaches, packed: PackedTokens, rows: RowArrays
    ) -> tuple[KVCaches, Sampled]:
        new = NewTokens(packed.positions, packed.rows, packed.continued)
        x_PCD, caches = model(packed.ids, caches, new)
        logits_BV = constrain(model.logits_at(x_PCD, packed.last), batch_spec(None))
        tokens_B, logprobs_B = self._sample(logits_BV, rows.seeds, rows.lengths)
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

        def unfinished(state: _Decoding) -> Array:
            active_B = state.left > 0
            none_ended = jnp.all(active_B == was_active_B)
            return (state.step < max_steps) & jnp.any(active_B) & (none_ended | ~waiting)

        tokens = jnp.zeros((MAX_STEPS, self.shape.rows), jnp.int32)
        start = _Decoding(
            step=jnp.int32(0),
            caches=caches,
            last=rows.tokens,
            lengths=rows.lengths,
            left=rows.left,
            tokens=tokens,
            logprobs=tokens.astype(jnp.float32),
        )
        # Outside of the loop, so that its steps do not create them again
        step = partial(self._decode_step, model, rows.seeds)
        end = lax.while_loop(unfinished, step, start)
        # Each process reads all tokens. XLA would split the results of a loop, although `sample`
        # replicates the tokens of each step.
        return end.caches, (constrain(end.tokens, P()), constrain(end.logprobs, P()), end.step)

    def _decode_step(self, model: DecodeModel, seeds_B: Array, state: _Decoding) -> _Decoding:
        is_active_B = state.left > 0
        next_B = state.lengths + 1
        positions_B1 = jnp.where(is_active_B, state.lengths, DROPPED)[:, None]
        new = NewTokens(constrain(positions_B1, batch_spec(None)))
        x_B1D, caches = model(state.last[:, None], state.caches, new)
        logits_BV = constrain(model.logits_of_hidden(x_B1D)[:, 0], batch_spec(None))
        sampled_B, logprobs_B = self._sample(logits_BV, seeds_B, next_B)
        is_end_B = jnp.any(sampled_B[:, None] == self._end_ids, axis=1)
        return _Decoding(
            step=state.step + 1,
            caches=caches,
            last=sampled_B,
            lengths=state.lengths + is_active_B,
            left=jnp.where(is_end_B, 0, state.left - is_active_B),
            tokens=state.tokens.at[state.step].set(sampled_B),
            logprobs=state.logprobs.at[state.step].set(logprobs_B),
        )

    def _copy(self, model: DecodeModel, caches: KVCaches, sources: Array) -> KVCaches:
        def copy(caches: KVCaches, sources: Array) -> KVCaches:
            def copy_row(row: Array, caches: KVCaches) -> KVCaches:
                source = jnp.where(sources[row] < 0, row, sources[row])

                def copy_array(x: Array) -> Array:
                    row_dim = x.ndim - 4
                    source_row = lax.dynamic_index_in_dim(x, source, row_dim)
                    return lax.dynamic_update_index_in_dim(x, source_row, row, row_dim)

                return jax.tree.map(copy_array, caches)

            # Row by row, so that there is no second cache in memory.
            return lax.fori_loop(0, sources.size, copy_row, caches)

        specs = jax.tree.map(lambda x: P(*(None,) * (x.ndim - 4), *LAYER_SPEC), caches)
        return device_view(copy, "copy", (specs, batch_spec()), specs)(caches, sources)

    def _program(
        self, key: Hashable, function: Callable[..., object], *arguments: object
    ) -> jax.stages.Compiled:
        def program(weights: list[Array], *arguments: object) -> object:
            state = jax.tree.unflatten(self._structure, weights)
            return function(nnx.merge(self._graph, state), *arguments)

        if key not in self._compiled:
            started = time.perf_counter()
            types = jax.tree.map(self._abstract, arguments)
            with jax.set_mesh(self._mesh):
                # The program donates the KV cache.
                jitted = jax.jit(program, donate_argnums=1 if arguments else ())
                self._compiled[key] = jitted.lower(self.weights, *types).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    def _abstract(self, array: Array | ShapeDtypeStruct | NDArray[np.generic]) -> ShapeDtypeStruct:
        if isinstance(array, jax.Array | ShapeDtypeStruct):
            return ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return ShapeDtypeStruct(
            np.shape(array), array.dtype, sharding=NamedSharding(self._mesh, P())
        )
