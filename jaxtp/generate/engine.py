"""The generator: it lays a model out for reading, checks prompts, and gives out their texts as they come."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax

from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.programs import Programs, Shape, State, grown, memory_bytes, mesh_of, same_choice
from jaxtp.generate.prompts import Prompt, encode_prompts, limits_of
from jaxtp.generate.request import Piece, Request, Result
from jaxtp.generate.scheduler import GenerationError, Row, Scheduler, Timing
from jaxtp.generate.settings import GenerationSettings, check
from jaxtp.layers.costs import Share
from jaxtp.mesh import CP, TP, batch_parts, memory_per_device, mesh_sizes, platform_here
from jaxtp.models.costs import costs_of
from jaxtp.models.decoder import Decoder
from jaxtp.models.reader import laid_out, reading_bytes, reading_mesh

MIN_SLOTS, CHAT_SLOTS = 64, 1024
"""Fewest slots of a memory, and of one that is kept for a conversation: each doubling compiles its programs again."""

LEAST_READ, MOST_READ = 512, 8192
"""Tokens of prompts that a device reads in a call, at most: the first on a CPU, whose cores such products fill, and
where little memory is left; elsewhere as many as there is memory for, up to the second."""


@dataclass
class Speed:
    """Number of tokens of a call, and how long they took."""

    shape: Shape | None = None
    """Shape of the memory."""
    cache_bytes: int = 0
    """Bytes of the memory on each device."""
    compile_seconds: float = 0.0
    """Time to compile, which is in none of the other times."""
    timing: Timing = field(default_factory=Timing)
    """Tokens read (prefill) and made (decode); the first of each text belongs to prefill."""
    cut_texts: int = 0
    """Texts that end because the model was made for no more tokens."""

    def lines(self) -> Iterator[str]:
        """Yields the lines that the command prints."""
        timing = self.timing
        kept = f"; {timing.kept_tokens:,} more were in the cache" if timing.kept_tokens else ""
        yield f"prefill {_rate(timing.prefill_tokens, timing.prefill_seconds)}{kept}"
        yield f"decode  {_rate(timing.decode_tokens, timing.decode_seconds)}"
        if self.shape is not None:
            size = (
                f"{self.shape.rows} x {self.shape.slots:,} tokens, {self.cache_bytes / 2**20:,.1f} MiB on each device"
            )
            yield f"cache   {size}; compiled in {self.compile_seconds:.1f} s before"
        if self.cut_texts:
            yield f"cut     {self.cut_texts:,} where the model's context ends; --beyond-context goes on"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.2f} s" + (f", {tokens / seconds:,.0f} tokens/s" if seconds else "")


class Generator:
    """Continues texts with a model on its mesh.

    Its weights are laid out once, for reading token by token: in the compute dtype, layer by layer, and whole on every
    device but for tp, which takes memory beside the model's own, or instead of it (`donate`). Devices along fsdp divide
    the rows as those along dp do.

    Args:
      model: built with `sequence_parallel=None` (or False), which a single token needs.
      tokenizer: the tokenizer of the model.
      end_ids: tokens that end a text; by default the tokenizer's end token, if it has one.
      prefix: ids to put before each prompt that is text; by default those that the tokenizer's own file asks for.
      batch_size: number of prompts to continue together, rounded up to a multiple of dp * fsdp.
      chunk: most tokens of prompts that a device reads in one call, rounded up to a power of two; by default as many as
        half of the memory that weights and cache leave has room for (on a CPU 512).
      context: the most tokens of a prompt and its text together; None for any number.
      donate: deletes the model's arrays as they are laid out.
      progress: called after each part of prompts with the tokens that have been read, and those that are being read.

    Raises:
      GenerationError: the model cannot read a single token, or its weights do not fit.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        end_ids: frozenset[int] | None = None,
        prefix: Sequence[int] | None = None,
        batch_size: int = 8,
        chunk: int | None = None,
        context: int | None = None,
        donate: bool = False,
        progress: Callable[[int, int], None] = lambda read, total: None,
    ):
        for name, value in {"batch_size": batch_size, "chunk": 1 if chunk is None else chunk}.items():
            if value < 1:
                raise GenerationError(f"{name}={value}: should be 1 or more")
        mesh = mesh_of(model)
        sizes = mesh_sizes(mesh)
        if sizes[CP] > 1:
            raise GenerationError(
                f"the model was built on a mesh with cp={sizes[CP]}, and a cache is not divided over cp; build it on "
                "one with cp=1 and more tp"
            )
        if model.config.sequence_parallel and sizes[TP] > 1:
            raise GenerationError(
                "the model was built with sequence_parallel=True, and a single token cannot be split over tp; "
                "build it with sequence_parallel=None"
            )
        self._mesh = None if mesh is None else reading_mesh(mesh)
        self._weight_bytes = reading_bytes(model, sizes)
        self._require_memory(self._weight_bytes, "the weights take", "give more devices to --mesh.tp")
        self.config = model.config
        self.tokenizer = tokenizer
        self.end_ids = tokenizer.info.end_ids if end_ids is None else end_ids
        self.prefix = tuple(getattr(tokenizer, "prefix", ()) if prefix is None else prefix)
        self.speed = Speed()
        """Speed of the last call."""
        self._num_ids = min(tokenizer.info.vocab_size, model.config.vocab_size)
        self._batch_parts = batch_parts(sizes)
        self._batch_size = batch_size
        self._chunk = chunk
        self.limits = limits_of(model.config, context)
        self._progress = progress
        self._reader = laid_out(model, self._mesh, donate=donate)
        self._programs: dict[tuple[Shape, GenerationSettings], Programs] = {}
        self._state: State | None = None
        self._rows: list[Row] = []

    def generate(
        self, prompts: Sequence[Prompt | None], settings: GenerationSettings = GenerationSettings()
    ) -> list[Result]:
        """Returns the continuation of each prompt, in their order; see `stream`."""
        results = [piece.result for piece in self.stream(prompts, settings) if piece.result is not None]
        return sorted(results, key=lambda result: result.index)

    def stream(
        self,
        prompts: Sequence[Prompt | None],
        settings: GenerationSettings = GenerationSettings(),
        *,
        keep: bool = False,
    ) -> Iterator[Piece]:
        """Yields the continuations as they come, a piece for each token.

        Args:
          prompts: texts, or lists of ids, which are taken as they are; None is counted and left out.
          settings: say how tokens are chosen, and when a text ends.
          keep: tokens with which a prompt begins are not read again if the last call has left them in the cache: for
            the turns of a chat.

        Raises:
          ConfigError: a setting cannot be.
          GenerationError: prompts is one text and no list; a prompt has no tokens, or one that the model lacks; or the
            logits are not finite.
        """
        check(settings)
        if isinstance(prompts, str):
            raise GenerationError(f"prompts is one text; for one prompt give [{prompts[:20]!r}]")
        encoded = encode_prompts(prompts, self.tokenizer, self.prefix, self.limits)
        requests = [
            Request(index, ids, self.tokenizer, settings, self.end_ids, self.limits.context)
            for index, ids in enumerate(encoded)
            if ids is not None
        ]
        self.speed = Speed()
        if requests:
            yield from self._serve(requests, settings, keep)

    def _serve(self, requests: Sequence[Request], settings: GenerationSettings, keep: bool) -> Iterator[Piece]:
        lengths = [len(request.prompt) for request in requests]
        programs, state = self._prepared(lengths, settings, CHAT_SLOTS if keep else MIN_SLOTS)
        if not keep:
            self._forget()
        compiled = programs.compile_seconds
        scheduler = Scheduler(
            programs,
            state,
            self._rows,
            num_parts=self._batch_parts,
            most=self._most_read(),
            seed=settings.seed,
            progress=self._progress,
        )
        self.speed.timing = scheduler.timing
        try:
            for piece in scheduler.serve(requests):
                self.speed.compile_seconds = programs.compile_seconds - compiled
                self.speed.cut_texts += piece.result is not None and piece.result.finish == "context"
                yield piece
        finally:
            self._state = scheduler.state
            if self._state is None:  # a call has failed, and what it was given cannot be used again
                self._forget(0)

    def _prepared(self, lengths: Sequence[int], settings: GenerationSettings, least: int) -> tuple[Programs, State]:
        """Returns the programs for prompts of some lengths, and what the devices hold before them.

        The memory of the last call is used again, with what its rows hold, if it has as many rows; with more slots if
        they are too few. Slots are powers of two, so that there are few programs.
        """
        parts = self._batch_parts
        rows = math.ceil(min(self._batch_size, len(lengths)) / parts) * parts
        longest = min(max(max(lengths) + settings.max_tokens, least), self.limits.context or sys.maxsize)
        slots = _power_of_two(longest, MIN_SLOTS)
        held, memories = 0, None
        if self._state is not None and len(self._rows) == rows:
            memories = self._state.memories
            held = jax.tree.leaves(memories)[0].shape[2]
        shape = Shape(rows, max(slots, held))
        self.speed.shape, self.speed.cache_bytes = shape, memory_bytes(self._reader, self._mesh, shape)
        self._require_memory(
            self._weight_bytes + self.speed.cache_bytes,
            f"the weights, and a cache for {rows} x {shape.slots:,} tokens, take",
            "give a smaller --max-tokens or --batch-size, or shorter prompts",
        )
        self._state = None  # of two memories only one is there at a time
        if memories is None:
            self._forget(rows)
        elif slots > held:
            memories = grown(memories, slots, self._mesh)
            if any(block.rope_scaling.kind == "longrope" for block in self.config.block_kinds()):
                self._forget()  # its frequencies depend on the number of slots
        key = shape, same_choice(settings)
        if key not in self._programs:
            self._programs[key] = Programs(self._reader, self._mesh, shape, settings, self._num_ids, self.end_ids)
        programs = self._programs[key]
        return programs, programs.state(memories)

    def _forget(self, count: int | None = None) -> None:
        """Makes the rows empty, as many as there are or another number."""
        self._rows = [Row(index) for index in range(len(self._rows) if count is None else count)]

    def _most_read(self) -> int:
        """Returns the most tokens of prompts to read in a call, once it is known how large the cache is."""
        if self._chunk is not None:
            return _power_of_two(self._chunk, 1)
        there = self._memory()
        if there is None or platform_here() == "cpu":
            return LEAST_READ
        sizes, most = mesh_sizes(self._mesh), MOST_READ
        room = (there - self._weight_bytes - self.speed.cache_bytes) / 2
        share = Share(sizes=sizes, rows=1, length=most, training=False, packed=True, platform=platform_here())
        while most > LEAST_READ and costs_of(self.config, replace(share, length=most)).working > room:
            most //= 2
        return most

    def _memory(self) -> int | None:
        return memory_per_device(jax.local_devices()[:1] if self._mesh is None else self._mesh.local_devices)

    def _require_memory(self, needed: int, what: str, way_out: str) -> None:
        """Checks that the devices have so much memory.

        Raises:
          GenerationError: they have less.
        """
        there = self._memory()
        if there is not None and needed > there:
            raise GenerationError(
                f"{what} {needed / 2**30:,.1f} GiB on each device, which has {there / 2**30:,.1f}; {way_out}"
            )


def _power_of_two(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())
