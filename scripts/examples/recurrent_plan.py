"""How `recurrent.py` is split, and what of a recurrent model cannot be.

The units of an LSTM can be split: a unit's four gates, and its memory c, stay on one device. Its output h cannot: every
gate of the next step reads all of it, so each step gathers it, and there is no row layer to pair with. That is worth it
for the memory of wide cells only. An MLP after the recurrence is paired as ever.

`nnx.GRUCell` and `nnx.OptimizedLSTMCell` make all gates by one layer, whose output they cut: a device would hold one
gate of every unit instead of every gate of its units. They stay whole.
"""

from jaxtp import Colwise, PrepareInput, Replicate, Rowwise, Shard

PLAN = {
    "rnn.cell": PrepareInput((None, Replicate()), (None, Replicate())),  # of (carry, x): x, for the four below
    "rnn.cell.{ii,if_,ig,io}": Colwise(),
    "rnn.cell.{hi,hf,hg,ho}": Colwise(input_layouts=Shard(-1)),  # h comes split, and is gathered
    "up": Colwise(),
    "down": Rowwise(),
}
