"""Which start of a run owns a URL, where only the owner writes and deletes.

    URL/run.json               the run's id, so that no other run is mixed with it
    URL/owners/00000003.json   one for each start, created if absent; the highest owns the URL
    URL/beats/00000003         written every 30 s; its age is measured by the store's clock
    URL/ended/00000003.json    this start has ended, and the next one need not wait

An owner that finds a higher number ends.
"""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import jax

from jaxtp.config.entry import say
from jaxtp.config.files import write_atomically
from jaxtp.config.reading import MAX_JSON, parse_json, read_bytes
from jaxtp.config.schema import ConfigError
from jaxtp.data.object_store import ObjectStore, StoreError
from jaxtp.distributed.agreement import meet, raise_everywhere

BEAT_SECONDS = 30.0
SILENT_SECONDS = 120.0
"""After this time without a beat, another start may take over."""
SLOW_SECONDS = 120.0
"""After this time, a line says that the owner still writes."""
_IDENTITY = "mirror.json"  # File in the run's folder with the id at the URL


class TakenOverError(ConfigError):
    """Another start owns the URL."""


def on_process_0(action: Callable[[], None], seconds: float) -> None:
    """Calls `action` on process 0; the others wait for so long, and raise its error."""
    # Collectives of the other processes could not wait for so long.
    with raise_everywhere(partial(meet, seconds)):
        if jax.process_index() == 0:
            action()


def numbers(store: ObjectStore, folder: str) -> list[int]:
    """Returns the numbers of the JSON objects in a folder, in ascending order."""
    names = [re.fullmatch(r"\w+/(\d+)\.json", key) for key in store.sizes(folder)]
    return sorted(int(name[1]) for name in names if name)


@dataclass
class Ownership:
    """The ownership of a URL by this start, from `claim` to `end`."""

    store: ObjectStore
    # The setting with the URL
    setting: str

    def __post_init__(self) -> None:
        self.number = 0
        self._stopped = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        # What is unfinished at the URL, and the time of the line on it
        self._unfinished = ""
        self._line_at = 0.0

    @property
    def _place(self) -> str:
        return f"{self.setting}={self.store.url}"

    def claim(self, line: Callable[[str], None]) -> None:
        """Becomes the owner, once the owner before has ended or is silent.

        Args:
          line: prints why the start waits.

        Raises:
          StoreError: the URL cannot be read and written.
          ConfigError: another start uses the URL, or a write cannot be conditional.
        """
        probe = f"probes/{uuid.uuid4().hex}.json"
        self.store.create(probe, b"1")
        if self.store.create(probe, b"2"):
            raise ConfigError(
                f"{self._place} ignores conditional writes, so two runs could overwrite each "
                "other; use a store that has them (If-None-Match)"
            )
        me = {"host": socket.gethostname(), "process": os.getpid(), "id": uuid.uuid4().hex}
        identity = json.dumps(me).encode()
        while True:
            last = self._newest()
            if last:
                self._wait_for_silence(last, probe, line)
            if self.store.create(f"owners/{last + 1:08}.json", identity):
                break
        self.number = last + 1
        self.store.delete(probe)
        self._beating.start()

    def _newest(self) -> int:
        return max(numbers(self.store, "owners"), default=0)

    def _last_sign(self, number: int) -> datetime | None:
        """Returns when a start was alive, by the store's clock; None if it has ended."""
        keys = (f"ended/{number:08}.json", f"owners/{number:08}.json", f"beats/{number:08}")
        times = list(map(self.store.modified, keys))
        return None if times[0] else max(filter(None, times))

    def _wait_for_silence(self, number: int, probe: str, line: Callable[[str], None]) -> None:
        sign = self._last_sign(number)
        now = self.store.modified(probe)
        if sign is None or now is None:
            return
        age = max((now - sign).total_seconds(), 0)
        until = time.monotonic() + SILENT_SECONDS - age
        user = self._owner(number)
        line(
            f"{self.store.url}: {user} was alive {age:.0f} s ago, and did not end; this run takes "
            f"over after {SILENT_SECONDS:g} s without a sign of it"
        )
        while time.monotonic() < until:
            time.sleep(SILENT_SECONDS / 40)
            latest = self._last_sign(number)
            if latest is None:
                return
            if latest != sign:
                raise ConfigError(
                    f"{self._place} is in use by {user}, which is alive; wait until it ends, or "
                    "name another URL"
                )

    def _owner(self, number: int) -> str:
        record = parse_json(self.store.read(f"owners/{number:08}.json"), self.store.url)
        return f"process {record.get('process')} on {record.get('host')}"

    def require(self) -> None:
        """Raises `TakenOverError` if another start owns the URL, or `StoreError`."""
        newest = self._newest()
        if newest != self.number:
            raise TakenOverError(
                f"{self.store.url}: {self._owner(newest)} has taken over, because this run was "
                "silent; that run continues, and this one ends"
            )

    def require_same_run(self, folder: Path, *, is_empty: bool) -> None:
        """Checks that a folder belongs to the run at the URL, and writes the run's id there.

        Raises ConfigError if they differ, unless `is_empty`.
        """
        path = folder / _IDENTITY
        identity = json.dumps({"id": uuid.uuid4().hex}).encode()
        with suppress(FileNotFoundError):
            identity = read_bytes(path, MAX_JSON)
        if not self.store.create("run.json", identity):
            stored = self.store.read("run.json")
            if stored != identity and not is_empty:
                raise ConfigError(
                    f"{self._place} has another run than {folder}; name another URL, or an empty "
                    "folder with --run.dir FOLDER to resume that run"
                )
            identity = stored
        write_atomically(path, identity)

    def begin(self, activity: str) -> None:
        """Marks that `activity` makes something that is unfinished until `finish`."""
        self._line_at = time.monotonic() + SLOW_SECONDS
        self._unfinished = activity

    def finish(self) -> None:
        """Marks that all is finished."""
        self._unfinished = ""

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            with suppress(StoreError):
                self.store.put(f"beats/{self.number:08}", b"1")
            if self._unfinished and time.monotonic() > self._line_at:
                self._line_at = float("inf")
                say(
                    f"{self.store.url}: {self._unfinished} takes more than {SLOW_SECONDS:g} s; "
                    "training continues until the next one"
                )

    def end(self) -> None:
        """Ends. The next start need not wait, unless this one may still write."""
        self._stopped.set()
        # Another process than 0, or a start that was refused
        if not self.number:
            return
        self._beating.join(10)
        if not self._unfinished and not self._beating.is_alive():
            with suppress(StoreError):
                self.store.create(f"ended/{self.number:08}.json", b"{}")
