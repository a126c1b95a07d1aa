"""Renders the chat templates that models come with: Jinja in a sandbox, in a process with limits."""

import json
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from jaxtp.data import template_worker as worker
from jaxtp.entry import UserError

Message = Mapping[str, Any]
"""`role` (system, user, assistant) and `content`."""

ASSISTANT = "assistant"
"""The role of the model."""

MAX_TEMPLATE = 2**20
"""Number of characters of a template at most; those that models come with have up to some ten thousand."""
SECONDS = 10.0
"""Seconds of computing at most, for loading a template and rendering one conversation by it."""
MEMORY = 2**30
"""Bytes that the process which does that may take."""
MAX_TEXT = 2**26
"""Number of characters of a rendered conversation at most."""


class ChatError(UserError):
    """A template that is missing, broken, or against the conversation; or a value that is no conversation."""


class ChatTemplate:
    """Renders a conversation as the text that a model goes on from.

    Args:
      template: the template, in Jinja.
      name: its name in messages.
      special_tokens: texts of the tokens that it may name, such as bos_token.

    Raises:
      ChatError: it is no template, takes too much to load, or the library jinja2 is not installed.
    """

    def __init__(self, template: str, name: str, special_tokens: Mapping[str, str]):
        if find_spec("jinja2") is None:
            raise ChatError("a chat template needs the library jinja2: pip install 'jaxtp[chat]'")
        if len(template) > MAX_TEMPLATE:
            raise ChatError(f"{name}: more than {MAX_TEMPLATE:,} characters, the limit for a chat template")
        self._template, self._name, self._special_tokens = template, name, dict(special_tokens)
        self._ask(None)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Returns the conversation as text, with the beginning of the next answer if one is wanted.

        Raises:
          ChatError: the template refuses it, fails, or takes too much time or memory.
        """
        return self._ask({"messages": messages, "add_generation_prompt": answer, **self._special_tokens})

    def _ask(self, variables: dict[str, Any] | None) -> str:
        try:
            kind, text = _RENDERER.ask(self._template, variables)
        except _EndedError as error:
            when = "when it is loaded" if variables is None else "on this conversation"
            raise ChatError(f"{self._name} {error} {when}") from None
        if kind == worker.TEXT:
            return text
        if kind == worker.BROKEN:
            raise ChatError(f"{self._name}: not a chat template: {text}")
        verb = "refuses" if kind == worker.REFUSED else "fails on"
        raise ChatError(f"{self._name} {verb} this conversation: {text}")


class _EndedError(Exception):
    """The worker ended over a request; the message says why."""


class _Renderer:
    """The worker for all templates of this process: it starts with the first request, and again after it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None
        self._one_at_a_time = threading.Lock()

    def ask(self, template: str, variables: dict[str, Any] | None) -> tuple[int, str]:
        """Loads a template, and renders it if there are variables; returns the answer's kind, and the answer.

        Raises:
          _EndedError: that took too much time or memory.
        """
        request = pickle.dumps((template, variables, SECONDS))
        with self._one_at_a_time:
            process = self._started()
            try:
                return _exchange(process, request)
            except BaseException as error:
                ended = isinstance(error, OSError | EOFError)
                code = process.wait() if ended else None
                self._process = None
                self._end()  # after Ctrl-C its answer would be taken for that to the next request
                if code is None:
                    raise
                raise _EndedError(_reason(code)) from None

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker.__file__, str(MEMORY), str(MAX_TEXT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is not meant for it
            )
            self._end = weakref.finalize(self, _close, self._process)
        return self._process


_RENDERER = _Renderer()


def _exchange(process: "subprocess.Popen[bytes]", request: bytes) -> tuple[int, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer.endswith(b"\n"):
        raise EOFError
    kind, text = json.loads(answer)
    return kind, text


def _close(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError), process:  # what it has not read is lost
        pass


def _reason(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"takes more than {SECONDS:g} s of computing, the limit for a chat template,"
    if code == worker.OUT_OF_MEMORY:
        return f"takes more than {MEMORY // 2**20:,} MiB of memory, the limit for a chat template,"
    return f"crashes the process that renders it (exit code {code})"
