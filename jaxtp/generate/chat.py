"""A conversation: the loop that asks and answers."""

import sys
from collections.abc import Iterator

from jaxtp.data.template import ChatError, ChatTemplate, Message
from jaxtp.generate.engine import Generator
from jaxtp.generate.row import Piece
from jaxtp.generate.settings import GenerationSettings


def converse(
    generator: Generator, template: ChatTemplate, settings: GenerationSettings, system: str | None = None
) -> None:
    """Answers each line of standard input, knowing those before it, until there are no more.

    Args:
      generator: answers.
      template: makes a text of the conversation.
      settings: of each answer; Ctrl-C stops one, and the conversation goes on from what there is of it.
      system: what the model is told at the beginning.
    """
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    while (line := _read_line()) is not None:
        messages.append({"role": "user", "content": line})
        (ids,) = generator.tokenizer.encode_batch([template.render(messages)])
        answer = _print_as_it_comes(generator.stream([ids.tolist()], settings))
        messages.append({"role": "assistant", "content": answer})


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
