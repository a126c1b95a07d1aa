"""A short version of scripts/process_failures.py: one process of four ends, twice, and
the run goes on with two.
"""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts/process_failures.py"


@pytest.mark.slow
def test_the_others_of_a_process_that_ends_end_too_and_the_run_goes_on(capsys):
    script = runpy.run_path(str(SCRIPT))
    assert script["main"](["--kind", "killed", "failing", "--rounds", "1", "--steps", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("3 named it" in line for line in lines) == 2
    assert "went on with two processes" in lines[0]
    assert lines[-1].startswith("ok")
