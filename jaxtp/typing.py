"""Types for annotations: what public functions return, and sections of settings."""

from jaxtp.config import public_names

__getattr__, __dir__, __all__ = public_names.attach(__name__, __file__)
