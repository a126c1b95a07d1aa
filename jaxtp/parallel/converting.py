"""Activations from one layout to another, around the call of a module."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxtp.collectives import check_divides, constrain
from jaxtp.parallel.copies import Copies, make_copies
from jaxtp.parallel.layouts import Layout, Replicate, activation_spec, leading_axes
from jaxtp.parallel.styles import Layouts, PrepareInput


def prepare(
    cls: type, style: PrepareInput, args: tuple[Any, ...], kwargs: dict[str, Any], *, context: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call in the layouts that a style wants.

    Args:
      cls: class of the module that is called.
      style: its style.
      args: arguments of the call.
      kwargs: those given by keyword.
      context: cp may divide their sequences, here and in what follows.

    Raises:
      TypeError: it names a positional argument that was given by keyword, or not at all.
    """
    desired = several(style.desired_input_layouts)
    if any(layout is not None for layout in desired[len(args) :]):
        raise TypeError(
            f"{cls.__name__} as {style} was called with {len(args)} positional arguments; those given by keyword are "
            "prepared by input_kwarg_layouts and desired_input_kwarg_layouts"
        )
    args = convert_all(args, several(style.input_layouts), desired, context=context)
    before, after = style.input_kwarg_layouts or {}, style.desired_input_kwarg_layouts or {}
    return args, {k: convert(v, before.get(k), after.get(k), context=context) for k, v in kwargs.items()}


def several(layouts: Layouts) -> tuple[Layout | None, ...]:
    """Returns the layouts of several arguments; those of one, as a tuple."""
    return layouts if isinstance(layouts, tuple) else (layouts,)


def convert_all(values: Any, before: Layouts, after: Layouts, *, context: bool) -> Any:
    """Returns a value, or each of a tuple, in other layouts."""
    if not isinstance(values, tuple):
        return convert(values, several(before)[0], several(after)[0], context=context)
    rest = (None,) * len(values)
    pairs = zip(values, (*several(before), *rest), (*several(after), *rest), strict=False)
    return tuple(convert(value, old, new, context=context) for value, old, new in pairs)


def convert(x: Any, before: Layout | None, after: Layout | None, *, context: bool) -> Any:
    """Returns a value in another layout; as it is where that is None."""
    if x is None or after is None:
        return x
    if after == Replicate():
        copied = isinstance(x, Copies) and x.copies is not None
        return x if copied else make_copies(jnp.asarray(x), before or Replicate(), context=context)
    return constrained(x, after, context=context)


def constrained(x: Any, layout: Layout, *, context: bool) -> Array:
    """Returns a global array in a layout, by the compiler's collectives.

    Raises:
      ValueError: the layout does not divide it.
    """
    x = jnp.asarray(x)
    spec = activation_spec(layout, x.ndim, leading_axes(x.shape, context=context))
    check_divides(f"an activation that the plan has as {layout}", x.shape, spec)
    return constrain(x, spec)
