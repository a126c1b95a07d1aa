"""Text as it comes: whole characters only, and nothing that may yet turn out to begin a stop text."""

import codecs
from collections.abc import Sequence

import numpy as np

from jaxtp.data.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens of the prompt that are decoded with the first one: what a token is spelled like depends on those before it."""

_HELD = 3
"""Tokens that may be held back because of an unfinished character: one byte each, of the four that it has at most."""

_REPLACEMENT = "\ufffd".encode()


class TextStream:
    """Tokens into text, one at a time; what has been given out is never taken back.

    Args:
      tokenizer: whose tokens they are.
      prompt: the tokens before the first.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._given = 0, len(self._ids)

    def feed(self, token: int) -> str:
        """The text that is certain now; may be empty."""
        self._ids.append(token)
        new = self._new()
        if new.endswith(_REPLACEMENT) and len(self._ids) - self._given <= _HELD:
            return ""  # a tokenizer that decodes to text shows an unfinished character so
        self._start, self._given = self._given, len(self._ids)
        return self._utf8.decode(new)

    def finish(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(self._new(), final=True)

    def _new(self) -> bytes:
        """What the tokens that were not given out add to those that were, of which only the last matter."""
        before, now = (self._decode(self._ids[self._start : end]) for end in (self._given, len(self._ids)))
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> bytes:
        return self._tokenizer.decode(np.array(ids, np.int64)) if ids else b""


class StopTexts:
    """Ends a text before the one of several that is complete first, however the pieces of it are cut.

    Args:
      stops: texts, none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """What is certain not to be of a stop text; and whether one was found, after which nothing may follow."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        certain = len(text) - max((self._beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """How much of the end of the text is the beginning of the stop text."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
