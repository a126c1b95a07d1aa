"""A proposed plan and its reasoning: what a user reads, and edits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxtp.mesh import describe_mesh
from jaxtp.parallel.styles import Style


@dataclass(frozen=True)
class Reason:
    """Why a module has its style, or none."""

    module: str
    """Its pattern in the plan, or that of several modules with one reason."""

    style: str
    """Style as it is written in the plan; empty for a module that stays whole."""

    why: str
    """Reason in words."""

    bytes: float
    """Bytes that each device sends over tp, forward and backward, for all modules of the pattern together."""

    def __str__(self) -> str:
        sent = f"  {self.bytes:,.0f} bytes" if self.bytes else ""
        return f"{self.module}  {self.style or 'whole'}{sent}\n    {self.why}"


class Proposal(dict[str, Style]):
    """A plan, as `parallelize` takes it, and its reasons.

    Args:
      plan: styles by pattern.
      reasons: for every layer of the model, in its order.
      sizes: of the mesh that it was made for.
    """

    def __init__(self, plan: Mapping[str, Style], reasons: Iterable[Reason], sizes: Mapping[str, int]):
        super().__init__(plan)
        self.reasons = tuple(reasons)
        self.sizes = dict(sizes)

    @property
    def bytes(self) -> float:
        """Bytes that each device sends over tp in a forward and a backward pass, without recomputation."""
        return sum(reason.bytes for reason in self.reasons)

    def __str__(self) -> str:
        mesh = f"mesh {describe_mesh(self.sizes)}"
        if not self:
            header = f"no plan for {mesh}: nothing in this model is worth a split over tp"
        else:
            header = f"proposed for {mesh}: a device sends {self.bytes:,.0f} bytes over tp, forward and backward"
        return "\n".join([header, *(f"\n{reason}" for reason in self.reasons)])


def merge_reasons(reasons: Iterable[Reason]) -> list[Reason]:
    """Adds up reasons that differ in their bytes alone."""
    merged: dict[tuple[str, str, str], float] = {}
    for reason in reasons:
        key = (reason.module, reason.style, reason.why)
        merged[key] = merged.get(key, 0) + reason.bytes
    return [Reason(*key, total) for key, total in merged.items()]
