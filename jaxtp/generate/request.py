"""Prompts and their generated texts, which consist of whole characters and end at stop texts."""

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxtp.config.entry import NumericsError, UserError
from jaxtp.data.chat_template import ChatError, Message
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.sampling import Settings
from jaxtp.models.config import ModelConfig

Ids = NDArray[np.int32]
Prompt = str | Sequence[int] | Ids | Sequence[Message]
Finish = Literal["end", "stop", "length", "context"]

# Prompt tokens decoded together with the first new token, whose spelling may depend on them
_CONTEXT_TOKENS = 8
# Maximum tokens of an unfinished character: UTF-8 has up to four bytes, each perhaps a token
_MAX_PENDING = 3
_REPLACEMENT = "\ufffd".encode()


class GenerationError(UserError):
    """A prompt or model is unusable for generation."""


@dataclass(frozen=True)
class Limits:
    """The token ids and lengths that a model accepts."""

    vocab_size: int
    context: int | None
    """Maximum number of tokens of prompt and text together; None for no limit."""
    learned: bool
    """Whether the limit is the number of learned positions."""

    def problem(self, ids: Sequence[int] | Ids, remedy: str = "") -> str:
        """Returns why the model cannot read a prompt, worded to follow its name; empty if it can.

        Args:
          remedy: alternative to a shorter prompt.
        """
        array = np.asarray(ids)
        if not array.size:
            return "is empty; the model needs at least one token"
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            return (
                f"has the token {wrong[0]}, but the model's tokens are 0 to {self.vocab_size - 1}: "
                "this is not the model's tokenizer; give the right one by --tokenizer PATH"
            )
        if self.context is None or array.size < self.context:
            return ""
        source = " (max_position_embeddings in its config.json)"
        if self.learned:
            source = ", the number of its learned positions (model.learned_positions)"
        elif not remedy:
            remedy = "allow it by --beyond-context"
        alternative = f", or {remedy}" if remedy else ""
        return (
            f"has {array.size:,} tokens, and the model's context is {self.context:,}, generated "
            f"text included{source}; shorten it by {array.size - self.context + 1:,}{alternative}"
        )


def limits_of(model: ModelConfig, context: int | None) -> Limits:
    """Returns a model's limits; `context` is its limit or the user's."""
    learned = model.learned_positions
    if learned is None or (context is not None and context < learned):
        return Limits(model.vocab_size, context, learned=False)
    return Limits(model.vocab_size, learned, learned=True)


def encode_conversations(
    prompts: Sequence[Prompt | None], tokenizer: Tokenizer, arguments: Mapping[str, object]
) -> Sequence[Prompt | None]:
    """Returns the prompts with ids in place of conversations; the same object if it has none.

    Args:
      arguments: of `tokenizer.chat`.

    Raises:
      ChatError: the chat template does not write a conversation; the message names the prompt.
      GenerationError: there are arguments, and no conversation.
    """
    encoded = list(prompts)
    is_chat = False
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, list | tuple) and any(isinstance(part, Mapping) for part in prompt):
            is_chat = True
            try:
                encoded[index] = tokenizer.chat(prompt, **arguments)
            except ChatError as error:
                raise ChatError(f"prompt {index}: {error}") from None
    names = [name for name, value in arguments.items() if value is not None]
    if names and not is_chat:
        raise GenerationError(
            f"{', '.join(names)}: only a chat template reads them, and no prompt is a list of "
            "messages"
        )
    return encoded if is_chat else prompts


def encode_prompts(
    prompts: Sequence[Prompt | None],
    tokenizer: Tokenizer,
    prefix: Sequence[int],
    limits: Limits,
    name: Callable[[int], str] = "prompt {}".format,
) -> list[Ids | None]:
    """Returns the ids of each prompt; None stays None.

    Args:
      prompts: texts, or ids, used unchanged.
      prefix: ids to put before each text.
      name: names a prompt in messages, by its index.

    Raises:
      GenerationError: the model cannot read a prompt.
      TokenizerError: the tokenizer cannot encode part of a prompt.
    """
    present = {index: prompt for index, prompt in enumerate(prompts) if prompt is not None}
    for index, prompt in present.items():
        if not _is_prompt(prompt):
            raise GenerationError(f"{name(index)} is {prompt!r:.40}, not text, ids or messages")
        # A prompt may have half a surrogate pair.
        if isinstance(prompt, str) and prompt != prompt.encode(errors="replace").decode():
            raise GenerationError(f"{name(index)} is not UTF-8")
    texts = {index: prompt for index, prompt in present.items() if isinstance(prompt, str)}
    encoded = dict(zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True))
    ids: dict[int, Ids] = {}
    for index, prompt in present.items():
        if index in encoded:
            array = np.asarray([*prefix, *encoded[index].tolist()])
        else:
            array = np.asarray(prompt)
        if problem := limits.problem(array):
            raise GenerationError(f"{name(index)} {problem}")
        ids[index] = array.astype(np.int32)
    return [ids.get(index) for index in range(len(prompts))]


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    try:
        array = np.asarray(prompt)
    except ValueError:  # lists of unequal lengths
        return False
    # [] is an array of floats.
    return array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)


@dataclass(frozen=True)
class Result:
    """The generated text of one prompt."""

    index: int
    """Index of the prompt, from 0."""
    text: str
    """The text before the end token or the stop text."""
    ids: tuple[int, ...]
    """Tokens of the text and of the stop text, without the end token."""
    logprobs: tuple[float, ...]
    """Log-probability of each token in nats, before temperature and filters."""
    finish: Finish
    """Why the text ended: an end token, a stop text, `max_tokens`, or the model's context (prompt
    and text)."""
    prompt_tokens: int
    sample: int = 0
    """Index among the texts of the prompt."""


@dataclass(frozen=True)
class Piece:
    """The text that one token adds."""

    index: int
    """Index of the prompt."""
    token: int | None
    """The token; None for an end token."""
    text: str
    """Whole characters; may be empty."""
    result: Result | None
    """The whole result in the last piece, else None."""
    sample: int = 0
    """Index among the texts of the prompt."""


class Request:
    """A prompt and its generated tokens.

    Args:
      number: counts samples and prompts; the seed is `settings.seed + number`.
      context: maximum tokens of prompt and text together, if any.
    """

    def __init__(
        self,
        number: int,
        prompt: Ids,
        tokenizer: Tokenizer,
        settings: Settings,
        end_ids: frozenset[int],
        context: int | None = None,
    ):
        self.index, self.sample = divmod(number, settings.samples)
        self.num_prompt = len(prompt)
        self.tokens: list[int] = prompt.tolist()
        """The prompt, then the generated tokens without an end token."""
        self.seed = (settings.seed + number) % 2**32
        self.finish: Finish | None = None
        self._text = ""
        self._pending = ""
        self._logprobs = list[float]()
        self._detokenizer = Detokenizer(tokenizer, self.tokens)
        self._stops = settings.stop
        self._end_ids = end_ids
        room = settings.max_tokens if context is None else context - len(prompt)
        self._limit = len(prompt) + min(settings.max_tokens, room)
        self._limit_reason: Finish = "length" if room >= settings.max_tokens else "context"

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self._limit - len(self.tokens)

    def append(self, token: int, logprob: float) -> Piece:
        """Appends a token and returns its text; sets `finish` after the last.

        Raises a `NumericsError` if its log-probability is not finite.
        """
        if not math.isfinite(logprob):
            raise NumericsError(
                f"the logits after prompt {self.index} are not finite: the weights are damaged"
            )
        ended = token in self._end_ids
        text = ""
        stopped = False
        if not ended:
            self.tokens.append(token)
            self._logprobs.append(logprob)
            text, self._pending, stopped = cut_at_stop(
                self._pending + self._detokenizer.feed(token), self._stops
            )
        if not stopped and (ended or self.tokens_left == 0):
            self.finish = "end" if ended else self._limit_reason
            last, pending, stopped = cut_at_stop(
                self._pending + self._detokenizer.finish(), self._stops
            )
            text += last + pending
        if stopped:
            self.finish = "stop"
        self._text += text
        result = None
        if self.finish is not None:
            ids = tuple(self.tokens[self.num_prompt :])
            logprobs = tuple(self._logprobs)
            result = Result(
                self.index, self._text, ids, logprobs, self.finish, self.num_prompt, self.sample
            )
        return Piece(self.index, None if ended else token, text, result, self.sample)


def requests_of(
    prompts: Sequence[Ids | None],
    tokenizer: Tokenizer,
    settings: Settings,
    end_ids: frozenset[int],
    context: int | None,
) -> list[Request]:
    """Returns a request for each sample of each prompt that is not None."""
    return [
        Request(index * settings.samples + sample, ids, tokenizer, settings, end_ids, context)
        for (index, ids), sample in product(enumerate(prompts), range(settings.samples))
        if ids is not None
    ]


class Detokenizer:
    """Turns tokens into text, one at a time, in whole characters.

    Args:
      prompt: the tokens before the first generated token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._start = 0
        self._emitted = len(self._ids)

    def feed(self, token: int) -> str:
        """Returns the text that this token completes, perhaps empty."""
        self._ids.append(token)
        new = self._pending_bytes()
        if new.endswith(_REPLACEMENT) and len(self._ids) - self._emitted <= _MAX_PENDING:
            # A tokenizer that decodes to text shows an unfinished character as U+FFFD.
            return ""
        self._start = self._emitted
        self._emitted = len(self._ids)
        return self._utf8.decode(new)

    def finish(self) -> str:
        """Returns the pending text; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(self._pending_bytes(), final=True)

    def _pending_bytes(self) -> bytes:
        context = self._decode(self._emitted)
        return self._decode(len(self._ids))[len(context) :]

    def _decode(self, end: int) -> bytes:
        ids = self._ids[self._start : end]
        return self._tokenizer.decode(np.array(ids, np.int64)) if ids else b""


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str, bool]:
    """Splits `text` at the stop text that is completed earliest.

    Returns:
      `(shown, pending, stopped)`: the text to show now; the end, which may begin a stop text;
      whether `text` contains a stop text.
    """
    places = {stop: text.find(stop) for stop in stops if stop in text}
    if places:
        first = min(places, key=lambda stop: (places[stop] + len(stop), places[stop]))
        return text[: places[first]], "", True
    end = len(text) - max((_overlap(text, stop) for stop in stops), default=0)
    return text[:end], text[end:], False


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that ends `text`."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
