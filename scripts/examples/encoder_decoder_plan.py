"""Splits `encoder_decoder.py` as Megatron-LM does (arXiv 1909.08053), vocabulary included.

Query, key and value of self-attention read the norm's output, and all cross-attentions read the encoder's output.
`SHARED` reduces the gradient of each of these arrays once, instead of once per reader.
"""

from jaxtp import Colwise, PrepareOutput, Replicate, Rowwise

SHARED = PrepareOutput(Replicate(), Replicate())

PLAN = {
    "embedding": Rowwise(),
    "{encoder,decoder}.*.attention_norm": SHARED,
    "encoder_norm": SHARED,
    "{encoder,decoder}.*.{attention,cross_attention}.{query,key,value}": Colwise(),
    "{encoder,decoder}.*.{attention,cross_attention}.out": Rowwise(),
    "{encoder,decoder}.*.mlp.up": Colwise(),
    "{encoder,decoder}.*.mlp.down": Rowwise(),
    "head": Colwise(),
}
