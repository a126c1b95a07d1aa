"""A request: one prompt, and the text that is generated for it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.detokenizer import Detokenizer, StopTexts
from jaxtp.generate.settings import GenerationSettings

Finish = Literal["end", "stop", "length", "context"]


@dataclass(frozen=True)
class Result:
    """The text that was generated for a prompt."""

    index: int
    """Index of the prompt, from 0."""

    text: str
    """The text before the end token or the stop text."""

    ids: tuple[int, ...]
    """Its tokens, without the end token, with those of the stop text."""

    logprobs: tuple[float, ...]
    """Log-probability of each token in nats, under the model as it is: without penalty, temperature and filters."""

    finish: Finish
    """Why it ends: an end token, a stop text, the most tokens that were asked for, or the most that the model was made
    for, prompt and text together."""

    prompt_tokens: int
    """Number of tokens of the prompt."""


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
    """The whole text, with its last piece."""


class Request:
    """A prompt and the tokens that were chosen for it.

    Args:
      index: index of the prompt.
      prompt: its ids.
      tokenizer: turns the ids into text.
      settings: say when the text ends.
      end_ids: tokens that end a text.
      context: the most tokens of prompt and text together; None for any number.
    """

    def __init__(
        self,
        index: int,
        prompt: NDArray[np.int32],
        tokenizer: Tokenizer,
        settings: GenerationSettings,
        end_ids: frozenset[int],
        context: int | None = None,
    ):
        self.index = index
        self.prompt = prompt
        self.finish: Finish | None = None
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._detokenizer = Detokenizer(tokenizer, prompt.tolist())
        self._stops = StopTexts(settings.stop)
        room = settings.max_tokens if context is None else context - len(prompt)
        self._max_tokens = min(settings.max_tokens, room)
        self._longest: Finish = "length" if room >= settings.max_tokens else "context"
        self._end_ids = end_ids

    @property
    def left(self) -> int:
        """Number of tokens that may still come."""
        return 0 if self.finish else self._max_tokens - len(self._ids)

    def add(self, token: int, logprob: float) -> Piece:
        """Takes the next token and returns its piece of text; if it was the last one, `finish` is then set."""
        text = ""
        if token in self._end_ids:
            self.finish = "end"
        else:
            self._ids.append(token)
            self._logprobs.append(logprob)
            text = self._certain(self._detokenizer.feed(token))
            if self.finish is None and len(self._ids) == self._max_tokens:
                self.finish = self._longest
        if self.finish in ("end", "length", "context"):
            text += self._certain(self._detokenizer.finish()) + self._stops.finish()
        self._text.append(text)
        return Piece(self.index, None if self.finish == "end" else token, text, self._result())

    def _certain(self, text: str) -> str:
        certain, found = self._stops.feed(text)
        if found:
            self.finish = "stop"
        return certain

    def _result(self) -> Result | None:
        if self.finish is None:
            return None
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        return Result(self.index, "".join(self._text), ids, logprobs, self.finish, len(self.prompt))
