"""Splits both MLPs of `mixer.py` by their hidden features.

The token-mixing MLP reads the transposed array, so its features are the tokens, and its plan is the same.
"""

from jaxtp import Colwise, Rowwise

PLAN = {
    "blocks.*.{tokens,channels}.up": Colwise(),
    "blocks.*.{tokens,channels}.down": Rowwise(),
}
