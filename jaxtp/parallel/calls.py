"""Wrapping the calls of a model's modules.

A module is given a subclass of its own class. It keeps its place, its attributes, its parameters and their paths, so
that `isinstance`, tied weights, checkpoints and `nnx.split` find what they found before.

Proposals, explanations and the check wrap the calls of a copy in this way; `parallel/swap.py` gives a module the class
for its style.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flax import nnx

Model = TypeVar("Model", bound=nnx.Module)

METHODS = ("__call__", "attend")
"""The methods by which modules are called; `attend` applies an embedding as a head."""


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Returns every module by its dotted path, each once, outermost first; the model itself is at the empty path."""
    found = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))
    return {".".join(map(str, path)): module for path, module in found}


def with_calls(model: Model, wrap: Callable[..., Any]) -> Model:
    """Wraps the calls of every module of a model, which is changed in place and returned.

    Args:
      model: the model.
      wrap: called in place of each method as `wrap(path, name, method, module, *args, **kwargs)`, where `method` is the
        one that was there.
    """
    for path, module in modules_of(model).items():
        wraps = {name: functools.partial(wrap, path, name) for name in METHODS if has_method(type(module), name)}
        if wraps:
            set_class(module, subclass(type(module), wraps))
    return model


def subclass(cls: type, wraps: Mapping[str, Callable[..., Any]], **members: Any) -> type:
    """Returns a subclass of a module's class, in which each `wraps[name]` is called in place of the method `name`.

    Args:
      cls: the class.
      wraps: called as `wrap(method, module, *args, **kwargs)`.
      **members: further members of the subclass.
    """
    kept = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {name: _wrapped(getattr(cls, name), wrap) for name, wrap in wraps.items()}
    members["_jaxtp_original"] = getattr(cls, "_jaxtp_original", cls)
    return type(cls)(cls.__name__, (cls,), kept | methods | members)


def set_class(module: nnx.Module, cls: type) -> None:
    """Makes a module an instance of a class that `subclass` made of its own, or of its original one."""
    object.__setattr__(module, "__class__", cls)


def original_class(module: nnx.Module) -> type:
    """Returns the class that the author of a module gave it."""
    return getattr(type(module), "_jaxtp_original", type(module))


def has_method(cls: type, name: str) -> bool:
    """Returns whether a class has a method; `hasattr` finds the `__call__` of its metaclass, too."""
    return any(name in vars(base) for base in cls.__mro__)


def _wrapped(method: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
        return wrap(method, self, *args, **kwargs)

    return call
