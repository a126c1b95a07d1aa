"""`Generator`: sizes the KV cache, checks memory and prompts, and streams texts."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax

from jaxtp.analysis.costs import Workload
from jaxtp.analysis.step_costs import costs_of
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.distributed.devices import memory_per_device
from jaxtp.generate.decode_model import cache_bytes, decode_mesh, model_mesh, to_decode_model, weight_bytes
from jaxtp.generate.programs import Programs, Shape, State, grow_cache, program_settings
from jaxtp.generate.prompts import Prompt, encode_prompts, limits_of
from jaxtp.generate.request import GenerationError, Piece, Request, Result
from jaxtp.generate.sampling import GenerationSettings, check_settings
from jaxtp.generate.scheduler import Row, Scheduler, Timing
from jaxtp.mesh import CP, TP, batch_parts, mesh_sizes, platform_here
from jaxtp.models.decoder import Decoder

MIN_SLOTS, CHAT_SLOTS = 64, 1024
"""Smallest number of tokens of a row, and of a chat's row: each doubling compiles the programs again."""

MIN_CHUNK, MAX_CHUNK = 512, 8192
"""Prompt tokens that a device reads in one call: the first fills a CPU's cores; other devices read up to the second, as
memory allows."""


@dataclass
class Speed:
    """Tokens and seconds of a call."""

    shape: Shape | None = None
    """Shape of the KV cache."""
    cache_bytes: int = 0
    """Bytes of the KV cache on each device."""
    compile_seconds: float = 0.0
    """Compilation, not included in the other times."""
    timing: Timing = field(default_factory=Timing)
    """Tokens read (prefill) and generated (decode); the first token of each text belongs to prefill."""
    cut_texts: int = 0
    """Number of texts that ended at the model's context."""

    def lines(self) -> Iterator[str]:
        """Yields the lines that the command prints."""
        timing = self.timing
        kept = f"; {timing.kept_tokens:,} more were in the cache" if timing.kept_tokens else ""
        yield f"prefill {_rate(timing.prefill_tokens, timing.prefill_seconds)}{kept}"
        yield f"decode  {_rate(timing.decode_tokens, timing.decode_seconds)}"
        if self.shape is not None:
            size = f"{self.shape.rows} x {self.shape.slots:,} tokens, {self.cache_bytes / 2**20:,.1f} MiB per device"
            yield f"cache   {size}; compiled in {self.compile_seconds:.1f} s"
        if self.cut_texts:
            yield f"cut     {self.cut_texts:,} at the model's context; --beyond-context continues"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.2f} s" + (f", {tokens / seconds:,.0f} tokens/s" if seconds else "")


class Generator:
    """Continues texts with a model on its mesh.

    The weights are copied once into the layout for decoding (`decode_model.py`).

    Args:
      model: built with `sequence_parallel=None` (or False): a single token cannot be split.
      end_ids: by default the tokenizer's end token, if any.
      prefix: ids before each text prompt; by default from the tokenizer's file.
      batch_size: prompts to continue together, rounded up to a multiple of dp * fsdp.
      chunk: maximum prompt tokens per device and call, rounded up to a power of two; by default as many as fit into
        half of the free memory (on a CPU 512).
      context: maximum tokens of a prompt and its text together, if any.
      donate: deletes the model's arrays as they are copied.
      progress: called after each chunk with prompt tokens read so far and in total.

    Raises:
      GenerationError: the model cannot decode, or its weights do not fit.
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
        mesh = model_mesh(model)
        sizes = mesh_sizes(mesh)
        if sizes[CP] > 1:
            raise GenerationError(
                f"the model was built on a mesh with cp={sizes[CP]}, and a KV cache cannot be split over cp; use cp=1 "
                "and more tp"
            )
        if model.config.sequence_parallel and sizes[TP] > 1:
            raise GenerationError(
                "the model was built with sequence_parallel=True, and a single token cannot be split over tp; "
                "build it with sequence_parallel=None"
            )
        self._mesh = None if mesh is None else decode_mesh(mesh)
        self._weight_bytes = weight_bytes(model, sizes)
        self._require_memory(self._weight_bytes, "the weights take", "use more devices by --mesh.tp")
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
        self._model = to_decode_model(model, self._mesh, donate=donate)
        self._programs: dict[tuple[Shape, GenerationSettings], Programs] = {}
        self._state: State | None = None
        self._rows: list[Row] = []

    def generate(
        self, prompts: Sequence[Prompt | None], settings: GenerationSettings = GenerationSettings()
    ) -> list[Result]:
        """Returns the continuations in prompt order; see `stream`."""
        results = [piece.result for piece in self.stream(prompts, settings) if piece.result is not None]
        return sorted(results, key=lambda result: result.index)

    def stream(
        self,
        prompts: Sequence[Prompt | None],
        settings: GenerationSettings = GenerationSettings(),
        *,
        keep: bool = False,
    ) -> Iterator[Piece]:
        """Yields the continuations as they are generated, one piece per token.

        Args:
          prompts: texts, or lists of ids, used unchanged; None is skipped but counted.
          keep: reuses the last call's KV cache for prompts that begin with its tokens, e.g. chat turns.

        Raises:
          ConfigError: an invalid setting.
          GenerationError: `prompts` is a single string, or the model cannot read a prompt.
          WrongNumbersError: the logits are not finite.
        """
        check_settings(settings)
        if isinstance(prompts, str):
            raise GenerationError(f"prompts is a string; for one prompt give [{prompts[:20]!r}]")
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
        programs, state = self._prepare(lengths, settings, CHAT_SLOTS if keep else MIN_SLOTS)
        if not keep:
            self._clear_rows()
        compiled = programs.compile_seconds
        scheduler = Scheduler(
            programs,
            state,
            self._rows,
            num_parts=self._batch_parts,
            max_chunk=self._prefill_chunk(),
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
            if self._state is None:  # a call failed, and its donated arrays are gone
                self._clear_rows(0)

    def _prepare(self, lengths: Sequence[int], settings: GenerationSettings, min_slots: int) -> tuple[Programs, State]:
        """Reuses the last KV cache if it has the same number of rows, and grows it if necessary.

        Slots are powers of two, so there are few programs.
        """
        parts = self._batch_parts
        rows = math.ceil(min(self._batch_size, len(lengths)) / parts) * parts
        longest = min(max(max(lengths) + settings.max_tokens, min_slots), self.limits.context or sys.maxsize)
        slots = _power_of_two(longest, MIN_SLOTS)
        old_slots, caches = 0, None
        if self._state is not None and len(self._rows) == rows:
            caches = self._state.caches
            old_slots = jax.tree.leaves(caches)[0].shape[2]
        shape = Shape(rows, max(slots, old_slots))
        size = cache_bytes(self._model, self._mesh, shape.rows, shape.slots)
        self.speed.shape, self.speed.cache_bytes = shape, size
        self._require_memory(
            self._weight_bytes + size,
            f"the weights and a KV cache of {rows} x {shape.slots:,} tokens take",
            "use a smaller --max-tokens or --batch-size, or shorter prompts",
        )
        self._state = None  # frees the old cache before a new one is made
        if caches is None:
            self._clear_rows(rows)
        elif slots > old_slots:
            caches = grow_cache(caches, slots, self._mesh)
            if any(block.rope_scaling.kind == "longrope" for block in self.config.block_kinds()):
                self._clear_rows()  # its frequencies depend on the number of slots
        key = shape, program_settings(settings)
        if key not in self._programs:
            self._programs[key] = Programs(self._model, self._mesh, shape, settings, self._num_ids, self.end_ids)
        programs = self._programs[key]
        return programs, programs.state(caches)

    def _clear_rows(self, count: int | None = None) -> None:
        self._rows = [Row(index) for index in range(len(self._rows) if count is None else count)]

    def _prefill_chunk(self) -> int:
        if self._chunk is not None:
            return _power_of_two(self._chunk, 1)
        memory = self._memory()
        if memory is None or platform_here() == "cpu":
            return MIN_CHUNK
        sizes, chunk = mesh_sizes(self._mesh), MAX_CHUNK
        room = (memory - self._weight_bytes - self.speed.cache_bytes) / 2
        share = Workload(sizes=sizes, rows=1, length=chunk, training=False, packed=True, platform=platform_here())
        while chunk > MIN_CHUNK and costs_of(self.config, replace(share, length=chunk)).working > room:
            chunk //= 2
        return chunk

    def _memory(self) -> int | None:
        return memory_per_device(jax.local_devices()[:1] if self._mesh is None else self._mesh.local_devices)

    def _require_memory(self, needed: int, what: str, way_out: str) -> None:
        memory = self._memory()
        if memory is not None and needed > memory:
            raise GenerationError(
                f"{what} {needed / 2**30:,.1f} GiB on each device, which has {memory / 2**30:,.1f}; {way_out}"
            )


def _power_of_two(size: int, minimum: int) -> int:
    return max(minimum, 1 << (size - 1).bit_length())
