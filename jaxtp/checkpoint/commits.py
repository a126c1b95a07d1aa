"""Finished checkpoints at a URL.

    URL/checkpoints/120/...    the files as they are: plain Orbax opens URL/checkpoints
    URL/files/120/...          metrics, samples and settings
    URL/commits/120.json       written last; without it a checkpoint is unfinished

Only the owner of the URL deletes, and deletes the commit first.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pydantic

from jaxtp.checkpoint.io_errors import DamagedError
from jaxtp.checkpoint.ownership import Ownership, numbers
from jaxtp.checkpoint.storage import CONFIG, HF_FILES, RUN_AT_URL, Info, unseal
from jaxtp.config.files import write_atomically
from jaxtp.config.reading import truncate
from jaxtp.config.schema import Address
from jaxtp.data.object_store import Item, ObjectStore, StoreError, in_threads, is_plain

CHECKPOINTS = "checkpoints"
COMMITS = "commits"
MARKER = "commit_success.txt"
"""A file without which Orbax takes a folder at a URL for unfinished."""
RUN_FILES = (CONFIG, "metrics.jsonl", "samples.jsonl", "trackers.json")
"""Files in a run's folder that are uploaded with each checkpoint, in addition to `HF_FILES`."""
_HF_FILE = re.compile(r"\w+\.(json|model|txt|jinja)")
_KEY = re.compile(rf"({CHECKPOINTS}|{RUN_AT_URL})/(\d+)/(.+)")
"""The key of a checkpoint's file: a folder, the step, and a path."""


class Commit(pydantic.BaseModel):
    """The record of a finished checkpoint."""

    # By key
    files: dict[str, Item]
    eval_loss: float | None = None


def run_files(folder: Path) -> list[str]:
    """Returns the names of the files in a run's folder that are kept with each checkpoint."""
    files = list(filter(Path.is_file, map(folder.joinpath, RUN_FILES)))
    for path in (folder / HF_FILES).glob("*"):
        if _HF_FILE.fullmatch(path.name) and path.is_file():
            files.append(path)
    return [str(path.relative_to(folder)) for path in files]


def copy_run_files(source: Path, run: Path, *, replaces: bool) -> None:
    """Copies the files of a checkpoint to a run's folder.

    Those that are there stay if they are as long, unless `replaces`.
    """
    for name in run_files(source):
        content = (source / name).read_bytes()
        path = run / name
        if replaces or not path.exists() or path.stat().st_size < len(content):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content)


def _read_commit(store: ObjectStore, step: int) -> Commit:
    key = f"{COMMITS}/{step}.json"
    try:
        return Commit.model_validate_json(store.read(key))
    except (FileNotFoundError, pydantic.ValidationError):
        raise DamagedError(f"{store.url}/{key} is damaged") from None


def whole_commit(store: ObjectStore, step: int) -> Commit:
    """Returns the record of a checkpoint, whose objects are at the URL.

    Raises `DamagedError` if one is missing or another, and `StoreError`.
    """
    commit = _read_commit(store, step)
    listed = store.listed(f"{CHECKPOINTS}/{step}") | store.listed(f"{RUN_AT_URL}/{step}")
    for key, item in commit.files.items():
        # The URL may be someone else's, and its paths have to stay inside of the folder.
        match = _KEY.fullmatch(key)
        is_here = match is not None and match[2] == str(step) and is_plain(key)
        if not is_here or key not in listed or not item.may_be(listed[key]):
            raise DamagedError(f"{store.url}/{truncate(key, 1000)} is damaged")
    return commit


def download(store: ObjectStore, step: int, places: dict[str, Path]) -> None:
    """Downloads and verifies the parts of a checkpoint: places of `CHECKPOINTS` and `RUN_AT_URL`.

    Raises `DamagedError`, `StoreError`.
    """
    commit = whole_commit(store, step)
    paths = {}
    for key in commit.files:
        folder, _, name = key.split("/", 2)
        if folder in places:
            paths[key] = places[folder] / name
            paths[key].parent.mkdir(parents=True, exist_ok=True)

    def get(key: str) -> None:
        if not store.download(key, paths[key], *commit.files[key]):
            raise DamagedError(f"{store.url}/{key} is damaged (its sha256 differs)")

    in_threads(get, paths)


def read_info_at(store: ObjectStore, step: int) -> Info:
    """Reads the info of a checkpoint whose objects are at the URL; raises as `whole_commit`."""
    folder = Address(store.url, CHECKPOINTS, str(step))
    whole_commit(store, step)
    try:
        sealed = dict(json.loads(store.read(f"{CHECKPOINTS}/{step}/info/metadata")))
    except (FileNotFoundError, ValueError) as error:
        raise DamagedError(f"{folder} is damaged (its info: {error})") from None
    return unseal(folder, sealed)


def newer_info(store: ObjectStore, newest: tuple[Path, Info] | None) -> tuple[Path, Info] | None:
    """Returns `newest`, or the newest checkpoint at the URL if that is of a later step.

    Writes nothing at the URL; raises `StoreError`.
    """
    for step in reversed(numbers(store, COMMITS)):
        if newest is not None and step <= int(newest[0].name):
            break
        with suppress(DamagedError):
            return Address(store.url, CHECKPOINTS, str(step)), read_info_at(store, step)
    return newest


class Commits:
    """The finished checkpoints at a URL that this start owns.

    Args:
      rule: given the loss of each checkpoint at the URL by its step, returns the steps to keep.
    """

    def __init__(self, owner: Ownership, rule: Callable[[dict[int, float | None]], set[int]]):
        self._owner = owner
        self._store = owner.store
        self._rule = rule
        self.losses: dict[int, float | None] = {}
        """Validation losses of the checkpoints at the URL."""

    def load(self) -> None:
        """Reads the records."""
        for step in numbers(self._store, COMMITS):
            self.losses[step] = None
            with suppress(DamagedError):
                self.losses[step] = _read_commit(self._store, step).eval_loss

    def create(self, step: int, files: dict[str, Item], loss: float | None) -> None:
        """Records a checkpoint; raises `TakenOverError`, `StoreError`."""
        self._owner.require()
        record = Commit(files=files, eval_loss=loss).model_dump_json().encode()
        if not self._store.create(f"{COMMITS}/{step}.json", record):
            raise StoreError(f"{self._store.url} has another checkpoint of step {step}")
        self.losses[step] = loss

    def clean(self, newest: int) -> None:
        """Deletes checkpoints that are not to be kept, and unfinished ones.

        Later steps than the newest were damaged, or the run has gone back before them.
        """
        losses = {step: loss for step, loss in self.losses.items() if step <= newest}
        for step in self.losses.keys() - self._rule(losses):
            self.delete(step)
        self.delete_unfinished()

    def delete_unfinished(self) -> None:
        """Deletes what has no record."""
        self._owner.require()
        for folder in (CHECKPOINTS, RUN_AT_URL):
            unfinished = []
            for key in self._store.sizes(folder):
                name = key.split("/")[1]
                if name.isdecimal() and int(name) not in self.losses:
                    unfinished.append(key)
            self._store.delete(*unfinished)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, or what there is of it."""
        self._owner.require()
        # First, because without it the rest is unfinished
        self._store.delete(f"{COMMITS}/{step}.json")
        self.losses.pop(step, None)
        for folder in (CHECKPOINTS, RUN_AT_URL):
            self._store.delete(*self._store.sizes(f"{folder}/{step}"))

    def set_aside(self, step: int) -> str:
        """Moves a damaged checkpoint to another place at the URL, which it returns."""
        self._owner.require()
        place = f"damaged/{self._owner.number}"
        keys = self._store.sizes(f"{CHECKPOINTS}/{step}")
        in_threads(lambda key: self._store.copy(key, key.replace(CHECKPOINTS, place, 1)), keys)
        self.delete(step)
        return f"{self._store.url}/{place}/{step}"
