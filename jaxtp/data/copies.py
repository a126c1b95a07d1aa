"""Folders at URLs: copies of them in the user's cache, and uploads of what a command writes.

URL/...                 the files of a folder as they are
URL/jaxtp_upload.json   of a folder that jaxtp uploaded: sizes and sha256. It says that the upload
                        is unfinished until all files are there

CACHE/lock              the process that fetches has it
CACHE/NAME-HASH/        a copy. The hash is of the URL and its files, so a copy never changes
CACHE/NAME-HASH.lock    the processes that use the copy share it
CACHE/made/NAME-HASH/   a folder that a command makes and uploads
"""

import fcntl
import os
import re
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, overload

import pydantic

from jaxtp.config.console import Display, size_text
from jaxtp.config.entry import say
from jaxtp.config.files import PARTIAL, fingerprint, lock, sha256, sync_folder
from jaxtp.config.reading import first_lines, truncate
from jaxtp.config.schema import Address, ConfigError, place
from jaxtp.data.object_store import Item, ObjectStore, StoreError, in_threads, is_plain
from jaxtp.distributed.agreement import meet
from jaxtp.distributed.environment import cache_gigabytes, make_private, user_cache

RECORD = "jaxtp_upload.json"
_SMALL = re.compile(r"[^/]+\.(json|jinja|model|txt)")
"""Files with a tokenizer and settings, but no weights and no tokens."""
_WAIT_SECONDS = 86_400.0  # Limit of the wait for a process that fetches
_LINE_SECONDS = 30.0  # Between lines of progress, without a terminal
_MAX_NAMES = 3  # Objects that a message names


class Record(pydantic.BaseModel):
    """The content of `RECORD`."""

    # Of the command that uploads
    id: str
    finished: bool
    # Size and sha256 by name
    files: dict[str, tuple[int, str]]


_urls: dict[Path, str] = {}
"""The URLs of the copies that this process uses."""
_in_use = ExitStack()
"""Their open lock files."""


@overload
def local(path: str | Path, *, is_small: bool = False) -> Path: ...


@overload
def local(path: str | Path | None, *, is_small: bool = False) -> Path | None: ...


def local(path: str | Path | None, *, is_small: bool = False) -> Path | None:
    """Returns a path, or a copy of the folder at a URL, which is fetched once.

    All processes must call it for the same URLs. One process of a host fetches, and the others
    wait. The copy stays while this process lives.

    Args:
      path: a folder, or its URL.
      is_small: whether the copy may lack weights and tokens.

    Raises:
      StoreError: the URL cannot be read, or its files are damaged.
      ConfigError: the upload is unfinished, or the cache has too little room.
    """
    if path is None:
        return None
    folder = place(Path(path))
    return _local(str(folder), is_small) if isinstance(folder, Address) else folder


@cache
def _local(url: str, is_small: bool) -> Path:
    try:
        folder = _fetched(url, is_small)
    except Exception:
        meet(_WAIT_SECONDS)
        raise
    meet(_WAIT_SECONDS)
    return folder


def recorded(path: Path) -> str:
    """Returns what another host can open: the URL of a path in a copy, or the resolved path."""
    real = path.resolve()
    for folder, url in _urls.items():
        if real.is_relative_to(folder):
            return str(Address(url, real.relative_to(folder)))
    return str(real)


def identities() -> dict[str, str]:
    """Returns the name of each copy that this process uses by its URL."""
    return {url: folder.name for folder, url in _urls.items()}


def _read_record(store: ObjectStore) -> Record | None:
    try:
        return Record.model_validate_json(store.read(RECORD))
    except FileNotFoundError:
        return None
    except pydantic.ValidationError:
        raise StoreError(f"{store.url}/{RECORD} is damaged") from None


def _items(store: ObjectStore) -> dict[str, Item]:
    """Returns the files at a URL by name."""
    record = _read_record(store)
    if record is not None and not record.finished:
        raise ConfigError(
            f"{store.url} is an unfinished upload; the command that began it finishes it"
        )
    if record is not None:
        items = {name: Item(size, sums) for name, (size, sums) in record.files.items()}
    else:
        listed = store.listed()
        items = {name: Item(size, None, tag) for name, (size, tag) in listed.items()}
    folders = set[str]()
    for name in items:
        # Someone else may have chosen the names, and they must stay inside of the copy.
        if not is_plain(name) and name:
            raise StoreError(f"{store.url} has a file with the name {truncate(name)!r}; rename it")
        folders.update(map(str, PurePosixPath(name).parents))
    # Consoles of stores mark a folder by an empty object with its name.
    items = {name: item for name, item in items.items() if item.size or name not in folders | {""}}
    if not items:
        raise StoreError(f"{store.url} has no files below it; name the URL of a folder")
    return items


def _fetched(url: str, is_small: bool) -> Path:
    store = ObjectStore(url, only_read=True)
    items = _items(store)
    if is_small:
        items = {name: item for name, item in items.items() if _SMALL.fullmatch(name)}
    folder = _root() / _name(url, items)
    with ExitStack() as stack:
        # NFS shares a lock only of a file that is read.
        shared = stack.enter_context(folder.with_name(f"{folder.name}.lock").open("a+"))
        _flock(shared, fcntl.LOCK_SH)
        if not _is_whole(folder, items):
            with _fetching(folder.parent):
                # Another process may have fetched it meanwhile.
                if not _is_whole(folder, items):
                    _fetch(store, items, folder)
        # The system's clock of files may stand still between two uses.
        now = time.time_ns()
        os.utime(shared.name, ns=(now, now))
        _in_use.push(stack.pop_all())
    _urls[folder] = url
    return folder


def _root() -> Path:
    root = (user_cache() / "urls").resolve()
    make_private(root)
    return root


def _name(url: str, items: object = None) -> str:
    readable = re.sub(r"[^\w.-]+", "_", PurePosixPath(url).name)[-60:].strip(".")
    return f"{readable}-{fingerprint([url, items])[:16]}"


def _flock(file: IO[str], operation: int) -> None:
    # A file system without locks locks nothing.
    with suppress(OSError):
        fcntl.flock(file, operation)


@contextmanager
def _fetching(root: Path) -> Iterator[None]:
    with (root / "lock").open("a") as file:
        try:
            lock(file, f"waiting for another process, which fetches into {root}")
        except ConfigError as busy:
            say(str(busy))
            _flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path, items: Mapping[str, Item]) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        sizes = [(folder / name).stat().st_size for name in items]
        return folder.is_dir() and sizes == [item.size for item in items.values()]
    return False


def _fetch(store: ObjectStore, items: Mapping[str, Item], folder: Path) -> None:
    total = sum(item.size for item in items.values())
    _make_room(folder.parent, total, store.url)
    partial = folder.with_name(f"{folder.name}{PARTIAL}")
    partial.mkdir()
    for name in items:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        with _Transfer(f"fetching {store.url} to {folder}", len(items), total) as transfer:

            def get(name: str) -> None:
                size, expected, tag = items[name]
                if not store.download(name, partial / name, size, expected, tag, transfer.advance):
                    raise StoreError(f"{store.url}/{name} is damaged (its sha256 differs)")

            in_threads(get, items, transfer.stopped.set)
        # A copy that lacks files
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_room(root: Path, needed: int, url: str) -> None:
    """Removes the copies that were used least recently, and that no process uses.

    The caller is the process that fetches.
    """
    text = cache_gigabytes()
    limit = -1
    with suppress(ValueError, OverflowError):
        limit = round(1e9 * float(text))
    if limit < 0:
        raise ConfigError(f"JAXTP_CACHE_GB={text}: should be a number of gigabytes")
    for path in root.glob(f"*{PARTIAL}"):
        shutil.rmtree(path)
    last_uses = {path: path.stat().st_mtime for path in root.glob("*.lock")}
    used = {path: _size(path.with_suffix("")) for path in last_uses}

    def lacks_room() -> bool:
        free = shutil.disk_usage(root).free
        return sum(used.values()) + needed > limit or free < needed

    for path in sorted(last_uses, key=last_uses.__getitem__):
        if needed > limit or not lacks_room():
            break
        with path.open("a") as file, suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            used[path] = 0
    if lacks_room():
        raise ConfigError(
            f"{url} has {size_text(needed)}. Copies of URLs may have {size_text(limit)} in {root}, "
            f"other commands use {size_text(sum(used.values()))} of them, and the disk has "
            f"{size_text(shutil.disk_usage(root).free)} left; JAXTP_CACHE_GB sets the limit, and "
            "XDG_CACHE_HOME another place"
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


class _Transfer:
    """Shows the progress of files that threads send or receive."""

    def __init__(self, activity: str, count: int, total: int):
        self._activity = activity
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._display = Display("{done}%", stream=sys.stderr)
        self._started = self._shown = time.monotonic()
        self.stopped = threading.Event()
        say(f"{activity}: {count} file{'s' * (count != 1)}, {size_text(total)}")

    def __enter__(self) -> "_Transfer":
        self._display.begin(0, 100)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._display.end()
        if error is None:
            seconds = time.monotonic() - self._started
            say(f"{self._activity}: done in {seconds:.1f} s")

    def advance(self, size: int) -> None:
        """Counts bytes; raises `StoreError` after `stopped`."""
        if self.stopped.is_set():
            raise StoreError(f"{self._activity}: interrupted")
        with self._lock:
            self._done += size
            # A damaged file is received again.
            percent = min(100 * self._done // max(self._total, 1), 100)
            self._display.move(percent)
            now = time.monotonic()
            if not self._display.has_bar and now > self._shown + _LINE_SECONDS:
                self._shown = now
                say(f"{self._activity}: {percent}%")


@contextmanager
def sending(path: Path, *, resumes: bool = False, replaces: bool = False) -> Iterator[Path]:
    """Yields the folder to write: `path`, or of an `Address` one that is uploaded at the end.

    Args:
      path: a folder, or its address.
      resumes: whether the command resumes in a folder with files. It then gets a copy of a finished
        upload, which it must not change.
      replaces: whether a finished upload is replaced.

    Raises:
      StoreError: the URL cannot be read and written.
      ConfigError: the URL has other files, or another command writes there.
    """
    if not isinstance(path, Address):
        yield path
        return
    store = ObjectStore(str(path))
    before = _read_record(store)
    if before is None and (names := sorted(store.listed())):
        raise ConfigError(
            f"{path} has other files ({', '.join(first_lines(names, _MAX_NAMES))}); name a URL of "
            "its own"
        )
    if before is not None and before.finished and not replaces:
        if not resumes:
            raise ConfigError(f"{path} exists already; name another URL")
        yield local(path)
        return
    before = before or Record(id="", finished=False, files={})
    # Shows before the work whether this is allowed.
    _put(store, before)
    folder = _root() / "made" / _name(str(path))
    folder.parent.mkdir(exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as file:
        lock(file, f"{path} is being written by another command; wait until it ends")
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)
        yield folder
        files = _upload(store, before, folder)
        _keep(folder, store.url, {name: Item(*item) for name, item in files.items()})


def _put(store: ObjectStore, record: Record) -> None:
    store.put(RECORD, record.model_dump_json().encode())


def _upload(store: ObjectStore, before: Record, folder: Path) -> dict[str, tuple[int, str]]:
    """Uploads a folder, and returns its files; those that are right in `before` stay."""
    files = {}
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        files[path.relative_to(folder).as_posix()] = (path.stat().st_size, sha256(path))
    present = store.sizes("")
    right = set[str]()
    for name, (size, sums) in files.items():
        if before.files.get(name) == (size, sums) and present.get(name) == size:
            right.add(name)
    if before.finished:
        _put(store, before.model_copy(update={"finished": False}))
    # Before the new record, by which an object of the same size would count as uploaded
    store.delete(*((before.files.keys() & present.keys()) - right))
    mine = Record(id=uuid.uuid4().hex, finished=False, files=files)
    _put(store, mine)
    missing = [name for name in files if name not in right]

    def require_mine() -> None:
        if _read_record(store) != mine:
            raise ConfigError(f"{store.url} is being written by another command; name another URL")

    total = sum(files[name][0] for name in missing)
    with _Transfer(f"sending {store.url}", len(missing), total) as transfer:

        def send(name: str) -> None:
            require_mine()
            store.put(name, folder / name)
            transfer.advance(files[name][0])

        # Last, because other programs take a folder with dataset.json or config.json for whole
        last = [name for name in missing if name.endswith(".json")]
        in_threads(send, set(missing) - set(last), transfer.stopped.set)
        in_threads(send, last, transfer.stopped.set)
        require_mine()
        _put(store, mine.model_copy(update={"finished": True}))
    return files


def _keep(folder: Path, url: str, items: Mapping[str, Item]) -> None:
    """Makes an uploaded folder a copy of its URL, if there is room."""
    target = folder.parent.parent / _name(url, items)
    with _fetching(target.parent), suppress(ConfigError, OSError):
        _make_room(target.parent, _size(folder), url)
        target.with_name(f"{target.name}.lock").touch()
        folder.rename(target)
    shutil.rmtree(folder, ignore_errors=True)
