"""Named variants of a model or of a run: what each changes of a base."""

from jaxtp.config.schema import merged, to_plain, validate


def variant(base, changes):
    """Returns a configuration with other settings; those of a section that is not named whole stay
    the base's."""
    return validate(type(base), merged(to_plain(base), changes), source="a variant of a test")


def variants(base, named):
    """Returns `{name: configuration}` of `{name: changes}`."""
    return {name: variant(base, changes or {}) for name, changes in named.items()}
