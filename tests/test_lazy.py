"""`import jaxtp` imports no library; names are imported at their first use."""

import builtins
import collections
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
import typing
from dataclasses import is_dataclass
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from runs import run_program

import jaxtp
from jaxtp.config import public_names
from jaxtp.config.schema import Settings

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
from jaxtp.config.public_names import NAMESPACES
for space in map(__import__("importlib").import_module, NAMESPACES):
    for name in space.__all__:
        getattr(space, name)
print("names:", *changed(before))
"""


def test_an_import_changes_nothing_in_the_process():
    """Also of a program that replaced its arguments."""
    assert output_of("-c", STATE_OF_PROCESS) == "import:\n"


@pytest.mark.journey
def test_the_import_of_all_names_changes_no_more_than_the_libraries_do():
    assert output_of("-c", STATE_OF_PROCESS + OF_ALL_NAMES) == "import:\nnames:\n"


NAMESPACES = {name: importlib.import_module(name) for name in public_names.NAMESPACES}
PUBLIC = {
    f"{space}.{name}": getattr(module, name)
    for space, module in NAMESPACES.items()
    for name in module.__all__
}
OBJECTS = {name: value for name, value in PUBLIC.items() if not inspect.ismodule(value)}


def test_every_name_is_that_of_its_object():
    """A stub renames nothing, and no name is also that of a file, which Python would return."""
    for space, module in NAMESPACES.items():
        files = {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}
        for name in module.__all__:
            value = PUBLIC[f"{space}.{name}"]
            assert inspect.ismodule(value) == (name in files), name
            assert value.__name__ in (name, f"{space}.{name}")


def test_a_star_gives_type_checkers_all_names():
    """They take an `__all__` of a stub without values for an empty one."""
    for module in NAMESPACES.values():
        assert "__all__" not in Path(module.__file__).with_suffix(".pyi").read_text()


def test_a_name_has_one_place():
    """Only the layers that most models are built from are on top, too."""
    places = collections.defaultdict(list)
    for name in OBJECTS:
        space, _, last = name.rpartition(".")
        places[last].append(space)
    twice = [spaces for spaces in places.values() if len(spaces) > 1]
    assert all(spaces == ["jaxtp", "jaxtp.layers"] for spaces in twice)


def test_few_names_are_on_top():
    assert len([name for name in jaxtp.__all__ if f"jaxtp.{name}" in OBJECTS]) <= 29


def functions_of(value):
    """Yields what a user calls, and a class, for its fields."""
    if not inspect.isclass(value):
        yield value
        return
    if is_dataclass(value):
        yield value
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        is_called = not name.startswith("_") or name in ("__init__", "__call__")
        is_generated = is_dataclass(value) and name == "__init__"
        if inspect.isfunction(function) and is_called and not is_generated:
            yield function


def classes_in(annotation):
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation
    for inner in typing.get_args(annotation):
        for each in inner if isinstance(inner, list) else [inner]:
            yield from classes_in(each)


INTERNAL = {
    "Balance",
    "ContextAttention",
    "Decided",
    "Float8",
    "LocalShape",
    "MXFP4",
    "PaddedHeads",
    "Placement",
    "Quantised",
    "Stack",
    "Transport",
    "Use",
}
"""Types in signatures of methods that only jaxtp calls."""


def test_types_in_public_signatures_are_public():
    hidden = {}
    for name, value in OBJECTS.items():
        # One gets what is in `jaxtp.typing`, and does not call it.
        if name.startswith(("jaxtp.errors.", "jaxtp.typing.")):
            continue
        for function in functions_of(value):
            for annotation in typing.get_type_hints(function).values():
                for kind in classes_in(annotation):
                    if kind.__module__.startswith("jaxtp.") and kind not in OBJECTS.values():
                        hidden.setdefault(kind.__name__, set()).add(name)
    assert hidden.keys() <= INTERNAL, hidden


def test_errors_that_public_docstrings_name_are_public():
    named = set()
    for value in OBJECTS.values():
        for each in (value, *functions_of(value)):
            raised = (inspect.getdoc(each) or "").partition("Raises:")[2]
            named |= set(re.findall(r"\b[A-Z]\w+Error\b", raised))
    assert named - vars(builtins).keys() <= set(jaxtp.errors.__all__)
    assert {"HFError", "MeshError", "PlanError"} <= named


OLD = {
    "Colwise": "jaxtp.plans.Colwise",
    "DPO": "jaxtp.losses.DPO",
    "HFError": "jaxtp.errors.HFError",
    "TP": '"tp"',
    "Settings": "jaxtp.generate.Settings",
    "load_hf": "jaxtp.hf.load",
    "save_peft": "jaxtp.hf.save_adapters",
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_says_the_new_one(name):
    with pytest.raises(AttributeError, match=f"'{name}'.* it is {OLD[name]}$"):
        getattr(jaxtp, name)


def test_signatures_of_public_dataclasses_show_the_names_of_types():
    callables = (value for name, value in OBJECTS.items() if not name.startswith("jaxtp.typing"))
    dataclasses = filter(is_dataclass, callables)
    assert not [kind for kind in dataclasses if "FieldInfo" in str(inspect.signature(kind))]


def test_signatures_are_short():
    """But for those of settings, which have a field for each."""
    long = {}
    for name, value in OBJECTS.items():
        is_settings = inspect.isclass(value) and issubclass(value, Settings)
        if is_settings or name.startswith("jaxtp.typing."):
            continue
        for function in functions_of(value):
            length = len(str(inspect.signature(function)))
            if length > 450:
                long[f"{name}.{function.__name__}"] = length
    assert not long


def test_settings_show_what_is_not_their_default():
    assert repr(jaxtp.ModelConfig(d_model=64)) == "ModelConfig(d_model=64)"
    assert repr(jaxtp.layers.LayerContext()) == "LayerContext()"
    context = jaxtp.layers.LayerContext(caller_communicates=True)
    shown = repr(jaxtp.layers.HeadConfig(32, context))
    assert shown == f"HeadConfig(vocab_size=32, context={context!r})"


def test_layers_have_default_settings():
    x = jnp.ones((2, 8, 64))
    for layer in (jaxtp.MLP, jaxtp.Norm, jaxtp.CausalSelfAttention):
        given = {} if layer is jaxtp.Norm else {"rngs": nnx.Rngs(0)}
        assert layer(64, **given)(x).shape == x.shape


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
