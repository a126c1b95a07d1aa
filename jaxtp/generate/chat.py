"""A chat: each line of input is answered, with the conversation before it in mind."""

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtp.data.chat_tokenizer import SpecialTokens, rendered_tokenizer, without_noncharacters
from jaxtp.data.template import ASSISTANT, ChatError, ChatTemplate, Message
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.data.tokenizer_files import TokenizerError
from jaxtp.generate.engine import GenerationError, Generator
from jaxtp.generate.request import Piece
from jaxtp.generate.settings import GenerationSettings

MAX_LINE = 2**24
"""Number of characters that a line of input must stay below."""


class Listener:
    """Turns a conversation into ids for the model: the template's special tokens are tokens, and a special token that a
    message spells, also one of the model's, is text.

    Earlier answers keep the ids that were generated, for as long as the template writes them as they were given. Where
    it writes one otherwise, such as without its reasoning, the whole text is encoded anew.

    Args:
      tokenizer: the tokenizer of the model.
      template: writes the conversation as one text.
      special_tokens: special tokens that messages spell become tokens too, but for those of the model's messages.

    Raises:
      TokenizerError: the tokenizer's special tokens cannot be told from text.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, special_tokens: bool = False):
        self._tokenizer, self._template = tokenizer, template
        self._rendered = rendered_tokenizer(tokenizer)
        self._entered = SpecialTokens(self._rendered.tokens, keep=special_tokens)
        self._answered = SpecialTokens(self._rendered.tokens)
        self._asked: tuple[str, list[int]] = "", []
        self._known: tuple[str, list[int]] = "", []

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of the conversation, up to where the model answers.

        Raises:
          ChatError: the template refuses it, or a message holds a code point that is no character.
        """
        escaped = [
            (self._answered if message["role"] == ASSISTANT else self._entered).escape(message) for message in messages
        ]
        marked = self._entered.mark(self._template.render(escaped))
        text, ids = self._known
        rest = marked.removeprefix(text)
        if not (marked.startswith(text) and self._rendered.begins_afresh(rest)):
            ids, rest = [], marked
        self._asked = marked, [*ids, *self._encode(rest)]
        return self._asked[1]

    def answered(self, answer: str, ids: Sequence[int]) -> None:
        """Remembers the ids of the answer to the conversation that `ids` was last called with.

        Args:
          answer: the text that was given; it may be shorter than the generated one, as before a stop text.
          ids: the ids that were generated.
        """
        whole = self._tokenizer.decode(np.array(ids, np.int64)).decode(errors="replace") if ids else ""
        text, asked = self._asked
        self._known = (text + answer, [*asked, *ids]) if whole == answer else ("", [])

    def _encode(self, marked: str) -> list[int]:
        ((ids, _),) = self._rendered.encode_batch([(marked, "")])
        return list(ids.tolist())


def opening(system: str | None) -> list[Message]:
    """Returns the messages before the first turn: the system message, if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def converse(generator: Generator, listener: Listener, settings: GenerationSettings, system: str | None = None) -> None:
    """Answers each line of standard input, knowing those before it, until there are no more.

    Args:
      generator: generates the answers.
      listener: turns the conversation into ids.
      settings: settings for each answer; Ctrl-C stops one, and the conversation goes on with the part there is.
      system: the system message.

    Raises:
      ChatError, TokenizerError, GenerationError: a line cannot be answered; a terminal shows the error instead, and the
        conversation goes on without the line.
    """
    messages = opening(system)
    while (line := _read_line()) is not None:
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer, ids = _print_as_it_comes(generator.stream([listener.ids(asked)], settings))
        except (ChatError, TokenizerError, GenerationError) as error:
            if not sys.stdin.isatty():
                raise
            print(f"not answered, and forgotten: {error}", file=sys.stderr)
            continue
        listener.answered(answer, ids)
        messages = [*asked, {"role": ASSISTANT, "content": without_noncharacters(answer)}]


def _read_line() -> str | None:
    """Returns the next line that is not blank; a terminal shows a prompt, and Ctrl-C discards an unfinished line."""
    if sys.stdin is None:  # closed by who started this
        return None
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline(MAX_LINE)
        except UnicodeDecodeError:
            raise ChatError("what was entered is not UTF-8") from None
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(Ctrl-D ends the chat)", file=sys.stderr)
            continue
        except OSError:  # the terminal is gone
            return None
        if len(line) == MAX_LINE:
            raise ChatError(f"a line has {MAX_LINE:,} characters or more, which is too many")
        if not line:
            print(end="\n" if terminal else "", file=sys.stderr)
            return None
        if line.strip():
            return line.removesuffix("\n")


def _print_as_it_comes(pieces: Iterator[Piece]) -> tuple[str, list[int]]:
    """Prints an answer piece by piece; returns its text and its tokens."""
    given, ids = [], []
    try:
        for piece in pieces:
            given.append(piece.text)
            ids += [] if piece.token is None else [piece.token]
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return "".join(given), ids
