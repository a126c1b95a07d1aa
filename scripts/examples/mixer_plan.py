"""How `mixer.py` is split: both MLPs by their hidden features.

The one that mixes tokens multiplies the transposed array: its features are the tokens, and the plan is the same.
"""

from jaxtp import Colwise, Rowwise

PLAN = {
    "blocks.*.{tokens,channels}.up": Colwise(),
    "blocks.*.{tokens,channels}.down": Rowwise(),
}
