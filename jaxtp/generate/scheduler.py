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
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jaxtp.config.entry import NumericsError
from jaxtp.generate.programs import MAX_STEPS, PackedTokens, Programs, RowArrays, SampledTokens, State, StepTokens
from jaxtp.generate.request import Piece, Request

MIN_LENGTH = 16
"""Length of the shortest sequence of packed prompts."""

MAX_WASTE = 2
"""A compiled program is used for sequences up to this many times too long, rather than compiling another one."""

SECONDS_PER_CALL = 0.1
"""Roughly how long a decode call takes before it hands out its tokens."""

Chunk = tuple[int, int, int]
"""Prompt tokens to read: the row, and the range of positions."""


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
      cached: the tokens in the cache, by row; updated as they change.
      num_parts: parts that the devices split the rows into.
      max_chunk: maximum length of a packed sequence.
      progress: called with prompt tokens read so far and in total.
    """

    def __init__(
        self,
        programs: Programs,
        state: State,
        cached: list[list[int]],
        *,
        num_parts: int,
        max_chunk: int,
        progress: Callable[[int, int], None],
    ):
        self.timing = Timing()
        self.state: State | None = state
        """None during a call: it is donated, so nothing is left if the call fails."""
        self._programs, self._cached, self._num_parts = programs, cached, num_parts
        self._rows_per_part = len(cached) // num_parts
        self._max_chunk, self._progress = max_chunk, progress
        self._requests: dict[int, Request] = {}  # by row; a row without one is free
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
        prompts = {}
        while free and waiting:
            request = waiting.popleft()
            row = max(free, key=lambda row: _num_cached(self._cached[row], request.tokens))
            count = _num_cached(self._cached[row], request.tokens)
            if not alone and count < request.num_prompt / 2:  # continued rows cannot share a sequence with earlier rows
                count = 0
            del self._cached[row][count:]
            self.timing.kept_tokens += count
            self._requests[row] = request
            free.remove(row)
            prompts[row] = np.array(request.tokens, np.int32)
        if prompts:
            state, self.state = self._take_state(), None
            self.state = self._programs.add_prompts(state, prompts)

    def _prefill(self) -> Iterator[Piece]:
        unread = {row: request for row, request in self._requests.items() if len(request.tokens) == request.num_prompt}
        total, done = sum(request.num_prompt - len(self._cached[row]) for row, request in unread.items()), 0
        for parts in self._packs(unread):
            sampled, seconds = self._call(partial(self._programs.read, packed=self._pack(parts)))
            chunks = [chunk for part in parts for chunk in part]
            count = sum(stop - start for _, start, stop in chunks)
            done += count
            self.timing.prefill_seconds += seconds
            self.timing.prefill_tokens += count
            self._progress(done, total)
            for row, start, stop in chunks:
                self._cached[row] += unread[row].tokens[start:stop]
            yield from self._append_tokens(sampled, [row for row, _, stop in chunks if stop == unread[row].num_prompt])

    def _decode(self, *, waiting: bool) -> Iterator[Piece]:
        rows = list(self._requests)
        sampled, seconds = self._call(partial(self._programs.decode, steps=self._steps, waiting=waiting))
        # Several processes must make the same calls, and their clocks differ.
        in_time = SECONDS_PER_CALL * len(sampled[0]) / max(seconds, 1e-9) if jax.process_count() == 1 else MAX_STEPS
        self._steps = min(max(1, int(in_time)), 2 * self._steps, MAX_STEPS)  # the first call of a program is slower
        self.timing.decode_seconds += seconds
        pieces = self._append_tokens(sampled, rows)
        self.timing.decode_tokens += len(pieces)
        yield from pieces

    def _call(self, program: Callable[..., tuple[State, SampledTokens]]) -> tuple[StepTokens, float]:
        state, self.state = self._take_state(), None
        started, compiled = time.perf_counter(), self._programs.compile_seconds
        self.state, sampled = program(state, rows=self._row_arrays())
        tokens = sampled.wait()
        return tokens, time.perf_counter() - started - (self._programs.compile_seconds - compiled)

    def _append_tokens(self, sampled: StepTokens, rows: Sequence[int]) -> list[Piece]:
        pieces = []
        for tokens, logprobs in zip(*sampled, strict=True):
            for row in rows:
                if (request := self._requests.get(row)) is None:  # its text has ended
                    continue
                if not math.isfinite(logprobs[row]):
                    raise NumericsError(
                        f"the logits after prompt {request.index} are not finite: the weights are damaged"
                    )
                self._cached[row] += request.tokens[len(self._cached[row]) :]
                pieces.append(request.append(tokens[row], logprobs[row]))
                if request.finish is not None:
                    del self._requests[row]
        return pieces

    def _take_state(self) -> State:
        assert self.state is not None, "an earlier call has failed"
        return self.state

    def _row_arrays(self) -> RowArrays:
        tokens, lengths, left = (np.zeros(len(self._cached), np.int32) for _ in range(3))
        seeds = np.zeros(len(self._cached), np.uint32)
        for row, request in self._requests.items():
            has_text = len(request.tokens) > request.num_prompt
            tokens[row], lengths[row] = request.tokens[-1], len(request.tokens) - has_text
            left[row], seeds[row] = request.tokens_left, request.seed
        return RowArrays(tokens, lengths, left, seeds)

    def _packs(self, unread: dict[int, Request]) -> Iterator[list[list[Chunk]]]:
        """Yields the chunks that each part reads in one call."""
        by_part: list[list[list[Chunk]]] = [[] for _ in range(self._num_parts)]
        room = [0] * self._num_parts
        for row, request in unread.items():
            part, start = row // self._rows_per_part, len(self._cached[row])
            if start:  # a row with cached tokens must come first
                room[part] = 0
            while start < request.num_prompt:
                if room[part] == 0:
                    by_part[part].append([])
                    room[part] = self._max_chunk
                stop = min(start + room[part], request.num_prompt)
                by_part[part][-1].append((row, start, stop))
                room[part] -= stop - start
                start = stop
        for number in range(max(map(len, by_part), default=0)):
            yield [packs[number] if number < len(packs) else [] for packs in by_part]

    def _pack(self, parts: list[list[Chunk]]) -> PackedTokens:
        length = self._length(max(sum(stop - start for _, start, stop in chunks) for chunks in parts))
        shape = (self._num_parts, length)
        ids, rows = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        positions = np.full(shape, self._programs.shape.slots, np.int32)
        last = np.full((self._num_parts, self._rows_per_part), -1, np.int32)
        for part, chunks in enumerate(parts):
            at = 0
            for row, start, stop in chunks:
                request, place = self._requests[row], row % self._rows_per_part
                here = slice(at, at + stop - start)
                at = here.stop
                ids[part, here], rows[part, here] = request.tokens[start:stop], place
                positions[part, here] = np.arange(start, stop)
                if stop == request.num_prompt:
                    last[part, place] = at - 1
        continued = any(start > 0 for chunks in parts for _, start, _ in chunks)
        return PackedTokens(ids, rows, positions, last, continued)

    def _length(self, needed: int) -> int:
        """Returns a compiled program's length if it fits, else a power of two."""
        fits = [length for length in self._programs.read_lengths if needed <= length <= MAX_WASTE * needed]
        return min(fits, default=min(max(MIN_LENGTH, 1 << (needed - 1).bit_length()), self._max_chunk))


def _num_cached(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Counts cached prompt tokens, except the last: it is read again, for its logits."""
    most = min(len(cached), len(prompt) - 1)
    return next((index for index in range(most) if cached[index] != prompt[index]), most)
