"""A model as its author wrote it, without arrays, and the plan that `parallelize` was given for it."""

from collections.abc import Callable

from flax import nnx

from jaxtp.parallel.initialisation import Creation, merge_abstract
from jaxtp.parallel.styles import Style
from jaxtp.parallel.swap import original_class, role_of


def as_written(model: nnx.Module | Callable[[], nnx.Module]) -> tuple[nnx.Module, dict[str, Style], bool]:
    """An abstract copy of a model before it was made parallel.

    Args:
      model: parallel or not, real or abstract, or a function that makes one.

    Returns:
      The copy; the style of each module that has one, by its dotted path; and whether its parameters are split over
      fsdp, which those of a model that is not parallel are to be.
    """
    if not isinstance(model, nnx.Module):
        return Creation(model).abstract(), {}, True
    copy = merge_abstract(*nnx.split(model))
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(copy)}
    roles = {path: role for path, module in modules.items() if (role := role_of(module)) is not None}
    for path in roles:
        _restore(modules[path])
    styles = {path: role.style for path, role in roles.items() if role.style is not None}
    return copy, styles, not roles or any(role.fsdp for role in roles.values())


def _restore(module: nnx.Module) -> None:
    object.__setattr__(module, "__class__", original_class(module))
    for value in vars(module).values():
        if isinstance(value, nnx.Param):
            value.set_metadata(out_sharding=None)
