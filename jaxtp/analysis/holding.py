"""Shardings of a compiled step's state: declared against realized."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec, Sharding
from jax.stages import Compiled

from jaxtp.mesh import axes_of


@dataclass(frozen=True)
class Holding:
    """An array of the state, as a compiled step holds it."""

    name: str
    """Its dotted path."""
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    """Shape of the part on one device."""
    dtype: str
    itemsize: int
    declared: PartitionSpec | None
    replicated_over: tuple[str, ...]
    """The mesh axes, of more than one device, along which the compiled step holds copies."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one shard."""
        return math.prod(self.shard) * self.itemsize

    @property
    def unasked(self) -> tuple[str, ...]:
        """Replicated axes that its spec names; all replicated axes if it declares no spec."""
        named = {axis for entry in self.declared or () for axis in axes_of(entry)}
        return tuple(axis for axis in self.replicated_over if self.declared is None or axis in named)

    @property
    def declaration(self) -> str:
        """The declared spec, in words."""
        if self.declared is None:
            return "no spec declared"
        if self.unasked:
            return f"{self.declared}, which the compiler did not keep"
        return str(self.declared)

    def matrices(self) -> set[tuple[int, ...]]:
        """Returns the shapes in which it may be sent: each dim whole or sharded; also one stacked layer."""
        dims = [sorted({whole, part}) for whole, part in zip(self.shape, self.shard, strict=True)]
        single = [dims[1:]] if len(dims) > 2 else []
        return {shape for choices in [dims, *single] if len(choices) > 1 for shape in itertools.product(*choices)}


def read_holdings(compiled: Compiled, state: Any, mesh: Mesh) -> tuple[Holding, ...]:
    """Returns how a compiled step holds its state.

    Args:
      compiled: of `state, ... -> state` or `-> (state, ...)`; if it returns no state, reads the input's sharding.
      state: pytree of real or abstract arrays; its `nnx.Variable`s can declare a spec.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variable)
    shardings = jax.tree.leaves(_state_shardings(compiled, state))
    return tuple(
        _holding(jax.tree_util.keystr(path, simple=True, separator="."), leaf, sharding, mesh)
        for (path, leaf), sharding in zip(leaves, shardings, strict=True)
    )


def _holding(name: str, leaf: Any, sharding: Sharding, mesh: Mesh) -> Holding:
    spec = leaf.get_metadata().get("out_sharding") if _is_variable(leaf) else None
    return Holding(
        name=name,
        shape=tuple(leaf.shape),
        shard=tuple(sharding.shard_shape(leaf.shape)),
        dtype=str(leaf.dtype),
        itemsize=leaf.dtype.itemsize,
        declared=None if spec is None else PartitionSpec(*spec),
        replicated_over=tuple(_replicated_over(sharding, leaf.shape, mesh)),
    )


def _state_shardings(compiled: Compiled, state: Any) -> Any:
    returned = compiled.output_shardings
    for candidate in (returned, returned[0] if isinstance(returned, tuple) and returned else None):
        if _paths(candidate) == _paths(state):
            return candidate
    return compiled.input_shardings[0][0]


def _replicated_over(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[str]:
    # The axes along which the first two devices hold the same part.
    held = sharding.devices_indices_map(tuple(shape))
    origin = (0,) * mesh.devices.ndim
    for dim, (axis, size) in enumerate(mesh.shape.items()):
        neighbour = tuple(int(i == dim) for i in range(mesh.devices.ndim))
        if size > 1 and held[mesh.devices[origin]] == held[mesh.devices[neighbour]]:
            yield axis


def _paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)]


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
