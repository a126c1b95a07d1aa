"""`Generator`: streams texts by continuous batching.

When a row's text ends, the next prompt takes the row while the others continue (Yu et al., Orca,
OSDI 2022). Prompts are packed: several share a sequence, and the last may continue in the next
call, so no prompt is padded to another's length. A finished row keeps its KV cache, and a prompt
with the same first tokens (the next chat turn) reuses it. A recurrent state cannot be cut back:
only a prompt that begins with all tokens of a row reuses it. Rows with equal prompts copy the cache
of one of them, so the samples of a prompt read it once.

The attention kernels are those for packed documents. The cached tokens of a continued prompt come
right before its new tokens, so each query attends to one range of keys. A few programs therefore
serve prompts of any length.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxtp.checkpoint.logical import named_variables, replace_arrays
from jaxtp.config.console import size_text
from jaxtp.config.entry import NumericsError
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.distributed.devices import memory_per_device
from jaxtp.generate.decode_model import (
    decode_mesh,
    decode_weights,
    model_mesh,
    to_decode_model,
    weight_bytes,
)
from jaxtp.generate.programs import MAX_STEPS, PackedTokens, Programs, RowArrays, Sampled, Shape
from jaxtp.generate.request import (
    GenerationError,
    Piece,
    Prompt,
    Request,
    Result,
    encode_conversations,
    encode_prompts,
    limits_of,
    requests_of,
)
from jaxtp.generate.sampling import Settings, check_settings
from jaxtp.layers.cache import KVCaches
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import batch_parts, current_platform, mesh_sizes
from jaxtp.models.config import architecture
from jaxtp.models.decoder import Decoder

MIN_SLOTS = 64
CHAT_SLOTS = 1024
"""Minimum tokens of a row, in general and in a chat. Each doubling of a row compiles the programs
again."""

CPU_CHUNK = 512
CHUNK = 2048
"""Default chunks: enough to use all of a CPU or GPU."""

# Length of the shortest sequence of packed prompts
MIN_LENGTH = 16

MAX_WASTE = 2
"""A compiled program is reused if its sequences are at most this many times longer than needed."""

MIN_SHARED = 8
"""An equal prompt is copied if it has more tokens than a chunk divided by this number. Fewer tokens
take less time to read again."""

# Target duration of a decode call; its tokens arrive when it ends
SECONDS_PER_CALL = 0.1

_REPLACED = (
    "__call__",
    "embed",
    "hidden",
    "with_routing",
    "stacked",
    "logits_of_hidden",
    "logits_at",
    "projection",
)
"""Methods of a decoder that decoding does not call, or for which it calls `Decoder`'s."""

StepTokens = tuple[list[list[int]], list[list[float]]]
"""Tokens and their log-probabilities, for each step and row."""

# Prompt tokens to read: the row, and the range of positions
Chunk = tuple[int, int, int]


@dataclass
class Speed:
    """Tokens and seconds of a call."""

    shape: Shape | None = None
    """Shape of the KV cache."""
    cache_bytes: int = 0
    """Bytes of the KV cache on each device."""
    compile_seconds: float = 0.0
    """Compilation, not included in the other times."""
    prefill_tokens: int = 0
    """Prompt tokens read."""
    prefill_seconds: float = 0.0
    kept_tokens: int = 0
    """Prompt tokens that were in the cache of their row, or copied from another row."""
    decode_tokens: int = 0
    """Tokens generated; the first token of each text belongs to prefill."""
    decode_seconds: float = 0.0
    cut_texts: int = 0
    """Number of texts that ended at the model's context."""

    def add(self, later: Speed) -> None:
        """Adds a later call's tokens and seconds; the cache is the later one's."""
        for name, value in vars(later).items():
            earlier = getattr(self, name)
            if name in ("shape", "cache_bytes"):
                setattr(self, name, value or earlier)
            else:
                setattr(self, name, earlier + value)

    def lines(self) -> Iterator[str]:
        """Yields the lines that the command prints."""
        cached = f"; {self.kept_tokens:,} more were in the cache" if self.kept_tokens else ""
        yield f"prefill {_rate(self.prefill_tokens, self.prefill_seconds)}{cached}"
        yield f"decode  {_rate(self.decode_tokens, self.decode_seconds)}"
        if self.shape is not None:
            tokens = f"{self.shape.rows} x {self.shape.slots:,} tokens"
            size = size_text(self.cache_bytes, binary=True)
            yield f"cache   {tokens}, {size} per device; compiled in {self.compile_seconds:.1f} s"
        if self.cut_texts:
            yield f"cut     {self.cut_texts:,} at the model's context; --beyond-context continues"


def _rate(tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:,.0f} tokens/s" if seconds else ""
    return f"{tokens:,} tokens in {seconds:.2f} s{rate}"


@dataclass
class Cache:
    """A KV cache and the tokens in it."""

    shape: Shape
    arrays: KVCaches | None
    """None during a call, which donates them, and after a failed call."""
    tokens: list[list[int]]
    """The tokens of each row."""


class Generator:
    """Continues texts with a model on its mesh.

    The weights are copied once into the layout for decoding (`decode_model.py`).

    Args:
      model: on any mesh.
      tokenizer: its prefix, if any, comes before each text.
      end_ids: by default the tokenizer's end token, if any.
      batch_size: prompts to continue together, rounded up to a multiple of dp * fsdp * cp.
      chunk: maximum prompt tokens that a device reads in one call; by default 512 on CPUs and 2,048
        on GPUs.
      context: maximum tokens of a prompt and its text together, if any.
      donate: deletes the model's arrays as they are copied.

    Raises:
      GenerationError: the model cannot decode, or its weights do not fit.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        end_ids: frozenset[int] | None = None,
        batch_size: int = 8,
        chunk: int | None = None,
        context: int | None = None,
        donate: bool = False,
    ):
        _require_decoder(model)
        if batch_size < 1:
            raise GenerationError(f"batch_size={batch_size}: should be 1 or more")
        mesh = model_mesh(model)
        sizes = mesh_sizes(mesh)
        own_methods = [
            name for name in _REPLACED if getattr(type(model), name) is not getattr(Decoder, name)
        ]
        if own_methods:
            raise GenerationError(
                f"{type(model).__name__} has its own {' and '.join(own_methods)}, which decoding "
                "would not call: it runs the blocks one by one. Put the change into a Branch, or "
                "into a method of another name"
            )
        self._mesh = decode_mesh(mesh)
        self._weight_bytes = weight_bytes(model, sizes)
        remedy = "use more devices by --mesh.tp"
        _require_memory(self._mesh, self._weight_bytes, "the weights take", remedy)
        self._model = to_decode_model(model, self._mesh, donate=donate)
        self.config = model.config
        self.tokenizer = tokenizer
        # A chat template, when it is first used, changes the tokens of `tokenizer.info`.
        self.prefix = tokenizer.info.prefix
        self.end_ids = tokenizer.info.end_ids if end_ids is None else end_ids
        self.limits = limits_of(model.config, context)
        self.speed = Speed()
        """Speed of the last call."""
        self._num_ids = min(tokenizer.info.vocab_size, model.config.vocab_size)
        self._batch_parts = batch_parts(mesh_sizes(self._mesh))
        self._batch_size = batch_size
        self._chunk = chunk or (CPU_CHUNK if current_platform() == "cpu" else CHUNK)
        self._programs: dict[tuple[Shape, Settings, frozenset[int]], Programs] = {}
        self._cache: Cache | None = None
        self._is_streaming = False

    def update(self, model: Decoder) -> None:
        """Takes the weights of a model in training, from any mesh, with any adapters merged.

        Compiles nothing again. Old arrays are deleted one by one before the new ones are made, and
        so is the KV cache.

        Raises:
          GenerationError: the model has another architecture, or a `stream` has not ended.
        """
        if self._is_streaming:
            raise GenerationError(
                "texts are being generated; finish or close the iterator of stream before update"
            )
        _require_decoder(model)
        fields = architecture(replace(self.config, lora=LoraConfig()))
        new_fields = architecture(replace(model.config, lora=LoraConfig()))
        changes = [
            f"{name}={new_fields.get(name)!r}, not {value!r}"
            for name, value in fields.items()
            if new_fields.get(name) != value
        ]
        if changes:
            raise GenerationError(
                f"update: the model has another architecture: {', '.join(changes)}"
            )
        self._cache = None
        state = nnx.state(self._model)
        targets = named_variables(state)
        weights = decode_weights(model, targets, self.config.precision.compute, self._mesh)
        nnx.update(self._model, replace_arrays(state, dict(weights)))
        for programs in self._programs.values():
            programs.weights = jax.tree.leaves(nnx.state(self._model))

    def generate(
        self,
        prompts: Sequence[Prompt | None],
        settings: Settings = Settings(),
        *,
        tools: object = None,
        **template_arguments: Any,
    ) -> list[Result]:
        """Returns the continuations in the order of prompts; see `stream`."""
        pieces = self.stream(prompts, settings, tools=tools, **template_arguments)
        results = [piece.result for piece in pieces if piece.result is not None]
        return sorted(results, key=lambda result: (result.index, result.sample))

    def stream(
        self,
        prompts: Sequence[Prompt | None],
        settings: Settings = Settings(),
        *,
        keep: bool = False,
        progress: Callable[[int, int], None] = lambda read, total: None,
        tools: object = None,
        **template_arguments: Any,
    ) -> Iterator[Piece]:
        """Yields the continuations as they are generated, one piece per token.

        Args:
          prompts: texts; lists of ids, used unchanged; or conversations, which are lists of
            messages. Their answers also end at the end that the tokenizer's chat template writes.
            None is skipped but counted.
          keep: reuses the last call's KV cache for prompts that begin with its tokens, e.g. chat
            turns.
          progress: called after each chunk with prompt tokens read so far and in total.
          tools, **template_arguments: of conversations, as in `tokenizer.chat`.

        Raises:
          ChatError: the chat template does not write a conversation.
          ConfigError: an invalid setting.
          GenerationError: `prompts` is a single string, or the model cannot read a prompt.
          NumericsError: the logits are not finite.
        """
        check_settings(settings)
        if isinstance(prompts, str):
            raise GenerationError(f"prompts is a string; for one prompt give [{prompts[:20]!r}]")
        if isinstance(prompts, Mapping):
            raise GenerationError("prompts is an object; for one message give [[message]]")
        arguments = {"tools": tools, **template_arguments}
        rendered = encode_conversations(prompts, self.tokenizer, arguments)
        end_ids = self.end_ids
        if rendered is not prompts:
            end_ids = end_ids.union(self.tokenizer.conversations.ends)
        encoded = encode_prompts(rendered, self.tokenizer, self.prefix, self.limits)
        requests = requests_of(encoded, self.tokenizer, settings, end_ids, self.limits.context)
        self.speed = Speed()
        if not requests:
            return
        programs, cache = self._prepare(requests, settings, end_ids, keep)
        compiled = programs.compile_seconds
        scheduler = Scheduler(programs, cache, self._batch_parts, self._chunk, progress, self.speed)
        self._is_streaming = True
        try:
            for piece in scheduler.serve(requests):
                self.speed.cut_texts += (
                    piece.result is not None and piece.result.finish == "context"
                )
                yield piece
        finally:
            self._is_streaming = False
            self.speed.compile_seconds = programs.compile_seconds - compiled
            if cache.arrays is not None:
                self._cache = cache

    def _prepare(
        self,
        requests: Sequence[Request],
        settings: Settings,
        end_ids: frozenset[int],
        keep: bool,
    ) -> tuple[Programs, Cache]:
        """Reuses a KV cache with as many rows and enough slots.

        Slots are powers of two, to compile few programs.
        """
        parts = self._batch_parts
        # For a single row, XLA on GPUs writes the elementwise products with a kernel to memory, and
        # sums them later, which takes 1.5 times as long on an H200.
        min_rows = 1 if current_platform() == "cpu" else 2
        rows = parts * max(math.ceil(min(self._batch_size, len(requests)) / parts), min_rows)
        length = max(request.num_prompt for request in requests) + settings.max_tokens
        length = max(length, CHAT_SLOTS if keep else MIN_SLOTS)
        length = min(length, self.limits.context or sys.maxsize)
        shape = Shape(rows, max(MIN_SLOTS, _next_power_of_two(length)))
        cache = self._cache
        if cache is not None and cache.shape.rows == rows and cache.shape.slots >= shape.slots:
            shape = cache.shape
        else:
            cache = None
        # These settings do not affect the programs.
        key = shape, replace(settings, max_tokens=1, samples=1, seed=0, stop=()), end_ids
        if key not in self._programs:
            self._programs[key] = Programs(
                self._model, self._mesh, shape, settings, self._num_ids, end_ids
            )
        programs = self._programs[key]
        self.speed.shape = shape
        self.speed.cache_bytes = programs.cache_bytes
        _require_memory(
            self._mesh,
            self._weight_bytes + programs.cache_bytes,
            f"the weights and a KV cache of {rows} x {shape.slots:,} tokens take",
            "use a smaller --max-tokens or --batch-size, or shorter prompts",
        )
        # Frees a cache that is not reused.
        self._cache = None
        tokens = [list[int]() for _ in range(rows)]
        if cache is None:
            return programs, Cache(shape, programs.empty(), tokens)
        if not keep:
            cache = replace(cache, tokens=tokens)
        return programs, cache


def _require_decoder(model: object) -> None:
    if not isinstance(model, Decoder):
        name = f"a {type(model).__name__}"
        if isinstance(model, type):
            name = f"the class {model.__name__}"
        raise GenerationError(
            f"the model is {name}, which is not a jaxtp.Decoder; only a decoder generates texts"
        )


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _require_memory(mesh: Mesh, needed: int, subject: str, remedy: str) -> None:
    memory = memory_per_device(mesh.local_devices)
    if memory is not None and needed > memory:
        raise GenerationError(
            f"{subject} {size_text(needed, binary=True)} on each device, which has "
            f"{size_text(memory, binary=True)}; {remedy}"
        )


class Scheduler:
    """Generates texts with the rows of one KV cache.

    Args:
      num_parts: number of parts of the batch, dp of `decode_mesh`.
      max_chunk: maximum length of a packed sequence.
      progress: called with prompt tokens read so far and in total.
      speed: counts the tokens and seconds.
    """

    def __init__(
        self,
        programs: Programs,
        cache: Cache,
        num_parts: int,
        max_chunk: int,
        progress: Callable[[int, int], None],
        speed: Speed,
    ):
        self._speed = speed
        self._programs = programs
        self._cache = cache
        self._cached = cache.tokens
        self._num_parts = num_parts
        self._rows_per_part = len(cache.tokens) // num_parts
        self._max_chunk = max_chunk
        self._progress = progress
        # By row; a row without a request is free.
        self._requests: dict[int, Request] = {}
        # By row: the row to copy the first tokens from, and their number
        self._shared: dict[int, tuple[int, int]] = {}
        self._steps = 1

    def serve(self, requests: Iterable[Request]) -> Iterator[Piece]:
        """Yields pieces of the requests' texts as they are generated."""
        waiting = deque(requests)
        while waiting or self._requests:
            self._admit(waiting)
            yield from self._prefill()
            if self._requests:
                yield from self._decode(waiting=bool(waiting))

    def _admit(self, waiting: deque[Request]) -> None:
        free = [row for row in range(len(self._cached)) if row not in self._requests]
        alone = len(waiting) == 1 or len(self._cached) == 1
        while free and waiting:
            request = waiting.popleft()
            counts = {row: self._num_cached(row, request.tokens) for row in free}
            row = max(counts, key=counts.__getitem__)
            count = counts[row]
            # A row with cached tokens must begin a sequence.
            if not alone and count < request.num_prompt / 2:
                count = 0
            source, num_shared = self._find_equal(row, request.tokens)
            if num_shared > count:
                self._shared[row] = source, num_shared
                self._cached[row].clear()
            del self._cached[row][count:]
            self._speed.kept_tokens += max(count, num_shared)
            self._requests[row] = request
            free.remove(row)

    def _num_cached(self, row: int, prompt: Sequence[int]) -> int:
        """Counts cached prompt tokens, except the last, whose logits are needed.

        A state has all its tokens or none.
        """
        cached = self._cached[row]
        max_count = min(len(cached), len(prompt) - 1)
        count = next((i for i in range(max_count) if cached[i] != prompt[i]), max_count)
        return 0 if self._programs.has_states and count < len(cached) else count

    def _find_equal(self, row: int, prompt: Sequence[int]) -> tuple[int, int]:
        """Returns the row of the same part with an equal prompt, and how many tokens it shares.

        A prompt that is not read yet shares all tokens: its last logits serve both.
        """
        counts = {row: 0}
        if len(prompt) > self._max_chunk // MIN_SHARED:
            for other_row, other in self._requests.items():
                is_near = other_row // self._rows_per_part == row // self._rows_per_part
                is_read = len(self._cached[other_row]) >= other.num_prompt
                # A recurrent state cannot be cut back to the prompt.
                is_usable = is_near and not (is_read and self._programs.has_states)
                if is_usable and other.tokens[: other.num_prompt] == prompt:
                    counts[other_row] = len(prompt) - is_read
        return max(counts.items(), key=lambda item: item[1])

    def _copy_shared(self) -> None:
        sources = np.full(len(self._cached), -1, np.int32)
        for row, (source, count) in list(self._shared.items()):
            if len(self._cached[source]) >= count:
                del self._shared[row]
                sources[row] = source % self._rows_per_part
                self._cached[row] += self._requests[row].tokens[:count]
        if np.any(sources >= 0):
            self._cache.arrays = self._programs.copy(self._taken_caches(), sources)

    def _prefill(self) -> Iterator[Piece]:
        total = sum(request.num_prompt - len(self._cached[row]) for row, request in self._unread())
        total -= sum(count for _, count in self._shared.values())
        num_read = 0
        self._copy_shared()
        while unread := self._unread():
            parts = [self._next_chunks(unread, part) for part in range(self._num_parts)]
            sampled, seconds = self._call(partial(self._programs.read, packed=self._pack(parts)))
            for row, start, stop in chain.from_iterable(parts):
                self._cached[row] += self._requests[row].tokens[start:stop]
            count = sum(map(_num_tokens, parts))
            num_read += count
            self._speed.prefill_seconds += seconds
            self._speed.prefill_tokens += count
            # May raise.
            self._progress(num_read, total)
            self._copy_shared()
            ended = [row for row, request in unread if len(self._cached[row]) == request.num_prompt]
            yield from self._append_tokens(sampled, ended)

    def _unread(self) -> list[tuple[int, Request]]:
        return [
            (row, request)
            for row, request in self._requests.items()
            if len(self._cached[row]) < request.num_prompt
        ]

    def _next_chunks(self, unread: Sequence[tuple[int, Request]], part: int) -> list[Chunk]:
        chunks = list[Chunk]()
        room = self._max_chunk
        for row, request in unread:
            start = len(self._cached[row])
            if row // self._rows_per_part != part or row in self._shared:
                continue
            # A row with cached tokens must begin a sequence, and a state reads one row in each.
            if room == 0 or (chunks and (start or self._programs.has_states)):
                break
            stop = min(start + room, request.num_prompt)
            chunks.append((row, start, stop))
            room -= stop - start
        return chunks

    def _decode(self, *, waiting: bool) -> Iterator[Piece]:
        rows = list(self._requests)
        sampled, seconds = self._call(
            partial(self._programs.decode, steps=self._steps, waiting=waiting)
        )
        lines, _ = sampled
        # Processes must make the same calls, but would measure different times.
        target = MAX_STEPS
        if jax.process_count() == 1:
            target = int(SECONDS_PER_CALL * len(lines) / max(seconds, 1e-9))
        # The first call of a program is slower.
        self._steps = min(max(1, target), 2 * self._steps, MAX_STEPS)
        self._speed.decode_seconds += seconds
        pieces = self._append_tokens(sampled, rows)
        self._speed.decode_tokens += len(pieces)
        yield from pieces

    def _taken_caches(self) -> KVCaches:
        # The program takes over their memory, so they do not exist until it returns.
        caches = self._cache.arrays
        assert caches is not None, "an earlier call has failed"
        self._cache.arrays = None
        return caches

    def _call(self, program: Callable[..., tuple[KVCaches, Sampled]]) -> tuple[StepTokens, float]:
        caches = self._taken_caches()
        started = time.perf_counter()
        compiled = self._programs.compile_seconds
        caches, sampled = program(caches, rows=self._row_arrays())
        # After an interrupt, the content of a recurrent state is unknown.
        if not self._programs.has_states:
            self._cache.arrays = caches
        tokens = wait(*sampled)
        self._cache.arrays = caches
        return tokens, time.perf_counter() - started - (self._programs.compile_seconds - compiled)

    def _append_tokens(self, sampled: StepTokens, rows: Sequence[int]) -> list[Piece]:
        pieces = []
        for tokens, logprobs in zip(*sampled, strict=True):
            for row in rows:
                request = self._requests.get(row)
                if request is None:  # the row's text has ended
                    continue
                self._cached[row] += request.tokens[len(self._cached[row]) :]
                try:
                    pieces.append(request.append(tokens[row], logprobs[row]))
                except NumericsError:
                    self._cache.arrays = None
                    raise
                if request.finish is not None:
                    del self._requests[row]
                    if request.finish == "stop" and self._programs.has_states:
                        # The state may have tokens after the stop text.
                        self._cached[row].clear()
        return pieces

    def _row_arrays(self) -> RowArrays:
        num_rows = len(self._cached)
        tokens, lengths, left = np.zeros((3, num_rows), np.int32)
        seeds = np.zeros(num_rows, np.uint32)
        for row, request in self._requests.items():
            has_text = len(request.tokens) > request.num_prompt
            tokens[row] = request.tokens[-1]
            lengths[row] = len(request.tokens) - has_text
            left[row] = request.tokens_left
            seeds[row] = request.seed
        return RowArrays(tokens, lengths, left, seeds)

    def _pack(self, parts: list[list[Chunk]]) -> PackedTokens:
        shape = (self._num_parts, self._length(max(map(_num_tokens, parts))))
        ids = np.zeros(shape, np.int32)
        rows = np.full(shape, -1, np.int32)
        positions = np.full(shape, self._programs.shape.slots, np.int32)
        last = np.full((self._num_parts, self._rows_per_part), -1, np.int32)
        for part, chunks in enumerate(parts):
            offset = 0
            for row, start, stop in chunks:
                request = self._requests[row]
                local_row = row % self._rows_per_part
                span = slice(offset, offset + stop - start)
                offset = span.stop
                ids[part, span] = request.tokens[start:stop]
                rows[part, span] = local_row
                positions[part, span] = np.arange(start, stop)
                if stop == request.num_prompt:
                    last[part, local_row] = offset - 1
                    # Equal prompts, which are not read, use the same logits.
                    for other_row, shared in self._shared.items():
                        if shared == (row, stop):
                            last[part, other_row % self._rows_per_part] = offset - 1
        continued = any(start > 0 for _, start, _ in chain.from_iterable(parts))
        return PackedTokens(ids, rows, positions, last, continued)

    def _length(self, needed: int) -> int:
        """Returns a fitting compiled program's length, else a power of two."""
        fits = [
            length
            for length in self._programs.read_lengths
            if needed <= length <= MAX_WASTE * needed
        ]
        new_length = min(max(MIN_LENGTH, _next_power_of_two(needed)), self._max_chunk)
        return min(fits, default=new_length)


def _num_tokens(chunks: Iterable[Chunk]) -> int:
    return sum(stop - start for _, start, stop in chunks)


def wait(tokens: Array, logprobs: Array, steps: Array) -> StepTokens:
    """Returns sampled tokens when they are computed."""
    count = int(steps)
    return np.asarray(tokens)[:count].tolist(), np.asarray(logprobs)[:count].tolist()
