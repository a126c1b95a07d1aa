"""Builds a model with sharded arrays: traces and compiles the function that builds it.

A trace cannot draw from an outside `nnx.Rngs`, as in `parallelize(lambda: Model(rngs), plan)`. So the function gets
copies of the `nnx.Rngs` that it captures, and the originals are updated afterwards.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.errors import TraceContextError
from jax.sharding import NamedSharding

from jaxtp.parallelize.plan import PlanError

Build = Callable[[], nnx.Module]

_LINEN = "linen keeps parameters outside of its modules, so there is nothing to split: port it to Flax NNX"


@dataclass(frozen=True)
class ModelBuilder:
    """Builds a model from a function without arguments."""

    build: Build

    def abstract(self) -> nnx.Module:
        """Returns the model without arrays.

        Raises:
          PlanError: `build` takes arguments, draws from outside state, needs an array's value, or hides an array from
            Flax.
        """
        self._check()
        outside, state = nnx.split(_captured_rngs(self.build))
        graphs = []

        def create(rngs: nnx.State) -> nnx.State:
            graph, state = nnx.split(self._build_with(outside, rngs)[0])
            graphs.append(graph)
            return state

        try:
            state = jax.eval_shape(create, state)
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

    def lower(self, shardings: tuple[NamedSharding, ...]) -> jax.stages.Lowered:
        """Lowers the function from captured `nnx.Rngs` to the model's arrays and the updated `nnx.Rngs`."""
        outside, state = nnx.split(_captured_rngs(self.build))

        def create(rngs: nnx.State) -> tuple[tuple[Any, ...], nnx.State]:
            model, copies = self._build_with(outside, rngs)
            return tuple(jax.tree.leaves(nnx.state(model))), nnx.state(copies)

        return jax.jit(create, out_shardings=(shardings, None)).lower(state)

    def run(self, shardings: tuple[NamedSharding, ...]) -> tuple[jax.Array, ...]:
        """Returns the model's arrays in `shardings`, and updates the captured `nnx.Rngs`."""
        outside = _captured_rngs(self.build)
        arrays: tuple[jax.Array, ...]
        arrays, rngs = self.lower(shardings).compile()(nnx.state(outside))
        nnx.update(outside, rngs)
        return arrays

    def _check(self) -> None:
        build: Any = self.build
        if isinstance(build, linen.Module) or (isinstance(build, type) and issubclass(build, linen.Module)):
            name = getattr(build, "__name__", type(build).__name__)
            raise PlanError(f"{name} is a linen module; {_LINEN}")
        if not callable(build) or isinstance(build, nnx.Module):
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

    def _build_with(self, outside: Any, state: nnx.State) -> tuple[nnx.Module, dict[str, nnx.Rngs]]:
        copies = nnx.merge(outside, state, copy=True)
        model = _with_rngs(self.build, copies)()
        if not isinstance(model, nnx.Module):
            reason = f"; {_LINEN}" if isinstance(model, linen.Module) else ""
            raise PlanError(f"the function returns a {type(model).__name__}, and should return an nnx.Module{reason}")
        _mark_arrays_as_data(model)
        return model, copies


def abstract_model(model: nnx.Module | Build) -> nnx.Module:
    """Returns a copy of a model, or the model that a function builds, without arrays.

    Raises:
      PlanError: as `ModelBuilder.abstract`.
    """
    return _merge_abstract(*nnx.split(model)) if isinstance(model, nnx.Module) else ModelBuilder(model).abstract()


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
    if isinstance(node, jax.core.Tracer):
        yield node
    elif isinstance(node, partial):
        yield from (leaf for leaf in jax.tree.leaves((node.args, node.keywords)) if isinstance(leaf, jax.core.Tracer))
        yield from _tracers(node.func)
    elif isinstance(node, types.FunctionType):
        yield from (value for value in _closure(node).values() if isinstance(value, jax.core.Tracer))


def _closure(function: types.FunctionType) -> dict[str, object]:
    variables: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:
            continue
    return variables


def _captured_rngs(build: object) -> dict[str, nnx.Rngs]:
    if isinstance(build, partial):
        return _captured_rngs(build.func) | {k: v for k, v in build.keywords.items() if isinstance(v, nnx.Rngs)}
    if not isinstance(build, types.FunctionType):
        return {}
    names = [name for name in build.__code__.co_names if name in build.__globals__]
    variables = _closure(build) | {name: build.__globals__[name] for name in names}
    return {name: value for name, value in variables.items() if isinstance(value, nnx.Rngs)}


def _with_rngs(build: Any, copies: Mapping[str, nnx.Rngs]) -> Build:
    if isinstance(build, partial):
        keywords = {name: copies.get(name, value) for name, value in build.keywords.items()}
        return partial(_with_rngs(build.func, copies), *build.args, **keywords)
    if not isinstance(build, types.FunctionType) or not copies:
        return build  # type: ignore[no-any-return]
    names = zip(build.__code__.co_freevars, build.__closure__ or (), strict=True)
    cells = tuple(types.CellType(copies[name]) if name in copies else cell for name, cell in names)
    variables = {**build.__globals__, **{n: c for n, c in copies.items() if n in build.__code__.co_names}}
    function = types.FunctionType(build.__code__, variables, build.__name__, build.__defaults__, cells)
    function.__kwdefaults__ = build.__kwdefaults__
    return function
