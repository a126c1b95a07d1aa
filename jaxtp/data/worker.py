"""Processes for untrusted input, which may crash a process or fill its memory.

A worker is a Python file that imports nothing from jaxtp, to start quickly. It reads requests from
standard input, limits its memory and time for each request, and writes each answer, after its size
in 8 bytes, to standard output.
"""

import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from jaxtp.data import worker_process


class WorkerDiedError(Exception):
    """A worker has died during a request."""

    def __init__(self, code: int):
        super().__init__(f"exit code {code}")
        self.code = code  # after a signal, its negative number

    def __str__(self) -> str:
        with suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"exit code {self.code}"


class Worker:
    """A process that starts at the first request, and again after it dies.

    Args:
      file: the worker's Python file.
    """

    def __init__(self, file: str = worker_process.__file__):
        self._command = [sys.executable, "-P", file]
        self.process: subprocess.Popen[bytes] | None = None
        self._close: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def request(self, request: bytes) -> bytes:
        """Sends a request and returns its answer; raises `WorkerDiedError`."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                size = int.from_bytes(_read(process.stdout, 8), "little")
                return _read(process.stdout, size)
            except BaseException as error:
                code = process.wait() if isinstance(error, OSError | EOFError) else None
                self.process = None
                # After Ctrl-C, the answer could be mistaken for the answer to the next request.
                self._close()
                if code is None:
                    raise
                raise WorkerDiedError(code) from None

    def _started(self) -> "subprocess.Popen[bytes]":
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # shields it from Ctrl-C in the terminal
            )
            self._close = weakref.finalize(self, _close, self.process)
        return self.process


WORKER = Worker()
"""Renders all chat templates, and encodes texts that may make the library crash."""


def _read(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _close(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError), process:  # drops an unread request
        pass
