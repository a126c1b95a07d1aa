"""The compiled programs of a generator: they read a chunk of each prompt, read a token of each row, and choose tokens.

Prompts are read in chunks of one size, so that one program does for any length, and attention scores never exist for
more than a chunk of queries. The cache is donated to each program, which writes into it in place.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec, constrain
from jaxtp.generate.sampling import sample
from jaxtp.generate.settings import GenerationSettings
from jaxtp.layers.cache import STACK_SPEC, Cache
from jaxtp.models.decoder import Decoder

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """The sizes that programs are compiled for."""

    rows: int
    """Number of sequences on all devices together; divisible by dp * fsdp."""

    slots: int
    """Number of tokens that a row can have at most."""

    chunk: int
    """Number of tokens of each prompt to read at a time."""


@dataclass(frozen=True)
class Read:
    """The state of the model after the tokens that have been read."""

    cache: Cache

    logits: Array
    """Logits `[rows, V]` after the last token of each row."""


@dataclass(frozen=True)
class Choice:
    """The next token of each row, perhaps not computed yet."""

    tokens: Array
    """Tokens `[rows]` int32."""

    logprobs: Array
    """Log-probabilities `[rows]` float32 of the tokens, under the model as it is."""

    seen: Array
    """Whether a row has a token, `[rows, V]`; these tokens are included."""


Sampler = Callable[[Read, Array, NDArray[np.uint32]], Choice]
"""Chooses tokens from the logits, the tokens that each row has (a donated array), and the seed of each row."""


def read_chunk(model: Decoder, cache: Cache, logits: Array, ids_BT: Array, counts_B: Array) -> tuple[Cache, Array]:
    """Reads the next `counts_B` tokens of each row, of T; returns the cache and the logits after the last of them.

    Rows without a next token keep the logits that they had.
    """
    cache, x_BTD = model.extend(cache, ids_BT, counts_B)
    is_last = jnp.arange(ids_BT.shape[1]) == counts_B[:, None] - 1
    # A one-hot sum: a look-up along T, which sequence parallelism splits, would gather the whole of x.
    last_B1D = jnp.sum(jnp.where(is_last[..., None], x_BTD, 0), axis=1, keepdims=True)
    found = model.logits_of_hidden(last_B1D)[:, 0].astype(logits.dtype)
    return cache, constrain(jnp.where(counts_B[:, None] > 0, found, logits), batch_spec(None))


def read_token(model: Decoder, cache: Cache, tokens_B: Array) -> tuple[Cache, Array]:
    """Reads a token of each row; returns the cache and the logits `[B, V]` after it."""
    cache, x_B1D = model.extend(cache, tokens_B[:, None], jnp.ones_like(tokens_B))
    return cache, constrain(model.logits_of_hidden(x_B1D)[:, 0], batch_spec(None))


class Programs:
    """A model's programs for one shape, each compiled once.

    Args:
      model: runs on the mesh that it was built on.
      shape: the sizes to compile for.
    """

    def __init__(self, model: Decoder, shape: Shape):
        self.shape = shape
        self._config = model.config
        self._mesh = mesh_of(model)
        graph, self._state = nnx.split(model)

        def bound(function: Any) -> Any:
            return lambda state, *arguments: function(nnx.merge(graph, state), *arguments)

        ids, counts = map(self._from_host, self._chunk([], 0))
        chunks, tokens = jax.jit(bound(read_chunk), donate_argnums=(1, 2)), jax.jit(bound(read_token), donate_argnums=1)
        with within(self._mesh):
            self._create = jax.jit(bound(self._empty)).lower(self._state).compile()
            start = self._create(self._state)
            self._start = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), start)
            self._read_chunk = chunks.lower(self._state, *self._start, ids, counts).compile()
            self._read_token = tokens.lower(self._state, self._start[0], counts).compile()
        self._samplers: dict[tuple[GenerationSettings, int], Any] = {}

    def prefill(self, prompts: Sequence[Ids], progress: Callable[[int], None] = lambda read: None) -> Read:
        """Reads prompts, at most one for each row, none longer than the slots, and waits until they are read.

        Args:
          prompts: the ids of each prompt.
          progress: called after each chunk with the number of tokens of each prompt that have been read.
        """
        read = Read(*self._create(self._state))
        for start in range(0, max(map(len, prompts)), self.shape.chunk):
            read = Read(*self._read_chunk(self._state, read.cache, read.logits, *self._chunk(prompts, start)))
            read.logits.block_until_ready()  # virtual CPU devices can hang where many programs are under way
            progress(start + self.shape.chunk)
        return read

    def decode(self, read: Read, tokens: Array) -> Read:
        """Reads a token of each row; the cache is donated."""
        return Read(*self._read_token(self._state, read.cache, tokens))

    def sampler(self, settings: GenerationSettings, num_ids: int) -> Sampler:
        """Returns `sampling.sample` for the filters of some settings, compiled when it is first asked for."""
        key = dataclasses.replace(settings, max_tokens=1, seed=0, stop=()), num_ids
        if key not in self._samplers:
            cache, logits = self._start
            seeds = self._from_host(np.zeros(self.shape.rows, np.uint32))
            function = jax.jit(partial(sample, settings=settings, num_ids=num_ids), donate_argnums=1)
            with within(self._mesh):
                lowered = function.lower(logits, self.seen([]), seeds, cache.lengths)
                self._samplers[key] = lowered.compile()
        compiled = self._samplers[key]
        return lambda read, seen, seeds: Choice(*compiled(read.logits, seen, seeds, read.cache.lengths))

    def seen(self, prompts: Sequence[Ids]) -> Array:
        """Returns whether each prompt has a token, `[rows, V]`."""
        seen = np.zeros((self.shape.rows, self._config.vocab_size), np.bool_)
        for row, prompt in enumerate(prompts):
            seen[row, prompt] = True
        return jax.device_put(seen, self._sharding(batch_spec(None)))

    def _empty(self, model: Decoder) -> tuple[Cache, Array]:
        """Returns an empty cache, and logits that mean nothing."""
        logits = jnp.zeros((self.shape.rows, self._config.vocab_size), self._config.precision.logits)
        return model.empty_cache(self.shape.rows, self.shape.slots), constrain(logits, batch_spec(None))

    def _chunk(self, prompts: Sequence[Ids], start: int) -> tuple[Ids, Ids]:
        """Returns the next ids `[rows, chunk]` of the prompts, padded on the right, and how many each row has."""
        ids = np.zeros((self.shape.rows, self.shape.chunk), np.int32)
        counts = np.zeros(self.shape.rows, np.int32)
        for row, prompt in enumerate(prompts):
            part = prompt[start : start + self.shape.chunk]
            ids[row, : len(part)], counts[row] = part, len(part)
        return ids, counts

    def _from_host(self, array: NDArray[Any]) -> jax.ShapeDtypeStruct:
        """Returns the type to compile with for an array of the host, which goes to every device."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._sharding(P()))

    def _sharding(self, spec: P) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, spec)


def cache_bytes(model: Decoder, shape: Shape) -> int:
    """Returns the bytes of keys and values on each device."""
    mesh = mesh_of(model)
    with within(mesh):
        cache = jax.eval_shape(lambda: model.empty_cache(shape.rows, shape.slots))
    arrays = jax.tree.leaves(cache.memories)
    shards = (a.shape if mesh is None else NamedSharding(mesh, STACK_SPEC).shard_shape(a.shape) for a in arrays)
    return sum(math.prod(shard) * array.dtype.itemsize for shard, array in zip(shards, arrays, strict=True))


def within(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Returns what has a mesh in context, if there is one."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def mesh_of(model: Decoder) -> Mesh | None:
    """Returns the mesh that a model was built on, or None."""
    sharding = jnp.asarray(model.norm.scale[...]).sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) else None  # type: ignore[return-value]
