"""Losses of a run, such as `DPO`, and the log-probabilities from which you write your own."""

from jaxtp.config import public_names

__getattr__, __dir__, __all__ = public_names.attach(__name__, __file__)
