"""Converts conversations to documents: each assistant answer, with everything before it as its prompt.

A template may render an earlier answer differently from the last. A document per answer trains on exactly the inference
input, but repeats the beginning of a conversation.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxtp.config.files import write_atomically
from jaxtp.config.schema import ConfigError
from jaxtp.data.chat_template import (
    ASSISTANT,
    ChatError,
    ChatTemplate,
    Message,
    SpecialTokens,
    rendered_tokenizer,
    without_marks,
)
from jaxtp.data.documents import Tokens
from jaxtp.data.prepare.prepare_config import LAYOUTS, TEXT_FIELD, PrepareConfig, check
from jaxtp.data.prepare.readers import TEXT, Fields, Source, TooLargeError, Turn, shorten
from jaxtp.data.prepare.sources import columns
from jaxtp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_file
from jaxtp.data.tokenizer_files import TEMPLATE, TOKENIZER_CONFIG, chat_template, read_template, special_tokens

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), ASSISTANT),
    **dict.fromkeys(("observation", "tool"), "tool"),
    "system": "system",
}
"""ShareGPT's values of `from`."""
_PROBE = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "a"}]


class Conversations:
    """Renders and tokenizes conversations."""

    def __init__(self, config: PrepareConfig, tokenizer: Tokenizer):
        self.template, name = template_of(config)
        self.special_tokens = _special_tokens(config, tokenizer)
        self._template = ChatTemplate(self.template, name, self.special_tokens)
        self._tokenizer = tokenizer
        self._rendered = rendered_tokenizer(tokenizer)
        self._tokens = SpecialTokens(self._rendered.tokens, keep=config.special_tokens)
        self._max_bytes = config.max_document_bytes
        self._probe = self.turns(_PROBE)

    def turns(self, messages: object) -> tuple[Turn, ...]:
        """Returns a conversation's answers; raises `ChatError` or `TooLargeError`."""
        escaped: list[Message] = self._tokens.escape(_checked(messages))
        answers = [index for index, message in enumerate(escaped) if message["role"] == ASSISTANT]
        if not answers:
            roles = ", ".join(dict.fromkeys(message["role"] for message in escaped))
            raise ChatError(f"no message has the role {ASSISTANT!r}; there are {roles}")
        turns: list[Turn] = []
        size = 0
        for index in answers:
            turns.append(self._turn(escaped, index))
            size += sum(len((text or "").encode()) for text in turns[-1][:2])
            if size > self._max_bytes:
                raise TooLargeError
        return tuple(turns)

    def encode(self, turns: Sequence[Turn]) -> list[list[Tokens]]:
        """Returns prompt ids and answer ids of each turn."""
        pairs = [(turn.prompt or "", turn.text) for turn in turns]
        dtype = self._tokenizer.info.dtype
        return [[part.astype(dtype) for part in parts] for parts in self._rendered.encode_batch(pairs)]

    def save(self, folder: Path) -> None:
        """Writes the template and its special tokens, for `generate --chat`."""
        write_atomically(folder / TEMPLATE, self.template.encode())
        write_atomically(folder / TOKENIZER_CONFIG, (json.dumps(self.special_tokens, indent=1) + "\n").encode())

    def begins_with(self, prefix: tuple[int, ...]) -> bool:
        """Returns whether the template writes these tokens first."""
        (ids, _), *_ = self.encode(self._probe)
        return np.array_equal(ids[: len(prefix)], prefix)

    @property
    def end(self) -> int | None:
        """The template's last special token after an answer."""
        (_, ids), *_ = self.encode(self._probe)
        return next((token for token in reversed(ids.tolist()) if token in self._rendered.ids), None)

    def _turn(self, messages: list[Message], index: int) -> Turn:
        before = self._template.render(messages[:index])
        whole = self._template.render(messages[: index + 1], answer=False)
        if not whole.startswith(before):
            raise ChatError(
                f"message {index + 1}: the template writes this answer otherwise than its header for answers, "
                f"{without_marks(self._tokens.mark(before))[-40:]!r}; give another by --template FILE"
            )
        return Turn(self._tokens.mark(before), self._tokens.mark(whole[len(before) :]), is_rendered=True)


def open_conversations(config: PrepareConfig, tokenizer: Tokenizer | None) -> Conversations | None:
    """Opens the renderer, if any; sets the tokenizer's prefix and end token."""
    if config.messages is None or tokenizer is None:
        return None
    conversations = Conversations(config, tokenizer)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        info = tokenizer.info
        prefix = info.prefix if conversations.begins_with(info.prefix) else ()
        end = conversations.end if config.eos is None and not config.no_eos else None
        tokenizer.info = replace(info, prefix=prefix, eos_id=info.eos_id if end is None else end)
    return conversations


def fields_of(config: PrepareConfig, conversations: Conversations | None) -> Fields:
    """Returns a row's columns, with the conversion to turns."""
    fields = config.fields
    if conversations is None:
        return fields
    return replace(fields, turns=lambda row: conversations.turns(_messages(row, fields)))


def with_layout(config: PrepareConfig, sources: list[Source]) -> tuple[PrepareConfig, str]:
    """Detects the layout from the first row's keys, unless a field is named.

    Returns:
      The configuration with that layout, and a line that names it (or empty).
    """
    tables = [source for source in sources if source.format != TEXT]
    is_explicit = config.messages is not None or config.prompt_field is not None or config.field != TEXT_FIELD
    names = [] if is_explicit or not tables else columns(tables[0])
    found = _layout_of(names)
    if found is None:
        if config.template is not None and config.messages is None:
            raise ConfigError("--template is for conversations; give --messages FIELD too")
        if config.messages is not None:
            _check_layouts(config, tables)
        return config, ""
    config = replace(config, messages=found)
    check(config)
    _check_layouts(config, tables[1:])
    others = ", ".join(shorten(name) for name in names if name not in config.fields.names_in(names))
    return config, LAYOUTS[found][0] + (f"; not read: {others}" if others else "")


def _layout_of(names: list[str]) -> str | None:
    if TEXT_FIELD in names:
        return None
    return next((layout for layout, (_, required) in LAYOUTS.items() if required <= {*names}), None)


def _check_layouts(config: PrepareConfig, tables: list[Source]) -> None:
    for source in tables:
        found = columns(source)
        other = _layout_of(found)
        if other is not None and not {*config.fields.names} <= {*found}:
            names = " and ".join(map(repr, config.fields.names))
            raise ConfigError(
                f"{source.path} has {LAYOUTS[other][0]}, but this command reads {names}. A command reads "
                "one layout: run jaxtp prepare once for each, with another --out, and train on both by data.mixture"
            )


def template_of(config: PrepareConfig) -> tuple[str, str]:
    """Returns the template and its name in messages; raises `ChatError` if missing."""
    if config.template is not None:
        return read_template(config.template), str(config.template)
    if config.tokenizer is None:
        raise ChatError("bytes come with no chat template; give one by --template FILE")
    folder = tokenizer_file(config.tokenizer).parent
    found = chat_template(folder)
    if found is None:
        raise ChatError(f"{folder} has no chat template; give one by --template FILE")
    return found, f"the chat template of {folder}"


def template_checksum(config: PrepareConfig) -> str:
    """Returns a hash of template and special tokens, to detect changes."""
    named = special_tokens(tokenizer_file(config.tokenizer).parent) if config.tokenizer else {}
    return hashlib.sha256(json.dumps([template_of(config)[0], named]).encode()).hexdigest()


def _special_tokens(config: PrepareConfig, tokenizer: Tokenizer) -> dict[str, str]:
    if config.tokenizer is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    info, found = tokenizer.info, {}
    if info.prefix:
        found["bos_token"] = tokenizer.spelled(info.prefix[0])
    if info.eos_id is not None:
        found["eos_token"] = tokenizer.spelled(info.eos_id)
    return found | special_tokens(tokenizer_file(config.tokenizer).parent)


def _messages(row: Mapping[str, object], fields: Fields) -> object:
    texts = [name for name in fields.optional if name != "history"]
    for name in (*texts, *(fields.names if fields.prompt else ())):
        value = row.get(name)
        if not isinstance(value, str) and (value is not None or name in fields.names):
            raise ChatError(f"{name!r} is not a string, but {shorten(value)}")
    messages = row[fields.text]
    if fields.prompt is not None:
        question = "\n\n".join(str(text) for text in (row[fields.prompt], row.get("input")) if text)
        turns = [*_history(row.get("history")), [question, messages]]
        roles = ("user", ASSISTANT)
        messages = [{"role": r, "content": text} for turn in turns for r, text in zip(roles, turn, strict=True)]
    if (system := row.get("system")) and isinstance(messages, list):
        if any(
            isinstance(message, dict) and "system" in (message.get("role"), message.get("from")) for message in messages
        ):
            raise ChatError("there are two system messages, one of them in the field 'system'")
        return [{"role": "system", "content": system}, *messages]
    return messages


def _history(value: object) -> list[list[object]]:
    turns = [] if value is None else value
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in turns
    ):
        raise ChatError(f"'history' is no list of pairs of texts, but {shorten(value)}")
    return turns


def _with_role(message: object, number: int) -> object:
    if not isinstance(message, dict) or message.get("role") is not None or not {"from", "value"} <= message.keys():
        return message
    role = message["from"]
    if not isinstance(role, str) or role not in _ROLES:
        raise ChatError(f"message {number} is from {shorten(role)}, and not from {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": message["value"]}


def _checked(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"not a list of messages, but {shorten(messages)}")
    checked: list[Message] = []
    for number, original in enumerate(messages, 1):
        message = _with_role(original, number)
        if not isinstance(message, dict):
            raise ChatError(f"message {number} is not an object with role and content, but {shorten(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                if key in message:
                    raise ChatError(f"message {number}: {key!r} is not a string, but {shorten(message[key])}")
                names = ", ".join(shorten(name) for name in list(message)[:4]) or "none"
                raise ChatError(f"message {number} has no {key!r}; there are {names}; rename them to role and content")
        checked.append(message)
    return checked
