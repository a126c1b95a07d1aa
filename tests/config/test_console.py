"""Whatever happens to standard output, a command that shows something on it goes on."""

import errno
import io
import os
import re
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


LEFT = "1:40 left"
NARROW = {
    0: f"step 5/10 [{'#' * 15}{'.' * 15}] loss 3.25, 1,234 tokens/s  accuracy 0.5  {LEFT}",
    100: f"step 5/10 [{'#' * 15}{'.' * 15}] loss 3.25, 1,234 tokens/s  accuracy 0.5  {LEFT}",
    70: f"step 5/10 [{'#' * 3}{'.' * 4}] loss 3.25, 1,234 tokens/s  accuracy 0.5  {LEFT}",
    60: f"step 5/10 loss 3.25, 1,234 tokens/s  accuracy 0.5  {LEFT}",
    59: f"step 5/10 [{'#' * 5}{'.' * 5}] loss 3.25, 1,234 tokens/s  {LEFT}",
    50: f"step 5/10 loss 3.25, 1,234 tokens/s  {LEFT}",
    40: f"step 5/10 loss 3.25, 1,234...  {LEFT}",
    20: f"step 5/10 ...  {LEFT}",
}
STYLES = re.compile(r"\x1b\[[012]m")


@pytest.mark.parametrize("columns", NARROW)
def test_a_narrow_terminal_shows_the_end_of_the_bar(columns, monkeypatch):
    stream = Failing()
    monkeypatch.setattr(stream, "fileno", lambda: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((columns, 24)))
    display = Display("step {done}/{total}", stream=stream)
    clock = iter([0.0, 0.0, 100.0])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    display.begin(0, 10)
    display.move(5, "loss 3.25, 1,234 tokens/s", "accuracy 0.5")
    bar = STYLES.sub("", stream.getvalue().rpartition("\x1b[?7l")[2])
    assert bar.removesuffix("\x1b[?7h") == NARROW[columns]


@pytest.mark.parametrize(
    ("name", "value"), [("TERM", "xterm"), ("NO_COLOR", "1"), ("TERM", "dumb"), (None, None)]
)
def test_only_a_terminal_with_colours_has_styles_and_none_cuts_a_word(name, value, monkeypatch):
    """The numbers of versions, paths, hashes and of other text's escape sequences stay whole."""
    for variable in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, value)
    stream = io.StringIO() if name is None else Failing()
    monkeypatch.setattr(stream, "fileno", lambda: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((38, 24)))
    text = "918,656 of jax 0.10.2 in e6fe0f9, lr 1e-05, x/2-3, \x1b[2;31m7\x1b[0m 5"
    Display("", stream=stream).rows(f"model   {text}")
    shown = stream.getvalue()
    has_styles = (name, value) == ("TERM", "xterm")
    assert STYLES.sub("", shown).split() == ["model", *STYLES.sub("", text).split()]
    assert max(map(len, STYLES.sub("", shown).splitlines())) <= 38 or value in (None, "dumb")
    assert ("\x1b[2mmodel\x1b[0m" in shown) == has_styles
    bold = re.findall("\x1b\\[1m(.*?)\x1b", shown)
    assert bold == (["918,656", "0.10.2", "1e-05", "5"] if has_styles else [])


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
    process = subprocess.Popen(
        [sys.executable, "-c", RESIZED],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE,
        # In color the numbers of a size have codes around them.
        env=os.environ | {"NO_COLOR": "1"},
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
