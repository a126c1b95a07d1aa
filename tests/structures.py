"""Values of any structure, for property tests of readers of untrusted files."""

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
    st.sampled_from(["", "1", "~nobody/x", "a\0b", "../x", "F32", "llama", "true", "1e400", "\x1b[2J\n", "x" * 5000]),
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
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
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
    return 0 < len(text) < 8000 and all(line.isprintable() for line in text.splitlines()) and "Traceback" not in text


def gives_one_of(expected, mistake, action):
    """Checks that an action returns an `expected` value, or raises a `mistake` with a clear message."""
    raised = None
    try:
        found = action()
    except mistake as error:
        raised = error
    assert isinstance(found, expected) if raised is None else is_one_clear_message(raised), repr(raised)


def examples(count):
    """Returns Hypothesis settings for a test that writes a file for each example."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
