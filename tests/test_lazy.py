"""`import jaxtp` costs nothing; its names are imported when they are used."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtp

HEAVY = ("jax", "flax", "optax", "orbax", "grain", "pydantic", "tyro", "rich", "numpy")


@pytest.mark.journey
def test_a_fresh_import_loads_no_library():
    loaded = f"import sys, jaxtp; print(*sys.modules.keys() & set({HEAVY}))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("name", jaxtp.__all__)
def test_every_name_resolves_to_what_type_checkers_see(name):
    source = ast.parse(Path(inspect.getfile(jaxtp)).read_text())
    (module,) = (
        node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom) and node.names[0].asname == name
    )
    assert getattr(jaxtp, name) is getattr(importlib.import_module(module), name)
    assert name in dir(jaxtp)


def test_type_checkers_see_no_other_name():
    source = ast.parse(Path(inspect.getfile(jaxtp)).read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assert sorted(node.names[0].asname for node in block.body if isinstance(node, ast.ImportFrom)) == jaxtp.__all__


@pytest.mark.parametrize("name", ["audit", "explain"])
def test_a_package_of_the_same_name_does_not_hide_a_function(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"jaxtp.{name}", raising=False)
    monkeypatch.delitem(vars(jaxtp), name, raising=False)
    assert inspect.ismodule(importlib.import_module(f"jaxtp.{name}"))
    assert inspect.isfunction(getattr(jaxtp, name))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'jaxtp' has no attribute 'Nonsense'"):
        jaxtp.Nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nonsense' from 'jaxtp'"):
        exec("from jaxtp import Nonsense")


def test_the_version():
    vars(jaxtp).pop("__version__", None)
    assert jaxtp.__version__ == importlib.metadata.version("jaxtp")
