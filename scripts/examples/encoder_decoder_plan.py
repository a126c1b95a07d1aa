"""How `encoder_decoder.py` is split: as Megatron-LM does it (arXiv 1909.08053), vocabulary included.

Query, key and value of self-attention read one array, the norm's; it is shared where it is made. The keys and values of
all cross-attentions read the encoder's output: one reduction of its gradient does for the whole decoder.
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
