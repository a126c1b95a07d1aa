"""`parallelize`: splits any Flax NNX model over a mesh by a plan of styles."""

from jaxtp.config import public_names

__getattr__, __dir__, __all__ = public_names.attach(__name__, __file__)
