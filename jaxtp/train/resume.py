"""Resumes a run from its newest checkpoint, if it may."""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxtp import config as configuration
from jaxtp.checkpoint.manager import Checkpoints, restore_newest
from jaxtp.data.samples import HELD_OUT, MIXTURE, ORDER, ROWS, SHUFFLE
from jaxtp.models.config import architecture, architecture_in
from jaxtp.train.config import TrainConfig
from jaxtp.train.folder import RunFolderError
from jaxtp.train.state import Blueprint

_HARMLESS = (
    *("run.*", "mesh.*", "eval.*", "checkpoint.*", "metrics.*", "profile.*", "launch.*"),
    *("model.remat", "model.sequence_parallel", "model.overlap", "model.scan_layers"),
    *("model.loss_chunk", "model.attention", "model.grouped"),
    *("train.accumulation", "train.log_every", "train.non_finite", "train.max_skipped"),
    *("train.stall_seconds", "train.stall_abort_seconds", "train.stopped_exit_code", "train.allow_oversize"),
    "train.verify_every",
)
"""Settings that leave the numbers as they are, up to the order of sums."""
_FATAL = (
    *(("run", "seed"), ("data", "sequence_length"), ("data", "packing"), ("data", "long_documents")),
    *(("optimizer", "name"), ("optimizer", "groups")),
)
"""Settings that, beside the model, decide the data, their order, and what the optimizer's state is."""
_TRAINED_ORDER = {
    ROWS: "documents in each row",
    SHUFFLE: "order of the rows in an epoch",
    MIXTURE: "order of the sources of a mixture",
}
"""Parts of the order of the samples to train on, for messages."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that a run goes on from."""

    step: int
    """Number of updates made so far."""
    state: nnx.State
    """All of the state; if adapters are trained, all but the model beside them."""
    info: dict[str, Any]
    """Values that were stored beside the arrays."""
    changed: list[str]
    """Settings that differ from those of the run that wrote it."""


def restore(
    config: TrainConfig,
    data: Mapping[str, Any],
    blueprint: Blueprint,
    checkpoints: Checkpoints,
    warn: Callable[[str], None],
) -> Restored | None:
    """Reads the newest checkpoint that is whole; returns None if there is none at all.

    Args:
      config: the run.
      data: a description of its data, as checkpoints have it.
      blueprint: the description of its state.
      checkpoints: those of its folder.
      warn: takes a line on each checkpoint that is damaged.

    Raises:
      RunFolderError: it is one of another run.
      CheckpointError: every checkpoint is damaged, or the newest whole one cannot be read.
    """
    changed: list[str] = []

    def accept(info: dict[str, Any]) -> None:
        changed[:] = check_resumable(config, data, info)

    found = restore_newest(checkpoints, blueprint.stored(blueprint.abstract), blueprint.mesh, accept, warn)
    if found is None:
        return None
    step, state, info = found
    # A row of skipped steps ends with the run that skipped them: this one may allow fewer.
    skipped: Any = state["skipped"]
    state["skipped"] = skipped.replace(jnp.zeros_like(skipped[...]))
    return Restored(step, state, info, changed)


def with_origin(config: TrainConfig, info: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration with the origin that the checkpoint has: a run that goes on began where it began."""
    stored = info["config"]["run"]["init_from"]
    return configuration.changed(config, {"run.init_from": None if stored is None else Path(stored)})


def check_resumable(config: TrainConfig, data: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """Compares what a checkpoint stored with the run that wants to continue it.

    Returns:
      The settings that differ and may, for the log; first those that make the run go on otherwise than it would have.

    Raises:
      RunFolderError: the model, the data or its order is another.
    """
    defaults = configuration.to_plain(type(config)())  # a setting that is newer than the checkpoint had no effect
    stored = {
        section: configuration.merged(defaults.get(section, {}), values) for section, values in info["config"].items()
    }
    now = configuration.to_plain(config)
    model, was_model = architecture(config.model), architecture_in(stored["model"])
    fatal = configuration.differences({name: was_model.get(name) for name in model}, model, "model.")
    # Wherever the data lie; their order follows from all that is compared here, and from the packages.
    was, is_now = ({**read, "source": None, ORDER: None} for read in (info["corpus"], data))
    fatal += configuration.differences(was, is_now, "data: ")
    for section, field in _FATAL:
        fatal += configuration.differences(
            {field: stored[section].get(field)}, {field: now[section][field]}, f"{section}."
        )
    if fatal:
        raise RunFolderError(
            f"{config.run.dir} holds a checkpoint of another run (stored -> asked for):\n"
            + "\n".join(f"  {line}" for line in fatal)
            + "\nResume it with the stored values, or start afresh with another --run.dir, from these weights with "
            "--run.init-from if the model is the same. Nothing was changed."
        )
    order = _compare_order(config, data.get(ORDER, {}), info)
    lines = [line for line in configuration.differences(stored, now) if not line.startswith("run.init_from")]
    harmless = {line for line in lines for each in _HARMLESS if fnmatch.fnmatchcase(line.partition(":")[0], each)}
    return [
        *order,
        *(f"changed since: {line}" for line in lines if line not in harmless),
        *(f"changed since, without effect on the numbers: {line}" for line in lines if line in harmless),
    ]


def _compare_order(config: TrainConfig, now: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """Compares what decides the order of the samples; returns what differs and may, for the log.

    Raises:
      RunFolderError: the samples to train on would come in another order, so that some would be read twice or never.
    """
    stored, versions = info["corpus"].get(ORDER), info.get("versions", {})
    jaxtp = f"jaxtp {versions.get('jaxtp', '(of unknown version)')}"
    if stored is None:
        unknown = f"order of the samples: the checkpoint, by {jaxtp}, is older than its record, and cannot be compared"
        return [unknown] if now else []
    fatal = []
    for part in _TRAINED_ORDER:
        if (change := _change(part, stored, now)) is not None:
            package = stored[part]["algorithm"] if part == SHUFFLE and part in stored else jaxtp
            fatal.append(f"{_TRAINED_ORDER[part]}: {change}; {package} has the stored one")
    if fatal:
        raise RunFolderError(
            f"{config.run.dir} holds a checkpoint of a run that reads the same data in another order (stored -> now):\n"
            + "\n".join(f"  {line}" for line in fatal)
            + "\nHere it would read some samples twice and others never. Install what it was written with, or start "
            "afresh with another --run.dir, from these weights with --run.init-from. Nothing was changed."
        )
    change = _change(HELD_OUT, stored, now)
    return [] if change is None else [f"changed since: rows of evaluations: {change}; compare their losses with care"]


def _change(part: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Returns how a part of the order differs, None where it is the same whatever its algorithm is called."""
    was, is_now = ({"algorithm": "none", "sha256": ""} | order.get(part, {}) for order in (stored, now))
    if was["sha256"] == is_now["sha256"]:
        return None
    return " -> ".join(f"{each['algorithm']} ({each['sha256'][:12]})" for each in (was, is_now))
