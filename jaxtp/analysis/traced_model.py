"""Traces a model call to a jaxpr that records where arrays enter and leave modules.

A jaxpr has no module boundaries. So wrapped module calls mark their arguments and results with
`jax.ad_checkpoint.checkpoint_name`, an identity that stays in the jaxpr through jit, remat and scan
bodies.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn  # type: ignore[attr-defined] # jax 0.12: another name of Jaxpr

from jaxtp.plans.module_wrappers import Method, modules_of, with_calls
from jaxtp.plans.parallelize import Build, abstract_model
from jaxtp.plans.plan import PlanError

Forward = Callable[..., object]  # of a model and its inputs
# A function of a model's state and the arrays among its inputs
StateFunction = Callable[[nnx.State, list[Any]], Any]

_PREFIX = "jaxtp "


@dataclass(frozen=True)
class ModelCall:
    """An abstract model and one call."""

    model: nnx.Module
    arrays: list[jax.ShapeDtypeStruct]  # among the inputs
    # Calls any model with the inputs, in which it replaces the arrays.
    run: Callable[[nnx.Module, list[Any]], object]

    @classmethod
    def of(
        cls,
        model: nnx.Module | Build,
        inputs: tuple[object, ...],
        call: Forward | None,
    ) -> "ModelCall":
        """Returns the call `call(model, *inputs)`, or `model(*inputs)`.

        Arguments are as in `explain`.
        """
        leaves, tree = jax.tree.flatten(inputs)
        abstract = {}
        for i, leaf in enumerate(leaves):
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                abstract[i] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

        def run(model: Any, arrays: list[Any]) -> object:
            filled_leaves = list(leaves)
            for i, array in zip(abstract, arrays, strict=True):
                filled_leaves[i] = array
            filled = jax.tree.unflatten(tree, filled_leaves)
            try:
                return call(model, *filled) if call else model(*filled)
            except ValueError as error:
                if not re.search("PartitionSpec passed to|Resource axis", str(error)):
                    raise
                problem = str(error).splitlines()[0]
                raise PlanError(
                    "the model shards its activations for a mesh with explicit axes, and jaxtp's "
                    f"axes are automatic: configure it without sharding of activations ({problem})"
                ) from error

        return cls(abstract_model(model), list(abstract.values()), run)

    def functional(
        self, model: nnx.Module, wrap: Method | None = None
    ) -> tuple[StateFunction, nnx.State]:
        """Returns the call as a function of the state of `model`, and the state.

        `wrap` is as in `with_calls`.
        """
        graph, state = nnx.split(model)

        def function(state: nnx.State, arrays: list[Any]) -> object:
            copy = nnx.merge(graph, state, copy=True)
            if wrap is not None:
                with_calls(copy, wrap)
            return self.run(copy, arrays)

        return function, state


@dataclass(frozen=True)
class Boundary:
    """A module boundary that an array crosses."""

    enters: bool  # True for an argument, False for a result
    path: str  # the module's path; empty for the model itself
    method: str  # `__call__` or `attend`
    argument: str  # position or keyword; "0" for the result; empty for an array inside a container


@dataclass(frozen=True)
class TracedModel:
    """The jaxpr of a model call, with module boundaries."""

    model: nnx.Module  # abstract
    jaxpr: ClosedJaxpr  # takes the leaves of the model's state, then the input arrays
    is_param: tuple[bool, ...]  # whether each leaf of the state belongs to an `nnx.Param`
    modules: dict[str, nnx.Module]  # by dotted path; a shared module has its first path
    tied: set[str]  # modules that share a parameter


def trace_model(call: ModelCall) -> TracedModel:
    """Traces a call abstractly."""
    function, state = call.functional(call.model, _marked_call)
    jaxpr = jax.make_jaxpr(function)(state, call.arrays)
    modules = modules_of(call.model)
    is_param: list[bool] = []
    for _, variable in nnx.to_flat_state(state):
        is_param += [isinstance(variable, nnx.Param)] * len(jax.tree.leaves(variable))
    return TracedModel(call.model, jaxpr, tuple(is_param), modules, _tied_modules(modules))


def read_boundary(equation: JaxprEqn) -> Boundary | None:
    """Returns the boundary that an equation marks, if any."""
    name = str(equation.params.get("name"))
    if equation.primitive.name != "name" or not name.startswith(_PREFIX):
        return None
    return Boundary(*json.loads(name.removeprefix(_PREFIX)))


def _marked_call(
    path: str,
    name: str,
    method: Method,
    module: nnx.Module,
    /,
    *args: object,
    **kwargs: object,
) -> Any:
    entry = partial(Boundary, True, path, name)
    args = tuple(_mark(value, entry(str(i))) for i, value in enumerate(args))
    kwargs = {key: _mark(value, entry(key)) for key, value in kwargs.items()}
    return _mark(method(module, *args, **kwargs), Boundary(False, path, name, "0"))


def _mark(tree: Any, boundary: Boundary) -> Any:
    """Marks tracers in tuples, lists and dicts, and returns other objects unchanged."""
    if isinstance(tree, jax.core.Tracer):
        if jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
            return tree
        return checkpoint_name(tree, _PREFIX + json.dumps(astuple(boundary)))
    boundary = replace(boundary, argument="")
    if type(tree) in (tuple, list):
        return type(tree)(_mark(value, boundary) for value in tree)
    if type(tree) is dict:
        return {key: _mark(value, boundary) for key, value in tree.items()}
    return tree


def _tied_modules(modules: Mapping[str, nnx.Module]) -> set[str]:
    owners: dict[int, set[str]] = {}
    for path, module in modules.items():
        for value in vars(module).values():
            if isinstance(value, nnx.Param):
                owners.setdefault(id(value), set()).add(path)
    tied: set[str] = set()
    return tied.union(*(paths for paths in owners.values() if len(paths) > 1))
