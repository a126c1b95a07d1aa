"""Resuming from the newest checkpoint, if settings and data allow it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxtp.checkpoint.manager import Checkpoints, restore_newest
from jaxtp.checkpoint.storage import Info, is_of_run
from jaxtp.config.affects import affects
from jaxtp.config.python_object import current_reference
from jaxtp.config.schema import differences, merged, to_plain, validate
from jaxtp.data.corpus import LIBRARY
from jaxtp.data.samples import HELD_OUT, MIXTURE, ORDER, ROWS, SHUFFLE
from jaxtp.models.config import upgrade_settings
from jaxtp.train.config import OptimizerConfig, TrainConfig
from jaxtp.train.optimizer import learning_rate
from jaxtp.train.run_folder import RunFolderError

if TYPE_CHECKING:
    from jaxtp.train.setup import RunPlan

_TRAINED_ORDER = {
    ROWS: "documents in each row",
    SHUFFLE: "order of the rows in an epoch",
    MIXTURE: "order of the sources of a mixture",
}


@dataclass(frozen=True)
class Restored:
    """A checkpoint to resume from."""

    # Number of steps so far, with those that were skipped
    step: int
    # The whole state, except frozen weights under adapters
    state: nnx.State
    info: Info
    # Lines on settings that differ from the checkpoint's
    changed: list[str]


def restore(
    plan: "RunPlan", checkpoints: Checkpoints, warn: Callable[[str], None]
) -> Restored | None:
    """Reads the newest undamaged checkpoint; None without checkpoints.

    Args:
      warn: reports each damaged checkpoint.

    Raises:
      RunFolderError: the checkpoint belongs to another run.
      CheckpointError: all checkpoints are damaged, or the newest undamaged one is unreadable.
    """
    config = plan.config
    blueprint = plan.blueprint
    changed: list[str] = []

    def accept(info: Info) -> None:
        changed[:] = check_resumable(to_plain(config), plan.data.description, info)

    abstract = blueprint.stored(blueprint.abstract)
    newest = restore_newest(checkpoints, abstract, blueprint.mesh, accept, warn)
    if newest is None:
        return None
    step, state, info = newest
    # Skipped steps do not count across runs, because this run may allow fewer.
    skipped: Any = state["skipped"]
    value = skipped[...]
    zero = np.zeros(value.shape, value.dtype)
    # `jnp.zeros_like` would compile a program, which the start of a new run does not.
    state["skipped"] = skipped.replace(
        jax.make_array_from_callback(value.shape, value.sharding, zero.__getitem__)
    )
    optimizer: Any = state["optimizer"]
    rate = learning_rate_change(
        config.optimizer, config.train.steps, info["config"], int(optimizer["step"][...])
    )
    return Restored(step, state, info, rate + changed)


def learning_rate_change(
    optimizer: OptimizerConfig, steps: int, stored: Mapping[str, Any], updates: int
) -> list[str]:
    """Returns a line if changed settings change the next step's learning rate.

    Args:
      stored: the checkpoint's configuration.
      updates: the number of steps so far, with those that were skipped.
    """
    values = merged(to_plain(OptimizerConfig()), stored["optimizer"])
    was = validate(OptimizerConfig, values, source="the checkpoint")
    was_steps = stored["train"]["steps"]
    if optimizer.build is not None or not updates or (was, was_steps) == (optimizer, steps):
        return []  # before anything is compiled
    before = learning_rate(was, was_steps)
    now = learning_rate(optimizer, steps)
    if math.isclose(before(updates), now(updates), rel_tol=1e-3, abs_tol=1e-12):
        return []
    return [
        f"learning rate: {float(before(updates - 1)):.4g} at the last step, "
        f"{float(now(updates)):.4g} at the next; "
        f"without the changes it would be {float(before(updates)):.4g}"
    ]


def check_resumable(settings: Mapping[str, Any], data: Mapping[str, Any], info: Info) -> list[str]:
    """Compares a checkpoint with the run that resumes it.

    Returns lines on changed settings; those that change the numbers come first.

    Args:
      settings: all settings of the run, as plain values.
      data: the description of the data, as in checkpoints.

    Raises:
      RunFolderError: the model, the data or the order of the samples differs.
    """
    folder = settings["checkpoint"]["url"] or settings["run"]["dir"]
    if not is_of_run(info):
        raise RunFolderError(
            f"{folder} has checkpoints of another loop; set --run.dir to another folder"
        )
    defaults = to_plain(TrainConfig())
    now = {**settings, "train": dict(settings["train"])}
    written = {**info["config"], "model": upgrade_settings(info["config"]["model"])}
    # Adds defaults for settings that are newer than the checkpoint, and drops settings of the model
    # that no longer exist.
    stored: dict[str, Any] = merged(
        {section: defaults.get(section) for section in written}, written
    )
    model = stored["model"]
    stored["model"] = {name: model[name] for name in model if name in now["model"]}
    for loop in (stored.get("train", {}), now["train"]):
        if loop.get("loss"):
            loop["loss"] = current_reference(loop["loss"])
    # The data may have moved, and its order is compared below.
    ignored = {"source": None, ORDER: None}
    fatal = differences(info["corpus"] | ignored, {**data, **ignored}, "data: ")
    changed = []
    harmless = []
    for line in differences(stored, now):
        mark = affects(TrainConfig, line.partition(":")[0])
        if mark.fixed:
            fatal.append(line)
        elif line.startswith("run.init_from"):
            continue
        elif mark.numbers or mark.samples:
            changed.append(f"changed since: {line}")
        else:
            harmless.append(f"changed since, without effect on the numbers: {line}")
    if fatal:
        raise RunFolderError(
            f"{folder} holds a checkpoint of another run (stored -> requested):\n  "
            + "\n  ".join([*fatal, *_other_library(info["corpus"], data)])
            + "\nResume it with the stored values, or start afresh with another --run.dir, from "
            "these weights with --run.init-from if the model is the same. Nothing was changed."
        )
    return _compare_order(folder, data.get(ORDER, {}), info) + changed + harmless


def _other_library(stored: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    # Explains a difference of the default data, the library of the Python that runs the run.
    before = str(stored.get("source"))
    after = str(now.get("source"))
    is_same = stored.get("sha256") == now.get("sha256")
    if is_same or not (before.startswith(LIBRARY) and after.startswith(LIBRARY)):
        return []
    return [
        f"each Python has its own default data: {before} -> {after}; resume with that Python, or "
        "set --data.path"
    ]


def _compare_order(folder: str, now: Mapping[str, Any], info: Info) -> list[str]:
    # Returns lines on allowed differences. Refuses another order of training samples, which would
    # repeat some samples and skip others.
    stored = info["corpus"].get(ORDER)
    versions = info.get("versions", {})
    jaxtp = f"jaxtp {versions.get('jaxtp', '(of unknown version)')}"
    if stored is None:
        unknown = (
            f"order of the samples: the checkpoint, by {jaxtp}, has no record of it, so it cannot "
            "be compared"
        )
        return [unknown] if now else []
    fatal = []
    for part, name in _TRAINED_ORDER.items():
        change = _change(part, stored, now)
        if change is not None:
            fatal.append(f"\n  {name}: {change}; {_holder(part, stored, jaxtp)} has the stored one")
    if fatal:
        raise RunFolderError(
            f"{folder} holds a checkpoint of a run that reads the same data in another "
            "order (stored -> now):"
            + "".join(fatal)
            + "\nHere it would read some samples twice and others never. Start a new run with "
            "another --run.dir, from these weights with --run.init-from, or finish this one with "
            "the versions that began it. Nothing was changed."
        )
    change = _change(HELD_OUT, stored, now)
    if change is None:
        return []
    return [f"changed since: rows of evaluations: {change}; compare their losses with care"]


def _holder(part: str, stored: Mapping[str, Any], jaxtp: str) -> str:
    # Returns the version that has the stored order.
    algorithm: str | None = stored.get(part, {}).get("algorithm")
    if part == SHUFFLE and algorithm is not None:
        return algorithm
    # Between two releases, the installed version has the same number and may have another order.
    return f"an earlier state of {jaxtp}" if jaxtp == f"jaxtp {version('jaxtp')}" else jaxtp


def _change(part: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    # Returns None if the hash is the same, even if the name of the algorithm changed.
    missing = {"algorithm": "none", "sha256": ""}
    before = missing | stored.get(part, {})
    after = missing | now.get(part, {})
    if before["sha256"] == after["sha256"]:
        return None
    orders = [f"{order['algorithm']} ({order['sha256'][:12]})" for order in (before, after)]
    return " -> ".join(orders)
