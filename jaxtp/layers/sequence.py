"""Sequence parallelism: between parallel layers, activations split over tp along the sequence.

Norms, dropout and residual sums then work on `1/tp` of the tokens; a column layer gathers them (all-gather) and a row
layer leaves its sum split (reduce-scatter). Korthikanti et al., arXiv 2205.05198.
"""

from jax.sharding import PartitionSpec

from jaxtp.collectives import axis_size, batch_spec
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
    return SEQUENCE_DIM if is_split(setting, shape[SEQUENCE_DIM], axis_size(TP)) else None


def is_split(setting: SequenceParallel, length: int, tp: int) -> bool:
    """Whether a sequence of so many tokens is split over so many devices."""
    return tp > 1 and length % tp == 0 if setting is None else setting


def activation_spec(sequence: int | None) -> PartitionSpec:
    """The spec of `[B, T, D]` between layers, of which `sequence_dim` says whether T is split over tp."""
    return batch_spec(None if sequence is None else TP, None)
