"""Whatever happens to standard output, a command that shows something on it goes on."""

import errno
import io
import os
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from jaxtp.config import console
from jaxtp.config.console import Display, size_text


class Failing(io.StringIO):
    """A terminal that takes some writes, and then fails at each with the same error."""

    def __init__(self, error=None, takes=sys.maxsize):
        super().__init__()
        self.error = error
        self.takes = takes

    def isatty(self):
        return True

    def write(self, text):
        self.takes -= 1
        if self.takes < 0:
            raise self.error
        return super().write(text)


def show(display):
    with display:
        display.line("first")
        display.begin(0, 3)
        for done in range(3):
            display.move(done, f"[/] {done}")
            display.line(f"line {done}")
    display.line("after")


NARROW = {
    0: f"step 5/10 [{'#' * 15}{'.' * 15}] loss 3.25, 1,234 tokens/s  0:01:40 left",
    100: f"step 5/10 [{'#' * 15}{'.' * 15}] loss 3.25, 1,234 tokens/s  0:01:40 left",
    70: f"step 5/10 [{'#' * 9}{'.' * 9}] loss 3.25, 1,234 tokens/s  0:01:40 left",
    56: "step 5/10 loss 3.25, 1,234 tokens/s  0:01:40 left",
    40: "step 5/10 loss 3.25, 1,...  0:01:40 left",
    20: "step 5/10 ...  0:01:40 left",
}


@pytest.mark.parametrize("columns", NARROW)
def test_a_narrow_terminal_shows_the_end_of_the_bar(columns, monkeypatch):
    stream = Failing()
    monkeypatch.setattr(stream, "fileno", lambda: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((columns, 24)))
    display = Display("step {done}/{total}", stream=stream)
    clock = iter([0.0, 0.0, 100.0])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    display.begin(0, 10)
    display.move(5, "loss 3.25, 1,234 tokens/s")
    assert stream.getvalue().rpartition("\x1b[?7l")[2].removesuffix("\x1b[?7h") == NARROW[columns]


ERRORS = [
    OSError(errno.EIO, "closed terminal"),
    OSError(errno.ENOSPC, "full"),
    BrokenPipeError(),
    ValueError("closed"),
]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "SLURM_PROCID", None])
def test_the_terminal_of_a_scheduler_gets_lines(variable, monkeypatch):
    if variable:
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(sys, "stdout", Failing())
    display = Display("step {done}")
    show(display)
    assert display.has_bar == (variable is None)
    assert ("\x1b" in sys.stdout.getvalue()) == (variable is None)


@pytest.mark.journey
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_the_log_of_mpirun_has_lines():
    code = (
        "import sys, test_console as t; assert sys.stdout.isatty(); t.show(t.Display('step "
        "{done}'))"
    )
    command = [
        "mpirun",
        "-n",
        "1",
        "--allow-run-as-root",
        "--oversubscribe",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run(
        command, cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["first", "line 0", "line 1", "line 2", "after"]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_while_displaying_silences_the_display(monkeypatch, error):
    for takes in (0, 1, 4):
        unread = []
        monkeypatch.setattr(sys, "stdout", Failing(error, takes))
        show(Display("step {done}", unread=partial(unread.append, error)))
        assert unread == [error] * isinstance(error, BrokenPipeError)
    monkeypatch.setattr(sys, "stdout", None)
    show(Display("step {done}"))


def test_what_the_encoding_lacks_is_escaped(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    Display("step {done}").line("runs/é \ud800")
    assert out.getvalue() == b"runs/\\xe9 \\ud800\n"


def test_a_full_device_fails_once_and_not_at_the_end(monkeypatch):
    """Python flushes what is left over when it ends: that would be an error of its own, with
    exit code 120.
    """
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        show(Display("step {done}"))
        full.write("at the end")


RESIZED = """
import sys, termios
from jaxtp.config.console import Display
with Display("step {done}") as display:
    display.begin(0, 9)
    for size in [(24, 80), (0, 0), (1, 1), (1, 0), (0, 1), (60000, 60000)]:
        termios.tcsetwinsize(1, size)
        display.move(1, "x" * 100)
        display.line(f"shown at {size}")
    input()
    for done in range(9):
        display.move(done, "x")
        display.line("lost")
"""


@pytest.mark.journey
def test_a_terminal_of_any_size_that_is_closed():
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", RESIZED]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    seen = b""
    while b"shown at (60000, 60000)" not in seen:
        seen += os.read(ours, 65536)
    os.close(ours)
    _, errors = process.communicate(b"\n", timeout=60)
    assert (process.returncode, errors) == (0, b"")


SIZES = {
    0: "0 B, 0 B",
    999: "999 B, 999 B",
    1000: "1.0 KB, 1,000 B",
    45_000: "45.0 KB, 43.9 KiB",
    45e9: "45.0 GB, 41.9 GiB",
    -2.5e6: "-2.5 MB, -2.4 MiB",
    1.2e15: "1,200,000.0 GB, 1,117,587.1 GiB",
}


def test_a_size_has_the_unit_that_leaves_it_a_digit():
    assert {size: f"{size_text(size)}, {size_text(size, binary=True)}" for size in SIZES} == SIZES
