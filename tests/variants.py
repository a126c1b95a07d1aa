"""Named variants of a model or of a run: what each changes of a base."""

from dataclasses import replace

from jaxtp.config.schema import merged, to_plain, validate
from jaxtp.models.config import ModelConfig

SMALL_MODEL = ModelConfig(
    vocab_size=61, d_model=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24
)


def small_model(**changes):
    """Returns the configuration of a one-layer model, with `changes`."""
    return replace(SMALL_MODEL, **changes)


def variant(base, changes):
    """Returns a configuration with other settings; those of a section that is not named whole stay
    the base's."""
    return validate(type(base), merged(to_plain(base), changes), source="a variant of a test")


def variants(base, named):
    """Returns `{name: configuration}` of `{name: changes}`."""
    return {name: variant(base, changes or {}) for name, changes in named.items()}
