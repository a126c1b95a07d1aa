"""Prompts: files of them, with one on each line or in JSONL; their ids, and whether a model can read these."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.config import ConfigError, nearest_file
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.scheduler import GenerationError
from jaxtp.models.config import ModelConfig

Ids = NDArray[np.int32]
Prompt = str | Sequence[int] | Ids

_MOST_NAMED = 5
"""Most prompts in a message."""


def is_jsonl(path: Path) -> bool:
    """Returns whether a file is JSONL, by its name."""
    return path.suffix in (".jsonl", ".ndjson")


MAX_BYTES = 2**30
"""Largest size of a file of prompts."""


def read_prompts(path: Path, field: str) -> list[str | None]:
    """Returns the prompt on each line of a file; None for a blank line.

    Args:
      path: the file.
      field: name of the field that has the text in an object of JSONL.

    Raises:
      ConfigError: the file cannot be read, or has no prompts; the message names the line that is at fault.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{path}: more than {MAX_BYTES // 2**20:,} MiB, the limit for a file of prompts; split it"
            )
        lines = content.decode().split("\n")  # splitlines would cut at characters within a text too
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start:,})") from None
    given = [line.removesuffix("\r") if line.strip() else None for line in lines]
    if not any(given):
        raise ConfigError(f"{path}: no prompts in it")
    if not is_jsonl(path):
        return given
    return [
        None if line is None else _field(f"{path}, line {number}", line, field) for number, line in enumerate(given, 1)
    ]


def _field(where: str, line: str, field: str) -> str:
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
    """The prompts that a model can read: which tokens, and how many."""

    vocab_size: int

    context: int | None
    """The most tokens of a prompt and its text together; None for any number."""

    learned: bool
    """Whether that is the number of positions that the model has vectors for."""

    def problem(self, ids: Sequence[int] | Ids, otherwise: str = "") -> str:
        """Returns what is wrong with a prompt, to be put behind its name; empty if it can be read.

        Args:
          ids: the prompt.
          otherwise: what can be done about too many tokens, but for fewer.
        """
        array = np.asarray(ids)
        if not array.size:
            return "is empty; the model needs at least one token to go on from"
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            return (
                f"has the token {wrong[0]}, and the model has those from 0 to {self.vocab_size - 1}: the tokenizer is "
                "not the model's; give the model's own by --tokenizer PATH"
            )
        if self.context is None or array.size < self.context:
            return ""
        why = " (max_position_embeddings in its config.json)"
        if self.learned:
            why = ": there are no vectors for later positions (model.learned_positions)"
        elif not otherwise:
            otherwise = "have it read all the same by --beyond-context"
        return (
            f"has {array.size:,} tokens, and the model was made for {self.context:,}, with the text that follows{why}; "
            f"shorten it by {array.size - self.context + 1:,}{', or ' if otherwise else ''}{otherwise}"
        )


def limits_of(model: ModelConfig, context: int | None) -> Limits:
    """Returns the limits of a model.

    Args:
      model: its configuration.
      context: the most tokens of a prompt and its text that it was made for, or that are wanted; None for any number.
    """
    learned = model.learned_positions
    fewest = min((limit for limit in (context, learned) if limit is not None), default=None)
    return Limits(model.vocab_size, fewest, fewest is not None and fewest == learned)


def encode_prompts(
    prompts: Sequence[Prompt | None],
    tokenizer: Tokenizer,
    prefix: Sequence[int],
    limits: Limits,
    named: Callable[[int], str] = "prompt {}".format,
) -> list[Ids | None]:
    """Returns the ids of each prompt, if the model can read all of them; None stays None.

    Args:
      prompts: texts, or ids, which are taken as they are.
      tokenizer: the tokenizer of the model.
      prefix: ids to put before each prompt that is text.
      limits: the limits of the model.
      named: gives the name of a prompt in messages, by its index.

    Raises:
      GenerationError: some cannot be read; the message names them.
      TokenizerError: the tokenizer has no token for something in them.
    """
    odd = {index: prompt for index, prompt in enumerate(prompts) if prompt is not None and not _is_prompt(prompt)}
    _require_none({index: f"is {prompt!r:.40}, and should be a text or ids" for index, prompt in odd.items()}, named)
    texts = {index: prompt for index, prompt in enumerate(prompts) if isinstance(prompt, str)}
    _require_none({index: "is not UTF-8" for index, text in texts.items() if not _is_utf8(text)}, named)
    encoded = dict(zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True))
    before = np.array(prefix, np.int64)
    ids = {
        index: np.concatenate([before, encoded[index]]) if index in encoded else np.asarray(prompt)
        for index, prompt in enumerate(prompts)
        if prompt is not None
    }
    problems = {index: limits.problem(found) for index, found in ids.items()}
    _require_none({index: problem for index, problem in problems.items() if problem}, named)
    return [ids[index].astype(np.int32) if index in ids else None for index in range(len(prompts))]


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (np.ndim(prompt) == 1 and np.asarray(prompt).dtype.kind in "iuf")  # [] is floats


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_none(problems: Mapping[int, str], named: Callable[[int], str]) -> None:
    """Raises an error of all problems, by the index of the prompt."""
    if problems:
        lines = [f"{named(index)} {problem}" for index, problem in problems.items()]
        more = [f"and {len(lines) - _MOST_NAMED:,} more prompts"] if len(lines) > _MOST_NAMED else []
        raise GenerationError("\n  ".join(lines[:_MOST_NAMED] + more))
