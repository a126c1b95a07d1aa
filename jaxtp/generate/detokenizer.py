"""Tokens into text as they come: whole characters only, and nothing that may yet turn out to begin a stop text."""

import codecs
from collections.abc import Sequence

import numpy as np

from jaxtp.data.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens of the prompt to decode together with the first token, whose spelling depends on those before it."""

_HELD = 3
"""Tokens to hold back at most for an unfinished character, which has up to four bytes, one in each token."""

_REPLACEMENT = "\ufffd".encode()


class Detokenizer:
    """Turns tokens into text, one at a time; text that was given out is never taken back.

    Args:
      tokenizer: decodes the tokens.
      prompt: the tokens before the first one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._given = 0, len(self._ids)

    def feed(self, token: int) -> str:
        """Takes a token and returns the text that is certain now; it may be empty."""
        self._ids.append(token)
        new = self._new()
        if new.endswith(_REPLACEMENT) and len(self._ids) - self._given <= _HELD:
            return ""  # a tokenizer that decodes to text shows an unfinished character so
        self._start, self._given = self._given, len(self._ids)
        return self._utf8.decode(new)

    def finish(self) -> str:
        """Returns the text that was held back; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(self._new(), final=True)

    def _new(self) -> bytes:
        """Returns the bytes that the tokens not given out add to those that were, of which only the last matter."""
        parts = (self._ids[self._start : end] for end in (self._given, len(self._ids)))
        before, now = (self._tokenizer.decode(np.array(ids, np.int64)) if ids else b"" for ids in parts)
        return now[len(before) :]


class StopTexts:
    """Ends a text before whichever stop text is complete first, however the text is cut into pieces.

    Args:
      stops: the stop texts, none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Takes a piece; returns the text that is certain not to be of a stop text, and whether one was found.

        No piece may follow a stop text.
        """
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        certain = len(text) - max((self._beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Returns how many characters at the end of the text are the beginning of the stop text."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
