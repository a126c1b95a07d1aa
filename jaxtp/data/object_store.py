"""The objects at a URL: a bucket of S3 or Google Cloud Storage, or a folder (`file:///...`).

The library is obstore. It takes credentials, regions and endpoints from the environment; for S3
boto3 finds the credentials, so that profiles and single sign-on work too.
"""

import hashlib
import importlib
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxtp.config.entry import FILES, UserError
from jaxtp.config.files import PAUSES, sync_file
from jaxtp.config.reading import MAX_JSON
from jaxtp.config.schema import ConfigError
from jaxtp.distributed.environment import has_public_buckets

T = TypeVar("T")
_PART = 2**24
"""Bytes of a request that reads, and at least of one that writes."""
_MAX_PARTS = 5000  # of an object; S3 has at most 10,000
# Of a small request, and of a part: over a slow link 16 are sent at once.
_LIMITS = ("30s", "300s")
_ATTEMPTS = 3  # Downloads of an object whose checksum differs
_THREADS = 8
_REFUSED = re.compile("status code: (301|40[0134])|Unable to canonicalize|invalid path")
# What the variables of a store begin with, by its scheme
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE"}
# obstore repeats a request in its first 20 s, but not if the answer was cut short.
_RETRIES = {"retry_timeout": timedelta(seconds=20)}


def is_plain(key: str) -> bool:
    """Returns whether a key that someone else chose is a path that stays inside of a folder."""
    return key.isprintable() and all(part.strip(".") for part in key.split("/"))


def in_threads(
    action: Callable[[str], None], keys: Iterable[str], stop: Callable[[], object] = lambda: None
) -> None:
    """Calls `action` for each key, in several threads.

    After an error it calls `stop`, starts no further actions, and raises the error.
    """
    pool = ThreadPoolExecutor(_THREADS)
    try:
        list(pool.map(action, keys))
    except BaseException as error:
        stop()
        # After Ctrl-C the process ends, and an upload in progress could take minutes.
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()


class StoreError(UserError):
    """The objects at a URL cannot be read or written: rights, credentials, or a missing bucket."""


class UnreachableError(StoreError):
    """A store does not answer, or answers with an error of its own; a retry may succeed."""

    exit_code = FILES


def missing(error: ImportError, url: str) -> ConfigError:
    """Returns the error that names the extra with a library."""
    extra = "gcs" if url.startswith("gs:") else "s3"
    return ConfigError(
        f"{url} needs {error.name}, which is not installed; pip install 'jaxtp[{extra}]'"
    )


class Stored(NamedTuple):
    """An object in a listing."""

    size: int
    # A name of its content by the store; None if the store gives none
    tag: str | None


class Item(NamedTuple):
    """A file at a URL: its checksum or, if jaxtp did not write it, the store's tag."""

    size: int
    sha256: str | None
    tag: str | None = None

    def may_be(self, stored: Stored) -> bool:
        """Returns whether an object has this size and, if both are known, this tag."""
        is_same = None in (self.tag, stored.tag) or self.tag == stored.tag
        return self.size == stored.size and is_same


class ObjectStore:
    """Objects by key. Every method raises `StoreError`, and `read` FileNotFoundError as well.

    A store that is not only read creates the folder of its file:/// URL.
    """

    def __init__(self, url: str, *, only_read: bool = False):
        self.url = url.rstrip("/")
        scheme = url.partition(":")[0]
        options: dict[str, Any] = {"mkdir": not only_read}
        # An endpoint of the environment may be a server in the own network.
        client = {"allow_http": True, "connect_timeout": "10s"}
        if scheme != "file":
            options = {"client_options": client, "retry_config": _RETRIES}
        opened = []
        try:
            self._library = importlib.import_module("obstore")
            self._errors = importlib.import_module("obstore.exceptions")
            stores = importlib.import_module("obstore.store")
            if scheme == "s3" and not has_public_buckets():
                credentials = importlib.import_module("obstore.auth.boto3")
                options["credential_provider"] = self._do(credentials.Boto3CredentialProvider)
            for limit in _LIMITS:
                client["timeout"] = limit
                opened.append(self._do(lambda: stores.from_url(self.url, **options)))
        except ImportError as error:
            raise missing(error, url) from None
        self._store, self._store_of_parts = opened

    def _do(self, action: Callable[[], T], *expected: type[Exception]) -> T:
        """Calls `action`, again after errors that may pass; lets `expected` errors through."""
        pauses = iter(PAUSES)
        while True:
            try:
                return action()
            except expected:
                raise
            # boto3 raises errors of its own, and a ValueError where there are no credentials.
            except Exception as error:
                cause = " ".join(str(error).partition("Debug source")[0].split())[:300]
                problem = f"{self.url} cannot be used ({cause})"
                is_refused = _REFUSED.search(str(error)) is not None
                if is_refused or not isinstance(error, self._errors.BaseError):
                    advice = "see its address, rights and credentials"
                    store = _VARIABLES.get(self.url[:2])
                    if store is not None:
                        advice += f" (a public bucket needs none with {store}_SKIP_SIGNATURE=true)"
                    raise StoreError(f"{problem}; {advice}") from error
                pause = next(pauses, None)
                if pause is None:
                    raise UnreachableError(problem) from error
            time.sleep(pause)

    def create(self, key: str, content: bytes) -> bool:
        """Writes an object, unless the key exists; returns whether it has this content."""
        exists = self._errors.AlreadyExistsError
        try:
            self._do(lambda: self._library.put(self._store, key, content, mode="create"), exists)
        except exists:
            # The answer to an earlier request may have been lost.
            return self.read(key) == content
        return True

    def put(self, key: str, value: bytes | Path) -> None:
        """Writes an object."""
        size = len(value) if isinstance(value, bytes) else value.stat().st_size
        options = {"chunk_size": max(_PART, size // _MAX_PARTS), "max_concurrency": 2}
        store = self._store if isinstance(value, bytes) else self._store_of_parts
        self._do(lambda: self._library.put(store, key, value, **options))

    def copy(self, key: str, target: str) -> None:
        """Copies an object to another key, within the store."""
        self._do(partial(self._library.copy, self._store_of_parts, key, target))

    def read(self, key: str) -> bytes:
        """Reads the first `MAX_JSON` bytes of an object."""
        get = partial(self._library.get_range, self._store, key, start=0, end=MAX_JSON)
        return bytes(self._do(get, FileNotFoundError))

    def download(
        self,
        key: str,
        path: Path,
        size: int,
        sha256: str | None,
        tag: str | None = None,
        advance: Callable[[int], object] = lambda size: None,
    ) -> bool:
        """Writes the first `size` bytes of an object to a file; returns whether they are right.

        Args:
          key: the object.
          path: the file; its folder exists.
          size: bytes.
          sha256: their checksum; None for any.
          tag: raises `StoreError` if the object no longer has it.
          advance: called with the number of bytes of each part.
        """
        for _ in range(_ATTEMPTS):
            digest = hashlib.sha256()
            path.unlink(missing_ok=True)
            with path.open("xb") as file:
                for start in range(0, size, _PART):
                    part = self._part(key, start, min(start + _PART, size), tag)
                    digest.update(part)
                    file.write(part)
                    advance(len(part))
                sync_file(file)
            if sha256 in (None, digest.hexdigest()):
                return True
        return False

    def _part(self, key: str, start: int, end: int, tag: str | None) -> Any:
        options: dict[str, Any] = {"range": (start, end)}
        if tag is not None:
            options["if_match"] = tag
        changed = self._errors.PreconditionError
        # The bytes arrive after the answer, and may end early.
        get = lambda: self._library.get(self._store_of_parts, key, options=options).bytes()  # noqa: E731
        try:
            return self._do(get, changed)
        except changed:
            raise StoreError(f"{self.url}/{key} was changed meanwhile; start again") from None

    def modified(self, key: str) -> datetime | None:
        """Returns when an object was written, by the store's clock; None if it does not exist."""
        with suppress(FileNotFoundError):
            head = self._do(partial(self._library.head, self._store, key), FileNotFoundError)
            written: datetime = head["last_modified"]
            return written
        return None

    def listed(self, folder: str = "") -> dict[str, Stored]:
        """Returns all objects below a folder by key."""
        pages = self._do(lambda: list(self._library.list(self._store, prefix=folder)))
        return {item["path"]: Stored(item["size"], item["e_tag"]) for item in chain(*pages)}

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the sizes of all objects below a folder, by key."""
        return {key: stored.size for key, stored in self.listed(folder).items()}

    def delete(self, *keys: str) -> None:
        """Deletes objects, which may be missing; many in one request, where a store can."""
        if not keys:
            return
        try:
            self._do(partial(self._library.delete, self._store, list(keys)), FileNotFoundError)
        except FileNotFoundError:
            if len(keys) > 1:
                # It ends at a missing one, which an earlier request may have deleted.
                for key in keys:
                    self.delete(key)
