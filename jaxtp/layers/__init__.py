"""The parallel layers: Flax NNX modules that take and return global arrays."""

from jaxtp.config import public_names

__getattr__, __dir__, __all__ = public_names.attach(__name__, __file__)
