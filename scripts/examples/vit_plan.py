"""Splits `vit.py`: attention by heads, the MLP by hidden features. Each has one all-reduce forward, and one backward.

The patch convolution stays whole. A norm reads its output at once, so `Colwise(output_layouts=Replicate())` would save
part of a small kernel, and cost an all-gather of each image.
"""

from jaxtp import Colwise, PrepareInput, Replicate, Rowwise

PLAN = {
    "blocks.*.attention": PrepareInput(Replicate(), Replicate()),  # one reduction for query, key and value
    "blocks.*.attention.{query,key,value}": Colwise(),
    "blocks.*.attention.out": Rowwise(),
    "blocks.*.mlp.layers.0": Colwise(),
    "blocks.*.mlp.layers.2": Rowwise(),
}
