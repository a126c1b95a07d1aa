"""What lies beside a `tokenizer.json` in a folder of Hugging Face: end token, special tokens, chat template."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtp.entry import UserError
from jaxtp.reading import MAX_JSON, inside, parse_json, read_bytes, shown

TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
MODEL_CONFIG, GENERATION = "config.json", "generation_config.json"
LONGEST = "max_position_embeddings"
"""The attribute of a config.json that says how many tokens a model was made for."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_TEMPLATE = 2**20
"""Bytes; the longest have some 20,000."""


class TokenizerFileError(UserError):
    """A file beside a tokenizer that cannot be read, or that says something else than it should."""


def end_token(folder: Path) -> tuple[str | int, Path] | None:
    """The token that ends a text, by name or id, and the file that says so; None where none does.

    tokenizer_config.json comes first, then config.json and generation_config.json, of several ids the first.

    Raises:
      TokenizerFileError: one of the files is damaged.
    """
    named = special_tokens(folder).get("eos_token")
    if named is not None:
        return named, folder / TOKENIZER_CONFIG
    for name in (MODEL_CONFIG, GENERATION):
        if ids := end_ids(folder / name):
            return ids[0], folder / name
    return None


def end_ids(path: Path) -> list[int]:
    """The `eos_token_id` of a config.json or generation_config.json: ids that end a text; none where it has none.

    Raises:
      TokenizerFileError: the file is damaged, or they are no ids.
    """
    ids = read(path).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
        raise TokenizerFileError(f"{path}: eos_token_id = {shown(ids)}: should be ids")
    return listed


def context(path: Path) -> int | None:
    """The `max_position_embeddings` of a config.json: tokens that the model was made for at most.

    Raises:
      TokenizerFileError: the file is damaged, or that is no number of tokens.
    """
    longest = read(path).get(LONGEST)
    if longest is not None and (type(longest) is not int or longest < 1):
        raise TokenizerFileError(
            f"{path}: max_position_embeddings = {str(longest)[:100]}: should be a whole number, 1 or more"
        )
    return longest


def special_tokens(folder: Path) -> dict[str, str]:
    """What a chat template may name, such as bos_token and eos_token, as tokenizer_config.json spells it.

    Raises:
      TokenizerFileError: the file is damaged.
    """
    described = read(folder / TOKENIZER_CONFIG)
    spelled = {name: _content(described.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in spelled.items() if isinstance(text, str)}


def chat_template(folder: Path) -> str | None:
    """The file of its own; or what tokenizer_config.json has: one, or of several by name the one called default.

    Raises:
      TokenizerFileError: a file is damaged.
    """
    if os.path.lexists(folder / TEMPLATE):
        return _text(_content_of(folder / TEMPLATE, _MAX_TEMPLATE), folder / TEMPLATE)
    template = read(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in named), None)
    return template if isinstance(template, str) else None


def read_template(path: Path) -> str:
    """The text of a template's file, wherever it is.

    Raises:
      TokenizerFileError: it cannot be read.
    """
    try:
        return _text(read_bytes(path, _MAX_TEMPLATE), path)
    except OSError as error:
        raise TokenizerFileError(f"{path}: {error.strerror}") from None


def read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file.

    Raises:
      TokenizerFileError: it is damaged.
    """
    if not os.path.lexists(path):
        return {}
    content = _content_of(path, MAX_JSON)
    try:
        return parse_json(content, str(path))
    except ValueError as error:
        raise TokenizerFileError(str(error)) from None


def _content_of(path: Path, most: int) -> bytes:
    """Returns the content of a file that does not lie outside of its folder by way of a link."""
    try:
        return read_bytes(inside(path.parent, path.name), most)
    except OSError as error:
        raise TokenizerFileError(f"{path}: {error.strerror}") from None


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise TokenizerFileError(f"{path}: not UTF-8") from None


def _content(token: Any) -> Any:
    """Of a token that is spelled as a string, or as an object that says how it is matched too."""
    return token.get("content") if isinstance(token, Mapping) else token
