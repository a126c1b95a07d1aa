"""Which prompt is in which row, and what the devices do next.

A row is free until a prompt is admitted to it, and again when its text has ended: the next prompt then takes its place
while the others go on (continuous batching: Yu et al., Orca, OSDI 2022). Prompts are read packed: the tokens of several
lie one after another in a sequence of a few lengths, and the longest is cut, so that no prompt is padded to another. A
row keeps its tokens when its text ends, and a prompt that begins with them, such as the next turn of a chat, is read
from there.

The kernels are those that train on packed documents. What a cut row has before is put in front of the sequence, last
token last, so that each query still sees one range of keys. So few programs do for prompts of any lengths.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from jaxtp.entry import UserError
from jaxtp.generate.programs import MAX_STEPS, Chosen, Made, Packed, Programs, Rows, State
from jaxtp.generate.request import Piece, Request

MIN_LENGTH = 16
"""Tokens of the shortest sequence in which prompts are read."""

MUCH_LONGER = 2
"""A sequence this many times as long as need be is read by a program that is there, rather than compiling another."""

SECONDS_PER_CALL = 0.1
"""About how long a call makes tokens before it hands them out."""

MAX_SEED = 2**32


class GenerationError(UserError):
    """A prompt or a model from which nothing can be generated."""


@dataclass(eq=False)
class Row:
    """A row of the memory."""

    index: int

    ids: list[int] = field(default_factory=list)
    """The tokens that it holds."""

    request: Request | None = None
    """The text that is made in it; None for a free row."""

    unread: list[int] = field(default_factory=list)
    """Tokens of the prompt that are still to be read, or the one that has been chosen last."""

    begun: bool = False
    """Whether the prompt has been read."""


@dataclass
class Timing:
    """Number of tokens that were read and made, and how long that took."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    kept_tokens: int = 0
    """Tokens of prompts that were not read because a row had them."""
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Scheduler:
    """Makes texts with the rows of one memory.

    Args:
      programs: the programs for it.
      state: what the devices hold.
      rows: what the rows hold, which is kept up to date.
      num_parts: parts into which the devices divide the rows.
      most: the most tokens of a sequence in which prompts are read.
      seed: of the request of index 0.
      progress: called with the tokens of the prompts that have been read, and of all that are being read.
    """

    def __init__(
        self,
        programs: Programs,
        state: State,
        rows: Sequence[Row],
        *,
        num_parts: int,
        most: int,
        seed: int,
        progress: Callable[[int, int], None],
    ):
        self.timing = Timing()
        self.state: State | None = state
        """None while a call is under way: what is left of the state if it fails cannot be used."""
        self._programs, self._rows, self._parts = programs, rows, num_parts
        self._most, self._seed, self._progress = most, seed, progress
        self._steps = 1

    def serve(self, requests: Iterable[Request]) -> Iterator[Piece]:
        """Yields the pieces of the requests' texts as they come."""
        waiting = deque(requests)
        for row in self._rows:
            row.request = None
        while waiting or any(row.request is not None for row in self._rows):
            self._admit(waiting)
            yield from self._read_prompts()
            if any(row.request is not None for row in self._rows):
                yield from self._make(waiting=bool(waiting))

    def _admit(self, waiting: deque[Request]) -> None:
        """Gives free rows to the next requests, each that which has most of its prompt already."""
        free = [row for row in self._rows if row.request is None]
        alone = len(waiting) == 1 or len(self._rows) == 1
        prompts = {}
        while free and waiting:
            request = waiting.popleft()
            prompt = request.prompt.tolist()
            row = max(free, key=lambda row: _shared(row.ids, prompt))
            kept = _shared(row.ids, prompt)
            if not alone and kept < len(prompt) / 2:  # it could not be read in one sequence with others
                kept = 0
            row.ids, row.unread, row.request, row.begun = prompt[:kept], prompt[kept:], request, False
            self.timing.kept_tokens += kept
            free.remove(row)
            prompts[row.index] = request.prompt
        if prompts:
            state, self.state = self._taken(), None
            self.state = self._programs.note(state, prompts)

    def _read_prompts(self) -> Iterator[Piece]:
        """Reads the prompts of rows that have just been admitted, and yields the first token of each text."""
        reading = [row for row in self._rows if row.request is not None and not row.begun]
        total, read = sum(len(row.unread) for row in reading), 0
        for pieces in self._packs(reading):
            made, spent = self._call(partial(self._programs.read, packed=self._packed(pieces)))
            count = sum(stop - start for _, start, stop in _all(pieces))
            read += count
            self.timing.prefill_seconds += spent
            self.timing.prefill_tokens += count
            self._progress(read, total)
            begun = []
            for row, start, stop in _all(pieces):
                row.ids += row.unread[start:stop]
                if stop == len(row.unread):
                    row.unread, row.begun = [], True
                    begun.append(row)
            yield from self._taken_up(made, begun)

    def _make(self, *, waiting: bool) -> Iterator[Piece]:
        """Makes the next tokens of all texts."""
        going = [row for row in self._rows if row.request is not None]
        made, spent = self._call(partial(self._programs.decode, steps=self._steps, waiting=waiting))
        done = len(made[0])
        # Twice as many at most, for the first call of a program takes longer than those after it. Several processes
        # have to make the same calls, and their clocks differ.
        wanted = int(SECONDS_PER_CALL * done / max(spent, 1e-9)) if jax.process_count() == 1 else MAX_STEPS
        self._steps = min(max(1, wanted), 2 * self._steps, MAX_STEPS)
        self.timing.decode_seconds += spent
        pieces = self._taken_up(made, going)
        self.timing.decode_tokens += len(pieces)
        yield from pieces

    def _call(self, program: Callable[..., tuple[State, Chosen]]) -> tuple[Made, float]:
        """Returns what a program has chosen for the rows as they are, and the seconds that it took to run."""
        state, self.state = self._taken(), None
        started, compiled = time.perf_counter(), self._programs.compile_seconds
        self.state, chosen = program(state, rows=self._facts())
        made = chosen.wait()
        return made, time.perf_counter() - started - (self._programs.compile_seconds - compiled)

    def _taken_up(self, made: Made, rows: Sequence[Row]) -> list[Piece]:
        """Brings rows up to date with the tokens that were chosen for them; returns their pieces, step by step."""
        pieces = []
        for tokens, logprobs in zip(*made, strict=True):
            for row in rows:
                if row.request is None:
                    continue
                if not math.isfinite(logprobs[row.index]):
                    raise GenerationError(
                        f"the logits after prompt {row.request.index} are not finite: the weights are damaged"
                    )
                row.ids += row.unread
                row.unread = [tokens[row.index]]
                pieces.append(row.request.add(tokens[row.index], logprobs[row.index]))
                if row.request.finish is not None:
                    row.request = None
        return pieces

    def _taken(self) -> State:
        assert self.state is not None, "a call before has failed"
        return self.state

    def _facts(self) -> Rows:
        count = len(self._rows)
        tokens, lengths, left = (np.zeros(count, np.int32) for _ in range(3))
        seeds = np.zeros(count, np.uint32)
        for row in self._rows:
            if row.request is None:
                continue
            seeds[row.index] = (self._seed + row.request.index) % MAX_SEED
            if row.begun:
                tokens[row.index], lengths[row.index] = row.unread[0], len(row.ids)
                left[row.index] = row.request.left
            else:
                lengths[row.index] = len(row.request.prompt)
        return Rows(tokens, lengths, left, seeds)

    def _packs(self, reading: Sequence[Row]) -> Iterator[list[list[tuple[Row, int, int]]]]:
        """Yields what is read in each call: for each part of the rows, which tokens of which rows, in order."""
        by_part: list[list[list[tuple[Row, int, int]]]] = []
        size = len(self._rows) // self._parts
        for part in range(self._parts):
            own = [row for row in reading if row.index // size == part]
            packs: list[list[tuple[Row, int, int]]] = []
            room = 0
            for row in own:
                start = 0
                while start < len(row.unread):
                    if room == 0 or (start == 0 and row.ids):  # a row that has tokens before these stands first
                        packs.append([])
                        room = self._most
                    stop = min(start + room, len(row.unread))
                    packs[-1].append((row, start, stop))
                    room -= stop - start
                    start = stop
            by_part.append(packs)
        for number in range(max(map(len, by_part), default=0)):
            yield [packs[number] if number < len(packs) else [] for packs in by_part]

    def _packed(self, pieces: list[list[tuple[Row, int, int]]]) -> Packed:
        needed = max(sum(stop - start for _, start, stop in part) for part in pieces)
        length, size = self._length(needed), len(self._rows) // self._parts
        ids, positions = np.zeros((self._parts, length), np.int32), np.zeros((self._parts, length), np.int32)
        rows, last = np.full((self._parts, length), -1, np.int32), np.full((self._parts, size), -1, np.int32)
        positions[:] = self._programs.shape.slots
        continued = False
        for part, given in enumerate(pieces):
            at = 0
            for row, start, stop in given:
                before, count = len(row.ids), stop - start
                here = slice(at, at + count)
                ids[part, here], rows[part, here] = row.unread[start:stop], row.index % size
                positions[part, here] = np.arange(before, before + count)
                continued = continued or before > 0
                at += count
                if stop == len(row.unread):
                    last[part, row.index % size] = at - 1
        return Packed(ids, rows, positions, last, continued)

    def _length(self, needed: int) -> int:
        """Returns the length of sequences for so many tokens."""
        fits = [length for length in self._programs.lengths if needed <= length <= MUCH_LONGER * needed]
        return min(fits, default=min(max(MIN_LENGTH, 1 << (needed - 1).bit_length()), self._most))


def _all(pieces: list[list[tuple[Row, int, int]]]) -> Iterator[tuple[Row, int, int]]:
    return (piece for part in pieces for piece in part)


def _shared(known: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns how many tokens of a prompt a row has already; one is left, for its logits."""
    most = min(len(known), len(prompt) - 1)
    return next((index for index in range(most) if known[index] != prompt[index]), most)
