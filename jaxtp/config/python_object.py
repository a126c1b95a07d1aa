"""Python objects that settings name: `FILE.py:NAME`, or `package.module:NAME`."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtp.config.reading import truncate
from jaxtp.config.schema import ConfigError, nearest_file

_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))})


def load_object(text: str, setting: str) -> Any:
    """Imports the object that a setting names.

    Raises:
      ConfigError: there is no such file, module or name, or its code fails; the message has the line.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{setting} {text}: should be FILE.py:NAME or package.module:NAME{_own_name(text, setting)}")
    module = _load_file(setting, Path(place)) if place.endswith(".py") else _import(setting, place)
    if not hasattr(module, name):
        raise ConfigError(f"{setting} {text}: {place} has no {name}; {_hint(module, name, setting)}")
    return getattr(module, name)


_CALLED_WITH = {"loss": ("model", "batch", "key"), "callbacks": ("trainer", "step")}
"""The arguments of what these settings name."""
_BUILDS = ("--model.build", "--build", "MODEL")  # settings that name a model


def _hint(module: ModuleType, name: str, setting: str) -> str:
    names = _names_for(setting, module)
    close = _closest(name, names)
    if close is not None:
        return f"did you mean {close}?"
    public = [each for each in names if not each.startswith("_") and _is_of(module, getattr(module, each))]
    return f"it has {', '.join(public)}" if public else f"it has nothing for {setting}"


def _own_name(text: str, setting: str) -> str:
    # Suggests a loss of jaxtp's own, to which others refer by its name alone.
    if _kind(setting) != "loss" or not text.isidentifier():
        return ""
    names = _names_for(setting, importlib.import_module("jaxtp"))
    close = _closest(text, names)
    if close is not None:
        return f"; did you mean jaxtp:{close}?"
    return f", such as {' or '.join(f'jaxtp:{each}' for each in names)}"


def _closest(name: str, names: Iterable[str]) -> str | None:
    in_lower_case = {each.lower(): each for each in names}
    found = get_close_matches(name.lower(), in_lower_case, 1)
    return in_lower_case[found[0]] if found else None


def _names_for(setting: str, module: ModuleType) -> list[str]:
    # `vars` lacks names that are imported at their first use.
    names = map(str, getattr(module, "__all__", vars(module)))
    return [name for name in names if _fits(setting, getattr(module, name, None))]


def _fits(setting: str, value: object) -> bool:
    # Whether a setting may name a value, as far as its form tells.
    kind = _kind(setting)
    is_ours = str(getattr(value, "__module__", "")).startswith("jaxtp.")
    bases = getattr(value, "__mro__", ())
    is_model = any(base.__module__.startswith("flax.") and base.__name__ == "Module" for base in bases)
    if kind == "plan":
        return isinstance(value, Mapping)
    if kind in _CALLED_WITH:
        return not is_model and _takes(value, _CALLED_WITH[kind], by_name=is_ours)
    if is_ours:
        return is_model and setting in _BUILDS
    if kind.endswith("batches") and hasattr(value, "__iter__"):
        return not isinstance(value, str | bytes)
    return callable(value)


def _takes(value: object, arguments: tuple[str, ...], *, by_name: bool) -> bool:
    # A class takes what its instances take.
    call: Any = value
    if isinstance(value, type):
        found = [vars(base)["__call__"] for base in value.__mro__ if "__call__" in vars(base)]
        call = partial(found[0], None) if found else None
    if not callable(call):
        return False
    try:
        signature = inspect.signature(call)
        signature.bind_partial(*arguments)
    except (TypeError, ValueError):
        return False
    return not by_name or tuple(signature.parameters)[: len(arguments)] == arguments


def _is_of(module: ModuleType, value: object) -> bool:
    # Whether a function or class is defined in a module or package; a file's imports are not its own.
    if not (isinstance(value, type) or inspect.isroutine(value)):
        return True
    return str(getattr(value, "__module__", "")).startswith(module.__name__)


def _kind(setting: str) -> str:
    return setting.rpartition(".")[2].lstrip("-")


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a call; None for some C functions."""
    given = function if isinstance(function, partial) else partial(function)
    called: Any = given.func
    if isinstance(called, type):  # `inspect` would read the `__call__` of a metaclass
        called = partial(called.__init__, None)  # type: ignore[misc]
    try:
        return inspect.signature(partial(called, *given.args, **given.keywords))
    except ValueError:
        return None


def check_arguments(name: str, function: Callable[..., object], setting: str, arguments: Mapping[str, object]) -> None:
    """Raises ConfigError if a function does not take the arguments that a setting gives it."""
    if (signature := signature_of(function)) is None:
        return
    given = function.keywords if isinstance(function, partial) else {}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = [each for each in signature.parameters if each not in given]
        close = [match for each in arguments if each not in takes for match in get_close_matches(each, takes, 1)]
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name}: {error}; {setting} can give {', '.join(takes) or 'none'}{hint}") from None


def reference_to(thing: object, neighbours: Iterable[object] = ()) -> str:
    """Returns the `FILE.py:NAME` or `package.module:NAME` of an object; for an object without a name a description.

    Args:
      neighbours: functions and classes; a value without a name of its own may be a variable of their modules.
    """
    modules = [sys.modules.get(str(getattr(each, "__module__", None))) for each in (thing, *neighbours)]
    own_name = str(getattr(thing, "__qualname__", ""))
    for module in filter(None, modules):
        is_here = own_name and "<" not in own_name and module is modules[0]
        name = own_name if is_here else next((name for name, each in vars(module).items() if each is thing), None)
        if name is not None:
            file = getattr(module, "__file__", None)
            by_file = file is not None and (module.__name__ == "__main__" or " " in module.__name__)
            return f"{file if by_file else module.__name__}:{name}"
    return f"<{own_name or type(thing).__name__}>"


def user_code_error(what: str, error: Exception) -> ConfigError:
    """Returns an error for an exception in a user's code, with the innermost line of that code."""
    return ConfigError(f"{what} fails{describe_exception(error)}")


def describe_exception(error: Exception) -> str:
    """Returns the innermost line of a user's code, and the exception: ` (FILE, line 7: ...): KeyError: 'x'`."""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        users = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
        users = [frame for frame in users if "site-packages" not in frame.filename]  # of another environment
        where = f" ({users[-1].filename}, line {users[-1].lineno}: {users[-1].line})" if users else ""
    reason = truncate(str(error).strip().split("\n\n")[0], 600) or "no message"
    if "different trace level" in reason:
        reason = (
            f"a model that the code uses is not a part of its arguments; make it an attribute of the model ({reason})"
        )
    if "`get_mesh` can only be used outside" in reason:
        reason = (
            f"models are built under jax.jit, where nothing can be loaded; load it outside of the function ({reason})"
        )
    return f"{where}: {type(error).__name__}: {reason}"


def _load_file(setting: str, path: Path) -> ModuleType:
    # The same file gives the same module, so that its classes and its state exist once.
    key = f"{path.stem} in {path.resolve().parent}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{setting} {path}: no such file{nearest_file(path)}")
    sys.path.insert(0, str(path.parent))  # like `python FILE.py`
    sys.modules[key] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise user_code_error(f"{setting} {path}", error) from error
    return module


def _import(setting: str, name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting} {name}: {error}; to name a file, write FILE.py:NAME") from None
    except Exception as error:
        raise user_code_error(f"{setting} {name}", error) from error
