"""Splits `recurrent.py`, as far as a recurrent model can be split.

The units of an LSTM can be split: a unit's four gates, and its memory c, are on one device. The output h cannot: each
gate of the next step reads all of h, so each step all-gathers it, and there is no row layer to pair with. This pays off
only for the memory of wide cells. The MLP after the recurrence is a column and a row layer as usual.

`nnx.GRUCell` and `nnx.OptimizedLSTMCell` compute all gates in one layer and slice its output. A device would get one
gate of all units instead of all gates of its units, so these cells stay whole.
"""

from jaxtp import Colwise, PrepareInput, Replicate, Rowwise, Shard

PLAN = {
    "rnn.cell": PrepareInput((None, Replicate()), (None, Replicate())),  # x in (carry, x), for the four layers below
    "rnn.cell.{ii,if_,ig,io}": Colwise(),
    "rnn.cell.{hi,hf,hg,ho}": Colwise(input_layouts=Shard(-1)),  # h is split, and all-gathered
    "up": Colwise(),
    "down": Rowwise(),
}
