"""Continuous batching: assigns prompts to rows of the KV cache and schedules device calls.

When a row's text has ended, the next prompt takes the row while the others continue (Yu et al., Orca, OSDI 2022).
Prompts are packed: several share a sequence, and the last is cut, so no prompt is padded to another's length. A
finished row keeps its tokens; a later prompt that begins with them, e.g. the next chat turn, is read from there.

The kernels are shared with training on packed documents. A cut row's cached tokens precede the sequence, last token
last, so each query still sees one range of keys. A few programs therefore serve prompts of any length.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from jaxtp.config.entry import WrongNumbersError
from jaxtp.generate.programs import MAX_STEPS, PackedTokens, Programs, RowArrays, SampledTokens, State, StepTokens
from jaxtp.generate.request import Piece, Request

MIN_LENGTH = 16
"""Length of the shortest sequence of packed prompts."""

MAX_WASTE = 2
"""A compiled program is used for sequences up to this many times too long, rather than compiling another one."""

SECONDS_PER_CALL = 0.1
"""Roughly how long a decode call takes before it hands out its tokens."""


@dataclass(eq=False)
class Row:
    """A row of the KV cache."""

    index: int

    ids: list[int] = field(default_factory=list)
    """The tokens in the cache."""

    request: Request | None = None
    """The request being served; None for a free row."""

    pending: list[int] = field(default_factory=list)
    """Tokens not in the cache yet: of the prompt, or the last sampled one."""

    prefilled: bool = False
    """Whether the prompt has been read."""


Chunk = tuple[Row, int, int]
"""Tokens of a row's prompt to read: `row.pending[start:stop]`."""


@dataclass
class Timing:
    """Tokens read and generated, and seconds."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    kept_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Scheduler:
    """Generates texts with the rows of one KV cache.

    Args:
      rows: updated as their contents change.
      num_parts: parts that the devices split the rows into.
      max_chunk: maximum length of a packed sequence.
      progress: called with prompt tokens read so far and in total.
    """

    def __init__(
        self,
        programs: Programs,
        state: State,
        rows: Sequence[Row],
        *,
        num_parts: int,
        max_chunk: int,
        progress: Callable[[int, int], None],
    ):
        self.timing = Timing()
        self.state: State | None = state
        """None during a call: it is donated, so nothing is left if the call fails."""
        self._programs, self._rows, self._num_parts = programs, rows, num_parts
        self._rows_per_part = len(rows) // num_parts
        self._max_chunk, self._progress = max_chunk, progress
        self._steps = 1

    def serve(self, requests: Iterable[Request]) -> Iterator[Piece]:
        """Yields pieces of the requests' texts as they are generated."""
        waiting = deque(requests)
        for row in self._rows:
            row.request = None
        while waiting or self._active():
            self._admit(waiting)
            yield from self._prefill()
            if self._active():
                yield from self._decode(waiting=bool(waiting))

    def _active(self) -> list[Row]:
        return [row for row in self._rows if row.request is not None]

    def _admit(self, waiting: deque[Request]) -> None:
        free = [row for row in self._rows if row.request is None]
        alone = len(waiting) == 1 or len(self._rows) == 1
        prompts = {}
        while free and waiting:
            request = waiting.popleft()
            prompt = request.prompt.tolist()
            row = max(free, key=lambda row: _num_cached(row.ids, prompt))
            cached = _num_cached(row.ids, prompt)
            if not alone and cached < len(prompt) / 2:  # continued rows cannot share a sequence with earlier rows
                cached = 0
            row.ids, row.pending, row.request, row.prefilled = prompt[:cached], prompt[cached:], request, False
            self.timing.kept_tokens += cached
            free.remove(row)
            prompts[row.index] = request.prompt
        if prompts:
            state, self.state = self._take_state(), None
            self.state = self._programs.add_prompts(state, prompts)

    def _prefill(self) -> Iterator[Piece]:
        reading = [row for row in self._active() if not row.prefilled]
        total, done = sum(len(row.pending) for row in reading), 0
        for parts in self._packs(reading):
            sampled, seconds = self._call(partial(self._programs.read, packed=self._pack(parts)))
            chunks = [chunk for part in parts for chunk in part]
            count = sum(stop - start for _, start, stop in chunks)
            done += count
            self.timing.prefill_seconds += seconds
            self.timing.prefill_tokens += count
            self._progress(done, total)
            ended = []
            for row, start, stop in chunks:
                row.ids += row.pending[start:stop]
                if stop == len(row.pending):
                    row.pending, row.prefilled = [], True
                    ended.append(row)
            yield from self._append_tokens(sampled, ended)

    def _decode(self, *, waiting: bool) -> Iterator[Piece]:
        active = self._active()
        sampled, seconds = self._call(partial(self._programs.decode, steps=self._steps, waiting=waiting))
        steps = len(sampled[0])
        # At most doubled, since the first call of a program is slower. Several processes must make the same calls,
        # and their clocks differ.
        wanted = int(SECONDS_PER_CALL * steps / max(seconds, 1e-9)) if jax.process_count() == 1 else MAX_STEPS
        self._steps = min(max(1, wanted), 2 * self._steps, MAX_STEPS)
        self.timing.decode_seconds += seconds
        pieces = self._append_tokens(sampled, active)
        self.timing.decode_tokens += len(pieces)
        yield from pieces

    def _call(self, program: Callable[..., tuple[State, SampledTokens]]) -> tuple[StepTokens, float]:
        state, self.state = self._take_state(), None
        started, compiled = time.perf_counter(), self._programs.compile_seconds
        self.state, sampled = program(state, rows=self._row_arrays())
        tokens = sampled.wait()
        return tokens, time.perf_counter() - started - (self._programs.compile_seconds - compiled)

    def _append_tokens(self, sampled: StepTokens, rows: Sequence[Row]) -> list[Piece]:
        pieces = []
        for tokens, logprobs in zip(*sampled, strict=True):
            for row in rows:
                if row.request is None:
                    continue
                if not math.isfinite(logprobs[row.index]):
                    raise WrongNumbersError(
                        f"the logits after prompt {row.request.index} are not finite: the weights are damaged"
                    )
                row.ids += row.pending
                row.pending = [tokens[row.index]]
                pieces.append(row.request.append(tokens[row.index], logprobs[row.index]))
                if row.request.finish is not None:
                    row.request = None
        return pieces

    def _take_state(self) -> State:
        assert self.state is not None, "an earlier call has failed"
        return self.state

    def _row_arrays(self) -> RowArrays:
        tokens, lengths, left = (np.zeros(len(self._rows), np.int32) for _ in range(3))
        seeds = np.zeros(len(self._rows), np.uint32)
        for row in self._rows:
            if row.request is None:
                continue
            seeds[row.index] = row.request.seed
            if row.prefilled:
                tokens[row.index], lengths[row.index] = row.pending[0], len(row.ids)
                left[row.index] = row.request.tokens_left
            else:
                lengths[row.index] = len(row.request.prompt)
        return RowArrays(tokens, lengths, left, seeds)

    def _packs(self, reading: Sequence[Row]) -> Iterator[list[list[Chunk]]]:
        by_part: list[list[list[Chunk]]] = []
        for part in range(self._num_parts):
            packs: list[list[Chunk]] = []
            room = 0
            for row in reading:
                start = 0
                while row.index // self._rows_per_part == part and start < len(row.pending):
                    if room == 0 or (start == 0 and row.ids):  # a row with cached tokens must come first
                        packs.append([])
                        room = self._max_chunk
                    stop = min(start + room, len(row.pending))
                    packs[-1].append((row, start, stop))
                    room -= stop - start
                    start = stop
            by_part.append(packs)
        for number in range(max(map(len, by_part), default=0)):
            yield [packs[number] if number < len(packs) else [] for packs in by_part]

    def _pack(self, parts: list[list[Chunk]]) -> PackedTokens:
        length = self._length(max(sum(stop - start for _, start, stop in chunks) for chunks in parts))
        shape, per_part = (self._num_parts, length), self._rows_per_part
        ids, rows = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        positions = np.full(shape, self._programs.shape.slots, np.int32)
        last = np.full((self._num_parts, per_part), -1, np.int32)
        continued = False
        for part, chunks in enumerate(parts):
            at = 0
            for row, start, stop in chunks:
                before, count = len(row.ids), stop - start
                here = slice(at, at + count)
                ids[part, here], rows[part, here] = row.pending[start:stop], row.index % per_part
                positions[part, here] = np.arange(before, before + count)
                continued = continued or before > 0
                at += count
                if stop == len(row.pending):
                    last[part, row.index % per_part] = at - 1
        return PackedTokens(ids, rows, positions, last, continued)

    def _length(self, needed: int) -> int:
        """Returns a compiled program's length if it fits, else a power of two."""
        fits = [length for length in self._programs.read_lengths if needed <= length <= MAX_WASTE * needed]
        return min(fits, default=min(max(MIN_LENGTH, 1 << (needed - 1).bit_length()), self._max_chunk))


def _num_cached(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Counts cached prompt tokens, except the last: it is read again, for its logits."""
    most = min(len(cached), len(prompt) - 1)
    return next((index for index in range(most) if cached[index] != prompt[index]), most)
