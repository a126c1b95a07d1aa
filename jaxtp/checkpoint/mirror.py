"""A copy of a run at a URL (`run.mirror`): a host that loses its disk resumes from it.

Process 0 uploads each finished checkpoint in the background, with the files that a restart
needs. A start downloads the newest checkpoint if the folder has none that is as new.

    URL/programs/...           compiled programs
    URL/programs.json          their sizes and sha256, with a proof of the run's secret

`commits` and `ownership` describe all other objects at the URL.
"""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax
import pydantic

from jaxtp.checkpoint.commits import (
    CHECKPOINTS,
    MARKER,
    Commits,
    copy_run_files,
    download,
    run_files,
)
from jaxtp.checkpoint.io_errors import CheckpointError, DamagedError, files_below
from jaxtp.checkpoint.ownership import Ownership, TakenOverError, on_process_0
from jaxtp.checkpoint.storage import (
    PROGRAMS,
    RUN_AT_URL,
    move_aside,
    newest_with_info,
    read_info,
    steps_in,
)
from jaxtp.config.entry import FILES
from jaxtp.config.files import sha256, sync_folder
from jaxtp.data.object_store import Item, ObjectStore, StoreError, in_threads
from jaxtp.distributed.environment import secret
from jaxtp.distributed.links import is_proof, proof_of

END_SECONDS = 600.0
"""Limit of the wait for the last upload, at the end of a run."""
_PROGRAMS = f"{PROGRAMS}.json"  # Key of the record of compiled programs
_POLL_SECONDS = 1.0  # Between looks for a new checkpoint
_MAX_PAUSE = 30.0  # Seconds between attempts to upload
_START_SECONDS = 86_400  # Limit of the other processes' wait for the download


class BehindError(CheckpointError):
    """The run ended before its last checkpoint was uploaded."""

    exit_code = FILES


class Programs(pydantic.BaseModel):
    """The record of compiled programs, written by a process with the run's secret."""

    # Size and sha256 by name
    files: dict[str, tuple[int, str]]
    proof: str


def fetch_programs(url: str, folder: Path) -> None:
    """Downloads compiled programs, unless an earlier start had another secret or none.

    Programs are code, and more people may write to a bucket than may start programs here.

    Raises:
      StoreError, DamagedError: some are missing.
    """
    key = secret()
    if not key:
        return
    store = ObjectStore(url)
    try:
        programs = Programs.model_validate_json(store.read(_PROGRAMS))
    except (FileNotFoundError, pydantic.ValidationError):
        return
    if not is_proof(programs.proof, key, PROGRAMS, programs.files):
        return
    sizes = store.sizes(PROGRAMS)

    def get(name: str) -> None:
        path = f"{PROGRAMS}/{name}"
        size, expected = programs.files[name]
        is_whole = sizes.get(path) == size
        if not is_whole or not store.download(path, folder / name, size, expected):
            raise DamagedError(f"{url}/{path} is damaged")

    in_threads(get, programs.files)


@dataclass
class Mirror:
    """Uploads the checkpoints of a folder from `begin` to the end of the block.

    All processes must enter it, which fetches a newer checkpoint, and call `begin`.

    Raises:
      StoreError: the URL cannot be read and written.
      ConfigError: another start uses the URL, it has another run, or a write cannot be conditional.
      BehindError: the last checkpoint was not uploaded within `END_SECONDS`.
    """

    url: str
    # The checkpoints, in the folder of a run that all processes share
    folder: Path
    # Prints a line
    say: Callable[[str], None]
    # Given the loss of each checkpoint at the URL by its step, returns the steps to keep
    rule: Callable[[dict[int, float | None]], set[int]]

    def __post_init__(self) -> None:
        self._store = ObjectStore(self.url)
        # Links to the files of an upload, or a download
        self._staging = self.folder / "mirror"
        self._owner = Ownership(self._store, "run.mirror")
        self._commits = Commits(self._owner, self.rule)
        # The newest step whose checkpoint is at the URL
        self._uploaded = -1
        # Names of the programs at the URL
        self._programs: set[str] = set()
        self._lines: deque[str] = deque()
        self._error: Exception | None = None
        self._stopped = threading.Event()
        # What is uploaded: a step, its validation loss, the files by key that are left, and all
        # sizes and sums
        self._staged = -1
        self._loss: float | None = None
        self._files: dict[str, Path] = {}
        self._sums: dict[str, Item] = {}
        self._uploading = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        on_process_0(self._start, _START_SECONDS)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Waits for the last upload, unless there is an error."""
        if error is None:
            on_process_0(self._finish, 2 * END_SECONDS)
        else:
            self._stop()

    def begin(self, restored: int) -> None:
        """Begins to upload checkpoints.

        Args:
          restored: the step of the checkpoint from which the run continues; -1 for none.
        """
        if jax.process_index() == 0:
            steps = [step for step in self._commits.losses if step <= restored]
            self._uploaded = max(steps, default=-1)
            self._uploading.start()

    def check(self) -> None:
        """Prints what happened since the last call; raises an error that ends the run."""
        while self._lines:
            self.say(self._lines.popleft())
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        try:
            self._owner.claim(self.say)
            is_empty = not steps_in(self.folder)
            self._owner.require_same_run(self.folder.parent, is_empty=is_empty)
            self._commits.load()
            shutil.rmtree(self._staging, ignore_errors=True)
            self._fetch()
        except BaseException:
            self._stop()
            raise

    def _newest_here(self) -> int:
        return max(steps_in(self.folder), default=-1)

    def _fetch(self) -> None:
        readable = newest_with_info(self.folder)
        newest = -1 if readable is None else int(readable[0].name)
        steps = [step for step in self._commits.losses if step > newest]
        for step in reversed(steps):
            self.say(f"fetching the checkpoint at step {step} from {self.url}")
            folder = self._staging / str(step)
            try:
                files = self._staging / RUN_AT_URL
                download(self._store, step, {CHECKPOINTS: folder, RUN_AT_URL: files})
            except DamagedError as error:
                self.say(f"{error}; trying the checkpoint before it")
                shutil.rmtree(self._staging, ignore_errors=True)
                continue
            copy_run_files(files, self.folder.parent, replaces=True)
            target = self.folder / folder.name
            if target.exists():
                self.say(f"{target} is damaged; moved to {move_aside(target)}")
            folder.rename(target)
            sync_folder(self.folder)
            return
        if steps and newest < 0:
            raise CheckpointError(
                f"every checkpoint at {self.url} is damaged; name another URL to start afresh"
            )

    def _work(self) -> None:
        pause = _POLL_SECONDS
        while not self._stopped.wait(pause):
            try:
                self._upload(self._newest_here())
                if pause > _POLL_SECONDS:
                    self._lines.append(f"uploads to {self.url} succeed again")
                pause = _POLL_SECONDS
            except TakenOverError as error:
                self._error = error
                return
            # A failed upload does not stop training.
            except Exception as error:
                reason = str(error)
                if isinstance(error, FileNotFoundError):
                    # The run deleted this checkpoint before it was staged, or a link is lost.
                    self._staged = -1
                    reason = f"{self.url}: a checkpoint was deleted before its upload ({error})"
                if pause == _POLL_SECONDS:
                    retry = "training continues, and the upload will be retried"
                    self._lines.append(f"{reason}; {retry}")
                pause = min(2 * pause, _MAX_PAUSE)

    def _upload(self, step: int) -> None:
        """Uploads a checkpoint, unless it is older than the last one."""
        if step <= self._uploaded:
            return
        started = time.monotonic()
        self._owner.require()
        if self._staged != step:
            # What an earlier start uploaded of this step
            self._commits.delete(step)
            self._stage(step)
        markers = [key for key in self._files if key.endswith(MARKER)]
        in_threads(self._send, self._files.keys() - set(markers))
        # Plain Orbax takes a checkpoint for finished when its outermost marker is there.
        for key in sorted(markers, key=len, reverse=True):
            self._send(key)
        self._send_programs()
        self._commits.create(step, self._sums, self._loss)
        self._uploaded = step
        size = sum(item.size for item in self._sums.values())
        seconds = time.monotonic() - started
        self._lines.append(f"uploaded step {step} to {self.url}: {size:,} bytes in {seconds:.1f} s")
        self._commits.clean(step)

    def _stage(self, step: int) -> None:
        """Links a checkpoint's files, because the run may delete it before they are uploaded.

        Raises FileNotFoundError if it is deleted meanwhile.
        """
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staged = -1
        self._files = {}
        self._sums = {}
        source = self.folder / str(step)
        listed = set(files_below(source))
        self._loss = None
        with suppress(CheckpointError):
            self._loss = read_info(source).get("eval_loss")
        for path in listed:
            name = path.relative_to(source)
            link = self._staging / str(step) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                link.hardlink_to(path)
            except OSError:
                # The file system has no hard links.
                link = path
            self._files[f"checkpoints/{step}/{name}"] = link
        for run_file in run_files(self.folder.parent):
            # The run writes to the original.
            copy = self._staging / "files" / run_file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder.parent / run_file, copy)
            self._files[f"files/{step}/{run_file}"] = copy
        for key, path in self._files.items():
            self._sums[key] = Item(path.stat().st_size, sha256(path))
        if set(files_below(source)) != listed:
            raise FileNotFoundError(f"{source} was deleted before it was uploaded")
        self._staged = step

    def _send(self, key: str) -> None:
        if self._stopped.is_set():
            raise StoreError(f"{self.url}: the run ended during an upload")
        self._store.put(key, self._files[key])
        del self._files[key]

    def _send_programs(self) -> None:
        """Uploads the run's programs, if the run has a secret with which a start trusts them."""
        files = {}
        # JAX may be writing one that is newer.
        before = self._staging.stat().st_mtime
        for path in (self.folder.parent / PROGRAMS).glob("*-cache"):
            if path.stat().st_mtime < before:
                files[path.name] = path
        key = secret()
        if not key or files.keys() == self._programs:
            return
        self._owner.require()
        sums = {name: (path.stat().st_size, sha256(path)) for name, path in files.items()}
        for name in files.keys() - self._programs:
            self._store.put(f"{PROGRAMS}/{name}", files[name])
        record = Programs(files=sums, proof=proof_of(key, PROGRAMS, sums))
        self._store.put(_PROGRAMS, record.model_dump_json().encode())
        keys = {f"{PROGRAMS}/{name}" for name in files}
        self._store.delete(*self._store.sizes(PROGRAMS).keys() - keys)
        self._programs = set(files)

    def _finish(self) -> None:
        newest = self._newest_here()
        until = time.monotonic() + END_SECONDS
        if self._uploaded < newest:
            self.say(f"waiting until {self.url} has step {newest}, for at most {END_SECONDS:g} s")
        try:
            while self._uploaded < newest:
                self.check()
                if time.monotonic() > until:
                    raise BehindError(
                        f"{self.url} has step {self._uploaded} (-1: none), and {self.folder} step "
                        f"{newest}; the same command on this host uploads it"
                    )
                time.sleep(0.1)
        finally:
            self._stop()
        self.check()

    def _stop(self) -> None:
        self._stopped.set()
        if self._uploading.is_alive():
            # Longer than the rest of a finished upload, the deletion of older checkpoints
            self._uploading.join(10)
            if self._uploading.is_alive():
                self._owner.begin("an upload")
        self._owner.end()
        # Another process than 0, or a start that was refused, has none.
        if self._owner.number:
            shutil.rmtree(self._staging, ignore_errors=True)
