"""`import jaxtp` imports no library; names are imported at their first use."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest
from runs import run_program
from support import swept

import jaxtp
from jaxtp.__main__ import COMMANDS, main

HEAVY = ("jax", "flax", "optax", "orbax", "grain", "pydantic", "tyro", "numpy")


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
import flax.nnx, grain, jax, numpy, optax, orbax.checkpoint, pydantic, tyro, yaml
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


@swept("name", COMMANDS, "train")
def test_help_needs_no_library(name, capsys, monkeypatch):
    """It is printed with stand-ins for the libraries, and is the same."""
    monkeypatch.setenv("COLUMNS", "100")
    module = importlib.import_module(f"{COMMANDS[name]}.__main__")
    for inner in getattr(module, "COMMANDS", {None: None}):
        words = [name, *([inner] if inner else []), "--help-all"]
        with pytest.raises(SystemExit):
            main(words)
        code = f"""
import sys
from jaxtp.__main__ import script
sys.argv = ["jaxtp", *{words}]
try:
    script()
finally:
    print("libraries:", *(name for name in {HEAVY[:5]} if hasattr(sys.modules.get(name), "__version__")))
"""  # noqa: E501
        assert output_of("-c", code) == f"{capsys.readouterr().out}libraries:\n"


def test_help_of_the_module_needs_no_library():
    command = [sys.executable, "-X", "importtime", "-m", "jaxtp.train", "--help"]
    done = run_program(*command, check=True)
    assert "--plot FILE.png" in done.stdout
    assert "jaxtp.train.trainer" in done.stderr
    assert "numpy._core" not in done.stderr


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


def test_a_package_of_the_same_name_does_not_hide_a_function(monkeypatch):
    monkeypatch.delitem(sys.modules, "jaxtp.parallelize", raising=False)
    monkeypatch.delitem(vars(jaxtp), "parallelize", raising=False)
    assert inspect.ismodule(importlib.import_module("jaxtp.parallelize"))
    assert inspect.isfunction(jaxtp.parallelize)


FUNCTIONS_AND_CLASSES = [
    name
    for name in jaxtp.__all__
    if callable(public := getattr(jaxtp, name))
    # built in: they take a message
    and not (isinstance(public, type) and issubclass(public, BaseException))
]


def has_own_signature(public):
    """NNX's metaclass would show `(*args, **kwargs)`."""
    parameters = list(inspect.signature(public).parameters)
    if isinstance(public, type) and public.__init__ is not object.__init__:
        return parameters == list(inspect.signature(public.__init__).parameters)[1:]
    return parameters != ["args", "kwargs"]


def has_plain_signature(dataclass):
    """Plain types, and the defaults of the fields."""
    signature = inspect.signature(dataclass)
    defaults = {
        field.name: field.default for field in fields(dataclass) if field.default is not MISSING
    }
    is_plain = not re.search("Annotated|<function|tyro|pydantic", str(signature))
    is_short = len(str(signature)) < 200 * (1 + len(signature.parameters))
    return (
        is_plain
        and is_short
        and all(signature.parameters[name].default == defaults[name] for name in defaults)
    )


def test_public_classes_and_functions_have_their_own_signatures():
    dataclasses = [name for name in jaxtp.__all__ if is_dataclass(getattr(jaxtp, name))]
    assert not [
        name for name in FUNCTIONS_AND_CLASSES if not has_own_signature(getattr(jaxtp, name))
    ]
    assert not [name for name in dataclasses if not has_plain_signature(getattr(jaxtp, name))]


def test_only_public_names_are_listed():
    assert dir(jaxtp) == sorted([*jaxtp.__all__, "__version__"])


def test_signatures_of_what_comes_of_a_public_class_are_their_own():
    class Scaled(jaxtp.Branch):
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x_BTD, sequences=None):
            return self.factor * x_BTD

    assert list(inspect.signature(Scaled).parameters) == ["factor"]
    assert list(inspect.signature(Scaled(2)).parameters) == ["x_BTD", "sequences"]


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'jaxtp' has no attribute 'Nonsense'"):
        jaxtp.Nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nonsense' from 'jaxtp'"):
        exec("from jaxtp import Nonsense")


def test_the_version():
    vars(jaxtp).pop("__version__", None)
    assert jaxtp.__version__ == importlib.metadata.version("jaxtp")
