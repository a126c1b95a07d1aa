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

import numpy as np

from jaxtp.config.entry import UserError
from jaxtp.config.reading import truncate
from jaxtp.data import worker_process
from jaxtp.data.documents import Tokens
from jaxtp.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    as_tokenizer_error,
    encode_isolated,
    load_library,
)
from jaxtp.data.tokenizer_files import TokenizerError
from jaxtp.data.worker import WORKER, WorkerDiedError
from jaxtp.data.worker_process import SPAN, SPAN_END

Message = Mapping[str, Any]  # `role` (system, user, assistant) and `content`

ASSISTANT = "assistant"

SECONDS = 10.0  # CPU time for loading a template and rendering one conversation
MEMORY = 2**30  # Bytes that the rendering process may take
MAX_TEXT = 2**26  # Characters of a rendered conversation
_BEFORE = "\ufdd0"
_AFTER = "\ufdd1"
_SPELLED = "\ufdd2"
_END = "\ufdd3"
_NONCHARACTERS = re.compile(f"[{_BEFORE}-{SPAN_END}]")
_MARKS = re.compile(f"[{_BEFORE}{_AFTER}{SPAN}{SPAN_END}]")
SPANS = re.compile(f"[{SPAN}{SPAN_END}]")
_ESCAPED = re.compile(f"{_SPELLED}([0-9]{{1,9}}){_END}|[{_SPELLED}{_END}]")
WORD = "Qx7"  # stands for a content, to see whether a template writes it


class ChatError(UserError):
    """A template is unusable or refuses a conversation, or a conversation is invalid."""


class RenderError(ChatError):
    """A template is unusable or refuses a conversation."""


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
        self, template: str, name: str, special_tokens: Mapping[str, Any], day: str | None = None
    ):
        if find_spec("jinja2") is None:
            raise ChatError("a chat template needs the library jinja2: pip install 'jaxtp[chat]'")
        self.text = template
        self.special_tokens = dict(special_tokens)
        self.name = name
        self.day = day
        self._reads_parts = False
        self._request([])
        if not self._writes_content():
            self._reads_parts = True
            self._reads_parts = self._writes_content()

    def render(
        self,
        messages: Sequence[Message],
        *,
        answer: bool = True,
        arguments: Mapping[str, object] | None = None,
        with_spans: bool = False,
    ) -> str:
        """Returns the text, with the next answer's header if `answer`.

        Args:
          arguments: other variables of the template, such as its tools.
          with_spans: whether the text has marks around its blocks `{% generation %}` (`SPANS`).
        """
        variables = self._variables(messages, answer, arguments or {})
        (text,) = self._request([variables], with_spans)
        return text

    def render_turn(
        self, messages: Sequence[Message], arguments: Mapping[str, object]
    ) -> tuple[str, str]:
        """Returns the prompt of the last message, and the text that ends with this message."""
        before = self._variables(messages[:-1], True, arguments)
        prompt, whole = self._request([before, self._variables(messages, False, arguments)])
        return prompt, whole

    def _writes_content(self) -> bool:
        try:
            text = self.render([{"role": "user", "content": WORD}])
        except RenderError:
            return False
        # In quotes it is a list of parts as Python writes it.
        return WORD in text and repr(WORD) not in text

    def _variables(
        self, messages: Sequence[Message], answer: bool, arguments: Mapping[str, object]
    ) -> dict[str, object]:
        if self._reads_parts:
            # Templates of multimodal models may read a content as a list of parts only.
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            ]
        return {
            # Templates test whether they are none, and some fail where they are not defined.
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **arguments,
            "messages": messages,
            "add_generation_prompt": answer,
        }

    def _request(
        self, variables: Sequence[Mapping[str, object]], with_spans: bool = False
    ) -> list[str]:
        request = {
            "template": self.text,
            "variables": variables,
            "day": self.day,
            "characters": MAX_TEXT,
            "with_spans": with_spans,
            "memory": MEMORY,
            "seconds": SECONDS,
        }
        try:
            problem, texts = json.loads(WORKER.request(pickle.dumps(request)))
        except WorkerDiedError as died:
            when = "on this conversation" if variables else "when it is loaded"
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
            raise RenderError(f"{self.name}{problem}{self._loops(problem, variables)}")
        return list(texts)

    def _loops(self, problem: str, variables: Sequence[Mapping[str, object]]) -> str:
        """Returns what to do about a loop over tools or documents where there are none."""
        if "'NoneType' object is not iterable" not in problem:
            return ""
        for name in ("tools", "documents"):
            is_absent = any(named[name] is None for named in variables)
            if is_absent and re.search(rf"\bin\s+{name}\b", self.text):
                return (
                    f"; it loops over {name!r}, and there are none here: write "
                    f"'in {name} or []' in the template"
                )
        return ""


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
            self._library = load_library(self._content, self._name)
            for token, id in self.special.items():
                if self._library.token_to_id(marked[token]) != id:
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
                self.escape(key, keep=keep): self.escape(part, keep=keep)
                for key, part in value.items()
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
        """Returns the ids of the prompt and of the answer of each pair of marked texts.

        The prompt is encoded alone, as at inference. The answer is encoded as the continuation of
        the prompt; if a token would span both, it is encoded in the middle of another text. Raises
        `TokenizerError`.
        """
        if not self._content:
            ids = ByteTokenizer().encode_batch(list(chain.from_iterable(pairs)))
            return list(zip(ids[::2], ids[1::2], strict=True))
        # A text is split at special tokens, so what follows the last one of a prompt suffices to
        # encode the answer after it.
        tails = [prompt[max(prompt.rfind(_BEFORE), 0) :] for prompt, _ in pairs]
        prompts = self._encode([(prompt, "") for prompt, _ in pairs])
        answers = self._encode(
            [(tail, answer) for tail, (_, answer) in zip(tails, pairs, strict=True)]
        )
        encoded = []
        for tail, (_, text), (prompt, _), (before, answer) in zip(
            tails, pairs, prompts, answers, strict=True
        ):
            if not np.array_equal(prompt[len(prompt) - len(before) :], before):
                answer = self._encode_in_text(tail, text)
            encoded.append((prompt, answer))
        return encoded

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tokens, Tokens]]:
        """Returns the ids of both parts; a token that spans them belongs to the first."""
        texts = [first + second for first, second in pairs]
        is_whole = not any(second for _, second in pairs)
        before = None if is_whole else [len(first) for first, _ in pairs]
        return encode_isolated(self._content, self._name, texts, before)

    def _encode_in_text(self, prompt: str, answer: str) -> Tokens:
        """Returns the ids of an answer that follows a prompt with whose end it shares a token.

        By itself it would begin a text: tokenizers from SentencePiece write a space before it. So
        it is encoded after a text that shares no token with it.
        """
        texts = ("\n", *map(marks, self._tokens[:1]), "a", "1", ".")
        (start, whole, *alone), _ = zip(
            *self._encode([(text, "") for text in (prompt, prompt + answer, *texts)]), strict=True
        )
        after = self._encode([(text, answer) for text in texts])
        spelling = self._decode(whole)
        for ids, (before, ids_of_answer) in zip(alone, after, strict=True):
            is_split = np.array_equal(before, ids)
            if is_split and self._decode(np.append(start, ids_of_answer)) == spelling:
                return ids_of_answer
        raise TokenizerError(
            f"{self._name}: an answer cannot be told from the end of its prompt, "
            f"{without_marks(prompt)[-40:]!r}: {truncate(without_marks(answer), 40)}"
        )

    def _decode(self, ids: Tokens) -> str:
        # After a letter, because spaces at the start of a text may be left out.
        letter = self._library.encode("a", add_special_tokens=False).ids
        try:
            return str(self._library.decode(letter + ids.tolist(), skip_special_tokens=False))
        except BaseException as error:
            raise as_tokenizer_error(error, f"{self._name}: cannot decode") from None


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
