"""Trains at the pace of a file, so that a test meets a run in the midst of it; takes no more CPU than the run does.

    PYTHON="python tests/paced.py" PACE=FILE sbatch ...

Each step waits for as many seconds as the file says at that time.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from jaxtp.train.stopping import Stopping

at_once = Stopping.flags


def flags(self):
    time.sleep(float(Path(os.environ["PACE"]).read_text()))
    return at_once(self)


Stopping.flags = flags
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
