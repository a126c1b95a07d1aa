"""Traces the function that builds a model, so that its arrays are computed sharded."""

import inspect
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.errors import TraceContextError

from jaxtp.parallelize.plan import PlanError

Build = Callable[[], nnx.Module]

_LINEN = "linen keeps parameters outside of its modules, so there is nothing to split: port it to Flax NNX"


def abstract_model(model: nnx.Module | Build) -> nnx.Module:
    """Returns a copy of a model, or the model that a function builds, without arrays.

    Raises:
      PlanError: the function takes arguments, draws from outside state, needs an array's value, or hides an array from
        Flax.
    """
    if isinstance(model, nnx.Module):
        return _merge_abstract(*nnx.split(model))
    _check_build(model)
    graphs = []

    def create() -> nnx.State:
        graph, state = nnx.split(_build(model))
        graphs.append(graph)
        return state

    try:
        state = jax.eval_shape(create)
    except TraceContextError as error:
        raise PlanError(
            "the function that builds the model draws from state outside of it; create that state inside: "
            f"parallelize(lambda: Model(nnx.Rngs(0)), plan) ({error})"
        ) from None
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise PlanError(
            "the function that builds the model needs the value of an array while it is traced; compute it with "
            f"NumPy, or build the model first and pass it to parallelize ({str(error).splitlines()[0]})"
        ) from error
    return _merge_abstract(graphs[-1], state)


def arrays_of(build: Build) -> tuple[Any, ...]:
    """Returns the arrays of the model that a function builds, in the order of its state; call it under `jax.jit`."""
    return tuple(jax.tree.leaves(nnx.state(_build(build))))


def _check_build(build: Any) -> None:
    if isinstance(build, linen.Module) or (isinstance(build, type) and issubclass(build, linen.Module)):
        name = getattr(build, "__name__", type(build).__name__)
        raise PlanError(f"{name} is a linen module; {_LINEN}")
    if not callable(build):
        raise PlanError(f"expected an nnx.Module, or a function that returns one, not {build!r}")
    try:
        is_class = isinstance(build, type)  # inspect would take its metaclass's signature
        inspect.signature(build.__init__ if is_class else build).bind(*([None] if is_class else []))
    except TypeError as error:
        raise PlanError(
            f"a function that builds a model is called without arguments, and {build!r} is {error}; write "
            "lambda: Model(..., rngs=nnx.Rngs(0))"
        ) from None
    except ValueError:
        return  # functions in C have no signature


def _build(build: Build) -> nnx.Module:
    model: Any = build()
    if not isinstance(model, nnx.Module):
        reason = f"; {_LINEN}" if isinstance(model, linen.Module) else ""
        raise PlanError(f"the function returns a {type(model).__name__}, and should return an nnx.Module{reason}")
    _mark_arrays_as_data(model)
    return model


class AbstractArray(np.ndarray):
    """Shape and dtype of an array outside any variable, without memory.

    Flax would treat a `jax.ShapeDtypeStruct` in a container as a constant.
    """


def _merge_abstract(graph: Any, state: nnx.State) -> nnx.Module:
    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), leaf)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape).view(AbstractArray)

    leaves = jax.tree.map(abstract, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    model: nnx.Module = nnx.merge(graph, leaves, copy=True)
    return model


def _mark_arrays_as_data(model: nnx.Module) -> None:
    """Marks arrays in module attributes as data; in a trace Flax would treat them as constants."""
    for _, node in list(nnx.iter_graph(model)):
        for name, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
            if isinstance(value, jax.core.Tracer):
                setattr(node, name, nnx.data(value))
    seen = {id(array) for array in jax.tree.leaves(nnx.state(model))}
    for path, node in nnx.iter_graph(model):
        if any(id(array) not in seen for array in _tracers(node)):
            raise PlanError(
                f"the function builds a model in which {'.'.join(map(str, path))} holds an array that Flax takes for a "
                "constant: assign a container of arrays as nnx.data(...), and make an array that a function uses an "
                "attribute of the module"
            )


def _tracers(node: Any) -> Iterator[jax.core.Tracer]:
    """Yields traced arrays in a node, in a partial, or in the closure of a function."""
    values: Any = [node]
    if isinstance(node, partial):
        values = jax.tree.leaves((node.args, node.keywords))
        yield from _tracers(node.func)
    elif isinstance(node, types.FunctionType):
        cells = node.__closure__ or ()
        values = (cell.cell_contents for cell in cells if cell != types.CellType())  # an empty cell has no contents
    yield from (value for value in values if isinstance(value, jax.core.Tracer))
