"""Findings of a run's start and of `jaxtp doctor`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxtp.config.entry import MISTAKE, WRONG
from jaxtp.distributed.agreement import raise_everywhere

Verdict = Literal["ok", "--", "WARNING", "WRONG"]
"""`--` was not examined."""


@dataclass(frozen=True)
class Finding:
    """The measurement of one examination, or the error that ends a run."""

    area: str
    subject: str
    text: str = ""
    verdict: Verdict = "ok"
    error: Exception | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of `jaxtp doctor`."""
        if self.error is None:
            return 0
        return MISTAKE if self.area in ("processes", "folder") else WRONG


def wrong(area: str, subject: str, error: Exception) -> Finding:
    """Returns the finding of an error."""
    return Finding(area, subject, str(error), "WRONG", error)


def conclude(stages: Iterable[list[Finding]]) -> list[str]:
    """Returns the lines of a run's start: warnings, then what is right.

    All processes must call it. Raises the first error of any process, before later stages.
    """
    warnings = []
    areas = dict[str, str]()
    for findings in stages:
        with raise_everywhere():
            for finding in findings:
                if finding.error is not None:
                    raise finding.error
                if finding.verdict == "WARNING":
                    warnings.append(finding.text)
                elif finding.area == "processes":
                    areas[finding.area] = f" ({finding.text})"
                else:
                    areas.setdefault(finding.area, "")
    right = ", ".join(map("".join, areas.items()))
    return [*warnings, f"doctor  no problem in {right}; jaxtp doctor says more"]
