"""Sets environment variables and signals, for this process and those that tests start. Import it
before JAX.
"""

import os
import signal
import site
import tempfile
from importlib.metadata import version
from pathlib import Path

USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PROGRAMS = USER_CACHE / "jaxtp-tests" / f"jax-{version('jax')}"
"""Compiled programs outlive a run and a clone. JAX names each one by its contents, its flags and
the versions.
"""
USERS_XLA_FLAGS = os.environ.get("XLA_FLAGS", "")

# A process that reads a program while another one writes it warns, and compiles the program itself.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry:UserWarning",
}
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))

# The commands that tests run write into a home folder of their own. Python still finds packages,
# and git settings, in the user's home folder.
os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
os.environ.setdefault("GIT_CONFIG_GLOBAL", str(Path.home() / ".gitconfig"))
_HOME = tempfile.TemporaryDirectory(prefix="jaxtp-home-")
os.environ["HOME"] = _HOME.name

# A shell that starts the suite in the background, or under nohup, ignores these signals, and all
# processes that the tests start would inherit that.
DEFAULT_ACTIONS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
}
for number, action in DEFAULT_ACTIONS.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, action)
