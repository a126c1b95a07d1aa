"""Findings of a run's start and of `jaxtp doctor`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxtp.config.entry import MISTAKE, WRONG
from jaxtp.distributed.agreement import raise_everywhere


@dataclass(frozen=True)
class Finding:
    """The measurement of one examination, or the error that ends a run."""

    area: str
    subject: str
    text: str = ""
    verdict: Literal["ok", "--", "WARNING", "WRONG"] = "ok"
    """`--` if it was not examined."""

    error: Exception | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of `jaxtp doctor`."""
        if self.error is None:
            return 0
        return MISTAKE if self.area in ("processes", "folder") else WRONG


def findings(area: str, subject: str, errors: Iterable[Exception], text: str = "") -> list[Finding]:
    """Returns a finding for each error; without errors, that the subject is right."""
    problems = [Finding(area, subject, str(error), "WRONG", error) for error in errors]
    return problems or [Finding(area, subject, text)]


def conclude(stages: Iterable[list[Finding]]) -> list[str]:
    """Returns the lines of a run's start: warnings, then what is right.

    All processes must call it. Raises the first error of any process, before later stages.
    """
    warnings = []
    areas: dict[str, None] = {}
    for stage in stages:
        with raise_everywhere():
            for finding in stage:
                if finding.error is not None:
                    raise finding.error
                if finding.verdict == "WARNING":
                    warnings.append(finding.text)
                elif finding.area == "processes":
                    areas[f"processes ({finding.text})"] = None
                else:
                    areas[finding.area] = None
    return [*warnings, f"doctor  no problem in {', '.join(areas)}; jaxtp doctor says more"]
