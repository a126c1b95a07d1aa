"""Models in and out of folders in Hugging Face format."""

from jaxtp.config import public_names

__getattr__, __dir__, __all__ = public_names.attach(__name__, __file__)
