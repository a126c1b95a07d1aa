"""Tokenizers: bytes, or any Hugging Face `tokenizer.json`.

Encoding adds no special tokens, truncation, padding or dropout. By default, text that spells a
special token stays text.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtp.config.reading import inside, read_bytes
from jaxtp.config.schema import missing_model
from jaxtp.data import worker_process
from jaxtp.data.corpus import BYTE_TOKENIZER
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import BYTES, HUGGING_FACE, TOKENIZER, TokenizerInfo, read_manifest
from jaxtp.data.tokenizer_files import TokenizerError, reading
from jaxtp.data.worker import WORKER, WorkerDiedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

    from jaxtp.data.prepare.conversations import Conversations

END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Well-known names of the end token."""

_MAX_FILE = 2**28  # Maximum bytes of a file; the largest files have some 50 million
# Characters that are encoded at a time, during which the library takes about 100 bytes per token
GROUP = 2**24
_MAX_GROWTH = 64  # Maximum number of characters that a normalizer or decoder may make of one
FIXED_MEMORY = 2**30
FIXED_SECONDS = 60.0
_MEMORY_OF_FILE = 32
MEMORY_OF_TEXT = 256
SECONDS_OF_TEXT = 1e-4
"""Limits of the worker for a request: fixed limits, and limits for each byte of a tokenizer.json or
character of a text. The library takes up to about 150 bytes and 10 microseconds for a character."""


class ChatMixin:
    """Writes the prompts of conversations, for a tokenizer that has a chat template."""

    open_conversations: "Callable[[], Conversations] | None" = None
    """Opens the chat template on first use, because it needs another library and a process."""

    @cached_property
    def conversations(self) -> "Conversations":
        """The chat template; raises `UserError` if it is missing or unusable."""
        if self.open_conversations is None:
            raise TokenizerError(
                "the tokenizer has no chat template; open one by jaxtp.generate.open_tokenizer, or "
                "set the conversations of this one"
            )
        return self.open_conversations()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: object = None,
        **template_arguments: object,
    ) -> list[int]:
        """Returns the ids of the prompt of the next answer: those that `jaxtp prepare` makes.

        Args:
          messages: `role` and `content`, and what else `jaxtp prepare` reads.
          tools: as `jaxtp prepare` reads them: objects, or JSON.
          **template_arguments: of the chat template, such as `enable_thinking`; and `documents`.

        Raises:
          UserError: there is no chat template, or it does not write a part of the conversation.
        """
        return self.conversations.chat(messages, tools, **template_arguments)


class ByteTokenizer(ChatMixin):
    """A tokenizer for which each byte of UTF-8 is a token."""

    info = BYTE_TOKENIZER

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Tokens, *, with_end: bool = False) -> bytes:
        """Returns the bytes; there is no end token."""
        return np.asarray(ids).astype(np.uint8).tobytes()


class HuggingFaceTokenizer(ChatMixin):
    """A tokenizer that is the `content` of a `tokenizer.json`; raises `TokenizerError`.

    Args:
      name: the tokenizer's name in messages.
      eos: the end token or its id; None to search for a well-known name, which may be absent.
      special_tokens: whether text can spell special tokens.
    """

    def __init__(
        self,
        content: bytes,
        name: str,
        *,
        eos: str | int | None = None,
        special_tokens: bool = False,
    ):
        self.name = name
        self.content = content
        self._special_tokens = special_tokens
        self._tokenizer = self._load()
        self._tokenizer.encode_special_tokens = not special_tokens
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise TokenizerError(f"{name}: a tokenizer without a vocabulary")
        size = max(ids.values()) + 1  # ids may have gaps
        eos_id = _end_token(ids, name, eos)
        self.info = TokenizerInfo(HUGGING_FACE, hashlib.sha256(content).hexdigest(), size, eos_id)
        file = self.file()
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._is_byte_level = (file["decoder"] or {}).get("type") == "ByteLevel"
        self.info = replace(self.info, prefix=self._prefix())

    def _load(self) -> "Library":
        return load_library(self.content, self.name)

    def file(self) -> dict[str, Any]:
        """Returns the `content` as the library reads it, which also reads invalid JSON."""
        return dict(json.loads(self._tokenizer.to_str()))

    @property
    def special(self) -> dict[str, int]:
        """The special tokens and their ids."""
        return {token.content: id for id, token in self._added.items() if token.special}

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Encodes without end tokens; raises `TokenizerError`."""
        return list(itertools.chain.from_iterable(map(self._encode, _groups(texts))))

    def decode(self, ids: Tokens, *, with_end: bool = False) -> bytes:
        """Returns UTF-8 text, with all special tokens; with the end token if `with_end`.

        The first and the last id may be parts of a character. Raises `TokenizerError` for ids
        outside of the vocabulary.
        """
        tokens = np.asarray(ids).tolist()
        if not with_end:
            tokens = [token for token in tokens if token != self.info.eos_id]
        try:
            if self._is_byte_level:
                return b"".join([self._bytes_of[token] for token in tokens])
            return str(self._tokenizer.decode(tokens, skip_special_tokens=False)).encode()
        except KeyError as error:
            raise TokenizerError(f"{self.name}: no token has the id {error}") from None
        except BaseException as error:
            raise as_tokenizer_error(error, f"{self.name}: cannot decode") from None

    def spelling(self, token: int) -> str:
        """Returns a token's spelling in the vocabulary."""
        return str(self._tokenizer.id_to_token(token))

    def _prefix(self) -> tuple[int, ...]:
        """Returns the ids that the post-processor prepends, e.g. BOS; `encode_batch` omits them."""
        plain = self._encode(["a"])[0].tolist()
        whole = self._encode(["a"], add_special_tokens=True)[0].tolist()
        starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return tuple(whole[: next(starts, 0)])

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Tokens]:
        try:
            encodings = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            raise as_tokenizer_error(error, f"{self.name}: cannot encode a text") from None
        return [np.array(encoding.ids, self.info.dtype) for encoding in encodings]

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        byte_of = _byte_of_character()
        bytes_of: dict[int, bytes] = {}
        for text, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in self._added or set(text) - byte_of.keys():
                bytes_of[token] = text.encode()
            else:
                bytes_of[token] = bytes(map(byte_of.__getitem__, text))
        return bytes_of


class IsolatedTokenizer(HuggingFaceTokenizer):
    """A tokenizer that encodes in a worker.

    If a tokenizer.json makes the library crash, only the worker dies; this raises `TokenizerError`.
    """

    def _load(self) -> "Library":
        _require_library(self.name)
        encode_isolated(self.content, self.name, [])  # loads it in the worker first
        return super()._load()

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Tokens]:
        encoded = encode_isolated(
            self.content,
            self.name,
            texts,
            add_special_tokens=add_special_tokens,
            encode_special_tokens=not self._special_tokens,
        )
        return [ids.astype(self.info.dtype) for ids, _ in encoded]


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def encode_isolated(
    content: bytes,
    name: str,
    texts: Sequence[str],
    before: Sequence[int] | None = None,
    **settings: bool,
) -> list[tuple[Tokens, Tokens]]:
    """Encodes texts in a worker; raises `TokenizerError`.

    Args:
      content: the tokenizer.json.
      name: the tokenizer's name in messages.
      before: the number of characters of each text's first part.
      **settings: the library's settings `add_special_tokens` and `encode_special_tokens`; by
        default False.

    Returns:
      The ids of both parts of each text; a token that spans both parts belongs to the first.
      Without `before`, the first part is the whole text.
    """
    num_characters = sum(map(len, texts))
    request: dict[str, Any] = {
        "key": hashlib.sha256(content).hexdigest(),
        "content": None,
        "texts": list(texts),
        "before": before,
        "settings": settings,
        "memory": FIXED_MEMORY + MEMORY_OF_TEXT * num_characters,
        "seconds": FIXED_SECONDS + SECONDS_OF_TEXT * num_characters,
    }
    problem, ids, cuts = _ask_worker(request, name)
    if problem == worker_process.UNKNOWN:
        request["content"] = content
        request["memory"] += _MEMORY_OF_FILE * len(content)
        problem, ids, cuts = _ask_worker(request, name)
    if problem:
        failure = "cannot encode a text" if texts else "not a tokenizer.json"
        raise TokenizerError(f"{name}: {failure}: {problem}")
    if before is None:
        cuts = map(len, ids)
    return [(part[:cut], part[cut:]) for part, cut in zip(ids, cuts, strict=True)]


def _ask_worker(request: dict[str, Any], name: str) -> tuple[str, list[Tokens], Iterable[int]]:
    try:
        answer = WORKER.request(pickle.dumps(request))
    except WorkerDiedError as died:
        doing = "encoding a text" if request["texts"] else "loading it"
        limit = f"{request['memory'] // 2**20:,} MiB of memory"
        if died.code == -signal.SIGPROF:
            limit = f"{request['seconds']:.0f} s of computing"
        raise TokenizerError(
            f"{name}: {doing} ends the tokenizer's process ({died}); it may take at most {limit}"
        ) from None
    line, _, content = answer.partition(b"\n")
    problem, sizes, cuts = json.loads(line)
    if problem or not sizes:
        return problem, [], []
    ids = np.frombuffer(content, np.uint32)
    return "", np.split(ids, np.cumsum(sizes[:-1], dtype=np.int64)), cuts


def load_tokenizer(folder: Path, *, special_tokens: bool = False) -> Tokenizer:
    """Returns a dataset's tokenizer; raises `DatasetError` or `TokenizerError`."""
    info = read_manifest(folder).tokenizer
    if info.kind == BYTES:
        return ByteTokenizer()
    path = folder / TOKENIZER
    content = read_tokenizer(path)
    if hashlib.sha256(content).hexdigest() != info.sha256:
        raise TokenizerError(
            f"{path} is not the tokenizer that made the dataset: its sha256 differs"
        )
    tokenizer = HuggingFaceTokenizer(content, str(path), special_tokens=special_tokens)
    tokenizer.info = info
    return tokenizer


def read_tokenizer(path: Path) -> bytes:
    """Reads a tokenizer file; raises `TokenizerError`."""
    with reading(path):
        return read_bytes(path, _MAX_FILE)


def tokenizer_file(path: Path) -> Path:
    """Returns the `tokenizer.json` at a path or in a folder; refuses links out of the folder."""
    if not os.path.lexists(path):
        raise TokenizerError(f"{path}: {os.strerror(errno.ENOENT)}{missing_model(path)}")
    with reading(path / TOKENIZER):
        return inside(path, TOKENIZER) if path.is_dir() else path


def load_library(content: bytes, name: str) -> "Library":
    """Returns a `tokenizers` tokenizer, without truncation, padding and dropout."""
    _require_library(name)
    try:
        tokenizer = worker_process.load(content)
    except BaseException as error:
        raise as_tokenizer_error(error, f"{name}: not a tokenizer.json") from None
    for part in (tokenizer.normalizer, tokenizer.decoder):
        # Compares with None, because an object of the library, such as a Sequence, may be false.
        if part is None:
            continue
        growth = _growth(json.loads(part.__getstate__()))
        if growth > _MAX_GROWTH:
            raise TokenizerError(
                f"{name}: its {type(part).__module__.rpartition('.')[2].removesuffix('s')} makes "
                f"{growth:,.0f} characters out of one; at most {_MAX_GROWTH} are allowed"
            )
    return tokenizer


def _require_library(name: str) -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise TokenizerError(
            f"{name} needs the library tokenizers: pip install 'jaxtp[data]'"
        ) from None


def _growth(part: Mapping[str, Any]) -> float:
    """Returns how many characters a normalizer or decoder makes out of one by replacements."""
    steps = part.get("normalizers") or part.get("decoders")
    if steps is not None:
        return math.prod(map(_growth, steps))
    if part.get("type") != "Replace":
        return 1.0
    # A regular expression may match one character.
    replaced = len(part["pattern"].get("String") or "x")
    return max(1.0, len(part["content"]) / replaced)


def as_tokenizer_error(error: BaseException, failure: str) -> BaseException:
    """Converts an `Exception` of the library, or its panic, which is a BaseException."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return TokenizerError(f"{failure}: {str(error)[:300]}")
    return error


def _end_token(ids: dict[str, int], name: str, eos: str | int | None) -> int | None:
    if isinstance(eos, int):
        if eos not in ids.values():
            raise TokenizerError(
                f"{name}: has no token with the id {eos}; name another by --eos TOKEN"
            )
        return eos
    for token in END_TOKENS if eos is None else (eos,):
        if token in ids:
            return ids[token]
    if eos is not None:
        special = ", ".join([token for token in ids if token.startswith(("<", "["))][:8])
        raise TokenizerError(
            f"{name}: has no token {eos!r}; it has {special or 'none that looks like an end'}"
        )
    return None


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields the texts in lists of about `GROUP` characters."""
    group = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's alphabet; a printable Latin-1 byte stands for itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(sorted({*range(256)} - {*printable})):
        characters[chr(256 + i)] = byte
    return characters
