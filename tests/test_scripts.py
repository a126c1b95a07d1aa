"""Scripts that measure are run small; others have a test of their own."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMALL = {
    "decision.py": "Trainer, scripts/examples/mixer.py: ",
    "loader_speed.py --tokens 100000 --seconds 0.1 --repeats 1": "concatenated, 4,096 tokens",
}


@pytest.mark.journey
@pytest.mark.parametrize("line", SMALL)
def test_a_script_runs(line):
    script, *flags = shlex.split(line)
    command = [sys.executable, str(SCRIPTS / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert SMALL[line] in done.stdout
