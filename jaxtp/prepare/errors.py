"""The events of reading inputs: a document, a problem with an item, and a mistake that ends the command."""

import json
from typing import Any, NamedTuple

from jaxtp.entry import UserError

END = -1
"""The `item` of an event after which the rest of its source cannot be read."""

EMPTY_FILE, EMPTY_DOCUMENT, BINARY_FILE, DUPLICATE = "empty file", "empty document", "binary file", "duplicate"
UNREADABLE, BROKEN_FILE, NOT_UTF8 = "unreadable file", "broken file", "not UTF-8"
NOT_JSON, NO_FIELD, NOT_A_STRING = "not JSON", "no such field", "not a string"
NO_CONVERSATION, TOO_LARGE = "no conversation", "too large"
"""Reasons to leave something out, as `dataset.json` counts them."""


class PrepareError(UserError):
    """A user's mistake or a bad input, complete in its message."""


class TooLargeError(ValueError):
    """A conversation whose documents take more memory together than one document may."""


class Turn(NamedTuple):
    """A document of the dataset."""

    prompt: str | None
    """The prompt of instruction data and conversations; else None."""

    text: str
    """The document, without its prompt."""

    rendered: bool = False
    """Whether a chat template wrote it, with marks around its special tokens (`data/chat_tokenizer.py`)."""


class Document(NamedTuple):
    """A document as it was read."""

    turns: tuple[Turn, ...]
    """One turn; for a conversation, one for each answer."""

    item: int
    """Number of items (lines, rows) of its source that have been read, this one included."""

    done: int
    """Bytes of its source that have been read; approximate."""


class Problem(NamedTuple):
    """A source or an item of it that gives no document."""

    kind: str
    message: str
    item: int
    done: int
    harmless: bool = False
    """Whether it is left out and counted, whatever `--on-error` says."""


def shown(value: Any) -> str:
    """Returns the beginning of a value as JSON, for messages."""
    text = json.dumps(value, default=str)
    return f"{text[:40]}..." if len(text) > 40 else text
