"""What moves in one forward and one backward pass of a model, by module."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.communication import Collective
from jaxtp.propose.subject import Program, Subject

_MARK = "module:"


@dataclass(frozen=True)
class Move:
    """Collectives of one kind in one module."""

    module: str
    """The dotted path of the module; empty for the model itself."""

    backward: bool
    """Whether they run in the backward pass; else in the forward pass."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, ..."""

    axes: tuple[str, ...]
    """The axes of the mesh along which they go."""

    count: int
    bytes: float
    """The bytes that a device sends in all of them together."""

    added: bool = False
    """Whether the compiler's partitioner added them, between the layers; the program does not ask for them."""

    counted: str = ""
    """The meaning of the count."""


def passes(model: nnx.Module, subject: Subject) -> tuple[Program, nnx.State]:
    """Returns a subject's program with another model, forward and backward, and its state (see `Subject.program`).

    The loss is the sum of all outputs. What a module does carries its path as its scope.
    """
    program, state = subject.program(model, _scoped)

    def run(state: nnx.State, arrays: list[Any]) -> Any:
        params, rest = nnx.split_state(state, nnx.Param, ...)

        def loss(params: nnx.State) -> jax.Array:
            outputs = program(nnx.merge_state(params, rest), arrays)
            floating = (leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating))
            return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in floating), jnp.zeros(()))

        return jax.grad(loss)(params)

    return run, state


def moves(collectives: Mapping[Collective, int], *, added: bool = False) -> list[Move]:
    """Returns the collectives by module, in the order of the modules' first."""
    found: dict[tuple[str, bool, str, tuple[str, ...], str], Move] = {}
    for collective, times in collectives.items():
        place = module_of(collective.scope), "transpose(" in collective.scope, collective.kind, collective.axes
        key = (*place, collective.counted)
        before = found.get(key, Move(*place, 0, 0.0, added, collective.counted))
        sent = before.bytes + times * collective.bytes_sent
        found[key] = replace(before, count=before.count + times, bytes=sent)
    return list(found.values())


def module_of(scope: str) -> str:
    """Returns the innermost module that a scope names."""
    found = re.findall(rf"{_MARK}([\w.]*)", scope)
    return found[-1] if found else ""


def _scoped(path: str, _: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with jax.named_scope(f"{_MARK}{path}"):
        return method(*args, **kwargs)
