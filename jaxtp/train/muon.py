"""Distributed Muon: each matrix is orthogonalized whole, on one of the devices that hold its shards.

Newton-Schulz multiplies whole matrices, but parameters are split over fsdp and tp. One all-to-all gives each device
some whole matrices, and a second returns shards of the results; the rest of the update works on shards. If whole
matrices are already divided, such as experts over tp, each device redistributes its own. Replicas along dp repeat the
work: sharing it would send the whole update over dp.

Jordan et al. 2024; scale from Liu et al., arXiv 2502.16982.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax import Array, lax

from jaxtp.analysis.collective import ALL_TO_ALL, Axes, Collective
from jaxtp.analysis.layer_costs import Product
from jaxtp.checkpoint.logical import Arrays, split_dims
from jaxtp.collectives import all_to_all, axis_size, device_view
from jaxtp.layers.parameter import Padding, logical_shape, pad, padding_of, spec_of, unpad
from jaxtp.mesh import TP, current_mesh, mesh_sizes, parts

MUON = "muon"
STEPS = 5
"""Steps of Newton-Schulz."""

RMS = 0.2
"""Root mean square of a full-rank update, as Adam's."""

_NEWTON_SCHULZ = optax.contrib.scale_by_muon(
    ns_steps=STEPS, beta=0.0, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
)
"""On a stack `[n, in, out]`: without momentum, Optax's muon is Newton-Schulz."""


@dataclass(frozen=True)
class Kind:
    """Matrices with the same shape and sharding, possibly transposed."""

    shape: tuple[int, int]
    """Rows and columns without padding."""
    axes: tuple[Axes, Axes]
    """Mesh axes that divide them."""
    over: Axes
    """Mesh axes over which whole matrices are divided."""
    padding: Padding
    dtype: jnp.dtype

    @property
    def scale(self) -> float:
        """Scales an orthogonal matrix to a root mean square of `RMS`."""
        return RMS * math.sqrt(max(self.shape))

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns rows and columns, padded for `tp`."""
        dims = list(self.shape)
        for dim, split in self.padding:
            dims[dim] = split.padded(tp)
        return tuple(dims)


@dataclass(frozen=True)
class Member:
    """The matrices of one parameter `[..., in, out]`, and how many of them have a shard on a device."""

    path: str
    transposed: bool
    count: int


def scale_by_muon(beta: float) -> optax.GradientTransformationExtraArgs:
    """Returns Optax's `scale_by_muon`, same state, on redistributed matrices; also scales the updates.

    Takes arrays by dotted path. `update` accepts their `variables`; without them, arrays are whole.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, variables: Mapping[str, Any] | None = None, **_: Any
    ) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))  # Nesterov's
        here = optax.tree.bias_correction(updates, beta, count)
        momentum = optax.tree.add(optax.tree.scale(beta, ahead), optax.tree.scale(1 - beta, here))
        matrices = {path: m for path, m in momentum.items() if not isinstance(m, optax.MaskedNode)}
        owners = {path: nnx.Param(m) if variables is None else variables[path] for path, m in matrices.items()}
        return {**updates, **_orthogonalised(matrices, owners)}, state._replace(count=count, mu=mu)

    return optax.GradientTransformationExtraArgs(optax.contrib.scale_by_muon(ns_steps=STEPS, beta=beta).init, update)


def kinds(variables: Mapping[str, nnx.Variable[Any]], sizes: Mapping[str, int]) -> dict[Kind, list[Member]]:
    """Groups the matrices of parameters by kind."""
    found: dict[Kind, list[Member]] = {}
    for path, variable in variables.items():
        kind, transposed = _kind(variable)
        count = math.prod(variable.shape[:-2]) // parts(sizes, kind.over)
        found.setdefault(kind, []).append(Member(path, transposed, count))
    return found


def _kind(variable: nnx.Variable[Any]) -> tuple[Kind, bool]:
    # Also returns whether the matrices have to be transposed.
    *others, rows_over, columns_over = split_dims(variable)
    shape, axes, padding = logical_shape(variable)[-2:], (rows_over, columns_over), padding_of(variable)
    transposed = (axes[1], shape[1]) < (axes[0], shape[0])
    if transposed:
        shape, axes, padding = shape[::-1], axes[::-1], tuple((-3 - dim, split) for dim, split in padding)
    (rows, columns), (over_rows, over_columns) = shape, axes
    over = tuple(chain(*others))
    return Kind((rows, columns), (over_rows, over_columns), over, padding, jnp.dtype(variable.dtype)), transposed


def _orthogonalised(matrices: Arrays, variables: Mapping[str, nnx.Variable[Any]]) -> Arrays:
    result: Arrays = {}
    for kind, members in kinds(variables, mesh_sizes(current_mesh())).items():
        specs = [spec_of(variables[member.path]) for member in members]
        view = device_view(partial(_of_kind, kind, members), MUON, in_specs=(specs,), out_specs=specs)
        made = view([matrices[member.path] for member in members])
        result |= {member.path: array for member, array in zip(members, made, strict=True)}
    return result


def _of_kind(kind: Kind, members: Sequence[Member], shards: Sequence[Array]) -> list[Array]:
    # Runs once per device, on its shards.
    # Matrices from all layers and projections together, because their number is rarely a multiple of the devices; zeros
    # fill the rest, so with fewer matrices than devices some devices wait.
    tp = axis_size(TP)
    turned = [shard.mT if member.transposed else shard for member, shard in zip(members, shards, strict=True)]
    stack = jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in turned])  # [n, rows/parts, columns/parts]
    whole = unpad(_deal(stack, kind.axes), kind.padding, tp)
    scaled = pad(kind.scale * _newton_schulz(whole), kind.padding, tp)
    made = jnp.split(_give_back(scaled, kind.axes), list(accumulate(member.count for member in members)))
    results = [part.reshape(x.shape) for part, x in zip(made, turned, strict=False)]  # the rest is padding
    return [x.mT if member.transposed else x for member, x in zip(members, results, strict=True)]


def _newton_schulz(stack: Array) -> Array:
    # `[n, in, out]`, in place and one matrix at a time: a single one can fill a device's multipliers.

    def one(i: Array, stack: Array) -> Array:
        matrix = lax.dynamic_slice_in_dim(stack, i, 1)
        orthogonal, _ = _NEWTON_SCHULZ.update(matrix, _NEWTON_SCHULZ.init(matrix))
        return lax.dynamic_update_slice_in_dim(stack, orthogonal, i, 0)

    return lax.fori_loop(0, len(stack), one, stack)


def _deal(stack: Array, axes: tuple[Axes, Axes]) -> Array:
    # From a shard of each matrix to some whole matrices.
    over_rows, over_columns = (axis_size(*names) for names in axes)
    devices = over_rows * over_columns
    n, rows, columns = stack.shape
    stack = jnp.pad(stack, ((0, -n % devices), (0, 0), (0, 0)))
    if devices > 1:
        stack = lax.optimization_barrier(stack)  # else XLA on CPUs may see operands with different layouts
        # One exchange over both axes sends down to half as much as two in turn.
        stack = all_to_all(stack, *axes[0], *axes[1], split=0, join=0)
    blocks = stack.reshape(over_rows, over_columns, -1, rows, columns)
    return blocks.transpose(2, 0, 3, 1, 4).reshape(-1, over_rows * rows, over_columns * columns)


def _give_back(whole: Array, axes: tuple[Axes, Axes]) -> Array:
    # The inverse of `_deal`.
    over_rows, over_columns = (axis_size(*names) for names in axes)
    n, rows, columns = whole.shape
    blocks = whole.reshape(n, over_rows, rows // over_rows, over_columns, columns // over_columns)
    stack = blocks.transpose(1, 3, 0, 2, 4).reshape(-1, rows // over_rows, columns // over_columns)
    return all_to_all(stack, *axes[0], *axes[1], split=0, join=0) if over_rows * over_columns > 1 else stack


@dataclass(frozen=True)
class Owned:
    """Matrices of one kind that a device orthogonalizes, and the cost."""

    kind: Kind
    count: int
    """Number of matrices, including zeros."""
    devices: int
    """Devices among which they are dealt out."""
    tp: int

    @property
    def bytes(self) -> int:
        """Bytes of the padded whole matrices, moved by each all-to-all."""
        return self.count * math.prod(self.kind.stored(self.tp)) * self.kind.dtype.itemsize

    def moves(self, module: str, sizes: Mapping[str, int]) -> Iterator[tuple[Collective, int]]:
        """Yields the collectives and how often each runs."""
        axes = tuple(axis for axis in sizes if sizes[axis] > 1 and axis in (*self.kind.axes[0], *self.kind.axes[1]))
        if self.devices > 1:
            yield Collective(ALL_TO_ALL, axes, self.devices, self.bytes, module), 2

    def products(self) -> Iterator[Product]:
        """Yields the products of all Newton-Schulz steps: `a = x @ x.T`, `a @ a`, and their sum times x."""
        short, long = sorted(self.kind.shape)
        for shape in ((short, long, short), (short, short, short), (short, short, long)):
            yield Product.of("newton-schulz", shape, self.kind.dtype.itemsize, STEPS * self.count)

    @property
    def working(self) -> int:
        """Bytes of the matrices and one Newton-Schulz step: x, its successor, two `[short, short]`."""
        short, long = sorted(self.kind.shape)
        return self.bytes + 2 * short * (long + short) * self.kind.dtype.itemsize


def owned(variables: Mapping[str, nnx.Variable[Any]], sizes: Mapping[str, int]) -> list[Owned]:
    """Returns the matrices that each device orthogonalizes, by kind."""
    found = []
    for kind, members in kinds(variables, sizes).items():
        devices = parts(sizes, (*kind.axes[0], *kind.axes[1]))
        count = -(-sum(member.count for member in members) // devices)
        found.append(Owned(kind, count, devices, sizes[TP]))
    return found
