"""A short version of scripts/process_failures.py: one process of four ends, and two processes
resume.
"""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts/process_failures.py"


@pytest.mark.slow
def test_all_processes_end_after_one_fails_and_the_run_resumes(capsys):
    script = runpy.run_path(str(SCRIPT))
    assert script["main"](["--kind", "killed", "--rounds", "1", "--steps", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 named it" in lines[0]
    assert lines[-1].startswith("ok")
