"""Sets sixteen virtual CPU devices, also on machines with GPUs, and a compilation cache that outlives the run."""

import gc
import itertools
import logging
import os
import re
import signal
import site
import subprocess
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path

# Of the processes that tests start as well, which read programs of each other and of earlier runs. A reader warns of a
# program that another is writing, and compiles it itself.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parent.parent / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry:UserWarning",
}

# Tests spend most of their time compiling. Without optimization it takes less than half of it, and with the emitters
# that jaxlib 0.10 still has beside its new ones half of that again; what is partitioned and computed is the same.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
    f"{' --xla_cpu_use_fusion_emitters=false' if version('jaxlib').startswith('0.10.') else ''}"
)

import hypothesis
import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir as mlir_of_jax
from jax.extend.core.primitives import threefry2x32_p
from jax.interpreters import mlir

# When a failed read's futures are collected, asyncio formats their tracebacks, which parses code; CPython 3.11 does not
# survive that inside of another parse (github.com/python/cpython/issues/106905), as of tyro's.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)

# The commands that tests run write into a home folder of their own. Python still finds packages, and git settings, in
# the user's.
os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
os.environ.setdefault("GIT_CONFIG_GLOBAL", str(Path.home() / ".gitconfig"))
_HOME = tempfile.TemporaryDirectory(prefix="jaxtp-home-")
os.environ["HOME"] = _HOME.name

jax.config.update("jax_num_cpu_devices", 16)


def _random_bits(key_1, key_2, count_1, count_2):
    """Returns two words that depend on key and counter, as Threefry does, without its twenty rounds.

    Threefry takes half of the time of a program that draws weights.
    """
    word = key_1 * np.uint32(0x9E3779B1) + key_2 * np.uint32(0x85EBCA77) + count_1 * np.uint32(0xC2B2AE3D) + count_2
    words = []
    for constant in (0x27D4EB2F, 0x165667B1):
        mixed = word ^ np.uint32(constant)
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        words.append(mixed ^ (mixed >> np.uint32(16)))
    return words


def _shared(make_context, lowerings=100):
    """Returns a function that makes one MLIR context for many programs. JAX 0.10 makes one per program, which takes
    five of the six milliseconds of lowering a small program."""
    contexts = itertools.chain.from_iterable(itertools.repeat(make_context(), lowerings) for _ in itertools.count())
    return lambda: next(contexts)


if version("jax").startswith("0.10."):
    mlir_of_jax.make_ir_context = _shared(mlir_of_jax.make_ir_context)


def pytest_configure(config):
    """Uses Threefry in journeys, because they compare this process with runs in other processes."""
    if config.option.markexpr and not re.search(r"(?<!not )(journey|slow|cluster)", config.option.markexpr):
        mlir.register_lowering(threefry2x32_p, mlir.lower_fun(_random_bits, multiple_results=True), platform="cpu")


# A shell that starts the suite in the background, or under nohup, has these ignored, and so would all that tests start.
defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}
for number, action in defaults.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, action)

# An example may take longer on a machine that has other things to do. They are others in each run of the suite.
hypothesis.settings.register_profile("suite", deadline=None, max_examples=15)
hypothesis.settings.load_profile("suite")

TIERS = {"wide", "journey", "slow", "cluster"}


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, default=1, metavar="N", help="run one test in N, different ones each commit")


def pytest_collection_modifyitems(config, items):
    """Checks that each test is in exactly one tier, so that CI runs it once."""
    for item in items:
        assert len(TIERS.intersection(mark.name for mark in item.iter_markers())) <= 1, f"{item.nodeid}: several tiers"
    if (n := config.option.sample) > 1:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=True
        )
        drawn = [zlib.crc32(commit.stdout + item.nodeid.encode()) % n == 0 for item in items]
        config.hook.pytest_deselected(items=[item for item, is_drawn in zip(items, drawn, strict=True) if not is_drawn])
        items[:] = itertools.compress(items, drawn)


def pytest_collection_finish():
    """Excludes imported objects from garbage collection. Traces make a million long-lived objects; searching them for
    cycles took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


@pytest.fixture(autouse=True)
def _no_mesh_left_behind():
    yield
    assert jax.sharding.get_abstract_mesh().empty, "a test left its mesh in context"
