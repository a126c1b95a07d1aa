"""Making a model whose arrays are born in their parts.

The function that makes it is traced and compiled. A trace cannot draw random numbers from an `nnx.Rngs` that was made
outside of it, as in `parallelize(lambda: Model(rngs), plan)`: the function is given copies of those that it captures,
and they go on afterwards where the copies are, as if the model had been made without a trace.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import NamedSharding

from jaxtp.parallel.plan import PlanError

Build = Callable[[], nnx.Module]


@dataclass(frozen=True)
class Creation:
    """How a model is made.

    Args:
      build: a function without arguments.
    """

    build: Build

    def abstract(self) -> nnx.Module:
        """The model without arrays.

        Raises:
          PlanError: it draws from something else that was made outside.
        """
        copies = {name: nnx.clone(rngs) for name, rngs in captured(self.build).items()}
        try:
            model: nnx.Module = nnx.eval_shape(lambda copies: with_captured(self.build, copies)(), copies)
        except TraceContextError as error:
            raise PlanError(
                "the function that makes the model draws from something made outside of it; make it inside: "
                f"parallelize(lambda: Model(nnx.Rngs(0)), plan) ({error})"
            ) from None
        if not isinstance(model, nnx.Module):
            raise PlanError(f"the function makes a {type(model).__name__}, and should make an nnx.Module")
        return model

    def lower(self, shardings: tuple[NamedSharding, ...]) -> Any:
        """The `jax.stages.Lowered` of its creation: the arrays of its state in these shardings, captured `nnx.Rngs`."""
        graph, given = nnx.split(captured(self.build))

        def create(given: nnx.State) -> tuple[tuple[Any, ...], nnx.State]:
            copies = nnx.merge(graph, given, copy=True)
            model = with_captured(self.build, copies)()
            return tuple(jax.tree.leaves(nnx.state(model))), nnx.state(copies)

        return jax.jit(create, out_shardings=(shardings, None)).lower(given)

    def run(self, shardings: tuple[NamedSharding, ...]) -> tuple[Any, ...]:
        """The arrays of the model's state, each in its parts."""
        outside = captured(self.build)
        arrays, drawn = self.lower(shardings).compile()(nnx.state(outside))
        nnx.update(outside, drawn)
        made: tuple[Any, ...] = arrays
        return made


def captured(build: Any) -> dict[str, nnx.Rngs]:
    """The `nnx.Rngs` that a function has from outside, by name: of its closure, of its module, of a `partial`."""
    if isinstance(build, partial):
        return captured(build.func) | {k: v for k, v in build.keywords.items() if isinstance(v, nnx.Rngs)}
    if not isinstance(build, types.FunctionType):
        return {}
    cells = zip(build.__code__.co_freevars, build.__closure__ or (), strict=True)
    names = {name: cell.cell_contents for name, cell in cells}
    names |= {name: build.__globals__[name] for name in build.__code__.co_names if name in build.__globals__}
    return {name: value for name, value in names.items() if isinstance(value, nnx.Rngs)}


def with_captured(build: Any, copies: Mapping[str, nnx.Rngs]) -> Build:
    """The function with others in their place."""
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
