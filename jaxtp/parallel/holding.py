"""How a compiled step holds the arrays of its state: declared against realised shardings."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.sharding import Mesh, PartitionSpec, Sharding


@dataclass(frozen=True)
class Holding:
    """How a compiled step holds one array of its state."""

    name: str
    """Its dotted path."""

    shape: tuple[int, ...]
    """Of the whole array."""

    shard: tuple[int, ...]
    """Of the part on one device."""

    dtype: str
    """Of its elements."""

    itemsize: int
    """Bytes of an element."""

    declared: PartitionSpec | None
    """The spec that it declares, or None if it declares none."""

    replicated_over: tuple[str, ...]
    """The mesh axes, of more than one device, along which the compiled step holds copies."""

    @property
    def bytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes_per_device(self) -> int:
        """Of the part on one device."""
        return math.prod(self.shard) * self.itemsize

    @property
    def unasked(self) -> tuple[str, ...]:
        """The axes over which it is replicated although its spec names them, or although it declares none."""
        return tuple(a for a in self.replicated_over if self.declared is None or a in _axes(self.declared))

    @property
    def why(self) -> str:
        """Where its split comes from."""
        if self.declared is None:
            return "declares no spec"
        if self.unasked:
            return f"declares {self.declared}, which the compiler did not keep"
        return f"declares {self.declared}"

    def matrices(self) -> set[tuple[int, ...]]:
        """The shapes in which it may travel: each dim whole or as it is held; of stacked ones, also a single layer."""
        dims = [sorted({whole, part}) for whole, part in zip(self.shape, self.shard, strict=True)]
        single = [dims[1:]] if len(dims) > 2 else []
        return {shape for choices in [dims, *single] if len(choices) > 1 for shape in itertools.product(*choices)}


def read_holdings(compiled: Any, state: nnx.State, mesh: Mesh) -> tuple[Holding, ...]:
    """How a compiled step holds its state.

    Args:
      compiled: a `jax.stages.Compiled` of `state, ... -> state` or `-> (state, ...)`; of a step that returns no
        state, the one that it takes is read.
      state: its first argument, real or abstract.
      mesh: the mesh that it runs on.
    """
    realised = dict(nnx.to_flat_state(_state_shardings(compiled, state)))
    holdings = []
    for path, variable in nnx.to_flat_state(state):
        sharding, spec = realised[path].get_value(), variable.get_metadata().get("out_sharding")
        holding = Holding(
            name=".".join(map(str, path)),
            shape=tuple(variable.shape),
            shard=tuple(sharding.shard_shape(variable.shape)),
            dtype=str(variable.dtype),
            itemsize=variable.dtype.itemsize,
            declared=None if spec is None else PartitionSpec(*spec),
            replicated_over=tuple(_replicated_over(sharding, variable.shape, mesh)),
        )
        holdings.append(holding)
    return tuple(holdings)


def _state_shardings(compiled: Any, state: nnx.State) -> nnx.State:
    returned = compiled.output_shardings
    for candidate in (returned, returned[0] if isinstance(returned, tuple) else None):
        if isinstance(candidate, nnx.State) and _paths(candidate) == _paths(state):
            return candidate
    taken: nnx.State = compiled.input_shardings[0][0]
    return taken


def _replicated_over(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[str]:
    """The axes along which the second device holds what the first one does."""
    held = sharding.devices_indices_map(tuple(shape))
    origin = (0,) * mesh.devices.ndim
    for dim, (axis, size) in enumerate(mesh.shape.items()):
        neighbour = tuple(int(i == dim) for i in range(mesh.devices.ndim))
        if size > 1 and held[mesh.devices[origin]] == held[mesh.devices[neighbour]]:
            yield axis


def _paths(state: nnx.State) -> list[tuple[Any, ...]]:
    return [path for path, _ in nnx.to_flat_state(state)]


def _axes(spec: PartitionSpec) -> set[str]:
    return {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
