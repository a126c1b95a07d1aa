"""A conversation: chat templates as models come with them (Jinja, in a sandbox), and the loop that asks and answers."""

import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtp.generate.engine import Generator
from jaxtp.generate.row import Piece
from jaxtp.generate.settings import GenerationSettings

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


class ChatError(ValueError):
    """A template that is missing, broken, or against the conversation."""


class ChatTemplate:
    """A conversation into the text that a model goes on from.

    Args:
      template: in Jinja.
      name: what it is called in messages.
      special_tokens: what it may name, such as bos_token.

    Raises:
      ChatError: it is no template, or the library jinja2 is not installed.
    """

    def __init__(self, template: str, name: str, special_tokens: Mapping[str, str]):
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ChatError("--chat needs the library jinja2: pip install 'jaxtp[chat]'") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self._name = name
        self._special_tokens = special_tokens
        self._errors: tuple[type[Exception], ...] = (
            TemplateError,
            ArithmeticError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        )
        try:
            self._template = environment.from_string(template)
        except self._errors as error:
            raise ChatError(f"{name}: not a chat template: {error}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation, and the beginning of the next answer.

        Raises:
          ChatError: the template refuses it, or fails.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except ChatError as error:
            raise ChatError(f"{self._name} refuses this conversation: {error}") from None
        except self._errors as error:
            raise ChatError(f"{self._name} fails on this conversation: {error}") from None


def _refuse(message: str) -> None:
    raise ChatError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own escapes for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


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
