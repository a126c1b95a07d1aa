"""New special tokens for a tokenizer.json, such as the marks of turns that a base model lacks.

`jaxtp prepare --add-tokens` and `jaxtp train --model.add-tokens` both add the tokens to the model's
own file, and get the same bytes, whose hash a dataset records. So neither needs the other's files,
and data that were made with other tokens are noticed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtp.config.reading import truncate
from jaxtp.data.tokenizer import encode_isolated, load_library
from jaxtp.data.tokenizer_files import TokenizerError

_OPTIONS = {
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "special": True,
}
ADDED = "added_tokens"
"""Key in a tokenizer.json: the list of tokens that its model does not make."""


@dataclass(frozen=True)
class NewTokens:
    """New special tokens of a tokenizer."""

    tokens: tuple[str, ...]
    ids: range
    """Consecutive ids after the largest id of the tokenizer."""
    tokenizer: bytes
    """The tokenizer.json with them."""

    @property
    def decoder(self) -> dict[str, dict[str, object]]:
        """The tokens by id, as in a tokenizer_config.json."""
        ids = map(str, self.ids)
        return {
            id: {"content": token, **_OPTIONS} for id, token in zip(ids, self.tokens, strict=True)
        }


def with_tokens(content: bytes, tokens: Sequence[str], name: str) -> NewTokens:
    """Adds special tokens to a tokenizer.json.

    Args:
      content: the file without the tokens.
      tokens: one or more texts.
      name: the file's name in messages.

    Raises:
      TokenizerError: a token is empty, is named twice or is in the file, or the file is not usable.
    """
    from tokenizers import AddedToken

    # A file that makes the library crash ends a worker, and not this process.
    encode_isolated(content, name, [])
    library = load_library(content, name)
    before = library.get_vocab(with_added_tokens=True)
    for place, token in enumerate(tokens):
        if not token.strip():
            raise TokenizerError(
                f"the new token {token!r} is empty; name a text such as <|im_end|>"
            )
        if token != token.encode(errors="replace").decode():
            raise TokenizerError(f"the new token {truncate(token)!r} is not UTF-8")
        if token in tokens[:place]:
            raise TokenizerError(f"the new token {truncate(token)!r} is named twice")
        if token in before:
            raise TokenizerError(
                f"the new token {truncate(token)!r} is in {name} already, with the id "
                f"{before[token]}; leave it out"
            )
    library.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    first = max(before.values()) + 1
    ids = range(first, first + len(tokens))
    if list(map(library.token_to_id, tokens)) != list(ids):
        raise TokenizerError(f"{name}: its ids have gaps, so new tokens would get ids of others")
    # Not the library's own text of the file, which differs between its versions.
    file = _parse(content, name)
    entries = list(file.get(ADDED) or ())
    for id, token in zip(ids, tokens, strict=True):
        entries.append({"id": id, "content": token, **_OPTIONS})
    file[ADDED] = entries
    tokenizer = json.dumps(file, indent=2, ensure_ascii=False).encode()
    return NewTokens(tuple(tokens), ids, tokenizer)


def added_tokens(content: bytes, name: str) -> dict[str, int]:
    """Returns the tokens in the list `ADDED` of a tokenizer.json, with their ids."""
    return {entry["content"]: entry["id"] for entry in _parse(content, name).get(ADDED) or ()}


def _parse(content: bytes, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except ValueError as error:
        raise TokenizerError(f"{name}: not JSON: {truncate(error)}") from None
