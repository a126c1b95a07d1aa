"""A model's jaxpr in which every value that enters or leaves a module says so.

Flax gives a jaxpr no module boundaries. Here the calls of a traced copy's modules are wrapped and name their arrays
with `jax.ad_checkpoint.checkpoint_name`: an identity that stays in the jaxpr, through jit, remat and the bodies of
scans. The model itself is not touched, and nothing is computed or allocated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtp.parallel.calls import modules_of
from jaxtp.propose.subject import Subject

_PREFIX = "jaxtp"


@dataclass(frozen=True)
class Mark:
    """A module boundary that a value crosses."""

    enters: bool
    """Whether the value goes into the module, as an argument; else out of it."""

    path: str
    """The dotted path of the module; empty for the model itself."""

    method: str
    """`__call__`, or `attend` of an embedding."""

    argument: str
    """Position or keyword of the argument; 0 for the result; empty for an array inside of either."""

    def __str__(self) -> str:
        return " ".join((_PREFIX, "in" if self.enters else "out", self.method, self.argument or "-", self.path))


@dataclass(frozen=True)
class Traced:
    """A model traced by `trace`."""

    jaxpr: Any
    """The closed jaxpr of the model's parameters, then its inputs, to its outputs."""

    trained: tuple[bool, ...]
    """Whether each leading argument of the jaxpr is a parameter, which is trained; the inputs follow these."""

    modules: dict[str, nnx.Module]
    """The model's modules by dotted path, their parameters abstract. One at several paths is at the first."""

    tied: dict[str, str]
    """Modules that hold a parameter of another module, and that one's path."""


def trace(subject: Subject) -> Traced:
    """Traces the call of a model abstractly."""
    program, state = subject.program(subject.model, _marked)
    jaxpr, modules = jax.make_jaxpr(program)(state, subject.arrays), modules_of(subject.model)
    variables = [variable for _, variable in nnx.to_flat_state(state)]
    trained = tuple(isinstance(variable, nnx.Param) for variable in variables for _ in jax.tree.leaves(variable))
    return Traced(jaxpr, trained, modules, _tied(modules))


def read_mark(equation: Any) -> Mark | None:
    """Returns the boundary that an equation of the jaxpr marks, or None."""
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    if not isinstance(name, str) or not name.startswith(f"{_PREFIX} "):
        return None
    _, direction, method, argument, path = name.split(" ", 4)
    return Mark(direction == "in", path, method, argument.strip("-"))


def _marked(path: str, name: str, method: Callable[..., Any], module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    given = [_mark(value, Mark(True, path, name, str(place))) for place, value in enumerate(args)]
    named = {key: _mark(value, Mark(True, path, name, key)) for key, value in kwargs.items()}
    return _mark(method(module, *given, **named), Mark(False, path, name, "0"))


def _mark(tree: Any, mark: Mark) -> Any:
    """Marks the traced arrays of tuples, lists and dicts; modules and the like stay the objects that they are."""
    if isinstance(tree, jax.core.Tracer):
        return tree if jnp.issubdtype(tree.dtype, jax.dtypes.prng_key) else checkpoint_name(tree, str(mark))
    mark = replace(mark, argument="")
    if type(tree) in (tuple, list):
        return type(tree)(_mark(value, mark) for value in tree)
    return {key: _mark(value, mark) for key, value in tree.items()} if type(tree) is dict else tree


def _tied(modules: Mapping[str, nnx.Module]) -> dict[str, str]:
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, module in modules.items():
        for value in vars(module).values():
            if isinstance(value, nnx.Param) and owners.setdefault(id(value), path) != path:
                tied |= {path: owners[id(value)]}
    return tied
