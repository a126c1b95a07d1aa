"""The process that loads a `tokenizer.json` and encodes texts within limits.

`tokenizer.py` starts it.

The `tokenizers` library aborts its process when memory is exhausted, and a file of a few kilobytes
can make it take all memory for a text of one letter. This file imports nothing from jaxtp, to start
quickly.
"""

import json
import os
import pickle
import resource
import signal
import sys
from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

UNKNOWN = "unknown"
"""The problem of a request whose tokenizer is not loaded; the same request with the `content` loads
it."""
OUT_OF_MEMORY = 77  # Exit code
_MAX_LOADED = 4  # Maximum number of tokenizers in memory
_RESERVED_BY_THREAD = 2**27  # Bytes of address space for a thread's stack and heap


def main() -> None:
    """Answers requests: pickled keyword arguments of `_answer`, with `memory` and `seconds`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # SIGPROF ends the process, even within one long operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    loaded: dict[str, Tokenizer] = {}
    while requests.peek(1):  # type: ignore[attr-defined]
        request = pickle.load(requests)
        _limit_memory(request.pop("memory"))
        signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
        ids = array("I")
        sizes = []
        cuts = []
        problem = ""
        try:
            encodings = _answer(loaded, **request)
            lengths = request["before"] or [0] * len(encodings)
            for encoding, before in zip(encodings, lengths, strict=True):
                sizes.append(len(encoding.ids))
                ids.extend(encoding.ids)
                cuts.append(tokens_before(encoding, before))
        except MemoryError:
            raise
        except LookupError:
            problem = UNKNOWN
        except BaseException as error:  # a panic of the library is not an Exception
            problem = str(error)[:300] or type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps([problem, sizes, cuts]).encode() + b"\n")
        if not problem:
            answers.write(ids.tobytes())
        answers.flush()


def _answer(
    loaded: "dict[str, Tokenizer]",
    *,
    key: str,
    content: bytes | None,
    texts: list[str],
    before: list[int] | None,
    settings: Mapping[str, bool],
) -> "list[Encoding]":
    """Returns the encodings of texts; raises KeyError for a tokenizer that is not loaded."""
    if content is not None:
        if len(loaded) == _MAX_LOADED:
            del loaded[next(iter(loaded))]
        loaded[key] = load(content)
    tokenizer = loaded[key]
    tokenizer.encode_special_tokens = settings.get("encode_special_tokens", False)
    # Only `encode_batch` computes the positions of tokens.
    encode = tokenizer.encode_batch_fast if before is None else tokenizer.encode_batch
    try:
        encodings: list[Encoding] = encode(
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

    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except LookupError as error:
        raise ValueError(str(error)) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer


def tokens_before(encoding: "Encoding", before: int) -> int:
    """Returns the number of tokens that start in the first `before` characters."""
    return sum(start < before for start, _ in encoding.offsets) if before else 0


def _limit_memory(max_bytes: int) -> None:
    """Limits the memory to `max_bytes` more than now, plus the addresses that threads reserve."""
    # Some systems cannot limit memory.
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        pages = list(map(int, file.read().split()))
        reserved = _RESERVED_BY_THREAD * (os.cpu_count() or 1)
        _set_limit(resource.RLIMIT_DATA, pages[5] * resource.getpagesize() + max_bytes)
        _set_limit(resource.RLIMIT_AS, pages[0] * resource.getpagesize() + max_bytes + reserved)


def _set_limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
