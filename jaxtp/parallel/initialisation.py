"""Making a model whose arrays are initialised sharded.

The function that makes it is traced and compiled. A trace cannot draw random numbers from an `nnx.Rngs` that was made
outside of it, as in `parallelize(lambda: Model(rngs), plan)`: the function is given copies of those that it captures,
and they go on afterwards where the copies are, as if the model had been made without a trace.
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

from jaxtp.parallel.plan import PlanError

Build = Callable[[], nnx.Module]

_LINEN = "linen keeps parameters outside of its modules, where there is nothing to split: port it to Flax NNX"


@dataclass(frozen=True)
class Creation:
    """Creation of a model by a function without arguments."""

    build: Build

    def abstract(self) -> nnx.Module:
        """Returns the model without arrays.

        Raises:
          PlanError: what makes it is no function without arguments, draws from something else that was made outside,
            needs the value of an array, or puts one where Flax does not see it.
        """
        self._check()
        outside, given = nnx.split(captured(self.build))
        made = []

        def create(given: nnx.State) -> nnx.State:
            graph, state = nnx.split(self._make(outside, given)[0])
            made.append(graph)
            return state

        try:
            state = jax.eval_shape(create, given)
        except TraceContextError as error:
            raise PlanError(
                "the function that makes the model draws from something made outside of it; make it inside: "
                f"parallelize(lambda: Model(nnx.Rngs(0)), plan) ({error})"
            ) from None
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise PlanError(
                "the function that makes the model needs the value of an array while it is traced; compute that with "
                f"NumPy, or make the model first and give it to parallelize ({str(error).splitlines()[0]})"
            ) from error
        return _merge_abstract(made[-1], state)

    def lower(self, shardings: tuple[NamedSharding, ...]) -> Any:
        """Returns its creation, lowered: of the arrays of its state in these shardings, and the captured `nnx.Rngs`."""
        outside, given = nnx.split(captured(self.build))

        def create(given: nnx.State) -> tuple[tuple[Any, ...], nnx.State]:
            model, copies = self._make(outside, given)
            return tuple(jax.tree.leaves(nnx.state(model))), nnx.state(copies)

        return jax.jit(create, out_shardings=(shardings, None)).lower(given)

    def run(self, shardings: tuple[NamedSharding, ...]) -> tuple[Any, ...]:
        """Returns the arrays of the model's state, each in its parts."""
        outside = captured(self.build)
        arrays, drawn = self.lower(shardings).compile()(nnx.state(outside))
        nnx.update(outside, drawn)
        made: tuple[Any, ...] = arrays
        return made

    def _check(self) -> None:
        build: Any = self.build
        if isinstance(build, linen.Module) or (isinstance(build, type) and issubclass(build, linen.Module)):
            name = getattr(build, "__name__", type(build).__name__)
            raise PlanError(f"{name} is a linen module; {_LINEN}")
        if not callable(build) or isinstance(build, nnx.Module):
            raise PlanError(f"a plan is for an nnx.Module, or a function that makes one, and this is {build!r}")
        try:
            is_class = isinstance(build, type)  # whose signature is that of its metaclass
            inspect.signature(build.__init__ if is_class else build).bind(*([None] if is_class else []))
        except TypeError as error:
            raise PlanError(
                f"a function that makes a model is called without arguments, and {build!r} is {error}; write "
                "lambda: Model(..., rngs=nnx.Rngs(0))"
            ) from None
        except ValueError:
            return  # a function in C has no signature to ask

    def _make(self, outside: Any, given: nnx.State) -> tuple[nnx.Module, dict[str, nnx.Rngs]]:
        """Returns the model, inside a trace, and the copies of the captured `nnx.Rngs` that it has drawn from."""
        copies = nnx.merge(outside, given, copy=True)
        model = with_captured(self.build, copies)()
        if not isinstance(model, nnx.Module):
            reason = f"; {_LINEN}" if isinstance(model, linen.Module) else ""
            raise PlanError(f"the function makes a {type(model).__name__}, and should make an nnx.Module{reason}")
        mark_arrays(model)
        return model, copies


def abstract_model(model: nnx.Module | Build) -> nnx.Module:
    """Returns a model without arrays: a copy of a model, real or abstract, or what a function makes.

    Raises:
      PlanError: as `Creation.abstract`.
    """
    return _merge_abstract(*nnx.split(model)) if isinstance(model, nnx.Module) else Creation(model).abstract()


class Placeholder(np.ndarray):
    """Stands for an array of an abstract model that is no variable; of a shape and a dtype, without memory.

    Flax takes a `jax.ShapeDtypeStruct` in a container for a constant.
    """


def _merge_abstract(graph: Any, state: nnx.State) -> nnx.Module:
    """Returns the model of an `nnx.split` without its arrays, or what stands for them."""

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), leaf)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape).view(Placeholder)

    leaves = jax.tree.map(abstract, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    model: nnx.Module = nnx.merge(graph, leaves, copy=True)
    return model


def mark_arrays(model: nnx.Module) -> None:
    """Tells Flax that the arrays which modules have for attributes are data; in a trace it takes them for constants.

    Raises:
      PlanError: an array is where Flax looks for none.
    """
    for _, node in list(nnx.iter_graph(model)):
        for name, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
            if isinstance(value, jax.core.Tracer):
                setattr(node, name, nnx.data(value))
    seen = {id(array) for array in jax.tree.leaves(nnx.state(model))}
    for path, node in nnx.iter_graph(model):
        if any(id(array) not in seen for array in _traced(node)):
            raise PlanError(
                f"the function makes a model in which {'.'.join(map(str, path))} holds an array that Flax takes for a "
                "constant: assign a container of arrays as nnx.data(...), and make an array that a function uses an "
                "attribute of the module"
            )


def _traced(node: Any) -> Iterator[jax.core.Tracer]:
    """Yields the traced arrays that a node of a model is, or that a function in it refers to."""
    if isinstance(node, jax.core.Tracer):
        yield node
    elif isinstance(node, partial):
        yield from (leaf for leaf in jax.tree.leaves((node.args, node.keywords)) if isinstance(leaf, jax.core.Tracer))
        yield from _traced(node.func)
    elif isinstance(node, types.FunctionType):
        yield from (value for value in _closure(node).values() if isinstance(value, jax.core.Tracer))


def _closure(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables that a function has from around it; not those that have no value yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: value for name, cell in cells for value in _contents(cell)}


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def captured(build: Any) -> dict[str, nnx.Rngs]:
    """Returns the `nnx.Rngs` that a function has from its closure, its module or a `partial`, by name."""
    if isinstance(build, partial):
        return captured(build.func) | {k: v for k, v in build.keywords.items() if isinstance(v, nnx.Rngs)}
    if not isinstance(build, types.FunctionType):
        return {}
    names = _closure(build) | {
        name: build.__globals__[name] for name in build.__code__.co_names if name in build.__globals__
    }
    return {name: value for name, value in names.items() if isinstance(value, nnx.Rngs)}


def with_captured(build: Any, copies: Mapping[str, nnx.Rngs]) -> Build:
    """Returns the function with others in their place."""
    if isinstance(build, partial):
        keywords = {name: copies.get(name, value) for name, value in build.keywords.items()}
        return partial(with_captured(build.func, copies), *build.args, **keywords)
    if not isinstance(build, types.FunctionType) or not copies:
        return build  # type: ignore[no-any-return]
    names = zip(build.__code__.co_freevars, build.__closure__ or (), strict=True)
    cells = tuple(types.CellType(copies[name]) if name in copies else cell for name, cell in names)
    space = {**build.__globals__, **{n: c for n, c in copies.items() if n in build.__code__.co_names}}
    made = types.FunctionType(build.__code__, space, build.__name__, build.__defaults__, cells)
    made.__kwdefaults__ = build.__kwdefaults__
    return made
