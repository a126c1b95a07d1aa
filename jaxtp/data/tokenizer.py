"""Turns text into tokens and back: bytes, or any `tokenizer.json` of Hugging Face.

Nothing is added on encoding: no special tokens, no truncation, no padding, no dropout. Unless told otherwise, text that
spells a special token, such as `<|endoftext|>`, is text.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.corpus import BYTE_TOKENIZER
from jaxtp.data.manifest import BYTES, HUGGING_FACE, TOKENIZER, TokenizerInfo, read_manifest
from jaxtp.data.tokenizer_files import TokenizerError, reading
from jaxtp.reading import inside, read_bytes

END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Usual names of the token that ends a document."""

_MAX_FILE = 2**28
"""Bytes of a file at most; the largest have some 50 million."""
_PIECE = 2**20
"""Characters after which a long text is cut, where that changes nothing: so one text keeps all cores busy."""
_GROUP = 2**24
"""Characters that are encoded at a time; the library holds about 100 bytes for each token until it is done."""
_CUT = re.compile(r"(?<=\S)\n")


class ByteTokenizer:
    """Makes a token of each byte of UTF-8."""

    info = BYTE_TOKENIZER

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Returns the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: NDArray[Any]) -> bytes:
        """Returns the bytes."""
        return np.asarray(ids).astype(np.uint8).tobytes()

    def num_bytes(self, ids: NDArray[Any]) -> int:
        """Returns the number of bytes that ids stand for."""
        return len(ids)


class HuggingFaceTokenizer:
    """A `tokenizer.json`.

    Args:
      content: the file.
      name: its name in messages.
      eos: the end token, or its id; None to find it by the names that are in use.
      has_eos: whether documents end in it.
      special_tokens: whether text that spells a special token becomes that token.

    Raises:
      TokenizerError: it is not a tokenizer, or has no such end token.
    """

    def __init__(
        self,
        content: bytes,
        name: str,
        *,
        eos: str | int | None = None,
        has_eos: bool = True,
        special_tokens: bool = False,
    ):
        self.name = name
        self.content = content
        self._tokenizer = load_library(content, name)
        self._tokenizer.encode_special_tokens = not special_tokens
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise TokenizerError(f"{name}: a tokenizer without a vocabulary")
        size = max(ids.values()) + 1  # not their number: there may be gaps
        eos_id = _end_token(ids, name, eos) if has_eos else None
        self.info = TokenizerInfo(HUGGING_FACE, hashlib.sha256(content).hexdigest(), size, eos_id)
        """The description of the tokenizer that a dataset has."""
        file = json.loads(self._tokenizer.to_str())  # not the content, of which the library may read what is no JSON
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._cuts_at_lines = _splits_like_gpt2(file) and not any(
            token.lstrip or "\n" in token.content for token in self._added.values()
        )
        self._is_byte_level = _type(file, "decoder") == "ByteLevel"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Returns the ids of each text, without an end token; works on all cores.

        Raises:
          TokenizerError: the tokenizer has no token for something in them.
        """
        pieces = [(index, piece) for index, text in enumerate(texts) for piece in self._pieces(text)]
        ids: list[list[NDArray[Any]]] = [[] for _ in texts]
        for group in _groups(pieces):
            for (index, _), encoded in zip(group, self._encode([piece for _, piece in group]), strict=True):
                ids[index].append(encoded)
        return [found[0] if len(found) == 1 else np.concatenate(found) for found in ids]

    def decode(self, ids: NDArray[Any]) -> bytes:
        """Returns the text of ids, as UTF-8; special tokens are spelled out, but for the end token.

        Ids may begin or end within a character.

        Raises:
          TokenizerError: an id that is not in the vocabulary.
        """
        kept = [token for token in np.asarray(ids).tolist() if token != self.info.eos_id]
        try:
            if self._is_byte_level:
                return b"".join([self._bytes_of[token] for token in kept])
            return str(self._tokenizer.decode(kept, skip_special_tokens=False)).encode()
        except KeyError as error:
            raise TokenizerError(f"{self.name}: no token has the id {error}") from None
        except BaseException as error:
            raise understood(error, f"{self.name}: cannot decode") from None

    def num_bytes(self, ids: NDArray[Any]) -> int:
        """Returns the number of bytes that ids stand for: the length of what `decode` returns.

        Raises:
          TokenizerError: an id that is not in the vocabulary.
        """
        if not self._is_byte_level:
            return len(self.decode(ids))
        ids = np.asarray(ids)
        if len(ids) and int(ids.max()) >= len(self._num_bytes_of):
            raise TokenizerError(f"{self.name}: no token has the id {int(ids.max())}")
        return int(self._num_bytes_of[ids].sum())

    def spelled(self, token: int) -> str:
        """Returns a token as the vocabulary has it, for messages."""
        return str(self._tokenizer.id_to_token(token))

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """Ids that the tokenizer's own template puts before a text, such as its first token; nothing here adds them.

        Raises:
          TokenizerError: it cannot encode a letter.
        """
        try:
            plain, whole = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
        except BaseException as error:
            raise understood(error, f"{self.name}: cannot encode a text") from None
        begins = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return tuple(whole[: next(begins, 0)])

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        """Bytes that each token of a byte-level tokenizer stands for."""
        byte_of = _byte_of_character()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return {
            token: text.encode()
            if token in self._added or set(text) - byte_of.keys()
            else bytes(byte_of[c] for c in text)
            for text, token in vocabulary.items()
        }

    @cached_property
    def _num_bytes_of(self) -> NDArray[np.int64]:
        """Number of bytes of each token of a byte-level tokenizer, by id; 0 of the end token, which `decode` drops."""
        found = np.zeros(self.info.vocab_size, np.int64)
        for token, text in self._bytes_of.items():
            found[token] = len(text) * (token != self.info.eos_id)
        return found

    def _encode(self, texts: list[str]) -> list[NDArray[Any]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            raise understood(error, f"{self.name}: cannot encode a text") from None
        return [np.array(encoding.ids, self.info.dtype) for encoding in encodings]

    def _pieces(self, text: str) -> Iterator[str]:
        """Cuts before a line break after something visible: there GPT-2's pattern splits, whatever comes next."""
        start = 0
        while self._cuts_at_lines and len(text) - start > _PIECE and (cut := _CUT.search(text, start + _PIECE)):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(folder: Path, *, special_tokens: bool = False) -> Tokenizer:
    """Returns the tokenizer of a dataset.

    Args:
      folder: folder of the dataset.
      special_tokens: whether text that spells a special token becomes that token.

    Raises:
      DatasetError: the folder is no dataset.
      TokenizerError: its tokenizer is missing or is not the one that made the tokens.
    """
    info = read_manifest(folder).tokenizer
    if info.kind == BYTES:
        return ByteTokenizer()
    path = folder / TOKENIZER
    content = read_tokenizer(path)
    if hashlib.sha256(content).hexdigest() != info.sha256:
        raise TokenizerError(f"{path} is not the tokenizer that made the dataset: its sha256 is another")
    tokenizer = HuggingFaceTokenizer(content, str(path), has_eos=False, special_tokens=special_tokens)
    tokenizer.info = info
    return tokenizer


def read_tokenizer(path: Path) -> bytes:
    """Returns the content of a tokenizer's file.

    Raises:
      TokenizerError: it cannot be read.
    """
    with reading(path):
        return read_bytes(path, _MAX_FILE)


def tokenizer_file(path: Path) -> Path:
    """Returns the file of a tokenizer that is named by it or by its folder.

    Raises:
      TokenizerError: in the folder it is a link out of it.
    """
    with reading(path / TOKENIZER):
        return inside(path, TOKENIZER) if path.is_dir() else path


def load_library(content: bytes, name: str) -> Any:
    """Returns a tokenizer of the library, with truncation, padding and dropout turned off.

    Raises:
      TokenizerError: it is none.
    """
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise TokenizerError(f"{name} needs the library tokenizers: pip install 'jaxtp[data]'") from None
    try:
        tokenizer = Library.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
    except BaseException as error:
        raise understood(error, f"{name}: not a tokenizer.json") from None
    return tokenizer


def understood(error: BaseException, what: str) -> BaseException:
    """Returns the error of the library as a `TokenizerError`.

    The library raises plain `Exception`, and where it panics something that is not even that; others stay as they are.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return TokenizerError(f"{what}: {str(error)[:300]}")
    return error


def _end_token(ids: dict[str, int], name: str, eos: str | int | None) -> int:
    if isinstance(eos, int):
        if eos not in ids.values():
            raise TokenizerError(
                f"{name}: has no token with the id {eos}; name another that ends a text by --eos TOKEN"
            )
        return eos
    if eos is not None:
        if eos not in ids:
            special = ", ".join([token for token in ids if token.startswith(("<", "["))][:8])
            raise TokenizerError(f"{name}: has no token {eos!r}; it has {special or 'none that looks like an end'}")
        return ids[eos]
    if named := [ids[token] for token in END_TOKENS if token in ids]:
        return named[0]
    raise TokenizerError(f"{name}: which token ends a document? Name it by --eos TOKEN, or give --no-eos")


def _splits_like_gpt2(file: dict[str, Any]) -> bool:
    if file.get("normalizer") is not None or _type(file, "pre_tokenizer") != "ByteLevel":
        return False
    settings = file["pre_tokenizer"]
    return settings.get("use_regex", True) is True and settings.get("add_prefix_space") is False


def _type(file: dict[str, Any], part: str) -> Any:
    found = file.get(part)
    return found.get("type") if isinstance(found, dict) else None


def _groups(pieces: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    sizes = itertools.accumulate((len(text) for _, text in pieces), initial=0)
    for _, group in itertools.groupby(zip(pieces, sizes, strict=False), key=lambda each: each[1] // _GROUP):
        yield [piece for piece, _ in group]


def _byte_of_character() -> dict[str, int]:
    """Returns the byte of each character of GPT-2's alphabet, in which a printable byte of Latin-1 is itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
