"""Makes tokens of what a chat template wrote: its special tokens are tokens, and what a message spells is text.

Noncharacters of Unicode, which no message may hold, keep the two apart. A special token that a message spells is
replaced by `U+FDD2 number U+FDD3` while the template is at work; those that are then in the text are the template's,
and get a U+FDD0 before and a U+FDD1 after them. So does each special token in a copy of the tokenizer, which reads all
of the text at once, as it would read it anywhere else.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.template import ChatError
from jaxtp.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_library, understood
from jaxtp.data.tokenizer_files import TokenizerError

_BEFORE, _AFTER, _SPELLED, _END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_OURS = re.compile(f"[{_BEFORE}-{_END}]")
_MARKS = re.compile(f"[{_BEFORE}{_AFTER}]")
_ESCAPED = re.compile(f"{_SPELLED}([0-9]{{1,9}}){_END}|[{_SPELLED}{_END}]")


class SpecialTokens:
    """Tells special tokens that a template writes from those that a message spells.

    Args:
      tokens: the special tokens, as they are spelled.
      keep: leaves those of messages as they are, so that they become tokens too.
    """

    def __init__(self, tokens: Sequence[str], *, keep: bool = False):
        self._tokens = sorted(tokens, key=len, reverse=True)  # the longest that fits is the one that is there
        self._number = {token: number for number, token in enumerate(self._tokens)}
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._keep = keep

    def escape(self, value: Any) -> Any:
        """Returns a message, or a part of it, to be rendered.

        Raises:
          ChatError: a code point in it is no character.
        """
        if isinstance(value, Mapping):
            return {key: self.escape(part) for key, part in value.items() if part is not None}
        if isinstance(value, list | tuple):
            return [self.escape(part) for part in value]
        return self._escape_text(value) if isinstance(value, str) else value

    def mark(self, rendered: str) -> str:
        """Returns rendered text with marks around the template's special tokens, and the messages as they were.

        Noncharacters that the template writes itself, or leaves where it cuts a message, are left out.
        """
        marked = self._pattern.sub(lambda found: marks(found[0]), _MARKS.sub("", rendered))
        return _ESCAPED.sub(self._spelled, marked)

    def _spelled(self, found: re.Match[str]) -> str:
        number = int(found[1] or -1)
        return self._tokens[number] if 0 <= number < len(self._tokens) else ""

    def _escape_text(self, text: str) -> str:
        if found := _OURS.search(text):
            raise ChatError(f"a message holds U+{ord(found[0]):04X}, which is no character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ChatError("a message holds half of a surrogate pair, which is no character") from None
        return text if self._keep else self._pattern.sub(lambda f: f"{_SPELLED}{self._number[f[0]]}{_END}", text)


def marks(token: str) -> str:
    """Returns a special token between its marks."""
    return f"{_BEFORE}{token}{_AFTER}"


def without_marks(marked: str) -> str:
    """Returns the text that people would see."""
    return marked.replace(_BEFORE, "").replace(_AFTER, "")


def without_noncharacters(text: str) -> str:
    """Returns the text with U+FFFD for what no message may hold."""
    return _OURS.sub("\ufffd", text)


class RenderedTokenizer:
    """Encodes marked text by a `tokenizer.json`; `tokens` are its special tokens, `ids` their ids.

    Args:
      content: the file.
      name: its name in messages.

    Raises:
      TokenizerError: it is not a tokenizer, or its special tokens cannot be told from text.
    """

    def __init__(self, content: bytes, name: str):
        library = load_library(content, name)
        special = {token.content: id for id, token in library.get_added_tokens_decoder().items() if token.special}
        self.tokens = tuple(special)
        self.ids = frozenset(special.values())
        self._name = name
        file = json.dumps(_renamed(json.loads(library.to_str()), {token: marks(token) for token in special}))
        self._library = load_library(file.encode(), name)
        for token, id in special.items():
            if self._library.token_to_id(marks(token)) != id:
                raise TokenizerError(f"{name}: its special token {token!r} cannot be told from text that spells it")

    def encode_batch(self, turns: Sequence[tuple[str, str]]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yields the ids of each marked text that is given in two parts, cut where the second begins.

        A token of both belongs to the first.

        Raises:
          TokenizerError: the tokenizer has no token for something in them.
        """
        try:
            encodings = self._library.encode_batch(
                [first + second for first, second in turns], add_special_tokens=False
            )
        except BaseException as error:
            raise understood(error, f"{self._name}: cannot encode a text") from None
        for (first, _), encoding in zip(turns, encodings, strict=True):
            ids = np.array(encoding.ids, np.uint32)
            cut = sum(start < len(first) for start, _ in encoding.offsets)
            yield ids[:cut], ids[cut:]

    def begins_afresh(self, marked: str) -> bool:
        """Returns whether a text gives the same ids alone and after another text."""
        return marked.startswith(_BEFORE)


class RenderedBytes:
    """Encodes marked text as bytes, like a `RenderedTokenizer` without special tokens."""

    tokens: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()

    def encode_batch(self, turns: Sequence[tuple[str, str]]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yields the bytes of both parts of each text."""
        for turn in turns:
            first, second = ByteTokenizer().encode_batch(turn)
            yield first, second

    def begins_afresh(self, marked: str) -> bool:
        """Returns True: bytes always give the same ids."""
        return True


def rendered_tokenizer(tokenizer: Tokenizer) -> RenderedTokenizer | RenderedBytes:
    """Returns the tokenizer of marked text that belongs to a tokenizer.

    Raises:
      TokenizerError: its special tokens cannot be told from text.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return RenderedTokenizer(tokenizer.content, tokenizer.name)
    return RenderedBytes()


def _renamed(file: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns a tokenizer with other names for some tokens, and without a template of its own."""
    model = file["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): id for token, id in vocabulary.items()}
    else:  # Unigram has pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [token | {"content": names.get(token["content"], token["content"])} for token in file["added_tokens"]]
    return file | {"added_tokens": added, "post_processor": None}
