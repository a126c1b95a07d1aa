"""Sequence parallelism: between parallel layers, activations split over tp along the sequence.

Norms, dropout and residual sums then work on `1/tp` of the tokens; a column layer gathers them (all-gather) and a row
layer leaves its sum split (reduce-scatter). Korthikanti et al., arXiv 2205.05198.
"""

from jaxtp.collectives import axis_size
from jaxtp.mesh import TP

SEQUENCE_DIM = 1

SequenceParallel = bool | None
"""On, off, or None: on wherever tp > 1 divides the sequence of the input, so that decoding a token is off."""


def sequence_dim(setting: SequenceParallel, shape: tuple[int, ...]) -> int | None:
    """The dim of an activation that is split over tp between layers, or None.

    Args:
      setting: as the layer was told.
      shape: of the global activation or ids, `[B, T, ...]`.
    """
    if setting is None:
        tp = axis_size(TP)
        setting = tp > 1 and shape[SEQUENCE_DIM] % tp == 0
    return SEQUENCE_DIM if setting else None
