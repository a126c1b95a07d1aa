"""Public names that are imported at their first use, as `lazy_loader` does it.

The stub beside a namespace (`__init__.pyi`) lists its names, for type checkers, for editors and for
`attach`. So a program that needs only the layers does not wait for Orbax or pydantic.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import MappingProxyType

NAMESPACES = (
    "jaxtp",
    "jaxtp.errors",
    "jaxtp.generate",
    "jaxtp.hf",
    "jaxtp.layers",
    "jaxtp.losses",
    "jaxtp.plans",
    "jaxtp.typing",
)

Place = tuple[str | None, str]  # A module, or None for the namespace's own, and a name in it


def attach(
    namespace: str, file: str, renamed: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a namespace.

    Args:
      namespace: `__name__` of the module.
      file: its `__file__`; the stub is beside it.
      renamed: new spellings by the names of earlier versions.
    """
    places = _places(f"{file.removesuffix('.py')}.pyi")

    def load(name: str) -> object:
        if name not in places:
            raise AttributeError(
                f"module {namespace!r} has no attribute {name!r}{_hint(namespace, name, renamed)}"
            )
        module, original = places[name]
        if module is None:
            return import_module(f"{namespace}.{original}")
        value = getattr(import_module(module), original)
        setattr(sys.modules[namespace], name, value)
        return value

    return load, lambda: sorted(places), sorted(places)


def namespace_of(name: str) -> str | None:
    """Returns the namespace that has a public name."""
    for namespace in NAMESPACES:
        if name in import_module(namespace).__all__:
            return namespace
    return None


def public_names() -> Iterator[str]:
    """Yields the public names of all namespaces."""
    for namespace in NAMESPACES:
        yield from import_module(namespace).__all__


def _hint(namespace: str, name: str, renamed: Mapping[str, str]) -> str:
    new = renamed.get(name)
    if new is None and namespace == NAMESPACES[0]:
        other = namespace_of(name)
        new = other and f"{other}.{name}"
    return f"; since jaxtp 0.3 it is {new}" if new else ""


def _places(stub: str) -> dict[str, Place]:
    with open(stub, encoding="utf-8") as source:
        statements = ast.parse(source.read()).body
    places: dict[str, Place] = {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                places[alias.asname or alias.name] = (statement.module, alias.name)
    return places
