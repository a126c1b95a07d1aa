"""A model's jaxpr in which every value that enters or leaves a module says so.

Flax gives a jaxpr no module boundaries. Here the modules of a traced copy are given a subclass of their own class,
whose `__call__` names its arrays with `jax.ad_checkpoint.checkpoint_name`: an identity that stays in the jaxpr, through
jit, remat and the bodies of scans. The model itself is not touched, and nothing is computed or allocated.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtp.propose.subject import Subject

_PREFIX = "jaxtp"


@dataclass(frozen=True)
class Mark:
    """A module boundary that a value crosses."""

    enters: bool
    """Into the module, as an argument; else out of it."""

    path: str
    """Of the module, dotted; empty for the model itself."""

    method: str
    """`__call__`, or `attend` of an embedding."""

    argument: str
    """Position or keyword of the argument; 0 for the result; empty for an array inside of either."""

    def __str__(self) -> str:
        return " ".join((_PREFIX, "in" if self.enters else "out", self.method, self.argument or "-", self.path))


@dataclass(frozen=True)
class Traced:
    """What `trace` found."""

    jaxpr: Any
    """Closed jaxpr of the model's parameters, then its inputs, to its outputs."""

    variables: tuple[tuple[str, bool], ...]
    """Dotted path of each leading argument of the jaxpr, and whether it is a parameter that is trained."""

    modules: dict[str, nnx.Module]
    """The model's modules by dotted path, their parameters abstract. One at several paths is at the first."""

    tied: dict[str, str]
    """Modules that hold a parameter of another module, and that one's path."""


def trace(subject: Subject) -> Traced:
    """Traces the call of a model abstractly."""

    def run(state: Any, arrays: list[Any]) -> Any:
        copy = nnx.merge(subject.graph, state)
        for path, module in modules_of(copy).items():
            _watch(module, path)
        return subject.run(copy, arrays)

    jaxpr, model = jax.make_jaxpr(run)(subject.state, subject.arrays), subject.model()
    return Traced(jaxpr, tuple(_variables(subject.state)), modules_of(model), _tied(model))


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Every module by dotted path, each once; the model itself is at the empty path."""
    found = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))
    return {".".join(map(str, path)): module for path, module in found}


def read_mark(equation: Any) -> Mark | None:
    """The boundary that an equation of the jaxpr marks, or None."""
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    if not isinstance(name, str) or not name.startswith(f"{_PREFIX} "):
        return None
    _, direction, method, argument, path = name.split(" ", 4)
    return Mark(direction == "in", path, method, argument.strip("-"))


def _watch(module: nnx.Module, path: str) -> None:
    cls = type(module)
    methods = [name for name in ("__call__", "attend") if hasattr(cls, name)]
    body = {name: _marked(getattr(cls, name), path, name) for name in methods}
    object.__setattr__(
        module, "__class__", types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(body))
    )


def _marked(method: Callable[..., Any], path: str, name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {str(i): value for i, value in enumerate(args)} | kwargs
        entered = {key: _mark(value, Mark(True, path, name, key)) for key, value in named.items()}
        positional = [entered.pop(str(i)) for i in range(len(args))]
        return _mark(method(self, *positional, **entered), Mark(False, path, name, "0"))

    return call


def _mark(tree: Any, mark: Mark) -> Any:
    """Marks the traced arrays of tuples, lists and dicts; modules and the like stay the objects that they are."""
    if isinstance(tree, jax.core.Tracer):
        return tree if jnp.issubdtype(tree.dtype, jax.dtypes.prng_key) else checkpoint_name(tree, str(mark))
    mark = replace(mark, argument="")
    if type(tree) in (tuple, list):
        return type(tree)(_mark(value, mark) for value in tree)
    return {key: _mark(value, mark) for key, value in tree.items()} if type(tree) is dict else tree


def _variables(state: nnx.State) -> Iterator[tuple[str, bool]]:
    for path, variable in nnx.to_flat_state(state):
        for _ in jax.tree.leaves(variable):
            yield ".".join(map(str, path)), isinstance(variable, nnx.Param)


def _tied(model: nnx.Module) -> dict[str, str]:
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, module in modules_of(model).items():
        for value in vars(module).values():
            if isinstance(value, nnx.Param) and owners.setdefault(id(value), path) != path:
                tied |= {path: owners[id(value)]}
    return tied
