"""The errors that jaxtp raises.

A `UserError` is a mistake that you can fix: its message has the setting, its value, and a value
that works. A `NumericsError` means that numbers are not finite or differ between devices.
"""

from jaxtp.config import public_names

__getattr__, __dir__, __all__ = public_names.attach(__name__, __file__)
