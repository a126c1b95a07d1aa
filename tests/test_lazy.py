"""`import jaxtp` imports no library; names are imported at their first use."""

import ast
import importlib
import importlib.metadata
import inspect
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from runs import run_program

import jaxtp

HEAVY = ("jax", "flax", "optax", "orbax", "grain", "pydantic", "numpy")


def output_of(*words):
    """Returns what a new Python prints."""
    command = [sys.executable, *words]
    return run_program(*command, check=True).stdout


@pytest.mark.journey
def test_a_fresh_import_loads_no_library():
    assert output_of("-c", f"import sys, jaxtp; print(*sys.modules.keys() & set({HEAVY}))") == "\n"


STATE_OF_PROCESS = """
import gc, logging, os, signal, sys, threading, warnings

sys.argv = ["a program"] + ["of its own"] * 50
del sys.orig_argv


def state():
    loggers = {
        name: (each.level, each.handlers, each.propagate)
        for name, each in logging.root.manager.loggerDict.items()
        if isinstance(each, logging.Logger)
    }
    return {
        "signals": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.callbacks[:]),
        "environment": dict(os.environ),
        "warnings": warnings.filters[:],
        "logging": (logging.root.level, logging.root.handlers[:], logging.root.manager.disable, loggers),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.meta_path[:], sys.path[:]),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "threads": threading.enumerate(),
        "folder and mask": (os.getcwd(), os.umask(os.umask(0o22))),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "arguments": sys.argv[:],
    }


def changed(before):
    return [name for name, value in state().items() if value != before[name]]


before = state()
import jaxtp
print("import:", *changed(before))
"""  # noqa: E501
OF_ALL_NAMES = """
import flax.nnx, grain, jax, numpy, optax, orbax.checkpoint, pydantic, yaml
import jax.experimental.pallas.triton, tensorboardX

before = state()
for name in jaxtp.__all__:
    getattr(jaxtp, name)
print("names:", *changed(before))
"""


def test_an_import_changes_nothing_in_the_process():
    """Also of a program that replaced its arguments."""
    assert output_of("-c", STATE_OF_PROCESS) == "import:\n"


@pytest.mark.journey
def test_the_import_of_all_names_changes_no_more_than_the_libraries_do():
    assert output_of("-c", STATE_OF_PROCESS + OF_ALL_NAMES) == "import:\nnames:\n"


def test_every_name_resolves_to_what_type_checkers_see():
    source = ast.parse(Path(inspect.getfile(jaxtp)).read_text())
    (block,) = (
        node
        for node in source.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    modules = {
        node.names[0].asname: node.module for node in block.body if isinstance(node, ast.ImportFrom)
    }
    assert sorted(modules) == jaxtp.__all__
    seen = {
        name: getattr(importlib.import_module(module), name) for name, module in modules.items()
    }
    assert not [name for name in modules if getattr(jaxtp, name) is not seen[name]]


def test_signatures_of_public_dataclasses_show_the_names_of_types():
    dataclasses = filter(is_dataclass, (getattr(jaxtp, name) for name in jaxtp.__all__))
    assert not [kind for kind in dataclasses if "FieldInfo" in str(inspect.signature(kind))]


def test_only_public_names_are_listed():
    assert dir(jaxtp) == sorted([*jaxtp.__all__, "__version__"])


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'jaxtp' has no attribute 'Nonsense'"):
        jaxtp.Nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nonsense' from 'jaxtp'"):
        exec("from jaxtp import Nonsense")


def test_the_version():
    vars(jaxtp).pop("__version__", None)
    assert jaxtp.__version__ == importlib.metadata.version("jaxtp")
