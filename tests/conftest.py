"""Sets up the suite: sixteen virtual CPU devices, tiers, time limits, and fixtures that many
tests share.
"""

import gc
import itertools
import logging
import zlib

import case_reports
import environment
import hypothesis
import jax
import pytest
from case_reports import TIERS, tier_of
from fast_programs import compile_fast, keep_partitioned_texts, use_cheap_random_bits
from made_once import byte_dataset, tiny_export, tiny_run
from quick_run import command, text
from stores import bucket, google, google_server, server, short_silence, url

from jaxtp.distributed.environment import evict_oldest

__all__ = [
    "bucket",
    "byte_dataset",
    "command",
    "google",
    "google_server",
    "server",
    "short_silence",
    "text",
    "tiny_export",
    "tiny_run",
    "url",
]

IN_OTHER_PROCESSES = {"journey", "slow", "cluster"}
MAX_HEAVY_CASES = 20
MAX_BYTES_OF_PROGRAMS = 6 * 2**30

# When the futures of a failed read are collected, asyncio formats their tracebacks, which parses
# code. CPython 3.11 crashes if this happens inside of another parse
# (github.com/python/cpython/issues/106905).
logging.getLogger("asyncio").setLevel(logging.CRITICAL)

jax.config.update("jax_num_cpu_devices", 16)

# A busy machine may take longer for an example. Each run of the suite draws other examples.
hypothesis.settings.register_profile("suite", deadline=None, max_examples=15)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        type=int,
        default=1,
        metavar="N",
        help="run one case in N, the same ones each time",
    )
    parser.addoption(
        "--turn",
        type=int,
        default=0,
        metavar="K",
        help="with --sample N, run other cases for each K from 0 to N - 1, and so on again",
    )
    parser.addoption(
        "--as-users",
        action="store_true",
        help="compile with optimization, and draw random numbers by Threefry, as users do",
    )


def pytest_configure(config):
    config.pluginmanager.register(case_reports)
    if config.option.as_users:
        return
    compile_fast()
    keep_partitioned_texts()
    # Journeys compare this process with runs in other processes, which use Threefry. An empty
    # expression asks for all tiers.
    expression = config.option.markexpr
    if expression and not IN_OTHER_PROCESSES & tiers_asked_for(expression):
        use_cheap_random_bits()


def tiers_asked_for(expression):
    """Returns the words of an expression of markers that no `not` precedes."""
    words = expression.replace("(", " ").replace(")", " ").split()
    pairs = zip(["", *words], words, strict=False)
    return {word for before, word in pairs if before != "not"}


def pytest_collection_modifyitems(config, items):
    """Checks the markers of each case, gives the long tiers more time, and draws the sample."""
    heavy = 0
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if len(names.intersection(TIERS)) > 1:
            raise pytest.UsageError(f"{item.nodeid} is in several tiers")
        heavy += "heavy" in names and not tier_of(names)
        if tier_of(names) in IN_OTHER_PROCESSES and "timeout" not in names:
            item.add_marker(pytest.mark.timeout(900))
    if heavy > MAX_HEAVY_CASES:
        raise pytest.UsageError(
            f"{heavy} cases of the default suite are heavy: at most {MAX_HEAVY_CASES} may be"
        )
    if config.option.sample > 1:
        shares = config.option.sample
        turn = config.option.turn % shares
        drawn = [zlib.crc32(item.nodeid.encode()) % shares == turn for item in items]
        left_out = [item for item, is_drawn in zip(items, drawn, strict=True) if not is_drawn]
        config.hook.pytest_deselected(items=left_out)
        items[:] = itertools.compress(items, drawn)


def pytest_collection_finish():
    """Excludes imported objects from garbage collection.

    Traces make a million long-lived objects; searching them for cycles took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def pytest_sessionfinish(session):
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and environment.PROGRAMS.is_dir():
        evict_oldest(environment.PROGRAMS, limit=MAX_BYTES_OF_PROGRAMS)


@pytest.fixture(autouse=True)
def _no_mesh_left_behind():
    yield
    assert jax.sharding.get_abstract_mesh().empty, "a test left its mesh in context"
