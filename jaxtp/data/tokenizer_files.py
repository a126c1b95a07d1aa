"""The files beside a `tokenizer.json` in a folder of Hugging Face: end token, special tokens, chat template."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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


class TokenizerError(UserError):
    """A tokenizer or a file beside it that cannot be read, or that cannot do what is asked of it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Surrounds what reads a file.

    Raises:
      TokenizerError: the file cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from None


def end_token(folder: Path) -> tuple[str | int, Path] | None:
    """Returns the token that ends a text, by name or id, and the file that says so; None where none does.

    tokenizer_config.json comes first, then config.json and generation_config.json, of several ids the first.

    Raises:
      TokenizerError: one of the files is damaged.
    """
    named = special_tokens(folder).get("eos_token")
    if named is not None:
        return named, folder / TOKENIZER_CONFIG
    for name in (MODEL_CONFIG, GENERATION):
        if ids := end_ids(folder / name):
            return ids[0], folder / name
    return None


def end_ids(path: Path) -> list[int]:
    """Returns the `eos_token_id` of a config.json or generation_config.json: the ids that end a text, if any.

    Raises:
      TokenizerError: the file is damaged, or they are no ids.
    """
    ids = read(path).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
        raise TokenizerError(f"{path}: eos_token_id = {shown(ids)}: should be ids")
    return listed


def context(path: Path) -> int | None:
    """Returns the `max_position_embeddings` of a config.json: the most tokens that the model was made for.

    Raises:
      TokenizerError: the file is damaged, or that is no number of tokens.
    """
    longest = read(path).get(LONGEST)
    if longest is not None and (type(longest) is not int or longest < 1):
        raise TokenizerError(
            f"{path}: max_position_embeddings = {str(longest)[:100]}: should be a whole number, 1 or more"
        )
    return longest


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns what a chat template may name, such as bos_token and eos_token, as tokenizer_config.json spells it.

    Raises:
      TokenizerError: the file is damaged.
    """
    described = read(folder / TOKENIZER_CONFIG)
    spelled = {name: described.get(name) for name in SPECIAL_TOKENS}
    # An object instead of a string also says how the token is matched.
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in spelled.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def chat_template(folder: Path) -> str | None:
    """Returns the chat template, if there is one: chat_template.jinja, or that of tokenizer_config.json.

    Of several by name the one called default.

    Raises:
      TokenizerError: a file is damaged.
    """
    if os.path.lexists(folder / TEMPLATE):
        with reading(folder / TEMPLATE):
            return read_template(inside(folder, TEMPLATE))
    template = read(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in named), None)
    return template if isinstance(template, str) else None


def read_template(path: Path) -> str:
    """Returns the text of a template's file, wherever it is.

    Raises:
      TokenizerError: it cannot be read.
    """
    with reading(path):
        content = read_bytes(path, _MAX_TEMPLATE)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: not UTF-8") from None


def read(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file that is no link out of its folder; an empty one if there is no such file.

    Raises:
      TokenizerError: it is damaged.
    """
    if not os.path.lexists(path):
        return {}
    with reading(path):
        content = read_bytes(inside(path.parent, path.name), MAX_JSON)
    try:
        return parse_json(content, str(path))
    except ValueError as error:
        raise TokenizerError(str(error)) from None
