"""Converts conversations to documents.

A document is an answer of the assistant; everything before it is its prompt.

A template may render an earlier answer differently from the last one. With one document per answer,
training sees exactly the input of inference, but reads the beginning of a conversation several
times.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxtp.config.files import write_atomically
from jaxtp.data.chat_template import (
    ASSISTANT,
    ChatError,
    ChatTemplate,
    ChatTokenizer,
    Message,
    without_marks,
    writes_day,
)
from jaxtp.data.documents import Tokens
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import MEDIA, BadInputError, Fields, Row, Turn, shorten, too_large
from jaxtp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_file
from jaxtp.data.tokenizer_files import (
    TEMPLATE,
    TEMPLATE_DAY,
    TOKENIZER_CONFIG,
    chat_template,
    read_template,
    special_tokens,
)

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), ASSISTANT),
    **dict.fromkeys(("observation", "tool"), "tool"),
    "system": "system",
}
"""ShareGPT's values of `from`."""
_MEDIUM = re.compile("image|audio|video")
_MEDIA = re.compile(f"<({_MEDIUM.pattern})>")
_PROBE = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "a"}]


class Conversations:
    """Renders and tokenizes conversations.

    Sets the tokenizer's prefix and end token to the template's.
    """

    def __init__(self, config: PrepareConfig, tokenizer: Tokenizer):
        self._config = config
        self._fields = config.fields
        text, name = _template_of(config)
        tokens: dict[str, str] = {}
        if config.tokenizer is not None:
            tokens = special_tokens(tokenizer_file(config.tokenizer).parent)
        self.checksum = hashlib.sha256(json.dumps([text, tokens]).encode()).hexdigest()
        """A hash of the template and the special tokens, to detect changes."""
        self.template = ChatTemplate(text, name, _ends(tokenizer) | tokens, config.date)
        self._tokens = ChatTokenizer(tokenizer)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            prefix = tokenizer.info.prefix
            ((first, last), *_) = self.encode(self.turns(_PROBE))
            if not np.array_equal(first[: len(prefix)], prefix):
                tokenizer.info = replace(tokenizer.info, prefix=())
            ends = [token for token in last.tolist() if token in self._tokens.special.values()]
            if ends and config.eos is None and not config.no_eos:
                tokenizer.info = replace(tokenizer.info, eos_id=ends[-1])

    def of_row(self, row: Row) -> tuple[Turn, ...]:
        """Returns the `turns` of a row's conversation."""
        return self.turns(_messages(row, self._fields))

    def turns(self, messages: object) -> tuple[Turn, ...]:
        """Returns a conversation's answers; raises `ChatError` or `BadInputError`."""
        escaped = self._escaped(checked(messages, self._config.media_as_text))
        answers = [index for index, message in enumerate(escaped) if message["role"] == ASSISTANT]
        if not answers:
            raise _no_answer([message["role"] for message in escaped])
        return self._limited(self._turn(escaped, index) for index in answers)

    def encode(self, turns: Sequence[Turn]) -> list[tuple[Tokens, Tokens]]:
        """Returns prompt ids and answer ids of each turn."""
        return self._tokens.encode([(turn.prompt or "", turn.text) for turn in turns])

    def first_day(self) -> str | None:
        """Returns the day that the template writes in a new dataset, by default today.

        None if the template writes no day.
        """
        if not writes_day(self.template.text):
            return None
        return self._config.date or datetime.date.today().isoformat()

    def save(self, folder: Path) -> None:
        """Writes the template, its special tokens and its day, for `jaxtp generate --chat`."""
        described = dict(self.template.special_tokens)
        if self.template.day is not None:
            described[TEMPLATE_DAY] = self.template.day
        write_atomically(folder / TEMPLATE, self.template.text.encode())
        write_atomically(
            folder / TOKENIZER_CONFIG, (json.dumps(described, indent=1) + "\n").encode()
        )

    def _escaped(self, messages: list[Message]) -> list[Message]:
        keep = self._config.special_tokens
        return [self._tokens.escape(message, keep=keep) for message in messages]

    def _limited(self, turns: Iterable[Turn]) -> tuple[Turn, ...]:
        limited = []
        size = 0
        max_bytes = self._config.max_document_bytes
        for turn in turns:
            limited.append(turn)
            size += sum(len((text or "").encode()) for text in turn[:2])
            if size > max_bytes:
                raise too_large(max_bytes, "its answers with their prompts: ")
        return tuple(limited)

    def _turn(self, messages: list[Message], index: int) -> Turn:
        before = self.template.render(messages[:index])
        whole = self.template.render(messages[: index + 1], answer=False)
        if not whole.startswith(before):
            raise ChatError(
                f"message {index + 1}: the template starts this answer differently from its "
                f"generation prompt, {without_marks(self._tokens.mark(before))[-40:]!r}; give "
                "another template by --template FILE"
            )
        return Turn(
            self._tokens.mark(before), self._tokens.mark(whole[len(before) :]), is_rendered=True
        )


def _template_of(config: PrepareConfig) -> tuple[str, str]:
    """Returns the template and its name in messages; raises `ChatError` if missing."""
    if config.template is not None:
        return read_template(config.template), str(config.template)
    if config.tokenizer is None:
        raise ChatError("bytes come with no chat template; give one by --template FILE")
    folder = tokenizer_file(config.tokenizer).parent
    template = chat_template(folder)
    if template is None:
        raise ChatError(f"{folder} has no chat template; give one by --template FILE")
    return template, f"the chat template of {folder}"


def _ends(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the tokens that start and end documents, as a template names them."""
    tokens: dict[str, str] = {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        info = tokenizer.info
        if info.prefix:
            tokens["bos_token"] = tokenizer.spelling(info.prefix[0])
        if info.eos_id is not None:
            tokens["eos_token"] = tokenizer.spelling(info.eos_id)
    return tokens


def _messages(row: Row, fields: Fields) -> object:
    texts = [name for name in fields.optional if name != "history"]
    for name in (*texts, *(fields.names if fields.prompt else ())):
        value = row.get(name)
        if not isinstance(value, str) and (value is not None or name in fields.names):
            raise ChatError(f"{name!r} is not a string, but {shorten(value)}")
    messages = row[fields.text]
    if fields.prompt is not None:
        question = "\n\n".join(str(text) for text in (row[fields.prompt], row.get("input")) if text)
        history = row.get("history") or []
        if not isinstance(history, list) or not all(
            isinstance(turn, list) and len(turn) == 2 for turn in history
        ):
            raise ChatError(f"'history' is not a list of pairs of texts, but {shorten(history)}")
        turns = [*history, [question, messages]]
        conversation: list[Message] = []
        for question, answer in turns:
            conversation.append({"role": "user", "content": question})
            conversation.append({"role": ASSISTANT, "content": answer})
        messages = conversation
    if isinstance(messages, list):
        return with_system(messages, row.get("system"))
    return messages


def with_system(messages: list[Message], system: object) -> list[Message]:
    """Puts a row's system message, if it has one, before the others."""
    if not system:
        return messages
    if any(
        isinstance(message, dict) and "system" in (message.get("role"), message.get("from"))
        for message in messages
    ):
        raise ChatError("there are two system messages, one of them in the field 'system'")
    return [{"role": "system", "content": system}, *messages]


def checked(messages: object, media_as_text: bool) -> list[Message]:
    """Converts ShareGPT's keys and lists of parts to messages with role and content."""
    if messages == []:
        raise ChatError("the list of messages is empty")
    if not isinstance(messages, list):
        raise ChatError(f"not a list of messages, but {shorten(messages)}")
    merged: list[Message] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ChatError(
                f"message {number} is not an object with role and content, but {shorten(message)}"
            )
        if message.get("role") is None and {"from", "value"} <= message.keys():
            role = message["from"]
            if not isinstance(role, str) or role not in _ROLES:
                raise ChatError(
                    f"message {number} is from {shorten(role)}, and not from {', '.join(_ROLES)}"
                )
            message = {"role": _ROLES[role], "content": message["value"]}
        if message.get("tool_calls") and message.get("content") is None:
            message = {**message, "content": ""}
        for key in ("role", "content"):
            if key not in message:
                raise _no_key(key, number, message)
        message = {**message, "content": _joined(message["content"])}
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                fix = "; give it a text, or remove the message" if message[key] is None else ""
                raise ChatError(
                    f"message {number}: {key!r} is not a string, but {shorten(message[key])}{fix}"
                )
        media = _MEDIA.search(message["content"])
        if media and not media_as_text:
            raise BadInputError(
                MEDIA,
                f"message {number} has {media[0]}, and only text is read; --media-as-text keeps "
                "that word as text",
            )
        merged.append(message)
    return merged


def _no_key(key: str, number: int, message: Message) -> ChatError:
    """Returns the error of a message without its role or its content."""
    other_keys = [name for name in list(message)[:4] if name not in ("role", "content")]
    if len(other_keys) == 1:
        fix = f"rename its key {other_keys[0]!r} to {key!r}"
    elif other_keys:
        fix = f"rename one of its keys to {key!r}: {', '.join(map(repr, other_keys))}"
    elif message:
        fix = f"it has only {next(iter(message))!r}; give it a {key}, or remove the message"
    else:
        fix = "it is empty; remove it"
    return ChatError(f"message {number} has no {key!r}: {fix}")


def _no_answer(roles: Sequence[str]) -> ChatError:
    """Returns the error of a conversation without a message of the assistant."""
    names = ", ".join(map(repr, dict.fromkeys(roles)))
    fix = ""
    for role in roles:
        if _ROLES.get(role.lower()) == ASSISTANT:
            fix = f"; write {ASSISTANT!r} instead of {role!r}"
            break
    return ChatError(
        f"no message has the role {ASSISTANT!r}, so there is no answer to learn; it has "
        f"{names}{fix}"
    )


def _joined(content: object) -> object:
    # Joins parts such as {"type": "text", "text": ...} and {"type": "image_url", ...}.
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            return content
        text = part.get("text")
        kind = part.get("type")
        medium = _MEDIUM.search(kind) if isinstance(kind, str) else None
        if medium:
            text = f"<{medium[0]}>"
        if not isinstance(text, str):
            return content
        texts.append(text)
    return "".join(texts)
