"""What a folder says of its model beside the weights: end tokens, chat template."""

from dataclasses import dataclass, field
from pathlib import Path

from jaxtp.data.tokenizer_files import (
    GENERATION,
    MODEL_CONFIG,
    TokenizerFileError,
    chat_template,
    context,
    end_ids,
    special_tokens,
)
from jaxtp.generate.source import SourceError


@dataclass(frozen=True)
class Described:
    """What is said; nothing of it has to be."""

    end_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""

    template: str | None = None
    """Chat template, in Jinja."""

    special_tokens: dict[str, str] = field(default_factory=dict)
    """What the template may name: bos_token, eos_token."""

    context: int | None = None
    """Tokens that the model was made for at most."""


def describe(folder: Path) -> Described:
    """Reads it, of a folder in Hugging Face format or of a dataset.

    Raises:
      SourceError: a file is damaged.
    """
    try:
        ends = end_ids(folder / GENERATION) or end_ids(folder / MODEL_CONFIG)  # the first may name several
        return Described(frozenset(ends), chat_template(folder), special_tokens(folder), context(folder / MODEL_CONFIG))
    except TokenizerFileError as error:
        raise SourceError(str(error)) from None
