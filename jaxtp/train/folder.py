"""The folder of a run: its configuration, its lock, and whether a checkpoint in it may be resumed."""

import fcntl
import fnmatch
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxtp import config as configuration
from jaxtp.files import write_atomically
from jaxtp.models.config import architecture
from jaxtp.train.config import TrainConfig

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
NON_FINITE = "non_finite"
PROFILE = "profile"
LOCK = ".lock"


_HARMLESS = (
    *("run.*", "mesh.*", "eval.*", "checkpoint.*", "metrics.*", "profile.*"),
    *("model.remat", "model.sequence_parallel", "model.scan_layers", "model.loss_chunk", "model.attention"),
    *("train.accumulation", "train.log_every", "train.non_finite", "train.max_skipped", "train.stall_seconds"),
    "train.allow_oversize",
)
"""Settings that leave the numbers as they are, up to the order of sums."""
_FATAL = (
    *(("run", "seed"), ("data", "sequence_length"), ("data", "packing"), ("data", "long_documents")),
    *(("optimizer", "name"), ("optimizer", "groups")),
)
"""Beside the model, what decides the data, their order, and what the optimizer's state is."""


class RunFolderError(ValueError):
    """A folder that cannot be written, or that holds another run."""


def prepare(folder: Path) -> None:
    """Creates the folder.

    Raises:
      RunFolderError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunFolderError(f"run.dir={folder}: {error.strerror}; name another with --run.dir FOLDER") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what opens or writes a file of the run.

    Raises:
      RunFolderError: the file system does not let it: a full disk, a folder of that name.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written ({error.strerror}); the same command goes on from the newest checkpoint, if "
            "there is one, or begins again"
        ) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder; the operating system lets go when the process ends, however it ends.

    Raises:
      RunFolderError: another run holds it, or the file system has no locks.
    """
    if jax.process_index() != 0:
        yield
        return
    with writing(folder / LOCK):
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunFolderError(
                f"run.dir={folder} is in use by {file.read().strip() or 'another run'}; "
                "wait until it ends, or name another with --run.dir FOLDER"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"run.dir={folder} cannot be locked ({error.strerror}); name one on another disk with --run.dir FOLDER"
            ) from None
        with writing(folder / LOCK):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Gives an empty folder, which takes the place of `folder` once every process has written its part of it.

    Until then what `folder` holds is left alone: it stays if this fails.
    """
    new = folder.with_name(f"{folder.name}.new")
    if jax.process_index() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
    multihost_utils.sync_global_devices(f"{new} is empty")
    yield new
    multihost_utils.sync_global_devices(f"{new} is written")
    if jax.process_index() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


def write_config(config: TrainConfig) -> None:
    """Writes the resolved configuration into the run's folder."""
    if jax.process_index() == 0:
        path = config.run.dir / CONFIG
        with writing(path):
            write_atomically(path, configuration.to_yaml(config).encode())


def checkpoint_info(
    config: TrainConfig, corpus: Mapping[str, Any], next_sample: int, mesh: Mapping[str, int]
) -> dict[str, Any]:
    """What a checkpoint stores beside the arrays: the position in the data, what the run is, and who wrote it."""
    return {
        "next_sample": next_sample,
        "corpus": dict(corpus),
        "config": configuration.to_plain(config),
        "mesh": dict(mesh),
        "processes": jax.process_count(),
        "versions": {name: version(name) for name in ("jaxtp", "jax", "flax", "optax", "orbax-checkpoint")}
        | {"python": platform.python_version()},
    }


def check_resumable(config: TrainConfig, corpus: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """Compares a checkpoint with the run that wants to continue it.

    Args:
      config: the run.
      corpus: what `Corpus.describe` says of its data.
      info: what the checkpoint stored.

    Returns:
      The settings that differ and may, for the log; those first that make the run go on otherwise than it would have.

    Raises:
      RunFolderError: the model, the data or its order is another.
    """
    stored = info["config"]
    now = configuration.to_plain(config)
    model = architecture(config.model)
    before = configuration.to_plain(type(config.model)()) | stored["model"]  # what is newer had no effect then
    fatal = configuration.differences({name: before[name] for name in model}, model, "model.")
    fatal += configuration.differences(_contents(info["corpus"]), _contents(corpus), "data: ")
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
    lines = configuration.differences(stored | {"model": before}, now)
    lines = [line for line in lines if not line.startswith("run.init_from")]
    matter = [line for line in lines if not _is_harmless(line.partition(":")[0])]
    return [
        *(f"changed since: {line}" for line in matter),
        *(f"changed since, without effect on the numbers: {line}" for line in lines if line not in matter),
    ]


def _contents(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """What is read, wherever it lies."""
    return {name: value for name, value in corpus.items() if name != "source"}


def _is_harmless(setting: str) -> bool:
    return any(fnmatch.fnmatchcase(setting, pattern) for pattern in _HARMLESS)
