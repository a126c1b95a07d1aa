"""Trains with a pause in each step, so that a test can act during the run; a pause takes no CPU
time.

    PYTHON="python tests/paced.py" PACE=FILE sbatch ...

Each step reads the seconds of its pause from the file.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from jaxtp.guards.stopping import Stopping

at_once = Stopping.flags


def flags(self):
    time.sleep(float(Path(os.environ["PACE"]).read_text()))
    return at_once(self)


Stopping.flags = flags
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
