"""Collectives of one forward and one backward pass of a model, by module."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.communication import Collective
from jaxtp.propose.subject import Program, Subject

_MARK = "module:"


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


def module_of(collective: Collective) -> str:
    """Returns the dotted path of the innermost module that a collective is written in; empty for the model itself."""
    found = re.findall(rf"{_MARK}([\w.]*)", collective.scope)
    return found[-1] if found else ""


def _scoped(path: str, _: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with jax.named_scope(f"{_MARK}{path}"):
        return method(*args, **kwargs)
