"""Tables in YAML files next to tests; in those of mistakes each row has the words that its error
`says`.
"""

import json
from pathlib import Path

import yaml

from jaxtp.config.entry import UserError


def read_table(test_file, name=None):
    """Returns the content of a YAML file next to a test file, by default of the one with its
    name.
    """
    return yaml.safe_load(
        Path(test_file).with_name(f"{name or Path(test_file).stem}.yaml").read_text()
    )


def read_json(file):
    return json.loads(file.read_text())


def write_json(file, value):
    file.write_text(json.dumps(value))


def with_tuples(settings):
    """Returns settings with tuples, as Python has them, for the lists of YAML."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def raised_by(action, *arguments, kind=UserError):
    """Returns the name and the text of a user's mistake that a call raises; `no error` if it
    raises none.
    """
    try:
        action(*arguments)
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def assert_errors(rows, error_of, names=None):
    """Checks that the error of each row has its words; reports all that lack some.

    Args:
      error_of: returns the text of the error of a row.
      names: replaces `{name}` in the words, if given.
    """
    found = []
    for row in rows:
        error = error_of(row)
        words = [row["says"]] if isinstance(row["says"], str) else row["says"]
        if not all((word if names is None else word.format(**names)) in error for word in words):
            found.append((row, error))
    assert not found
