"""Python objects that settings name: `FILE.py:NAME`, or `package.module:NAME`.

Anyone may have written a configuration, so a name in a file is imported only with the user's
consent (`require_consent`). Names on the command line, and in a program that calls jaxtp, are the
user's own.
"""

import importlib
import importlib.util
import inspect
import json
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtp.config.affects import RUNS_CODE, ArgumentsOf, settings_of
from jaxtp.config.entry import say
from jaxtp.config.hints import closest
from jaxtp.config.public_names import namespace_of, public_names
from jaxtp.config.reading import parse_yaml, truncate
from jaxtp.config.schema import ConfigError, nearest_file, value_at

ALLOW_CODE = "--allow-code"
_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = (_PACKAGE, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def load_object(text: str, setting: str) -> Any:
    """Imports the object that a setting names.

    Raises:
      ConfigError: there is no such file, module or name, or its code fails; the message has the
        line of the code.
    """
    place, _, name = current_reference(text).rpartition(":")
    if not place or not name:
        close = _nearest(text, public_names())
        hint = f"; did you mean {namespace_of(close)}:{close}?" if close else ""
        raise ConfigError(f"{setting} {text}: should be FILE.py:NAME or package.module:NAME{hint}")
    module = _load_file(setting, Path(place)) if place.endswith(".py") else _import(setting, place)
    with user_code(f"{setting} {text}", ConfigError):
        if not hasattr(module, name):
            close = _nearest(name, public_names() if place == "jaxtp" else dir(module))
            names = _own_names(module) or "no names"
            hint = f"did you mean {close}?" if close else f"it has {names}"
            raise ConfigError(f"{setting} {text}: {place} has no {name}; {hint}")
        value = getattr(module, name)
    if value is None:  # None would mean that the setting was not given
        raise ConfigError(f"{setting} {text} is None")
    return value


@contextmanager
def user_code(name: str, *passing: type[Exception]) -> Iterator[None]:
    """Converts errors of a user's code to a `ConfigError`, except Ctrl-C and the `passing` types.

    It also converts `SystemExit`, which could silently end a command with exit code 0.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, *passing)):
            raise
        raise user_code_error(name, error) from error


def describe_value(value: object) -> str:
    """Returns the start of an object's representation, or its type if that fails."""
    try:
        return truncate(repr(value), 100)
    except Exception:
        return f"a {type(value).__name__}"


def current_reference(reference: str) -> str:
    """Returns `jaxtp.losses:DPO` for `jaxtp:DPO`, which files of jaxtp 0.2 have."""
    place, _, name = reference.rpartition(":")
    namespace = namespace_of(name) if place == "jaxtp" else None
    return reference if namespace is None else f"{namespace}:{name}"


def is_public(reference: str) -> bool:
    """Returns whether a reference names settings or a loss of jaxtp's own: `jaxtp.losses:DPO`.

    These are dataclasses, which only hold values. Public functions do not count: with arguments
    from a file they could write files.
    """
    place, _, name = reference.rpartition(":")
    namespace = namespace_of(name)
    if place.partition(".")[0] != "jaxtp" or namespace is None:
        return False
    value = getattr(importlib.import_module(namespace), name)
    is_settings = isinstance(value, type) and is_dataclass(value)
    return is_settings and place in ("jaxtp", namespace, value.__module__)


def named_code(config: Hashable, ignored: Set[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Returns the flags and values of the settings that name code other than jaxtp's own.

    Args:
      config: a configuration.
      ignored: the keys of settings to leave out.
    """
    references = []
    for setting in settings_of(type(config)).values():
        if RUNS_CODE not in setting.marks or setting.keys in ignored:
            continue
        values = value_at(config, setting.path)
        for value in values if isinstance(values, tuple) else (values,):
            # A path is never public, whatever its name.
            is_harmless = value is None or (isinstance(value, str) and is_public(value))
            if not is_harmless:
                references.append((setting.flag, str(value)))
    return references


def require_consent(
    file: Path,
    config: Hashable,
    file_config: Hashable,
    flags: Mapping[tuple[str, ...], object],
    *,
    is_allowed: bool,
) -> None:
    """Prints the code that a configuration file names, and the arguments that it gives to code.

    jaxtp's own code does not count.

    Args:
      file: the file that `--config` names.
      config: the configuration of the file and the flags.
      file_config: the configuration of the file alone.
      flags: values by the keys of their settings.
      is_allowed: whether the user gave `ALLOW_CODE`.

    Raises:
      ConfigError: the user did not consent.
    """
    references = named_code(config, flags.keys())
    shown = [f"{flag} {truncate(value, 300)}" for flag, value in references]
    # If the user chose other code than the file, the file's arguments were not written for it.
    is_mixed = False
    for setting in settings_of(type(config)).values():
        mark = next((mark for mark in setting.marks if isinstance(mark, ArgumentsOf)), None)
        if mark is None:
            continue
        path = (*setting.path[:-1], mark.reference)
        reference = value_at(config, path)
        if reference is None or is_public(str(reference)):
            continue
        for name, value in value_at(file_config, setting.path).items():
            # A flag replaces the file's argument, but a mapping is merged with it.
            if isinstance(flags.get((*setting.keys, name), {}), Mapping):
                is_mixed |= value_at(file_config, path) not in (None, reference)
                shown.append(truncate(_as_flag(f"{setting.flag}.{name}", value), 300))
    if not shown:
        return
    if (references or is_mixed) and not is_allowed:
        problem = "names code, and jaxtp runs no code that a file names"
        if not references:
            problem = "has arguments of other code than the code that runs"
        message = f"{file} {problem}; if you trust it, add {ALLOW_CODE}, or give these flags:"
        raise ConfigError("\n  ".join([message, *shown]))
    content = "names code that runs" if references else "has arguments of code that runs"
    say(f"{file} {content}: {', '.join(shown)}")


def _as_flag(flag: str, value: object) -> str:
    word = json.dumps(value, default=str)
    # A text needs quotes only if YAML would read something else.
    if isinstance(value, str):
        with suppress(ValueError):
            word = value if parse_yaml(value.encode()) == value else word
    return f"{flag}{'=' if word.startswith('-') else ' '}{shlex.quote(word)}"


def _nearest(name: str, names: Iterable[str]) -> str | None:
    by_lower_case = {other.lower(): other for other in names}
    close = closest(name.lower(), by_lower_case, cutoff=0.75)
    return by_lower_case.get(close or "")


def _own_names(module: ModuleType) -> str:
    """Returns the names that a module does not import from another one."""
    names = []
    for name in dir(module):
        value = vars(module).get(name)
        place = module.__name__
        if isinstance(value, type) or inspect.isroutine(value):
            place = str(value.__module__)
        is_own = place.startswith(module.__name__) and not inspect.ismodule(value)
        if is_own and not name.startswith("_"):
            names.append(name)
    return truncate(", ".join(names), 300)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a function, or None.

    Some C functions have no signature, and a user's object may hide it.
    """
    call = function if isinstance(function, partial) else partial(function)
    called: Any = call.func
    if isinstance(called, type):  # `inspect` would read the `__call__` of a metaclass
        called = partial(called.__init__, None)  # type: ignore[misc]
    try:
        return inspect.signature(partial(called, *call.args, **call.keywords))
    except Exception:
        return None


def check_call(name: str, function: Callable[..., object], parameters: Sequence[str]) -> None:
    """Raises ConfigError if a function cannot be called with these arguments by position."""
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            f"{name} takes {signature}, and is called with ({', '.join(parameters)}): {error}"
        ) from None


def check_arguments(
    name: str, function: Callable[..., object], setting: str, arguments: Mapping[str, object]
) -> None:
    """Raises ConfigError if a function does not take the arguments that a setting gives it."""
    signature = signature_of(function)
    if signature is None:
        return
    fixed = function.keywords if isinstance(function, partial) else {}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        accepted = [parameter for parameter in signature.parameters if parameter not in fixed]
        unknown = next((argument for argument in arguments if argument not in accepted), "")
        close = closest(unknown, accepted)
        hint = f"; did you mean {close}?" if close else ""
        raise ConfigError(
            f"{name}: {error}; {setting} can give {', '.join(accepted) or 'none'}{hint}"
        ) from None


def reference_to(value: object, neighbours: Iterable[object] = ()) -> str:
    """Returns the `FILE.py:NAME` or `package.module:NAME` of an object.

    An object without a name gets a description.

    Args:
      neighbours: functions and classes; a variable of their modules may hold the object.
    """
    own_module, *modules = (
        sys.modules.get(_attribute(owner, "__module__")) for owner in (value, *neighbours)
    )
    own_name = _attribute(value, "__qualname__")
    if own_module is not None and own_name and "<" not in own_name:
        return f"{_place(own_module)}:{own_name}"
    for module in filter(None, (own_module, *modules)):
        for name, variable in vars(module).items():
            if variable is value:
                return f"{_place(module)}:{name}"
    return f"<{own_name or type(value).__name__}>"


def _place(module: ModuleType) -> str:
    # Modules of files (`_load_file`) have a space in their name.
    is_file = module.__name__ == "__main__" or " " in module.__name__
    return (is_file and getattr(module, "__file__", None)) or module.__name__


def _attribute(value: object, name: str) -> str:
    try:
        return str(getattr(value, name, ""))
    except Exception:
        return ""


def user_code_error(name: str, error: BaseException) -> ConfigError:
    """Returns an error for an exception in a user's code, with the innermost line of that code."""
    return ConfigError(f"{name} fails{describe_exception(error)}")


def describe_exception(error: BaseException) -> str:
    """Returns the innermost line of a user's code, and the exception.

    For example ` (FILE, line 7: ...): KeyError: 'x'`.
    """
    where = ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
    else:
        for frame in _users_frames(error):
            if not frame.filename.startswith("<"):
                where = f" ({frame.filename}, line {frame.lineno}: {frame.line})"
    if isinstance(error, SystemExit):
        return f"{where}: it ends the process by sys.exit({describe_value(error.code)})"
    reason = _message(error)
    if "different trace level" in reason:
        reason = (
            "a model that the code uses is not a part of its arguments; make it an attribute "
            f"of the model ({reason})"
        )
    if "`get_mesh` can only be used outside" in reason:
        reason = (
            "models are built under jax.jit, where nothing can be loaded; load it outside of "
            f"the function ({reason})"
        )
    return f"{where}: {type(error).__name__}: {reason}"


def users_lines(error: BaseException) -> list[str]:
    """Returns the lines of a user's code in a traceback: `mine.py, line 7: train()`."""
    lines = []
    for frame in _users_frames(error):
        # The frame of a cell is in no file that a user knows.
        is_cell = "ipykernel_" in frame.filename or frame.filename.startswith("<")
        place = "" if is_cell else f"{frame.filename}, "
        lines.append(f"{place}line {frame.lineno}: {frame.line}")
    return lines


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, "<frozen"))
        # Libraries may also be in another environment.
        and "site-packages" not in frame.filename
    ]


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        return "a message that fails"
    return truncate(text.strip().split("\n\n")[0], 600) or "no message"


def _load_file(setting: str, path: Path) -> ModuleType:
    # A file gives one module, so that its classes and its state exist once.
    if not path.is_file():  # also a link to itself, which `resolve` refuses
        raise ConfigError(f"{setting} {path}: no such file{nearest_file(path)}")
    key = f"{path.stem} in {path.resolve().parent}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(path.parent))  # like `python FILE.py`
    sys.modules[key] = module = importlib.util.module_from_spec(spec)
    try:
        with user_code(f"{setting} {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(key, None)
        raise
    return module


def _import(setting: str, name: str) -> ModuleType:
    sys.path.insert(0, "")
    with user_code(f"{setting} {name}", ConfigError):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{setting} {name}: {error}; to name a file, write FILE.py:NAME"
            ) from None
