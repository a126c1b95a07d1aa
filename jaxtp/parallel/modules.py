"""The modules of a model, with all the paths that lead to them, and the parameters of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxtp.parallel.calls import modules_of, original_class
from jaxtp.parallel.stock import Signature, signature
from jaxtp.parallel.swap import CONTAINERS


@dataclass(frozen=True)
class Found:
    """A module of a model."""

    module: nnx.Module
    paths: tuple[str, ...]
    """More than one if it is shared; `""` is the model itself."""

    parameters: dict[str, nnx.Param[Any]]
    """Its own, by their names in it; not those of modules in it."""

    signature: Signature | None
    """Its signature, if it is a stock module."""

    stack: tuple[int, ...]
    """Sizes of the dims that its parameters have in front, where `nnx.vmap` stacked layers."""

    @property
    def path(self) -> str:
        """Returns the first path."""
        return self.paths[0]

    @property
    def kind(self) -> str:
        """Returns the name of its class."""
        return original_class(self.module).__name__


def find_modules(model: nnx.Module) -> list[Found]:
    """Returns every module once, outermost first; containers (`nnx.List`, lists, dicts) only lend their names."""
    nodes = [(path, node) for path, node in modules_of(model).items() if not isinstance(node, nnx.List | nnx.Dict)]
    aliases = [[".".join(map(str, path)) for path in group] for group in nnx.find_duplicates(model)]
    signatures = {path: signature(node) for path, node in nodes}
    stacks = {path: _stack(node, read) for path, node in nodes if (read := signatures[path])}
    return [
        Found(
            node,
            _with_aliases(path, aliases),
            dict(_own_parameters(node)),
            signatures[path],
            stacks[path] if path in stacks else _stack_around(path, stacks),
        )
        for path, node in nodes
    ]


def _with_aliases(path: str, aliases: list[list[str]]) -> tuple[str, ...]:
    """Returns a path, and those that lead to the same place by way of what is shared above it."""
    paths = [path]
    for group in aliases:
        for old in list(paths):
            for start in group:
                if old == start or old.startswith(f"{start}."):
                    paths += [other + old[len(start) :] for other in group]
    return tuple(dict.fromkeys(paths))


def _own_parameters(node: Any, prefix: str = "") -> Iterator[tuple[str, nnx.Param[Any]]]:
    if isinstance(node, list | tuple):
        node = dict(enumerate(node))
    for name, value in (node if isinstance(node, dict) else vars(node)).items():
        if isinstance(value, nnx.Param):
            yield f"{prefix}{name}", value
        elif isinstance(value, CONTAINERS):
            yield from _own_parameters(value, f"{prefix}{name}.")


def _stack(module: nnx.Module, read: Signature) -> tuple[int, ...]:
    """Returns the sizes that its first parameter has in front of the dims that its type knows."""
    for name, letters in read.params.items():
        if (parameter := getattr(module, name)) is not None:
            return tuple(parameter.shape[: len(parameter.shape) - len(letters)])
    return ()


def _stack_around(path: str, stacks: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the stack of a module whose type says nothing: as the stock modules in it are, or those beside it."""
    while path:
        inside = {stack for other, stack in stacks.items() if other == path or other.startswith(f"{path}.")}
        if inside:
            return inside.pop() if len(inside) == 1 else ()
        path = path.rpartition(".")[0]
    return ()
