"""Finds a model's modules and wraps their methods.

A wrapped module gets a subclass, so `isinstance` still works.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flax import nnx

from jaxtp.config.entry import UserError
from jaxtp.config.hints import by_dotted_path, dotted

Model = TypeVar("Model", bound=nnx.Module)
Method = Callable[..., Any]

METHODS = ("__call__", "attend")  # `attend` of an embedding is a tied head

CONTAINERS = nnx.List | nnx.Dict | list | tuple | dict
"""Containers of modules. They are never called, but the attribute that holds a container is part of
a module's path."""


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Returns each module once by its dotted path, outermost first; the model has the empty path.

    Raises:
      UserError: two modules have the same path, or a module seems to be inside of another module,
        because a key has a dot.
    """
    outermost_first = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))
    modules = by_dotted_path(outermost_first)
    for keys, _ in outermost_first:
        names = dotted(keys).split(".")
        around = {dotted(keys[:depth]) for depth in range(len(keys) + 1)}
        seem_around = {dotted(names[:depth]) for depth in range(len(names))}
        for outer in sorted(seem_around - around):
            if outer in modules and not isinstance(modules[outer], nnx.List | nnx.Dict):
                raise UserError(
                    f"the module at the keys {list(keys)} is not inside of {outer!r}, although its "
                    "dotted path says so; rename the key that has a dot"
                )
    return modules


def with_calls(model: Model, wrap: Method) -> Model:
    """Replaces each module's methods, in place.

    A new method calls `wrap(path, name, method, module, *args, **kwargs)`.
    """
    for path, module in modules_of(model).items():
        wraps = {}
        for name in METHODS:
            if has_method(type(module), name):
                wraps[name] = functools.partial(wrap, path, name)
        if wraps:
            set_class(module, subclass(type(module), wraps))
    return model


def subclass(cls: type, wraps: Mapping[str, Method], **members: object) -> type:
    """Returns a subclass whose method `name` is `wraps[name](method, module, *args, **kwargs)`."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {name: _wrapped(getattr(cls, name), wrap) for name, wrap in wraps.items()}
    members["_jaxtp_original"] = getattr(cls, "_jaxtp_original", cls)
    return type(cls)(cls.__name__, (cls,), names | methods | members)


def set_class(module: nnx.Module, cls: type) -> None:
    """Sets a module's class."""
    object.__setattr__(module, "__class__", cls)


def original_class(module: nnx.Module) -> type:
    """Returns a module's class before `subclass`."""
    return getattr(type(module), "_jaxtp_original", type(module))


def loads_shards(module: nnx.Module) -> bool:
    """Returns whether a module is a layer of jaxtp, which loads the shards that it declares."""
    return any(base.__module__.startswith("jaxtp.") for base in original_class(module).__mro__)


def has_method(cls: type, name: str) -> bool:
    """Returns whether a class has a method.

    `hasattr` would also find `__call__` of the metaclass.
    """
    return any(name in vars(base) for base in cls.__mro__)


def _wrapped(method: Method, wrap: Method) -> Method:
    @functools.wraps(method)
    def call(self: nnx.Module, /, *args: object, **kwargs: object) -> Any:
        return wrap(method, self, *args, **kwargs)

    return call


@dataclass(frozen=True)
class ModuleInfo:
    """A module with all its paths."""

    module: nnx.Module
    paths: tuple[str, ...]  # several if the module is shared; `""` is the model itself
    # Parameters by name, also in containers; without parameters of submodules
    parameters: dict[str, nnx.Param[Any]]

    @property
    def path(self) -> str:
        """The first path."""
        return self.paths[0]

    @property
    def kind(self) -> str:
        """The class name."""
        return original_class(self.module).__name__


def find_modules(model: nnx.Module) -> list[ModuleInfo]:
    """Returns each module once, outermost first, without containers."""
    aliases = [list(map(dotted, group)) for group in nnx.find_duplicates(model)]
    infos = []
    for path, module in modules_of(model).items():
        if not isinstance(module, nnx.List | nnx.Dict):
            parameters = by_dotted_path(_parameters(module))
            infos.append(ModuleInfo(module, _with_aliases(path, aliases), parameters))
    return infos


def _with_aliases(path: str, aliases: list[list[str]]) -> tuple[str, ...]:
    paths = [path]
    for group in aliases:
        for old in list(paths):
            for start in group:
                if old == start or old.startswith(f"{start}."):
                    paths += [other + old[len(start) :] for other in group]
    return tuple(dict.fromkeys(paths))


def _parameters(
    node: Any, outer: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], nnx.Param[Any]]]:
    values = node
    if isinstance(node, list | tuple):
        values = dict(enumerate(node))
    elif not isinstance(node, dict):
        values = vars(node)
    for name, value in values.items():
        if isinstance(value, nnx.Param):
            yield (*outer, name), value
        elif isinstance(value, CONTAINERS):
            yield from _parameters(value, (*outer, name))
