"""Makes turns of conversations: an answer of the assistant, and as its prompt all that comes before it.

Each answer becomes a document of its own. Templates may write an earlier answer otherwise than the last, so only then
does the model train on what it will see when it answers. The price is that beginnings are read again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.chat_tokenizer import SpecialTokens, rendered_tokenizer, without_marks
from jaxtp.data.template import ASSISTANT, ChatError, ChatTemplate, Message
from jaxtp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_file
from jaxtp.data.tokenizer_files import TEMPLATE, TOKENIZER_CONFIG, chat_template, read_template, special_tokens
from jaxtp.files import write_atomically
from jaxtp.prepare.config import PrepareConfig
from jaxtp.prepare.errors import TooLargeError, Turn, shown

_PROBE = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "a"}]


class Conversations:
    """Renders conversations by a chat template, and makes tokens of them.

    Args:
      config: names the template.
      tokenizer: tokenizer of the dataset.

    Raises:
      ChatError: no template, or one that fails on the simplest conversation.
      TokenizerError: a file beside the tokenizer is damaged.
    """

    def __init__(self, config: PrepareConfig, tokenizer: Tokenizer):
        self.template, name = template_of(config)
        self.special_tokens = _special_tokens(config, tokenizer)
        self._template = ChatTemplate(self.template, name, self.special_tokens)
        self._tokenizer = tokenizer
        self._rendered = rendered_tokenizer(tokenizer)
        self._tokens = SpecialTokens(self._rendered.tokens, keep=config.special_tokens)
        self._most = config.max_document_bytes
        self._probe = self.turns(_PROBE)

    def turns(self, messages: Any) -> tuple[Turn, ...]:
        """Returns the answers in a conversation; what comes after the last one is left out.

        Raises:
          ChatError: it is no conversation, has no answer, or the template refuses it.
          TooLargeError: the answers and what comes before each of them have too many bytes together.
        """
        escaped = self._tokens.escape(_checked(messages))
        answers = [index for index, message in enumerate(escaped) if message["role"] == ASSISTANT]
        if not answers:
            roles = ", ".join(dict.fromkeys(message["role"] for message in escaped))
            raise ChatError(f"no message has the role {ASSISTANT!r}; there are {roles}")
        turns, size = [], 0
        for index in answers:
            turns.append(self._turn(escaped, index))
            size += sum(len((text or "").encode()) for text in turns[-1][:2])
            if size > self._most:
                raise TooLargeError
        return tuple(turns)

    def encode(self, turns: Sequence[Turn]) -> list[list[NDArray[Any]]]:
        """Returns the ids of prompt and answer of each turn."""
        pairs = [(turn.prompt or "", turn.text) for turn in turns]
        dtype = self._tokenizer.info.dtype
        return [[part.astype(dtype) for part in parts] for parts in self._rendered.encode_batch(pairs)]

    def save(self, folder: Path) -> None:
        """Writes the template and what it names beside the tokenizer of a dataset, so that one can talk to a run."""
        write_atomically(folder / TEMPLATE, self.template.encode())
        write_atomically(folder / TOKENIZER_CONFIG, (json.dumps(self.special_tokens, indent=1) + "\n").encode())

    def begins_with(self, prefix: tuple[int, ...]) -> bool:
        """Returns whether the template writes the tokens that texts begin with."""
        (ids, _), *_ = self.encode(self._probe)
        return np.array_equal(ids[: len(prefix)], prefix)

    @property
    def end(self) -> int | None:
        """The last special token that the template writes after an answer, if it does."""
        (_, ids), *_ = self.encode(self._probe)
        return next((token for token in reversed(ids.tolist()) if token in self._rendered.ids), None)

    def _turn(self, messages: list[Message], index: int) -> Turn:
        before = self._template.render(messages[:index])
        whole = self._template.render(messages[: index + 1], answer=False)
        if not whole.startswith(before):
            raise ChatError(
                f"message {index + 1}: the template writes this answer otherwise than it asks for it, which is by "
                f"{without_marks(self._tokens.mark(before))[-40:]!r} at the end; give another by --template FILE"
            )
        return Turn(self._tokens.mark(before), self._tokens.mark(whole[len(before) :]), rendered=True)


def open_conversations(config: PrepareConfig, tokenizer: Tokenizer | None) -> Conversations | None:
    """Returns the reader of the conversations that a command line asks for; the template gives prefix and end token.

    Raises:
      ChatError, TokenizerError: as `Conversations`.
    """
    if config.messages is None or tokenizer is None:
        return None
    conversations = Conversations(config, tokenizer)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        info = tokenizer.info
        prefix = info.prefix if conversations.begins_with(info.prefix) else ()
        end = conversations.end if config.eos is None and not config.no_eos else None
        tokenizer.info = replace(info, prefix=prefix, eos_id=info.eos_id if end is None else end)
    return conversations


def template_of(config: PrepareConfig) -> tuple[str, str]:
    """Returns the chat template, and its name in messages.

    Raises:
      ChatError: there is none.
      TokenizerError: its file cannot be read.
    """
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
    """Returns a hash by which an interrupted command tells whether it goes on with the same template."""
    named = special_tokens(tokenizer_file(config.tokenizer).parent) if config.tokenizer else {}
    return hashlib.sha256(json.dumps([template_of(config)[0], named]).encode()).hexdigest()


def _special_tokens(config: PrepareConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the tokens that the template may name: those beside the tokenizer, else documents' first and last."""
    if config.tokenizer is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    info, found = tokenizer.info, {}
    if info.prefix:
        found["bos_token"] = tokenizer.spelled(info.prefix[0])
    if info.eos_id is not None:
        found["eos_token"] = tokenizer.spelled(info.eos_id)
    return found | special_tokens(tokenizer_file(config.tokenizer).parent)


def _checked(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"not a list of messages, but {shown(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ChatError(f"message {number} is not an object with role and content, but {shown(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                if key in message:
                    raise ChatError(f"message {number}: {key!r} is not a string, but {shown(message[key])}")
                there = ", ".join(shown(name) for name in list(message)[:4]) or "none"
                raise ChatError(f"message {number} has no {key!r}; there are {there}; rename them to role and content")
    return messages
