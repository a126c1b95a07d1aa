"""Which checkpoints of a run are kept when a new one is written."""

from collections.abc import Mapping, Sequence
from typing import Any

from orbax.checkpoint import checkpoint_managers as policies


class KeepBest(policies.PreservationPolicy):
    """Keeps the checkpoint with the lowest validation loss.

    Args:
      losses: validation losses by step, of those that were evaluated; read anew at each decision.

    Orbax would keep losses in memory, and a run that resumes would delete the best of those before it.
    """

    def __init__(self, losses: Mapping[int, float]):
        self._losses = losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each checkpoint whether it is the best; at equal losses the newest is."""
        steps = [each.step for each in checkpoints]
        best = min((step for step in steps if step in self._losses), key=lambda s: (self._losses[s], -s), default=None)
        return [step == best for step in steps]


def policy(keep: int, keep_every: int, losses: Mapping[int, float] | None) -> policies.PreservationPolicy:
    """Returns what tells Orbax which checkpoints to keep.

    Args:
      keep: number of the newest to keep.
      keep_every: also keeps those whose step is a multiple of it; 0 for none.
      losses: if given, also keeps the best by these.
    """
    kept: list[Any] = [policies.LatestN(keep)]
    if keep_every:
        kept.append(policies.EveryNSteps(keep_every))
    if losses is not None:
        kept.append(KeepBest(losses))
    return policies.AnyPreservationPolicy(kept)
