"""Renders chat templates in a sandboxed process and tokenizes the result.

Special tokens that the template writes must become tokens; special tokens that messages spell must
stay text. While the template renders, `U+FDD2 number U+FDD3` replaces each special token in a
message. All special tokens in the result then come from the template, and are marked by U+FDD0
before and U+FDD1 after them. Messages may not contain these noncharacters. A copy of the tokenizer
has the marked spellings as its special tokens, so it encodes the whole text in one pass.
"""

import json
import pickle
import re
import signal
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

from jaxtp.config.entry import UserError
from jaxtp.data import worker_process
from jaxtp.data.documents import Tokens
from jaxtp.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    encode_isolated,
    load_library,
)
from jaxtp.data.tokenizer_files import TokenizerError
from jaxtp.data.worker import WORKER, WorkerDiedError

Message = Mapping[str, Any]  # `role` (system, user, assistant) and `content`

ASSISTANT = "assistant"

SECONDS = 10.0  # CPU time for loading a template and rendering one conversation
MEMORY = 2**30  # Bytes that the rendering process may take
MAX_TEXT = 2**26  # Characters of a rendered conversation
_BEFORE = "\ufdd0"
_AFTER = "\ufdd1"
_SPELLED = "\ufdd2"
_END = "\ufdd3"
_NONCHARACTERS = re.compile(f"[{_BEFORE}-{_END}]")
_MARKS = re.compile(f"[{_BEFORE}{_AFTER}]")
_ESCAPED = re.compile(f"{_SPELLED}([0-9]{{1,9}}){_END}|[{_SPELLED}{_END}]")


class ChatError(UserError):
    """A template is unusable or refuses a conversation, or a conversation is invalid."""


class ChatTemplate:
    """Renders conversations.

    Args:
      template: the template in Jinja.
      name: the template's name in messages.
      special_tokens: variables of the template, such as bos_token.
      day: the day that the template reads as today (`strftime_now`), such as 2026-01-31; by default
        the day of the rendering.
    """

    def __init__(
        self, template: str, name: str, special_tokens: Mapping[str, str], day: str | None = None
    ):
        if find_spec("jinja2") is None:
            raise ChatError("a chat template needs the library jinja2: pip install 'jaxtp[chat]'")
        self.text = template
        self.special_tokens = dict(special_tokens)
        self._name = name
        self.day = day
        self._request(None)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Returns the text, with the next answer's header if `answer`."""
        return self._request(
            {"messages": messages, "add_generation_prompt": answer, **self.special_tokens}
        )

    def _request(self, variables: dict[str, object] | None) -> str:
        request = {
            "template": self.text,
            "variables": variables,
            "day": self.day,
            "characters": MAX_TEXT,
            "memory": MEMORY,
            "seconds": SECONDS,
        }
        try:
            problem, text = json.loads(WORKER.request(pickle.dumps(request)))
        except WorkerDiedError as died:
            when = "when it is loaded" if variables is None else "on this conversation"
            limits = {
                -signal.SIGPROF: f"{SECONDS:g} s of computing",
                worker_process.OUT_OF_MEMORY: f"{MEMORY // 2**20:,} MiB of memory",
            }
            problem = f" crashes the process that renders it ({died}) {when}"
            if died.code in limits:
                problem = (
                    f" takes more than {limits[died.code]}, the limit for a chat template, {when}"
                )
        if problem:
            raise ChatError(f"{self._name}{problem}")
        return str(text)


def writes_day(template: str) -> bool:
    """Returns whether a template may write the day on which it renders."""
    return "strftime_now" in template


class ChatTokenizer:
    """Makes tokens of rendered conversations, in a worker, as `IsolatedTokenizer` does.

    Special tokens of the template become tokens; special tokens that messages spell stay text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.special: dict[str, int] = {}
        """The special tokens and their ids."""
        self._content = b""  # a tokenizer.json with marked special tokens; empty for bytes
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self._name = tokenizer.name
            self.special = tokenizer.special
            marked = {token: marks(token) for token in self.special}
            self._content = json.dumps(_renamed(tokenizer.file(), marked)).encode()
            library = load_library(self._content, self._name)
            for token, id in self.special.items():
                if library.token_to_id(marked[token]) != id:
                    raise TokenizerError(
                        f"{self._name}: special token {token!r} is indistinguishable from text "
                        "that spells it"
                    )
        self._tokens = sorted(self.special, key=len, reverse=True)  # the longest match wins
        self._number = {token: number for number, token in enumerate(self._tokens)}
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")

    def escape(self, value: object, *, keep: bool = False) -> Any:
        """Escapes a message or a part of it; raises `ChatError` for invalid code points.

        If `keep`, special tokens that it spells become tokens.
        """
        if isinstance(value, str):
            _require_characters(value)
            if keep:
                return value
            return self._pattern.sub(lambda m: f"{_SPELLED}{self._number[m[0]]}{_END}", value)
        if isinstance(value, list | tuple):
            return [self.escape(part, keep=keep) for part in value]
        if isinstance(value, Mapping):
            return {
                key: self.escape(part, keep=keep) for key, part in value.items() if part is not None
            }
        return value

    def mark(self, rendered: str) -> str:
        """Marks the template's special tokens and restores the messages.

        Drops noncharacters that the template writes, or that remain where it cuts a message.
        """
        marked = self._pattern.sub(lambda match: marks(match[0]), _MARKS.sub("", rendered))
        return _ESCAPED.sub(self._spelled, marked)

    def _spelled(self, match: re.Match[str]) -> str:
        number = int(match[1] or -1)
        return self._tokens[number] if 0 <= number < len(self._tokens) else ""

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tokens, Tokens]]:
        """Returns the ids of both parts of each pair of marked texts.

        A token that spans both belongs to the first.
        """
        if not self._content:
            ids = ByteTokenizer().encode_batch(list(chain.from_iterable(pairs)))
            return list(zip(ids[::2], ids[1::2], strict=True))
        texts = [first + second for first, second in pairs]
        lengths = [len(first) for first, _ in pairs]
        return encode_isolated(self._content, self._name, texts, lengths)


def _require_characters(text: str) -> None:
    match = _NONCHARACTERS.search(text)
    if match:
        raise ChatError(f"a message holds U+{ord(match[0]):04X}, which is not a character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ChatError(
            "a message holds half of a surrogate pair, which is not a character"
        ) from None


def marks(token: str) -> str:
    """Returns a special token between its marks."""
    return f"{_BEFORE}{token}{_AFTER}"


def without_marks(marked: str) -> str:
    """Returns the text without marks."""
    return _MARKS.sub("", marked)


def without_noncharacters(text: str) -> str:
    """Replaces the noncharacters used as marks by U+FFFD."""
    return _NONCHARACTERS.sub("\ufffd", text)


def _renamed(file: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    def rename(record: dict[str, Any], key: str) -> None:
        record[key] = names.get(record[key], record[key])

    model = file["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): id for token, id in vocabulary.items()}
    else:  # Unigram: (token, score) pairs
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if "unk_token" in model:
        rename(model, "unk_token")
    for token in file["added_tokens"]:
        rename(token, "content")
    file["post_processor"] = None
    return file
