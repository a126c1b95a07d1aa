"""The generator: prompts are read in batches, continued a token at a time, and given out as they come."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from jaxtp.data.tokenizer import Tokenizer
from jaxtp.entry import UserError
from jaxtp.generate.programs import Choice, Programs, Read, Shape, cache_bytes, mesh_of
from jaxtp.generate.request import Piece, Request, Result
from jaxtp.generate.settings import GenerationSettings, check
from jaxtp.mesh import CP, TP, batch_parts, memory_per_device, mesh_sizes
from jaxtp.models.decoder import Decoder

Prompt = str | Sequence[int]

MIN_CHUNK = 16
MIN_SLOTS = 64
MAX_SEED = 2**32


class GenerationError(UserError):
    """A prompt or a model from which nothing can be generated."""


@dataclass
class Speed:
    """Number of tokens of a call, and how long they took."""

    shape: Shape | None = None
    """Shape of the programs."""
    cache_bytes: int = 0
    """Bytes of the cache on each device."""
    compile_seconds: float = 0.0
    """Time to compile, which is in none of the other times."""
    prefill_tokens: int = 0
    """Tokens of the prompts."""
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    """Tokens that were chosen, but for the first of each text, which belongs to prefill."""
    decode_seconds: float = 0.0
    cut_texts: int = 0
    """Texts that end because the model was made for no more tokens."""

    def lines(self) -> Iterator[str]:
        """Yields the lines that the command prints."""
        yield f"prefill {_rate(self.prefill_tokens, self.prefill_seconds)}"
        yield f"decode  {_rate(self.decode_tokens, self.decode_seconds)}"
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

    Args:
      model: built with `sequence_parallel=None` (or False), which a single token needs.
      tokenizer: the tokenizer of the model.
      end_ids: tokens that end a text; by default the tokenizer's end token, if it has one.
      prefix: ids to put before each prompt that is text; by default those that the tokenizer's own file asks for.
      batch_size: number of prompts to continue together, rounded up to a multiple of dp * fsdp.
      chunk: number of tokens of a prompt to read at a time.
      context: the most tokens of a prompt and its text together; None for any number.
      progress: called after each chunk with the tokens of each prompt read so far, and those of the longest prompt.

    Raises:
      GenerationError: the model cannot read a single token.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        end_ids: frozenset[int] | None = None,
        prefix: Sequence[int] | None = None,
        batch_size: int = 8,
        chunk: int = 512,
        context: int | None = None,
        progress: Callable[[int, int], None] = lambda read, longest: None,
    ):
        sizes = mesh_sizes(mesh_of(model))
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
        self.model = model
        self.tokenizer = tokenizer
        self.end_ids = tokenizer.info.end_ids if end_ids is None else end_ids
        self.prefix = tuple(getattr(tokenizer, "prefix", ()) if prefix is None else prefix)
        self.speed = Speed()
        """Speed of the last call."""
        self._num_ids = min(tokenizer.info.vocab_size, model.config.vocab_size)
        self._batch_parts = batch_parts(sizes)
        self._batch_size = batch_size
        self._chunk = chunk
        limits = [limit for limit in (context, model.config.learned_positions) if limit is not None]
        self._context = min(limits, default=None)
        self._progress = progress
        self._programs: dict[Shape, Programs] = {}

    def generate(
        self, prompts: Sequence[Prompt | None], settings: GenerationSettings = GenerationSettings()
    ) -> list[Result]:
        """Returns the continuation of each prompt, in their order; see `stream`."""
        results = [piece.result for piece in self.stream(prompts, settings) if piece.result is not None]
        return sorted(results, key=lambda result: result.index)

    def stream(
        self, prompts: Sequence[Prompt | None], settings: GenerationSettings = GenerationSettings()
    ) -> Iterator[Piece]:
        """Yields the continuations as they come, a piece for each token.

        Args:
          prompts: texts, or lists of ids, which are taken as they are; None is counted and left out.
          settings: say how tokens are chosen, and when a text ends.

        Raises:
          ConfigError: a setting cannot be.
          GenerationError: prompts is one text and no list; a prompt has no tokens, or one that the model lacks; or the
            logits are not finite.
        """
        check(settings)
        if isinstance(prompts, str):
            raise GenerationError(f"prompts is one text; for one prompt give [{prompts[:20]!r}]")
        requests = [
            Request(index, ids, self.tokenizer, settings, self.end_ids, self._context)
            for index, ids in self._encode(prompts)
        ]
        self.speed = Speed()
        if requests:
            programs = self.programs([len(request.prompt) for request in requests], settings)
            for start in range(0, len(requests), programs.shape.rows):
                yield from self._continue(programs, requests[start : start + programs.shape.rows], settings)

    def programs(self, lengths: Sequence[int], settings: GenerationSettings) -> Programs:
        """Returns the compiled programs for prompts of some lengths; their sizes are powers of two, to be few."""
        parts = self._batch_parts
        rows = math.ceil(min(self._batch_size, len(lengths)) / parts) * parts
        longest = min(max(lengths) + settings.max_tokens, self._context or sys.maxsize)
        shape = Shape(rows, _power_of_two(longest, MIN_SLOTS), min(_power_of_two(max(lengths), MIN_CHUNK), self._chunk))
        self._require_memory(shape)
        started = time.perf_counter()
        if shape not in self._programs:
            self._programs[shape] = Programs(self.model, shape)
        self._programs[shape].sampler(settings, self._num_ids)
        self.speed.compile_seconds += time.perf_counter() - started
        self.speed.shape, self.speed.cache_bytes = shape, cache_bytes(self.model, shape)
        return self._programs[shape]

    def _encode(self, prompts: Sequence[Prompt | None]) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Yields the index and the ids of each prompt that is not left out."""
        texts = [_valid(index, prompt) for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        for index, prompt in enumerate(prompts):
            if prompt is not None:
                ids = [*self.prefix, *next(encoded).tolist()] if isinstance(prompt, str) else [int(i) for i in prompt]
                self._check_prompt(index, ids)
                yield index, np.array(ids, np.int32)

    def _check_prompt(self, index: int, ids: Sequence[int]) -> None:
        vocab_size = self.model.config.vocab_size
        if not ids:
            raise GenerationError(f"prompt {index} is empty; the model needs at least one token to go on from")
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise GenerationError(
                f"prompt {index} has the token {wrong}, and the model has those from 0 to {vocab_size - 1}: the "
                "tokenizer is not the model's"
            )
        if self._context is not None and len(ids) >= self._context:
            end = (
                "shorten it: there are no vectors for later positions (model.learned_positions)"
                if self._context == self.model.config.learned_positions
                else "shorten it, or have it read all the same by --beyond-context"
            )
            raise GenerationError(
                f"prompt {index} has {len(ids):,} tokens, and the model was made for {self._context:,}, with the text "
                f"that follows (max_position_embeddings in its config.json); {end}"
            )

    def _require_memory(self, shape: Shape) -> None:
        """Checks that the devices have memory for the cache.

        Raises:
          GenerationError: they have less than it takes.
        """
        needed, mesh = cache_bytes(self.model, shape), mesh_of(self.model)
        there = memory_per_device(jax.local_devices()[:1] if mesh is None else mesh.local_devices)
        if there is not None and needed > there:
            raise GenerationError(
                f"the cache for {shape.rows} x {shape.slots:,} tokens takes {needed / 2**30:,.1f} GiB on each "
                f"device, which has {there / 2**30:,.1f}; give a smaller --max-tokens or --batch-size, or shorter "
                "prompts"
            )

    def _continue(
        self, programs: Programs, requests: Sequence[Request], settings: GenerationSettings
    ) -> Iterator[Piece]:
        """Reads the prompts of a batch, a row for each request, and yields pieces until every text has ended."""
        prompts = [request.prompt for request in requests]
        seeds = np.zeros(programs.shape.rows, np.uint32)
        seeds[: len(requests)] = [(settings.seed + request.index) % MAX_SEED for request in requests]
        choose = programs.sampler(settings, self._num_ids)
        read = self._prefill(programs, prompts)
        started = time.perf_counter()
        choice = choose(read, programs.seen(prompts), seeds)
        for left in reversed(range(settings.max_tokens)):
            current = choice
            if left:  # the devices are at the next token while the host hands out this one
                read = programs.decode(read, current.tokens)
                choice = choose(read, current.seen, seeds)
            pieces = _pieces(requests, current)
            self.speed.decode_tokens += len(pieces) if left + 1 < settings.max_tokens else 0
            self.speed.decode_seconds += time.perf_counter() - started
            yield from pieces
            self.speed.cut_texts += sum(
                piece.result is not None and piece.result.finish == "context" for piece in pieces
            )
            if all(request.finish is not None for request in requests):
                return
            started = time.perf_counter()

    def _prefill(self, programs: Programs, prompts: Sequence[NDArray[np.int32]]) -> Read:
        started = time.perf_counter()
        longest = max(map(len, prompts))
        read = programs.prefill(prompts, lambda read: self._progress(min(read, longest), longest))
        self.speed.prefill_seconds += time.perf_counter() - started
        self.speed.prefill_tokens += sum(map(len, prompts))
        return read


def _valid(index: int, prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise GenerationError(f"prompt {index} is not UTF-8") from None
    return prompt


def _pieces(requests: Sequence[Request], choice: Choice) -> list[Piece]:
    """Returns a piece for each text that has not ended; waits until the chosen tokens are computed."""
    tokens, logprobs = np.asarray(choice.tokens), np.asarray(choice.logprobs)
    pieces = []
    for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=False):
        if request.finish is None:
            if not math.isfinite(logprob):
                raise GenerationError(
                    f"the logits after prompt {request.index} are not finite: the weights are damaged"
                )
            pieces.append(request.add(token, logprob))
    return pieces


def _power_of_two(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())
