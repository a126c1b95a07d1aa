"""How `vit.py` is split: attention by heads, the MLP by its hidden features; one all-reduce after each and one before.

The patch convolution stays whole: what it makes is normalised at once, so `Colwise(output_layouts=Replicate())` would
save a part of a small kernel for an all-gather of every image.
"""

from jaxtp import Colwise, PrepareInput, Replicate, Rowwise

PLAN = {
    "blocks.*.attention": PrepareInput(Replicate(), Replicate()),  # one reduction for query, key and value
    "blocks.*.attention.{query,key,value}": Colwise(),
    "blocks.*.attention.out": Rowwise(),
    "blocks.*.mlp.layers.0": Colwise(),
    "blocks.*.mlp.layers.2": Rowwise(),
}
