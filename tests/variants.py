"""Reads named variants of a model from the YAML file beside a test."""

from pathlib import Path

import yaml

from jaxtp.config.schema import to_plain, validate


def sections(test):
    """Returns the content of the YAML file that has a test file's name."""
    return yaml.safe_load(Path(test).with_suffix(".yaml").read_text())


def variant(base, changes):
    """Returns a configuration with other settings; those of a section that is not named whole stay
    the base's."""
    return validate(type(base), _merged(to_plain(base), changes), source="a variant of a test")


def variants(base, named):
    """Returns `{name: configuration}` of `{name: changes}`."""
    return {name: variant(base, changes or {}) for name, changes in named.items()}


def _merged(values, changes):
    both = {
        name: _merged(values[name], changes[name])
        for name in changes
        if isinstance(changes[name], dict) and isinstance(values.get(name), dict)
    }
    return values | changes | both
