"""A copy of a run at a URL (`run.mirror`): a host that loses its disk resumes from it.

Process 0 uploads each finished checkpoint in the background, with the files that a restart
needs. A start downloads the newest checkpoint if the folder has none that is as new.

    URL/run.json               the run's id, so that no other run is mixed with it
    URL/owners/00000003.json   one for each start, created if absent; the highest owns the URL
    URL/beats/00000003         written every 30 s; its age is measured by the store's clock
    URL/ended/00000003.json    this start has ended, and the next one need not wait
    URL/checkpoints/120/...    the files as they are: plain Orbax opens URL/checkpoints
    URL/files/120/...          metrics, samples and settings
    URL/commits/120.json       written last: sizes and sha256; without it a checkpoint is unfinished
    URL/programs/...           compiled programs
    URL/programs.json          their sizes and sha256, with a proof of the run's secret

Only the owner deletes, and deletes the commit first. An owner that finds a higher number ends.
"""

import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Self

import jax
import pydantic

from jaxtp.checkpoint.io_errors import CheckpointError, DamagedError, files_below
from jaxtp.checkpoint.storage import (
    CONFIG,
    HF_FILES,
    PROGRAMS,
    Info,
    move_aside,
    newest_with_info,
    read_info,
    steps_in,
)
from jaxtp.config.entry import FILES
from jaxtp.config.files import sha256, sync_folder, write_atomically
from jaxtp.config.reading import MAX_JSON, parse_json, read_bytes, truncate
from jaxtp.config.schema import ConfigError
from jaxtp.data.object_store import ObjectStore, StoreError, in_threads, is_plain
from jaxtp.distributed.agreement import meet, raise_everywhere
from jaxtp.distributed.environment import secret
from jaxtp.distributed.links import is_proof, proof_of

BEAT_SECONDS = 30.0
SILENT_SECONDS = 120.0
"""After this time without a beat, another start may take over."""
END_SECONDS = 600.0
"""Limit of the wait for the last upload, at the end of a run."""
RUN_FILES = (CONFIG, "metrics.jsonl", "samples.jsonl", "trackers.json")
"""Files in a run's folder that are uploaded with each checkpoint, in addition to `HF_FILES`."""
_HF_FILE = re.compile(r"\w+\.(json|model|txt|jinja)")
_FOLDERS = ("checkpoints", "files")  # Folders at the URL with a subfolder for each step
_PROGRAMS = f"{PROGRAMS}.json"  # Key of the record of compiled programs
_IDENTITY = "mirror.json"  # File in the run's folder with the id at the URL
_MARKER = "commit_success.txt"
"""A file without which Orbax takes a folder at a URL for unfinished."""
_KEY = re.compile(r"(\w+/\d+)/(.+)")
"""The key of a checkpoint's file: its folder, and a path."""
_POLL_SECONDS = 1.0  # Between looks for a new checkpoint
_MAX_PAUSE = 30.0  # Seconds between attempts to upload
_START_SECONDS = 86_400  # Limit of the other processes' wait for the download


class TakenOverError(ConfigError):
    """Another start owns the URL."""


class BehindError(CheckpointError):
    """The run ended before its last checkpoint was uploaded."""

    exit_code = FILES


class Commit(pydantic.BaseModel):
    """The record of a finished upload."""

    # Size and sha256 by key
    files: dict[str, tuple[int, str]]
    eval_loss: float | None = None


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


def newer_info(url: str, newest: tuple[Path, Info] | None) -> tuple[Path, Info] | None:
    """Returns `newest`, or the newest checkpoint at the URL if that is of a later step.

    Of the latter's folder only the name is valid. Writes nothing at the URL; raises `StoreError`.
    """
    store = ObjectStore(url)
    for step in reversed(_numbers(store, "commits")):
        if newest is not None and step <= int(newest[0].name):
            break
        with tempfile.TemporaryDirectory() as name, suppress(DamagedError):
            folder = Path(name, str(step))
            _download(store, step, folder, only="info/")
            return folder, read_info(folder)
    return newest


def _run_files(folder: Path) -> list[str]:
    """Returns the names of the files in a run's folder that are kept with each checkpoint."""
    files = list(filter(Path.is_file, map(folder.joinpath, RUN_FILES)))
    for path in (folder / HF_FILES).glob("*"):
        if _HF_FILE.fullmatch(path.name) and path.is_file():
            files.append(path)
    return [str(path.relative_to(folder)) for path in files]


def _numbers(store: ObjectStore, folder: str) -> list[int]:
    """Returns the numbers of the JSON objects in a folder, in ascending order."""
    names = [re.fullmatch(r"\w+/(\d+)\.json", key) for key in store.sizes(folder)]
    return sorted(int(name[1]) for name in names if name)


def _read_commit(store: ObjectStore, step: int) -> Commit:
    key = f"commits/{step}.json"
    try:
        return Commit.model_validate_json(store.read(key))
    except (FileNotFoundError, pydantic.ValidationError):
        raise DamagedError(f"{store.url}/{key} is damaged") from None


def _download(store: ObjectStore, step: int, folder: Path, only: str = "") -> None:
    """Downloads and verifies a checkpoint, and the files of its run to `files` next to `folder`.

    Raises `DamagedError`, `StoreError`.
    """
    commit = _read_commit(store, step)
    roots = {f"checkpoints/{step}": folder, f"files/{step}": folder.parent / "files"}
    sizes = store.sizes(f"checkpoints/{step}") | store.sizes(f"files/{step}")
    paths = {}
    for key, (size, _) in commit.files.items():
        # The URL may be someone else's, and its paths have to stay inside of the folder.
        match = _KEY.fullmatch(key)
        if match is None or not is_plain(key) or match[1] not in roots or sizes.get(key) != size:
            raise DamagedError(f"{store.url}/{truncate(key, 1000)} is damaged")
        if match[2].startswith(only):
            paths[key] = roots[match[1]] / match[2]
            paths[key].parent.mkdir(parents=True, exist_ok=True)

    def get(key: str) -> None:
        if not store.download(key, paths[key], *commit.files[key]):
            raise DamagedError(f"{store.url}/{key} is damaged (its sha256 differs)")

    in_threads(get, paths)


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
        self._number = 0
        # The newest step whose checkpoint is at the URL
        self._uploaded = -1
        # Validation losses of the checkpoints at the URL
        self._losses: dict[int, float | None] = {}
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
        self._sums: dict[str, tuple[int, str]] = {}
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._uploading = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._on_process_0(self._start, _START_SECONDS)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Waits for the last upload, unless there is an error."""
        if error is None:
            self._on_process_0(self._finish, 2 * END_SECONDS)
        else:
            self._stop()

    def _on_process_0(self, action: Callable[[], None], seconds: float) -> None:
        # Collectives of the other processes could not wait for so long.
        with raise_everywhere(partial(meet, seconds)):
            if jax.process_index() == 0:
                action()

    def begin(self, restored: int) -> None:
        """Begins to upload checkpoints.

        Args:
          restored: the step of the checkpoint from which the run continues; -1 for none.
        """
        if jax.process_index() == 0:
            steps = [step for step in self._losses if step <= restored]
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
            self._claim()
            self._beating.start()
            self._require_same_run()
            for step in _numbers(self._store, "commits"):
                self._losses[step] = None
                with suppress(DamagedError):
                    self._losses[step] = _read_commit(self._store, step).eval_loss
            shutil.rmtree(self._staging, ignore_errors=True)
            self._fetch()
        except BaseException:
            self._stop()
            raise

    def _claim(self) -> None:
        """Becomes the owner, once the owner before has ended or is silent."""
        probe = f"probes/{uuid.uuid4().hex}.json"
        self._store.create(probe, b"1")
        if self._store.create(probe, b"2"):
            raise ConfigError(
                f"run.mirror={self.url} ignores conditional writes, so two runs could overwrite "
                "each other; use a store that has them (If-None-Match)"
            )
        me = {"host": socket.gethostname(), "process": os.getpid(), "id": uuid.uuid4().hex}
        identity = json.dumps(me).encode()
        while True:
            last = self._newest_owner()
            if last:
                self._wait_for_silence(last, probe)
            if self._store.create(f"owners/{last + 1:08}.json", identity):
                break
        self._number = last + 1
        self._store.delete(probe)

    def _newest_owner(self) -> int:
        return max(_numbers(self._store, "owners"), default=0)

    def _last_sign(self, number: int) -> datetime | None:
        """Returns when a start was alive, by the store's clock; None if it has ended."""
        keys = (f"ended/{number:08}.json", f"owners/{number:08}.json", f"beats/{number:08}")
        times = list(map(self._store.modified, keys))
        return None if times[0] else max(filter(None, times))

    def _wait_for_silence(self, number: int, probe: str) -> None:
        sign = self._last_sign(number)
        now = self._store.modified(probe)
        if sign is None or now is None:
            return
        age = max((now - sign).total_seconds(), 0)
        until = time.monotonic() + SILENT_SECONDS - age
        user = self._owner(number)
        self.say(
            f"{self.url}: {user} was alive {age:.0f} s ago, and did not end; this run takes over "
            f"after {SILENT_SECONDS:g} s without a sign of it"
        )
        while time.monotonic() < until:
            time.sleep(SILENT_SECONDS / 40)
            latest = self._last_sign(number)
            if latest is None:
                return
            if latest != sign:
                raise ConfigError(
                    f"run.mirror={self.url} is in use by {user}, which is alive; wait until it "
                    "ends, or name another URL"
                )

    def _owner(self, number: int) -> str:
        record = parse_json(self._store.read(f"owners/{number:08}.json"), self.url)
        return f"process {record.get('process')} on {record.get('host')}"

    def _require_ownership(self) -> None:
        newest = self._newest_owner()
        if newest != self._number:
            raise TakenOverError(
                f"{self.url}: {self._owner(newest)} has taken over, because this run was silent; "
                "that run continues, and this one ends"
            )

    def _require_same_run(self) -> None:
        path = self.folder.parent / _IDENTITY
        identity = json.dumps({"id": uuid.uuid4().hex}).encode()
        with suppress(FileNotFoundError):
            identity = read_bytes(path, MAX_JSON)
        if not self._store.create("run.json", identity):
            stored = self._store.read("run.json")
            if stored != identity and steps_in(self.folder):
                raise ConfigError(
                    f"run.mirror={self.url} has another run than {self.folder.parent}; name "
                    "another URL, or an empty folder with --run.dir FOLDER to resume that run"
                )
            identity = stored
        write_atomically(path, identity)

    def _newest_here(self) -> int:
        return max(steps_in(self.folder), default=-1)

    def _fetch(self) -> None:
        readable = newest_with_info(self.folder)
        newest = -1 if readable is None else int(readable[0].name)
        steps = [step for step in self._losses if step > newest]
        for step in reversed(steps):
            self.say(f"fetching the checkpoint at step {step} from {self.url}")
            folder = self._staging / str(step)
            try:
                _download(self._store, step, folder)
            except DamagedError as error:
                self.say(f"{error}; trying the checkpoint before it")
                shutil.rmtree(self._staging, ignore_errors=True)
                continue
            for name in _run_files(self._staging / "files"):
                path = self.folder.parent / name
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, (self._staging / "files" / name).read_bytes())
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

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            with suppress(StoreError):
                self._store.put(f"beats/{self._number:08}", b"1")

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
        self._require_ownership()
        if self._staged != step:
            # What an earlier start uploaded of this step
            self._delete(step)
            self._stage(step)
        markers = [key for key in self._files if key.endswith(_MARKER)]
        in_threads(self._send, self._files.keys() - set(markers))
        # Plain Orbax takes a checkpoint for finished when its outermost marker is there.
        for key in sorted(markers, key=len, reverse=True):
            self._send(key)
        self._send_programs()
        self._require_ownership()
        commit = Commit(files=self._sums, eval_loss=self._loss)
        if not self._store.create(f"commits/{step}.json", commit.model_dump_json().encode()):
            raise StoreError(f"{self.url} has another checkpoint of step {step}")
        self._losses[step] = self._loss
        self._uploaded = step
        size = sum(size for size, _ in self._sums.values())
        seconds = time.monotonic() - started
        self._lines.append(f"uploaded step {step} to {self.url}: {size:,} bytes in {seconds:.1f} s")
        self._clean()

    def _stage(self, step: int) -> None:
        """Links a checkpoint's files, because the run may delete it before they are uploaded.

        Raises FileNotFoundError if it is deleted meanwhile.
        """
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staged = -1
        self._files = {}
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
        for run_file in _run_files(self.folder.parent):
            # The run writes to the original.
            copy = self._staging / "files" / run_file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder.parent / run_file, copy)
            self._files[f"files/{step}/{run_file}"] = copy
        self._sums = {key: (path.stat().st_size, sha256(path)) for key, path in self._files.items()}
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
        self._require_ownership()
        sums = {name: (path.stat().st_size, sha256(path)) for name, path in files.items()}
        for name in files.keys() - self._programs:
            self._store.put(f"{PROGRAMS}/{name}", files[name])
        record = Programs(files=sums, proof=proof_of(key, PROGRAMS, sums))
        self._store.put(_PROGRAMS, record.model_dump_json().encode())
        keys = {f"{PROGRAMS}/{name}" for name in files}
        self._store.delete(*self._store.sizes(PROGRAMS).keys() - keys)
        self._programs = set(files)

    def _clean(self) -> None:
        """Deletes checkpoints that are not to be kept, and unfinished ones.

        Later steps than the last upload were damaged, or the run has gone back before them.
        """
        losses = {step: loss for step, loss in self._losses.items() if step <= self._uploaded}
        for step in self._losses.keys() - self.rule(losses):
            self._delete(step)
        for folder in _FOLDERS:
            unfinished = []
            for key in self._store.sizes(folder):
                name = key.split("/")[1]
                if name.isdecimal() and int(name) not in self._losses:
                    unfinished.append(key)
            self._store.delete(*unfinished)

    def _delete(self, step: int) -> None:
        self._require_ownership()
        # First, because without it the rest is unfinished
        self._store.delete(f"commits/{step}.json")
        self._losses.pop(step, None)
        for folder in _FOLDERS:
            self._store.delete(*self._store.sizes(f"{folder}/{step}"))

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
        if not self._number:
            # Another process than 0, or a start that was refused
            return
        threads = (self._beating, self._uploading)
        for thread in filter(threading.Thread.is_alive, threads):
            # Longer than the rest of a finished upload, the deletion of older checkpoints
            thread.join(10)
        # The next start need not wait, unless this one may still write.
        if not any(map(threading.Thread.is_alive, threads)):
            with suppress(StoreError):
                self._store.create(f"ended/{self._number:08}.json", b"{}")
        shutil.rmtree(self._staging, ignore_errors=True)
