"""The folder of a run: lock, configuration, and checkpoint info."""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxtp.checkpoint.storage import CONFIG, HF_FILES, PROGRAMS
from jaxtp.config.entry import FILES, UserError
from jaxtp.config.files import open_directly, write_atomically
from jaxtp.mesh import Sizes

CHECKPOINTS = "checkpoints"
NON_FINITE = "non_finite"
PROFILE = "profile"
_REPORTS = ("tensorboard", "wandb", HF_FILES, NON_FINITE, PROFILE, PROGRAMS, "damaged")
"""Folders that a run makes and fills. `checkpoints` is not among them, because it may be a link:
large runs keep checkpoints on another disk."""
LOCK = ".lock"
_MAX_LOCK = 300  # Maximum characters of the lock file that a message shows
_NO_FILE = (errno.ELOOP, errno.EINVAL)  # Errors of `open_directly` and `open_regular`
BASE = "base"
"""Key in the info of a checkpoint of adapters: the identity of the frozen model, as in
`hf.runs`."""
STREAMS = "streams"
"""Key in a checkpoint's info: the states of a user's streams, which give the position in the
data."""


class RunFolderError(UserError):
    """The folder of a run cannot be written, or belongs to another run."""


class RunFilesError(RunFolderError):
    """A file cannot be written during the run: the disk is full, or a network disk was lost."""

    exit_code = FILES


def prepare(folder: Path) -> None:
    """Creates a run's folder.

    Raises RunFolderError if it cannot be written, or has links that would redirect reports.
    """
    for name in _REPORTS:
        if (folder / name).is_symlink():
            raise RunFolderError(
                f"{folder / name} is a link, and a run writes no reports through links; delete it, "
                "or name another folder with --run.dir FOLDER"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunFolderError(
            f"run.dir={folder}: {error.strerror}; name another with --run.dir FOLDER"
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts an OSError to a `RunFilesError`.

    If a folder, link or pipe is in the way, it becomes a `RunFolderError`.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror
        if isinstance(error, shutil.Error):
            # For each file its source, target and cause
            cause = error.args[0][0][2]
        kind: type[RunFolderError] = RunFilesError
        if isinstance(error, IsADirectoryError | NotADirectoryError) or error.errno in _NO_FILE:
            kind = RunFolderError
        raise kind(
            f"{path} cannot be written ({cause}); the same command resumes from the "
            "newest checkpoint, if there is one, or starts again"
        ) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other runs, until the `with` block or the process ends.

    Raises:
      RunFolderError: another run has the lock, or the file system has no locks.
    """
    if jax.process_index() != 0:
        yield
        return
    with writing(folder / LOCK):
        file = open_directly(folder / LOCK, "a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = (
                f"cannot be locked ({error.strerror}); name one on another disk with "
                "--run.dir FOLDER"
            )
            if isinstance(error, BlockingIOError):
                file.seek(0)
                user = file.read(_MAX_LOCK).strip() or "another run"
                problem = (
                    f"is in use by {user}; wait until it ends, or name another with "
                    "--run.dir FOLDER"
                )
            raise RunFolderError(f"run.dir={folder} {problem}") from None
        with writing(folder / LOCK):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def copy_checkpoint(older: Path, run: Path) -> None:
    """Copies a checkpoint to another run that has none, with the run's config.json and tokenizer.

    Its files are links to the same data, where the file system has hard links. A kill leaves no
    part of a checkpoint.
    """
    from jaxtp.hf.runs import copy_hf_files, hf_files_of

    if jax.process_index() != 0:
        return
    copy = run / f"{older.name}.copy"
    with writing(copy):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(older, copy, copy_function=_link_or_copy)
        files = hf_files_of(older)
        if files is not None:
            copy_hf_files(files, run)
        (run / CHECKPOINTS).mkdir(exist_ok=True)
        copy.rename(run / CHECKPOINTS / older.name)


def _link_or_copy(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(Path(source).resolve())
    except OSError:
        shutil.copy2(source, target)


def write_config(folder: Path, text: str) -> None:
    """Writes config.yaml."""
    if jax.process_index() == 0:
        path = folder / CONFIG
        with writing(path):
            write_atomically(path, text.encode())


def checkpoint_info(
    settings: Mapping[str, Any], data: Mapping[str, Any], next_sample: int, mesh: Sizes
) -> dict[str, Any]:
    """Returns the info that a checkpoint stores next to its arrays.

    Args:
      settings: all settings of the run, as plain values.
    """
    from jaxtp.guards.known_versions import versions

    return {
        "next_sample": next_sample,
        "corpus": dict(data),
        "config": dict(settings),
        "mesh": dict(mesh),
        "processes": jax.process_count(),
        "versions": versions(),
    }
