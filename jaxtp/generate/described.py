"""What a folder in Hugging Face format says of its model beside the weights: end tokens, chat template."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtp.generate.source import SourceError
from jaxtp.hf.folder import CONFIG

GENERATION = "generation_config.json"
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True)
class Described:
    """What is said; nothing of it has to be."""

    end_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""

    template: str | None = None
    """Chat template, in Jinja."""

    special_tokens: dict[str, str] = field(default_factory=dict)
    """What the template may name: bos_token, eos_token."""


def describe(folder: Path) -> Described:
    """Reads it.

    Raises:
      SourceError: a file is damaged.
    """
    tokenizer = _read(folder / TOKENIZER_CONFIG)
    return Described(
        frozenset(_end_ids(folder)), _template(folder, tokenizer.get("chat_template")), dict(_special_tokens(tokenizer))
    )


def _end_ids(folder: Path) -> list[int]:
    """Those of the generation's configuration, which may be several; or else the model's."""
    for name in (GENERATION, CONFIG):
        ids = _read(folder / name).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) for token in listed):
                raise SourceError(f"{folder / name}: eos_token_id = {ids}: should be ids")
            return listed
    return []


def _template(folder: Path, template: Any) -> str | None:
    """The file beside the tokenizer; or what its configuration has: one, or several by name."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = described.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield name, text


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(record, dict):
        raise SourceError(f"{path}: expected a JSON object, found {type(record).__name__}")
    return record
