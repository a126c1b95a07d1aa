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
        raise ConfigError(f"{setting} {text}: should be FILE.py:NAME or package.module:NAME")
    module = _load_file(setting, Path(place)) if place.endswith(".py") else _import(setting, place)
    if not hasattr(module, name):
        values = (key for key, value in vars(module).items() if isinstance(value, dict) or callable(value))
        names = list(getattr(module, "__all__", values))  # `vars` lacks names that are imported at their first use
        close = {each.lower(): each for each in names}
        found = [close[each] for each in get_close_matches(name.lower(), close, 1)]
        hint = f"did you mean {found[0]}?" if found else f"it has {', '.join(each for each in names if each[0] != '_')}"
        raise ConfigError(f"{setting} {text}: {place} has no {name}; {hint}")
    return getattr(module, name)


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
        users = [frame for frame in _users_frames(error) if not frame.filename.startswith("<")]
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


def users_lines(error: BaseException) -> list[str]:
    """Returns the lines of a user's code through which an exception came: `mine.py, line 7: train()`."""
    lines = []
    for frame in _users_frames(error):
        is_cell = "ipykernel_" in frame.filename or frame.filename.startswith("<")  # no file that a user knows
        place = "" if is_cell else f"{frame.filename}, "
        lines.append(f"{place}line {frame.lineno}: {frame.line}")
    return lines


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen"))]
    return [frame for frame in users if "site-packages" not in frame.filename]  # also of another environment


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
