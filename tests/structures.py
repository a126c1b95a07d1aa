"""Values of any structure, and files of any kind, for tests of readers of untrusted files."""

import os
import re
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**33),
    st.sampled_from([-1, 0, 1, 2, 2**31 - 1, 2**31, 2**63, -(2**63), 2**64, 10**99, 10**400]),
    st.floats(),
    st.sampled_from([0.0, 0.5, 1.0, 1e-45, 1e308]),
    st.text(max_size=5),
    st.sampled_from(
        [
            "",
            "1",
            "~nobody/x",
            "a\0b",
            "../x",
            "F32",
            "llama",
            "true",
            "1e400",
            "\x1b[2J\n",
            "x" * 5000,
        ]
    ),
)


def extended(values):
    """Returns a strategy for lists and objects of values."""
    keys = st.text(max_size=3)
    return st.one_of(st.lists(values, max_size=4), st.dictionaries(keys, values, max_size=3))


VALUES = st.recursive(SCALARS, extended, max_leaves=6)
"""Values that both JSON and YAML can express."""


def places(value, at=()):
    """Yields the path of each value inside a value."""
    yield at
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*at, key))


def replaced(value, place, new):
    """Returns a copy of a value with `new` at a path."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(copy[place[0]], place[1:], new)
    return copy


@st.composite
def changed(draw, value):
    """Draws a value with up to three inner values replaced, or keys added."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(value))))
        value = replaced(value, place, draw(VALUES))
        if isinstance(value, dict) and draw(st.booleans()):
            value = value | draw(st.dictionaries(st.text(max_size=8), VALUES, max_size=1))
    return value


def is_one_clear_message(error):
    """Returns whether an error's message is printable and short."""
    text = str(error)
    text.encode()
    return (
        0 < len(text) < 8000
        and all(line.isprintable() for line in text.splitlines())
        and "Traceback" not in text
    )


def gives_one_of(expected, mistake, action):
    """Checks that an action returns an `expected` value, or raises a `mistake` with a clear
    message.
    """
    raised = None
    try:
        found = action()
    except mistake as error:
        raised = error
    assert isinstance(found, expected) if raised is None else is_one_clear_message(raised), repr(
        raised
    )


def examples(count):
    """Returns Hypothesis settings for a test that writes a file for each example."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def _pipe(path):
    os.mkfifo(path)


def _link_to(target):
    return lambda path: path.symlink_to(target)


def _sparse(path):
    with path.open("wb") as file:
        file.truncate(2**41)  # takes no room on the disk


PLANTED = {
    "pipe": _pipe,
    "device": _link_to("/dev/zero"),
    "sparse file": _sparse,
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": _link_to("absent"),
    "link to another file": _link_to("../victim"),
    "empty file": lambda path: path.touch(),
}
"""What someone may put in the place of a file of a folder that they share; `victim` is next to
the folder.
"""


def plant(path, kind):
    """Puts something else in the place of a file, which may be absent."""
    path.unlink(missing_ok=True)
    PLANTED[kind](path)


@contextmanager
def watched(seconds=60, memory=4 * 10**9):
    """Ends a body that hangs, or that takes much more memory."""

    def hung(number, frame):
        raise AssertionError(f"it still ran after {seconds} s")

    handler = signal.signal(signal.SIGALRM, hung)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    taken = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + memory, limits[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
