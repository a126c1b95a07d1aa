"""What one forward and one backward pass of a model move, by module."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.communication import Collective
from jaxtp.propose.subject import Subject

_MARK = "module:"


@dataclass(frozen=True)
class Move:
    """Collectives of one kind in one module."""

    module: str
    """Its dotted path; empty for the model itself."""

    backward: bool
    """In the backward pass; else in the forward pass."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, ..."""

    axes: tuple[str, ...]
    """Of the mesh, along which they go."""

    count: int
    bytes: float
    """That a device sends, of all of them together."""

    added: bool = False
    """The program does not ask for it: the compiler's partitioner added it, between the layers."""

    counted: str = ""
    """How the count is meant."""


def passes(model: nnx.Module, subject: Subject) -> tuple[Callable[..., Any], Any]:
    """A forward and a backward pass of what a subject runs, with another model, as a function of arrays.

    Returns:
      `run(state, arrays)`, and the state.

    The loss is the sum of all outputs. What a module does carries its path as its scope.
    """
    graph, *state = nnx.split(model, nnx.Param, ...)

    def run(state: Any, arrays: list[Any]) -> Any:
        def loss(params: Any) -> jax.Array:
            copy = nnx.merge(graph, params, state[1], copy=True)  # its own variables: they may change
            _scope_modules(copy)
            outputs = subject.run(copy, arrays)
            floating = (leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating))
            return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in floating), jnp.zeros(()))

        return jax.grad(loss)(state[0])

    return run, tuple(state)


def moves(collectives: Mapping[Collective, int], *, added: bool = False) -> list[Move]:
    """Collectives by module, in the order of the modules' first."""
    found: dict[tuple[str, bool, str, tuple[str, ...], str], Move] = {}
    for collective, times in collectives.items():
        place = module_of(collective.scope), "transpose(" in collective.scope, collective.kind, collective.axes
        key = (*place, collective.counted)
        before = found.get(key, Move(*place, 0, 0.0, added, collective.counted))
        sent = before.bytes + times * collective.bytes_sent
        found[key] = replace(before, count=before.count + times, bytes=sent)
    return list(found.values())


def module_of(scope: str) -> str:
    """The innermost module that a scope names."""
    found = re.findall(rf"{_MARK}([\w.]*)", scope)
    return found[-1] if found else ""


def _scope_modules(model: nnx.Module) -> None:
    for path, module in nnx.iter_modules(model):
        cls: Any = type(module)
        body = {"__module__": cls.__module__, **dict(_scoped(cls, ".".join(map(str, path))))}
        object.__setattr__(module, "__class__", type(cls)(cls.__name__, (cls,), body))


def _scoped(cls: type, path: str) -> Iterator[tuple[str, Any]]:
    for name in ("__call__", "attend"):
        if hasattr(cls, name):
            yield name, jax.named_scope(f"{_MARK}{path}")(getattr(cls, name))
