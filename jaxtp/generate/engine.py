"""Prompts into texts: read in batches, continued a token at a time, and handed out as they come."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.programs import Choice, Programs, Read, Shape, cache_bytes, mesh_of
from jaxtp.generate.row import Piece, Result, Row, by_batch
from jaxtp.generate.settings import GenerationSettings, check
from jaxtp.mesh import DP, FSDP, TP, memory_per_device, mesh_sizes
from jaxtp.models.decoder import Decoder

Prompt = str | Sequence[int]

MIN_CHUNK = 16
MIN_SLOTS = 64
MAX_SEED = 2**32


class GenerationError(ValueError):
    """A prompt or a model that nothing can be generated from."""


@dataclass
class Speed:
    """What a call did, and how long it took."""

    shape: Shape | None = None
    """Of the programs."""
    cache_bytes: int = 0
    """On each device."""
    compile_seconds: float = 0.0
    """None of it is in the other times."""
    prefill_tokens: int = 0
    """Of the prompts."""
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    """Those chosen, but for the first of each text, which is of its prompt's reading."""
    decode_seconds: float = 0.0
    cut_texts: int = 0
    """Those that end because the model was made for no more tokens."""

    def lines(self) -> Iterator[str]:
        """What a command says of it."""
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
      tokenizer: of the model.
      end_ids: tokens that end a text; default, the tokenizer's end token if it has one.
      prefix: ids before each prompt that is text; default, those that the tokenizer's own file asks for.
      batch_size: prompts that are continued together, rounded up to a multiple of dp * fsdp.
      chunk: tokens of a prompt that are read at a time.
      context: the most tokens of a prompt and its text together; None for any number.
      progress: told after each chunk how many tokens of each prompt have been read, and how many the longest has.

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
        sizes = mesh_sizes(mesh) if (mesh := mesh_of(model)) else {DP: 1, FSDP: 1, TP: 1}
        if model.config.sequence_parallel and sizes[TP] > 1:
            raise GenerationError(
                "the model was built with sequence_parallel=True, and a single token cannot be split over tp; "
                "build it with sequence_parallel=None"
            )
        own_end = () if tokenizer.info.eos_id is None else (tokenizer.info.eos_id,)
        self.model = model
        self.tokenizer = tokenizer
        self.end_ids = frozenset(own_end) if end_ids is None else end_ids
        self.prefix = tuple(getattr(tokenizer, "prefix", ()) if prefix is None else prefix)
        self.speed = Speed()
        """Of the last call."""
        self._num_ids = min(tokenizer.info.vocab_size, model.config.vocab_size)
        self._batch_parts = sizes[DP] * sizes[FSDP]
        self._batch_size = batch_size
        self._chunk = chunk
        self._context = context
        self._progress = progress
        self._programs: dict[Shape, Programs] = {}

    def generate(
        self, prompts: Sequence[Prompt | None], settings: GenerationSettings = GenerationSettings()
    ) -> list[Result]:
        """The continuation of each prompt, in their order; see `stream`."""
        results = [piece.result for piece in self.stream(prompts, settings) if piece.result is not None]
        return sorted(results, key=lambda result: result.index)

    def stream(
        self, prompts: Sequence[Prompt | None], settings: GenerationSettings = GenerationSettings()
    ) -> Iterator[Piece]:
        """The continuations as they come, a piece for each token.

        Args:
          prompts: texts, or lists of ids, which are taken as they are; None is counted and left out.
          settings: how to choose tokens, and when to end.

        Raises:
          ConfigError: settings that cannot be.
          GenerationError: a text in place of a list of them, a prompt without tokens or with such that the model lacks;
            logits that are not finite.
        """
        check(settings)
        if isinstance(prompts, str):
            raise GenerationError(f"prompts is one text; for one prompt give [{prompts[:20]!r}]")
        rows = [
            Row(index, ids, self.tokenizer, settings, self.end_ids, self._context)
            for index, ids in self._encode(prompts)
        ]
        self.speed = Speed()
        if rows:
            programs = self.programs([len(row.prompt) for row in rows], settings)
            for group in by_batch(rows, programs.shape.rows):
                yield from self._continue(programs, group, settings)

    def programs(self, lengths: Sequence[int], settings: GenerationSettings) -> Programs:
        """The compiled programs for prompts of such lengths; sizes are powers of two, so that they are few."""
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
        """The index and the ids of each prompt that is not left out."""
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
        if not all(0 <= token < vocab_size for token in ids):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise GenerationError(
                f"prompt {index} has the token {wrong}, and the model has those from 0 to {vocab_size - 1}: the "
                "tokenizer is not the model's"
            )

        if self._context is not None and len(ids) >= self._context:
            raise GenerationError(
                f"prompt {index} has {len(ids):,} tokens, and the model was made for {self._context:,}, with the text "
                "that follows (max_position_embeddings in its config.json); shorten it, or have it read all the same "
                "by --beyond-context"
            )

    def _require_memory(self, shape: Shape) -> None:
        """Checks that a cache fits where it will be.

        Raises:
          GenerationError: it takes more than there is.
        """
        needed, mesh = cache_bytes(self.model, shape), mesh_of(self.model)
        there = memory_per_device(jax.local_devices()[:1] if mesh is None else mesh.local_devices)
        if there is not None and needed > there:
            raise GenerationError(
                f"the cache for {shape.rows} x {shape.slots:,} tokens takes {needed / 2**30:,.1f} GiB on each "
                f"device, which has {there / 2**30:,.1f}; give a smaller --max-tokens or --batch-size, or shorter "
                "prompts"
            )

    def _continue(self, programs: Programs, rows: Sequence[Row], settings: GenerationSettings) -> Iterator[Piece]:
        """Reads the prompts of a batch, and adds tokens until every text has ended."""
        prompts = [row.prompt for row in rows]
        seeds = np.zeros(programs.shape.rows, np.uint32)
        seeds[: len(rows)] = [(settings.seed + row.index) % MAX_SEED for row in rows]
        choose = programs.sampler(settings, self._num_ids)
        read = self._prefill(programs, prompts)
        started = time.perf_counter()
        choice = choose(read, programs.seen(prompts), seeds)
        for left in reversed(range(settings.max_tokens)):
            current = choice
            if left:  # the devices are at the next token while the host hands out this one
                read = programs.decode(read, current.tokens)
                choice = choose(read, current.seen, seeds)
            pieces = _pieces(rows, current)
            self.speed.decode_tokens += len(pieces) if left + 1 < settings.max_tokens else 0
            self.speed.decode_seconds += time.perf_counter() - started
            yield from pieces
            self.speed.cut_texts += sum(
                piece.result is not None and piece.result.finish == "context" for piece in pieces
            )
            if all(row.finish is not None for row in rows):
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


def _pieces(rows: Sequence[Row], choice: Choice) -> list[Piece]:
    """What the chosen tokens add to the texts that have not ended; waits until they are computed."""
    tokens, logprobs = np.asarray(choice.tokens), np.asarray(choice.logprobs)
    pieces = []
    for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=False):
        if row.finish is None:
            if not math.isfinite(logprob):
                raise GenerationError(f"the logits after prompt {row.index} are not finite: the weights are damaged")
            pieces.append(row.add(token, logprob))
    return pieces


def _power_of_two(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())
