"""Results of a check: a line per case for people, a dict for machines."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxtp.check.parity import Errors, Tolerance
from jaxtp.check.shrink import Case

_WIDTH = 56
HEADER = f"{'':4}  {'mesh':<{_WIDTH}}{'dtype':<10}{'loss':>9}{'grad norm':>11}{'gradient':>10}{'updated':>9}"


@dataclass(frozen=True)
class Verdict:
    """A case compared with one device."""

    case: Case
    dtype: str
    tolerance: Tolerance
    errors: Errors | None
    """Errors; None if the step could not be run."""
    problems: tuple[str, ...]
    """Problems of the compiled step, or why it could not be run."""
    first_difference: str | None = None
    """The first module that differs, where any does."""

    @property
    def passed(self) -> bool:
        """Whether numbers and compiled step are as they should be."""
        return self.errors is not None and self.errors.within(self.tolerance) and not self.problems

    def lines(self) -> list[str]:
        """Returns the row of the table; below it what is wrong, if anything."""
        name = f"{'ok' if self.passed else 'FAIL':4}  {self.case!s:<{_WIDTH}}{self.dtype:<10}"
        if self.errors is None:
            return [name, *(f"        {problem}" for problem in self.problems)]
        e = self.errors
        gradient, update = self._worst(e)
        row = f"{name}{e.loss:>9.1e}{e.grad_norm:>11.1e}{e.gradients[gradient]:>10.1e}{e.updates[update]:>9.1e}"
        if self.passed:
            return [row, *self._flips(e)]
        first = [f"first difference: {self.first_difference}"] if self.first_difference else []
        limits = [f"{name} (up to {e.allowed(name, self.tolerance):.1e} allowed)" for name in (gradient, update)]
        worst = ["worst gradient {}, worst updated array {}".format(*limits)]
        details = ([] if e.within(self.tolerance) else first + worst) + list(self.problems)
        return [row, *self._flips(e), *(f"        {detail}" for detail in details)]

    def as_json(self) -> dict[str, Any]:
        """Returns everything, as plain values."""
        plain = dataclasses.asdict(self)
        case, e = plain.pop("case"), self.errors
        if e is not None:
            gradient, update = self._worst(e)
            plain["errors"] = {
                "loss": e.loss,
                "grad_norm": e.grad_norm,
                "gradient": e.gradients[gradient],
                "worst_gradient": gradient,
                "update": e.updates[update],
                "worst_update": update,
                "flips": e.flips,
                "margin": e.margin,
                "choices": e.choices,
            }
        names = {"mesh": case["sizes"], "sequence_parallel": case["sequence_parallel"], "context": case["context"]}
        return {**names, **plain, "passed": self.passed}

    def _flips(self, errors: Errors) -> list[str]:
        """Returns what is said of choices of experts that are others than on one device."""
        if not errors.flips:
            return []
        of_all = f"{errors.flips:,} of {errors.choices:,} choices of experts are others"
        return [f"        {of_all}, by at most {errors.margin:.1e} of score ({self.tolerance.tensor:.1e} allowed)"]

    def _worst(self, errors: Errors) -> tuple[str, str]:
        return errors.worst(errors.gradients, self.tolerance), errors.worst(errors.updates, self.tolerance)
