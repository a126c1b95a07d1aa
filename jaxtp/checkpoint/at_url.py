"""Checkpoints at a URL (`checkpoint.url`), for hosts that share no disk.

Orbax writes them there: the processes' arrays by TensorStore, all else by gcsfs. Process 0 owns the
URL (`ownership`), and records a checkpoint once Orbax has finished it (`commits`): a second start,
or one after a kill, deletes what has no record, and no other file.
"""

import asyncio
import hashlib
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxtp.checkpoint.commits import (
    CHECKPOINTS,
    COMMITS,
    MARKER,
    Commits,
    copy_run_files,
    download,
    read_info_at,
    run_files,
)
from jaxtp.checkpoint.io_errors import CheckpointError, DamagedError, describe_error, read_on_all
from jaxtp.checkpoint.logical import Arrays
from jaxtp.checkpoint.manager import BARRIER_SECONDS, Checkpoints
from jaxtp.checkpoint.ownership import (
    SILENT_SECONDS,
    Ownership,
    TakenOverError,
    numbers,
    on_process_0,
)
from jaxtp.checkpoint.storage import RUN_AT_URL, Info, kept_steps
from jaxtp.config.entry import UserError
from jaxtp.config.schema import Address
from jaxtp.data.object_store import Item, ObjectStore, StoreError, UnreachableError, missing

T = TypeVar("T")


def open_store(url: str) -> ObjectStore:
    """Returns the objects at a URL that Orbax can write; raises ConfigError without a library."""
    try:
        importlib.import_module("gcsfs")
        config = importlib.import_module("fsspec.config")
    except ImportError as error:
        raise missing(error, url) from None
    # Other processes and libraries write and delete there.
    config.conf.setdefault("gs", {})["use_listings_cache"] = False
    return ObjectStore(url)


def _calling(record: Callable[[int], None]) -> type[ocp.path.atomicity_types.TemporaryPath]:
    """Returns Orbax's way of finishing a checkpoint at a URL, followed by `record` of its step."""

    class Recorded(ocp.path.atomicity.CommitFileTemporaryPath):  # type: ignore[misc]
        async def finalize(self) -> None:
            await super().finalize()
            # Orbax finishes the parts of a checkpoint in the same way, and then the checkpoint.
            name = self.get_final().name
            if name.isdecimal():
                await asyncio.to_thread(record, int(name))

    return Recorded


class UrlCheckpoints(Checkpoints):
    """The checkpoints of a run at a URL; the processes' folders may be on disks of their own.

    Args:
      url: gs://BUCKET/PATH.
      run: the run's folder, whose logs and settings are kept with each checkpoint. If they are
        missing in the folder of process 0, it gets them.
      line: prints a line.
      rules: which checkpoints to keep, as for `Checkpoints`.

    Raises:
      StoreError: the URL cannot be read and written.
      ConfigError: another start uses the URL, or it has another run.
    """

    setting = "checkpoint.url"

    def __init__(self, url: str, run: Path, line: Callable[[str], None], **rules: Any):
        self._run = run
        self._line = line
        self._store = open_store(url)
        self._owner = Ownership(self._store, self.setting)
        self._commits = Commits(self._owner, partial(kept_steps, **rules))
        self._marking = _calling(self._record)
        try:
            on_process_0(self._start, 2 * SILENT_SECONDS + BARRIER_SECONDS)
            # Orbax deletes none, because it would not delete the record first.
            super().__init__(Address(url, CHECKPOINTS), keep=sys.maxsize)
        except BaseException:
            self._owner.end()
            raise

    def _start(self) -> None:
        self._owner.claim(self._line)
        self._owner.require_same_run(self._run, is_empty=not run_files(self._run))
        self._commits.load()
        self._commits.delete_unfinished()
        for step in sorted(self._commits.losses, reverse=True):
            with tempfile.TemporaryDirectory() as name, suppress(DamagedError):
                download(self._store, step, {RUN_AT_URL: Path(name)})
                copy_run_files(Path(name), self._run, replaces=False)
                return

    def _prepare(self) -> None:
        """A URL has no folders."""

    def _open(self, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
        try:
            return super()._open(options)
        # gcsfs and the library of Google raise errors of their own.
        except Exception as error:
            raise CheckpointError(
                f"{self.folder} cannot be opened ({describe_error(error)}); see its rights, with "
                "storage.buckets.get, and the credentials"
            ) from error

    def _listed(self) -> list[int]:
        return numbers(self._store, COMMITS)

    def _exists(self) -> bool:
        return True

    def _require_writable(self) -> None:
        # Orbax waits until an unreachable store is back.
        with suppress(UnreachableError):
            if jax.process_index() == 0:
                self._owner.require()

    def _start_save(self, step: int, arrays: Arrays, describe: Callable[[], Info]) -> bool:
        self._owner.begin(f"the checkpoint of step {step}")
        return super()._start_save(step, arrays, describe)

    def _record(self, step: int) -> None:
        """Records a checkpoint that Orbax has finished, on process 0."""
        self._patiently(self._owner.require)
        files = {}
        folder = f"{CHECKPOINTS}/{step}"
        for key, stored in self._patiently(self._store.listed, folder).items():
            files[key] = Item(stored.size, None, stored.tag)
        if f"{folder}/{MARKER}" not in files:
            raise StoreError(f"{self._store.url}/{folder} has no {MARKER}, which Orbax wrote")
        for name in run_files(self._run):
            # The run writes to it meanwhile.
            content = (self._run / name).read_bytes()
            key = f"{RUN_AT_URL}/{step}/{name}"
            files[key] = Item(len(content), hashlib.sha256(content).hexdigest())
            self._patiently(self._store.put, key, content)
        self._patiently(self._commits.create, step, files, self._losses.get(step))
        self._owner.finish()
        self._patiently(self._commits.clean, step)

    def _patiently(self, action: Callable[..., T], *arguments: Any) -> T:
        until = time.monotonic() + BARRIER_SECONDS
        while True:
            try:
                return action(*arguments)
            except UnreachableError:
                if time.monotonic() > until:
                    raise
            time.sleep(1)

    def _unwritable(self, error: Exception) -> UserError:
        return error if isinstance(error, TakenOverError) else super()._unwritable(error)

    def info(self, step: int) -> Info:
        """Returns the info of a checkpoint."""
        return read_on_all(lambda: read_info_at(self._store, step))

    def _move_aside(self, step: int) -> str:
        return self._commits.set_aside(step)

    def describe_disk(self) -> str:
        """Describes the newest checkpoint at the URL."""
        try:
            return super().describe_disk()
        except StoreError as error:
            return str(error)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """See `Checkpoints`. The next start need not wait, unless this one may still write."""
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._owner.end()
