"""Changes of a model's tokenizer in training: new tokens, the chat template, the end of answers."""

from pathlib import Path
from typing import Any

from jaxtp.data.added_tokens import NewTokens, added_tokens
from jaxtp.data.manifest import TOKENIZER, read_manifest
from jaxtp.data.tokenizer import read_tokenizer
from jaxtp.data.tokenizer_files import (
    GENERATION,
    MODEL_CONFIG,
    TEMPLATE,
    TOKENIZER_CONFIG,
    chat_template,
    end_ids,
    read,
    read_template,
)
from jaxtp.hf.saving import json_bytes

_SPECIAL_TOKENS = "special_tokens_map.json"
_DECODER = "added_tokens_decoder"


def changed_files(folder: Path, data: Path | None, new: NewTokens | None) -> dict[str, bytes]:
    """Returns the tokenizer files of a run that differ from those of its model.

    Conversations bring the template that wrote them, and the token that ends an answer becomes the
    end of texts, or transformers and vLLM would generate past it.

    Args:
      folder: the model's files.
      data: the run's dataset, if there is one.
      new: tokens that the model's tokenizer lacks.

    Raises:
      TokenizerError, DatasetError: a file is not readable.
    """
    files: dict[str, bytes] = {}
    described = read(folder / TOKENIZER_CONFIG)
    changes = dict[str, Any]()
    if new is not None:
        files[TOKENIZER] = new.tokenizer
        if _DECODER in described:
            changes[_DECODER] = {**described[_DECODER], **new.decoder}
    if data is not None and (data / TEMPLATE).is_file():
        template = read_template(data / TEMPLATE)
        if template != chat_template(folder):
            files[TEMPLATE] = template.encode()
        end = read_manifest(data).tokenizer.eos_id
        ends = end_ids(folder / GENERATION) or end_ids(folder / MODEL_CONFIG)
        if end is not None and end not in ends:
            tokens = added_tokens(read_tokenizer(data / TOKENIZER), str(data / TOKENIZER))
            generation = {**read(folder / GENERATION), "eos_token_id": [end, *ends]}
            files[GENERATION] = json_bytes(generation)
            # `jaxtp prepare --eos` may name a token that is not a special one.
            names = {id: {"eos_token": token} for token, id in tokens.items()}
            end_token = names.get(end, {})
            changes |= end_token
            # Older versions of transformers prefer this file.
            if special := read(folder / _SPECIAL_TOKENS):
                files[_SPECIAL_TOKENS] = json_bytes({**special, **end_token})
    if changes:
        files[TOKENIZER_CONFIG] = json_bytes({**described, **changes})
    return files
