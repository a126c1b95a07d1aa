"""The folder of a run: its lock, its configuration, and the description in its checkpoints."""

import fcntl
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

from jaxtp import config as configuration
from jaxtp.entry import UserError
from jaxtp.files import write_atomically
from jaxtp.launch.agreement import together
from jaxtp.train.config import TrainConfig

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
NON_FINITE = "non_finite"
CORRUPTION = "corruption"
PROFILE = "profile"
LOCK = ".lock"


class RunFolderError(UserError):
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
    """Surrounds what opens or writes a file of the run.

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
    """Yields an empty folder, which replaces `folder` once every process has written its part of it.

    Until then what `folder` holds is left alone: it stays if this fails, in whichever process.
    """
    new = folder.with_name(f"{folder.name}.new")
    with together():
        if jax.process_index() == 0:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
    with together():
        yield new
    with together():
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
    config: TrainConfig, data: Mapping[str, Any], next_sample: int, mesh: Mapping[str, int]
) -> dict[str, Any]:
    """Returns what a checkpoint stores beside the arrays: the data and the position in them, the run, who wrote it."""
    return {
        "next_sample": next_sample,
        "corpus": dict(data),
        "config": configuration.to_plain(config),
        "mesh": dict(mesh),
        "processes": jax.process_count(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide what a run computes and stores."""
    packages = ("jaxtp", "jax", "flax", "optax", "orbax-checkpoint")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}
