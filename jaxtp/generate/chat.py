"""A conversation: the loop that asks and answers."""

import sys
from collections.abc import Iterator, Sequence

from jaxtp.data.rendered import SpecialTokens, rendered_tokenizer
from jaxtp.data.template import ASSISTANT, ChatError, ChatTemplate, Message
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.engine import Generator
from jaxtp.generate.row import Piece
from jaxtp.generate.settings import GenerationSettings


class Listener:
    """Makes of a conversation what the model reads: special tokens are the template's and the model's own, and what
    others spell is text.

    Args:
      tokenizer: of the model.
      template: makes a text of the conversation.
      special_tokens: what others spell becomes tokens too.

    Raises:
      TokenizerError: the tokenizer's special tokens cannot be told from text.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, special_tokens: bool = False):
        self._template = template
        self._rendered = rendered_tokenizer(tokenizer)
        self._special = SpecialTokens(self._rendered.tokens, keep=special_tokens)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation, up to where the model answers.

        Raises:
          ChatError: the template refuses it, or a message holds what is no character.
        """
        heard = [message if message["role"] == ASSISTANT else self._special.escape(message) for message in messages]
        marked = self._special.mark(self._template.render(heard))
        ((ids, _),) = self._rendered.encode_batch([(marked, "")])
        return list(ids.tolist())


def converse(generator: Generator, listener: Listener, settings: GenerationSettings, system: str | None = None) -> None:
    """Answers each line of standard input, knowing those before it, until there are no more.

    Args:
      generator: answers.
      listener: makes tokens of the conversation.
      settings: of each answer; Ctrl-C stops one, and the conversation goes on from what there is of it.
      system: what the model is told at the beginning.
    """
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    while (line := _read_line()) is not None:
        messages.append({"role": "user", "content": line})
        answer = _print_as_it_comes(generator.stream([listener.ids(messages)], settings))
        messages.append({"role": ASSISTANT, "content": answer})


def _read_line() -> str | None:
    """The next line that is not blank; asks for it in a terminal."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise ChatError("what was entered is not UTF-8") from None
        if not line:
            return None
        if line.strip():
            return line.removesuffix("\n")


def _print_as_it_comes(pieces: Iterator[Piece]) -> str:
    given = []
    try:
        for piece in pieces:
            given.append(piece.text)
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return "".join(given)
