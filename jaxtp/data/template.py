"""Chat templates as models come with them: Jinja, in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""`role` (system, user, assistant) and `content`."""

ASSISTANT = "assistant"
"""The role of the model."""


class ChatError(ValueError):
    """A template that is missing, broken, or against the conversation; or what is no conversation."""


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
            raise ChatError("a chat template needs the library jinja2: pip install 'jaxtp[chat]'") from None
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

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The conversation, and the beginning of the next answer if one is wanted.

        Raises:
          ChatError: the template refuses it, or fails.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=answer, **self._special_tokens)
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
