"""The process that renders chat templates within limits; `chat_template.py` starts it.

A template is untrusted code: a single operator or string method can exhaust memory or time. The
kernel limits both for this process. This file imports nothing from jaxtp, to start quickly.
"""

import json
import os
import pickle
import random
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime, time
from functools import lru_cache, partial
from typing import Any, BinaryIO

OUT_OF_MEMORY = 77  # Exit code
_SHOWN = 300  # Maximum characters of an error message, which a template may have written


class RefusedError(Exception):
    """Raised by a template."""


def main(memory: int, characters: int) -> None:
    """Answers requests, within `memory` bytes and `characters` per text."""
    with suppress(ValueError, OSError):  # some systems cannot limit memory
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # SIGPROF ends the process, even within one long operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer, characters)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _serve(requests: BinaryIO, answers: BinaryIO, characters: int) -> None:
    while requests.peek(1):  # type: ignore[attr-defined]
        template, variables, day, seconds = pickle.load(requests)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        problem, text = _answer(template, variables, day)
        if len(text) > characters:
            problem = (
                f" fails on this conversation: its text has more than {characters:,} characters"
            )
            text = ""
        answer = json.dumps([problem, text], ensure_ascii=False).encode(errors="replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + b"\n")
        answers.flush()


def _answer(template: str, variables: Mapping[str, Any] | None, day: str | None) -> tuple[str, str]:
    """Returns a problem (empty if there is none) and the text.

    In a message, the problem follows the template's name. If `day` is given, the template reads
    noon of this day as the present time, so that it always writes the same text.
    """
    random.seed(0)  # Jinja has a filter `random`
    _DAY[0] = day
    try:
        render = _load(template)
    except Exception as error:
        return f": not a chat template: {_shown(error)}", ""
    try:
        text = "" if variables is None else render(**variables)
        text.encode()  # a template may write a lone surrogate
        return "", text
    except Exception as error:
        verb = "refuses" if isinstance(error, RefusedError) else "fails on"
        return f" {verb} this conversation: {_shown(error)}", ""


_DAY: list[str | None] = [None]


def _strftime_now(form: str) -> str:
    day = _DAY[0]
    now = datetime.now() if day is None else datetime.combine(date.fromisoformat(day), time(12))
    return now.strftime(form)


@lru_cache(maxsize=8)
def _load(template: str) -> Callable[..., str]:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment.from_string(template).render


def _shown(error: Exception) -> str:
    if isinstance(error, MemoryError):
        raise error
    text = str(error) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _refuse(message: str) -> None:
    raise RefusedError(message)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
