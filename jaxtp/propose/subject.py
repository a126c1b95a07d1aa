"""A model and one call of it, without a number in them: what a plan is proposed for, and tried on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxtp.parallel.initialisation import Creation, merge_abstract


@dataclass(frozen=True)
class Subject:
    """An abstract model, and what is run."""

    graph: Any
    state: Any
    """The `nnx.split` of the model, with `jax.ShapeDtypeStruct`s for arrays."""

    arrays: list[jax.ShapeDtypeStruct]
    """The arrays among the inputs."""

    run: Callable[[nnx.Module, list[Any]], Any]
    """The call, of a model and the arrays."""

    def model(self) -> nnx.Module:
        """A new abstract copy of the model."""
        return merge_abstract(self.graph, self.state)


def subject_of(model: Any, inputs: tuple[Any, ...], call: Callable[..., Any] | None) -> Subject:
    """The subject of `call(model, *inputs)`.

    Args:
      model: an `nnx.Module`, real or abstract, or a function of no arguments that makes one.
      inputs: pytrees of arrays, `jax.ShapeDtypeStruct`s, and anything else, which is passed as it is.
      call: by default `model(*inputs)`.

    Raises:
      PlanError: `model` is neither.
    """
    made = model if isinstance(model, nnx.Module) else Creation(model).abstract()
    graph, state = nnx.split(made)
    leaves, tree = jax.tree.flatten(inputs)

    def run(model: Any, arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = jax.tree.unflatten(tree, [next(given) if _is_array(leaf) else leaf for leaf in leaves])
        return call(model, *filled) if call else model(*filled)

    return Subject(graph, jax.tree.map(_abstract, state), [_abstract(leaf) for leaf in leaves if _is_array(leaf)], run)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
