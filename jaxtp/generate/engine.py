"""`Generator`: sizes the KV cache, checks memory and prompts, and streams texts."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax

from jaxtp.data.tokenizer import Tokenizer
from jaxtp.distributed.devices import memory_per_device
from jaxtp.generate.decode_model import cache_bytes, decode_mesh, model_mesh, to_decode_model, weight_bytes
from jaxtp.generate.programs import Programs, Shape, State
from jaxtp.generate.prompts import Prompt, encode_prompts, limits_of
from jaxtp.generate.request import GenerationError, Piece, Request, Result
from jaxtp.generate.sampling import GenerationSettings, check_settings
from jaxtp.generate.scheduler import Scheduler, Timing
from jaxtp.mesh import CP, TP, batch_parts, current_platform, mesh_sizes
from jaxtp.models.decoder import Decoder

MIN_SLOTS, CHAT_SLOTS = 64, 1024
"""Smallest number of tokens of a row, and of a chat's row: each doubling compiles the programs again."""

CPU_CHUNK, CHUNK = 512, 2048
"""Most prompt tokens that a device reads in one call: enough to fill a CPU's cores, or a GPU."""


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
      tokenizer: its prefix, if any, comes before each text.
      end_ids: by default the tokenizer's end token, if any.
      batch_size: prompts to continue together, rounded up to a multiple of dp * fsdp.
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
        context: int | None = None,
        donate: bool = False,
    ):
        if batch_size < 1:
            raise GenerationError(f"batch_size={batch_size}: should be 1 or more")
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
        self.limits = limits_of(model.config, context)
        self.speed = Speed()
        """Speed of the last call."""
        self._num_ids = min(tokenizer.info.vocab_size, model.config.vocab_size)
        self._batch_parts, self._batch_size = batch_parts(sizes), batch_size
        self._chunk = CPU_CHUNK if current_platform() == "cpu" else CHUNK
        self._model = to_decode_model(model, self._mesh, donate=donate)
        self._programs: dict[tuple[Shape, GenerationSettings], Programs] = {}
        self._cache: tuple[Shape, State] | None = None
        self._cached: list[list[int]] = []  # the tokens in the cache, by row

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
        progress: Callable[[int, int], None] = lambda read, total: None,
    ) -> Iterator[Piece]:
        """Yields the continuations as they are generated, one piece per token.

        Args:
          prompts: texts, or lists of ids, used unchanged; None is skipped but counted.
          keep: reuses the last call's KV cache for prompts that begin with its tokens, e.g. chat turns.
          progress: called after each chunk with prompt tokens read so far and in total.

        Raises:
          ConfigError: an invalid setting.
          GenerationError: `prompts` is a single string, or the model cannot read a prompt.
          NumericsError: the logits are not finite.
        """
        check_settings(settings)
        if isinstance(prompts, str):
            raise GenerationError(f"prompts is a string; for one prompt give [{prompts[:20]!r}]")
        prefix = getattr(self.tokenizer, "prefix", ())
        requests = [
            Request(index, ids, self.tokenizer, settings, self.end_ids, self.limits.context)
            for index, ids in enumerate(encode_prompts(prompts, self.tokenizer, prefix, self.limits))
            if ids is not None
        ]
        self.speed = Speed()
        if not requests:
            return
        programs, state = self._prepare(requests, settings, keep)
        compiled, parts = programs.compile_seconds, self._batch_parts
        scheduler = Scheduler(programs, state, self._cached, num_parts=parts, max_chunk=self._chunk, progress=progress)
        self.speed.timing = scheduler.timing
        try:
            for piece in scheduler.serve(requests):
                self.speed.cut_texts += piece.result is not None and piece.result.finish == "context"
                yield piece
        finally:
            self.speed.compile_seconds = programs.compile_seconds - compiled
            if scheduler.state is not None:  # otherwise a call failed, and its donated arrays are gone
                self._cache = programs.shape, scheduler.state

    def _prepare(self, requests: Sequence[Request], settings: GenerationSettings, keep: bool) -> tuple[Programs, State]:
        """Reuses the last KV cache if it has as many rows and enough slots; slots are powers of two: few programs."""
        parts = self._batch_parts
        rows = math.ceil(min(self._batch_size, len(requests)) / parts) * parts
        longest = max(request.num_prompt for request in requests) + settings.max_tokens
        longest = min(max(longest, CHAT_SLOTS if keep else MIN_SLOTS), self.limits.context or sys.maxsize)
        shape, caches = Shape(rows, max(MIN_SLOTS, 1 << (longest - 1).bit_length())), None
        if self._cache is not None and self._cache[0].rows == rows and self._cache[0].slots >= shape.slots:
            shape, caches = self._cache[0], self._cache[1].caches
        size = cache_bytes(self._model, self._mesh, shape.rows, shape.slots)
        self.speed.shape, self.speed.cache_bytes = shape, size
        self._require_memory(
            self._weight_bytes + size,
            f"the weights and a KV cache of {rows} x {shape.slots:,} tokens take",
            "use a smaller --max-tokens or --batch-size, or shorter prompts",
        )
        self._cache = None  # frees it before a new one is made
        if caches is None or not keep:
            self._cached = [[] for _ in range(rows)]
        key = shape, replace(settings, max_tokens=1, seed=0, stop=())  # they do not affect compilation
        if key not in self._programs:
            self._programs[key] = Programs(self._model, self._mesh, shape, settings, self._num_ids, self.end_ids)
        return self._programs[key], self._programs[key].state(caches)

    def _require_memory(self, needed: int, what: str, way_out: str) -> None:
        memory = memory_per_device(jax.local_devices()[:1] if self._mesh is None else self._mesh.local_devices)
        if memory is not None and needed > memory:
            raise GenerationError(
                f"{what} {needed / 2**30:,.1f} GiB on each device, which has {memory / 2**30:,.1f}; {way_out}"
            )
