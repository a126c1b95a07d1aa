"""The process that renders chat templates and encodes texts within limits; `worker.py` starts it.

A template is untrusted code: a single operator or string method can exhaust memory or time. The
`tokenizers` library aborts its process when memory is exhausted, and a file of a few kilobytes can
make it take all memory for a text of one letter. The kernel limits both for this process. This file
imports nothing from jaxtp, to start quickly.
"""

import json
import os
import pickle
import random
import resource
import signal
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime, time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

SPAN = "\ufdd4"
SPAN_END = "\ufdd5"
"""Marks around the blocks `{% generation %}` of a text."""
UNKNOWN = "unknown"
"""The problem of a request whose tokenizer is not loaded; the same request with the `content` loads
it."""
OUT_OF_MEMORY = 77  # Exit code
_MAX_LOADED = 4  # Maximum number of tokenizers in memory
_RESERVED_BY_THREAD = 2**27  # Bytes of address space for a thread's stack and heap
_SHOWN = 300  # Maximum characters of an error message, which a template may have written
_LOADED: "dict[str, Tokenizer]" = {}


class RefusedError(Exception):
    """Raised by a template."""


def main() -> None:
    """Answers requests: pickled keyword arguments of `render` or `encode`, with `memory` and
    `seconds`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # SIGPROF ends the process, even within one long operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    try:
        while requests.peek(1):  # type: ignore[union-attr]
            request = pickle.load(requests)
            with limited_memory(request.pop("memory")):
                signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
                answer = encode(**request) if "texts" in request else render(**request)
                signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(len(answer).to_bytes(8, "little") + answer)
            answers.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def render(
    template: str,
    variables: Sequence[Mapping[str, Any]],
    day: str | None,
    characters: int,
    with_spans: bool,
) -> bytes:
    """Returns a problem, and a text of up to `characters` for each set of variables, as JSON.

    If `with_spans`, the texts have marks around their blocks `{% generation %}`.
    """
    problem = ""
    texts: list[str] = []
    try:
        write = _template(template, day, with_spans)
    except Exception as error:
        problem = f": not a chat template: {_shown(error)}"
        variables = ()
    for named in variables:
        problem, text = _rendered(write, named)
        if len(text) > characters:
            problem = (
                f" fails on this conversation: its text has more than {characters:,} characters"
            )
        if problem:
            texts = []
            break
        texts.append(text)
    return json.dumps([problem, texts], ensure_ascii=False).encode(errors="replace")


def encode(*, before: list[int] | None, **request: Any) -> bytes:
    """Returns a problem, the number of ids of each text and of its first part, as a line of JSON,
    and then the ids.

    Args:
      before: the number of characters of each text's first part.
      **request: other arguments of `_encodings`.
    """
    ids = array("I")
    sizes = []
    cuts = []
    problem = ""
    try:
        encodings = _encodings(is_whole=before is None, **request)
        for encoding, characters in zip(encodings, before or [0] * len(encodings), strict=True):
            sizes.append(len(encoding.ids))
            ids.extend(encoding.ids)
            # The tokens that start in the first part
            starts = encoding.offsets if characters else ()
            cuts.append(sum(start < characters for start, _ in starts))
    except MemoryError:
        raise
    except LookupError:
        problem = UNKNOWN
    except BaseException as error:  # a panic of the library is not an Exception
        problem = str(error)[:300] or type(error).__name__
    line = json.dumps([problem, sizes, cuts]).encode() + b"\n"
    return line if problem else line + ids.tobytes()


def _rendered(write: Callable[..., str], variables: Mapping[str, Any]) -> tuple[str, str]:
    """Returns a problem (empty if there is none) and the text.

    In a message, the problem follows the template's name.
    """
    random.seed(0)  # Jinja has a filter `random`
    try:
        text = write(**variables)
        text.encode()  # a template may write a lone surrogate
        return "", text
    except Exception as error:
        verb = "refuses" if isinstance(error, RefusedError) else "fails on"
        return f" {verb} this conversation: {_shown(error)}", ""


def _strftime_now(day: str | None, form: str) -> str:
    now = datetime.now() if day is None else datetime.combine(date.fromisoformat(day), time(12))
    return now.strftime(form)


@lru_cache(maxsize=8)
def _template(template: str, day: str | None, with_spans: bool) -> Callable[..., str]:
    """Returns the function that renders a template, with the extensions of transformers.

    If `day` is given, the template reads noon of this day as the present time, so that it always
    writes the same text.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}`, which marks what a model writes: its content alone."""

        tags = {"generation"}  # noqa: RUF012 (as in Jinja)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # As in transformers, the block is a call: what it sets is not set after it.
            call = nodes.CallBlock(self.call_method("_content"), [], [], content)
            return call.set_lineno(line)

        def _content(self, caller: Callable[[], str]) -> str:
            return f"{SPAN}{caller()}{SPAN_END}" if with_spans else caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": partial(_strftime_now, day),
    }
    return environment.from_string(template).render


def _shown(error: Exception) -> str:
    if isinstance(error, MemoryError):
        raise error
    text = str(error) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _refuse(message: str) -> None:
    raise RefusedError(message)


def _encodings(
    *,
    key: str,
    content: bytes | None,
    texts: list[str],
    is_whole: bool,
    settings: Mapping[str, bool],
) -> "list[Encoding]":
    """Returns the encodings of texts; raises KeyError for a tokenizer that is not loaded."""
    if content is not None:
        if len(_LOADED) == _MAX_LOADED:
            del _LOADED[next(iter(_LOADED))]
        _LOADED[key] = load(content)
    tokenizer = _LOADED[key]
    tokenizer.encode_special_tokens = settings.get("encode_special_tokens", False)
    # Only `encode_batch` computes the positions of tokens.
    encode_batch = tokenizer.encode_batch_fast if is_whole else tokenizer.encode_batch
    try:
        encodings: list[Encoding] = encode_batch(
            texts, add_special_tokens=settings.get("add_special_tokens", False)
        )
    except TypeError:
        # The texts are strings. If tokenizers 0.21 has no memory to copy them, it says that they
        # are not.
        raise MemoryError from None
    return encodings


def load(content: bytes) -> "Tokenizer":
    """Returns a tokenizer without truncation, padding and dropout."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer


@contextmanager
def limited_memory(max_bytes: int) -> Iterator[None]:
    """Limits the memory to `max_bytes` more than now, plus the addresses that threads reserve."""
    before: dict[int, tuple[int, int]] = {}
    # Some systems cannot limit memory.
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        pages = list(map(int, file.read().split()))
        reserved = _RESERVED_BY_THREAD * (os.cpu_count() or 1)
        for kind, used, more in (
            (resource.RLIMIT_DATA, pages[5], max_bytes),
            (resource.RLIMIT_AS, pages[0], max_bytes + reserved),
        ):
            before[kind] = soft, hard = resource.getrlimit(kind)
            limit = used * resource.getpagesize() + more
            if soft == resource.RLIM_INFINITY or limit < soft:
                resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


if __name__ == "__main__":
    main()
