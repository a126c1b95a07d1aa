"""The files next to a `tokenizer.json`: end token, special tokens, chat template."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtp.config.entry import UserError
from jaxtp.config.reading import MAX_JSON, inside, parse_json, read_bytes, truncate

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_WITH_TOOLS = "tool_use"
_TEMPLATE_WITH_TOOLS = f"additional_chat_templates/{_WITH_TOOLS}.jinja"
MODEL_CONFIG = "config.json"
GENERATION = "generation_config.json"
MAX_POSITIONS = "max_position_embeddings"  # The context length in config.json
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
TEMPLATE_DAY = "chat_template_day"
"""Key in a dataset's tokenizer_config.json: the day that its chat template wrote."""
TEMPLATE_ARGUMENTS = "chat_template_arguments"
"""Key in a dataset's tokenizer_config.json: the arguments with which it was rendered."""
MAX_TEMPLATE = 2**20  # Maximum bytes of a template; real templates have up to some 20,000


class TokenizerError(UserError):
    """A tokenizer, or a file next to it, is unusable."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts OSError into TokenizerError."""
    try:
        yield
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from None


def end_token(folder: Path) -> str | int | None:
    """Returns the configured end token, by name or id.

    Reads tokenizer_config.json, or else the first id in config.json or generation_config.json.
    """
    token = special_tokens(folder).get("eos_token")
    if token is not None:
        return token
    ids = end_ids(folder / MODEL_CONFIG) or end_ids(folder / GENERATION)
    return ids[0] if ids else None


def end_ids(path: Path) -> list[int]:
    """Returns `eos_token_id` of a config.json or generation_config.json.

    Raises `TokenizerError`.
    """
    ids = _with_text(read(path)).get("eos_token_id")
    if ids is None:
        return []
    listed = ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
        raise TokenizerError(f"{path}: eos_token_id = {truncate(ids)}: should be ids")
    return listed


def context(path: Path) -> int | None:
    """Returns the context length in a config.json; raises `TokenizerError`."""
    longest = _with_text(read(path)).get(MAX_POSITIONS)
    if longest is not None and (type(longest) is not int or longest < 1):
        raise TokenizerError(
            f"{path}: max_position_embeddings = {str(longest)[:100]}: should be a whole number, "
            "1 or more"
        )
    return longest


def _with_text(described: dict[str, Any]) -> dict[str, Any]:
    """Adds the settings of the text model in a multimodal config.json."""
    text = described.get("text_config")
    return {**text, **described} if isinstance(text, dict) else described


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns a chat template's tokens, such as bos_token, from tokenizer_config.json."""
    described = read(folder / TOKENIZER_CONFIG)
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = described.get(name)
        # An object instead of a string also configures how the token is matched.
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def template_day(folder: Path) -> str | None:
    """Returns the day that the chat template wrote into a dataset; raises `TokenizerError`."""
    day = read(folder / TOKENIZER_CONFIG).get(TEMPLATE_DAY)
    if day is None:
        return None
    try:
        return datetime.date.fromisoformat(day).isoformat()
    except (ValueError, TypeError):
        raise TokenizerError(
            f"{folder / TOKENIZER_CONFIG}: {TEMPLATE_DAY} = {truncate(day)}: not a day"
        ) from None


def template_arguments(folder: Path) -> dict[str, Any]:
    """Returns the arguments of the chat template of a dataset; raises `TokenizerError`."""
    arguments = read(folder / TOKENIZER_CONFIG).get(TEMPLATE_ARGUMENTS) or {}
    if not isinstance(arguments, dict):
        raise TokenizerError(
            f"{folder / TOKENIZER_CONFIG}: {TEMPLATE_ARGUMENTS} = {truncate(arguments)}: should be "
            "an object"
        )
    return arguments


def chat_template(folder: Path) -> str | None:
    """Returns the template in chat_template.jinja, tokenizer_config.json or chat_template.json.

    As in transformers, conversations with tools have the template named "tool_use", if there is
    one, and others the one named "default".
    """
    templates: dict[str, Any] = {}
    for name, file in (("default", TEMPLATE), (_WITH_TOOLS, _TEMPLATE_WITH_TOOLS)):
        if os.path.lexists(folder / file):
            with reading(folder / file):
                templates[name] = read_template(inside(folder, file))
    if "default" not in templates:
        templates = _templates_in_json(folder) | templates
    default = templates.get("default")
    with_tools = templates.get(_WITH_TOOLS)
    if not isinstance(default, str):
        return None
    if not isinstance(with_tools, str):
        return default
    # Jinja drops the line break after a block, and one at the end of a template. The empty texts
    # keep it from dropping spaces before a block.
    texts = [text.removesuffix("\n") + "{{ '' }}" for text in (with_tools, default)]
    return f"{{% if tools %}}\n{texts[0]}{{% else %}}\n{texts[1]}{{% endif %}}"


def _templates_in_json(folder: Path) -> dict[str, Any]:
    """Returns the templates in JSON files by name; raises `TokenizerError` if one is too long."""
    template = read(folder / TOKENIZER_CONFIG).get("chat_template")
    if template is None:
        # Files of multimodal models from 2024
        template = read(folder / "chat_template.json").get("chat_template")
    if not isinstance(template, list):
        template = [{"name": "default", "template": template}]
    named = [entry for entry in template if isinstance(entry, dict)]
    templates = {str(entry.get("name")): entry.get("template") for entry in named}
    for text in templates.values():
        if isinstance(text, str) and len(text) > MAX_TEMPLATE:
            raise TokenizerError(
                f"{folder / TOKENIZER_CONFIG}: a chat template of more than {MAX_TEMPLATE:,} "
                "characters"
            )
    return templates


def read_template(path: Path) -> str:
    """Reads a template file; raises `TokenizerError`."""
    with reading(path):
        content = read_bytes(path, MAX_TEMPLATE)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: not UTF-8") from None


def read(path: Path) -> dict[str, Any]:
    """Reads a JSON object, which is empty without a file; refuses links out of the folder."""
    if not os.path.lexists(path):
        return {}
    with reading(path):
        content = read_bytes(inside(path.parent, path.name), MAX_JSON)
    try:
        return parse_json(content, str(path))
    except ValueError as error:
        raise TokenizerError(str(error)) from None
