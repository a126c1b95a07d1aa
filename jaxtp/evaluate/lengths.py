"""How many tokens a model reads together: in a window of a document, and of a task's request."""

from pathlib import Path

from jaxtp.checkpoint.stored import finished, newest, stored_info
from jaxtp.config import ConfigError
from jaxtp.evaluate.config import EvaluateConfig
from jaxtp.generate.loading import Source
from jaxtp.generate.prompts import limits_of
from jaxtp.hints import nearest_multiples
from jaxtp.mesh import CP

MOST_BY_DEFAULT = 2048
"""Tokens of a window at most where neither the command nor a run says how many."""


def window_length(config: EvaluateConfig, source: Source) -> int:
    """Returns the number of tokens in a window of a document: as the command says, as trained, or 2048 at most.

    Raises:
      ConfigError: it is more than the model was made for, not divided by cp, or less than the stride.
    """
    cp, length = max(config.mesh.cp, 1), config.sequence_length
    if length is None:
        wanted, made_for = trained_length(config.model) or MOST_BY_DEFAULT, context(source)
        length = wanted if made_for is None else min(wanted, made_for)
        length = max(length // cp, 1) * cp
    _require_within_context(config, source)
    if length % cp:
        nearest = " or ".join(map(str, nearest_multiples(length, cp)))
        raise ConfigError(f"--sequence-length {length} is not divisible by --mesh.{CP} {cp}; nearest: {nearest}")
    if config.stride is not None and config.stride > length:
        raise ConfigError(
            f"--stride {config.stride} is more than the {length} tokens of a window (--sequence-length): what lies "
            "between windows would not be read; give at most that"
        )
    return length


def request_length(config: EvaluateConfig, source: Source) -> int:
    """Returns the most tokens of a task's request: as the command says, or all that the model was made for.

    Raises:
      ConfigError: it is more than that.
    """
    _require_within_context(config, source)
    return config.sequence_length or context(source) or trained_length(config.model) or MOST_BY_DEFAULT


def context(source: Source) -> int | None:
    """Returns the most tokens that a model was made for; None where nothing says so."""
    return limits_of(source.config, source.context).context


def trained_length(path: Path | None) -> int | None:
    """Returns the number of tokens of a sequence that a run was trained on; None for what is no run."""
    if path is None or not finished(path):
        return None
    length = stored_info(newest(path))["config"].get("data", {}).get("sequence_length")
    return length if isinstance(length, int) and length > 0 else None


def _require_within_context(config: EvaluateConfig, source: Source) -> None:
    asked, made_for, learned = config.sequence_length, context(source), source.config.learned_positions
    if asked is None or made_for is None or asked <= made_for:
        return
    if learned is not None and asked > learned:
        raise ConfigError(
            f"--sequence-length {asked}: the model has vectors for {learned:,} positions (model.learned_positions); "
            f"give at most {made_for}"
        )
    if not config.beyond_context:
        raise ConfigError(
            f"--sequence-length {asked}: the model was made for {made_for:,} tokens (max_position_embeddings in its "
            f"config.json); give at most {made_for}, or --beyond-context too"
        )
