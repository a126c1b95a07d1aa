"""Reads prompt files, encodes prompts, and checks them against the model's limits."""

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtp.config.schema import ConfigError, nearest_file
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.request import GenerationError
from jaxtp.models.config import ModelConfig

Ids = NDArray[np.int32]
Prompt = str | Sequence[int] | Ids

MAX_BYTES = 2**30
"""Maximum size of a prompt file."""


def is_jsonl(path: Path) -> bool:
    """Whether a file name has a JSON Lines suffix."""
    return path.suffix in (".jsonl", ".ndjson")


def read_prompts(path: Path, field: str) -> list[str | None]:
    """Returns the prompt on each line; None for a blank line.

    Args:
      field: the JSONL field with the text.

    Raises:
      ConfigError: the file is unreadable or has no prompts; the message names the line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES // 2**20:,} MiB, the limit for a prompt file; split it")
        lines = content.decode().split("\n")  # splitlines would also split at U+2028 within a text
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start:,})") from None
    texts = [line.removesuffix("\r") if line.strip() else None for line in lines]
    if not any(texts):
        raise ConfigError(f"{path}: no prompts in it")
    if not is_jsonl(path):
        return texts
    return [
        None if line is None else _json_field(f"{path}, line {number}", line, field)
        for number, line in enumerate(texts, 1)
    ]


def _json_field(where: str, line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected an object such as {{{json.dumps(field)}: ...}}, found {line[:60]}")
    if field not in record:
        close = difflib.get_close_matches(field, record, n=1, cutoff=0.5)
        hint = f"did you mean --field {close[0]}?" if close else f"it has {', '.join(record) or 'none'}"
        raise ConfigError(f"{where}: no field {field!r}; {hint}")
    if not isinstance(record[field], str):
        raise ConfigError(f"{where}: {field} = {json.dumps(record[field])[:60]}: should be text")
    return record[field]


@dataclass(frozen=True)
class Limits:
    """The token ids and lengths that a model accepts."""

    vocab_size: int
    context: int | None
    """Maximum number of tokens of prompt and text together; None for no limit."""
    learned: bool
    """Whether the limit is the number of learned positions."""

    def problem(self, ids: Sequence[int] | Ids, way_out: str = "") -> str:
        """Returns why the model cannot read a prompt, to follow its name; empty if it can.

        Args:
          way_out: a remedy for too many tokens, besides a shorter prompt.
        """
        array = np.asarray(ids)
        if not array.size:
            return "is empty; the model needs at least one token"
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            return (
                f"has the token {wrong[0]}, but the model's tokens are 0 to {self.vocab_size - 1}: this is not the "
                "model's tokenizer; give the right one by --tokenizer PATH"
            )
        if self.context is None or array.size < self.context:
            return ""
        why = " (max_position_embeddings in its config.json)"
        if self.learned:
            why = ", the number of its learned positions (model.learned_positions)"
        elif not way_out:
            way_out = "allow it by --beyond-context"
        return (
            f"has {array.size:,} tokens, and the model's context is {self.context:,}, generated text included{why}; "
            f"shorten it by {array.size - self.context + 1:,}{', or ' if way_out else ''}{way_out}"
        )


def limits_of(model: ModelConfig, context: int | None) -> Limits:
    """Returns a model's limits; `context` is its limit or the user's."""
    learned = model.learned_positions
    limit = min((limit for limit in (context, learned) if limit is not None), default=None)
    return Limits(model.vocab_size, limit, limit is not None and limit == learned)


def encode_prompts(
    prompts: Sequence[Prompt | None],
    tokenizer: Tokenizer,
    prefix: Sequence[int],
    limits: Limits,
    name: Callable[[int], str] = "prompt {}".format,
) -> list[Ids | None]:
    """Returns the ids of each prompt; None stays None.

    Args:
      prompts: texts, or ids, used unchanged.
      prefix: ids to put before each text.
      name: names a prompt in messages, by its index.

    Raises:
      GenerationError: the model cannot read a prompt.
      TokenizerError: the tokenizer cannot encode part of a prompt.
    """
    present = {index: prompt for index, prompt in enumerate(prompts) if prompt is not None}
    for index, prompt in present.items():
        if not _is_prompt(prompt):
            raise GenerationError(f"{name(index)} is {prompt!r:.40}, not text or ids")
        if isinstance(prompt, str) and prompt != prompt.encode(errors="replace").decode():  # half a surrogate pair
            raise GenerationError(f"{name(index)} is not UTF-8")
    texts = {index: prompt for index, prompt in present.items() if isinstance(prompt, str)}
    encoded = dict(zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True))
    before, ids = np.array(prefix, np.int64), list[Ids | None]()
    for index, maybe in enumerate(prompts):
        if maybe is None:
            ids.append(None)
            continue
        array = np.concatenate([before, encoded[index]]) if index in encoded else np.asarray(maybe)
        if problem := limits.problem(array):
            raise GenerationError(f"{name(index)} {problem}")
        ids.append(array.astype(np.int32))
    return ids


def _is_prompt(prompt: object) -> bool:
    array = np.asarray(prompt)
    return isinstance(prompt, str) or (array.ndim == 1 and array.dtype.kind in "iuf")  # [] is an array of floats
