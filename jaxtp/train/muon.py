"""Muon by ownership: every matrix is orthogonalised whole, on one of the devices that hold its parts.

Newton-Schulz multiplies whole matrices, and those of a model are split over fsdp and tp. The devices among which
matrices of one shape are split deal them out: an all-to-all brings each device its share of them whole, and another one
brings back the parts of what it has made of them. Momentum, weight decay and the step itself stay on the parts. Where
whole matrices are divided already, as experts over tp, each device deals out those that it has.

Devices that hold copies, such as those along dp, do the same work. A share is rounded up, with matrices of zeros: of
fewer matrices than devices each has one or none, and those with none wait: so it is where fsdp x tp is more than the
matrices of a shape. Sharing the work over dp as well would send the whole update over dp. Layers and projections of one
shape are pooled, because their number is rarely a multiple of the number of devices. One all-to-all over both axes
sends less than one after the other, down to half. Padding is cut off once matrices are whole.

Jordan et al. 2024; the scale is that of Liu et al., arXiv 2502.16982.
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

from jaxtp.checkpoint.logical import Arrays, split_dims
from jaxtp.collectives import all_to_all, axis_size, device_view
from jaxtp.communication import ALL_TO_ALL, Axes, Collective
from jaxtp.layers.costs import Product
from jaxtp.layers.parameter import Padding, cut, logical_shape, pad, padding_of, spec_of
from jaxtp.mesh import TP, current_mesh, mesh_sizes, parts

MUON = "muon"
STEPS = 5
"""Steps of Newton-Schulz."""

RMS = 0.2
"""Root mean square of an update of full rank, which is that of Adam's."""

_NEWTON_SCHULZ = optax.contrib.scale_by_muon(
    ns_steps=STEPS, beta=0.0, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
)
"""Optax's own on a stack `[n, in, out]`: without momentum, muon is Newton-Schulz alone."""


@dataclass(frozen=True)
class Kind:
    """Matrices of one shape, split alike: they are dealt out together. Some of them are transposed to be so."""

    shape: tuple[int, int]
    """Rows and columns, without padding."""

    axes: tuple[Axes, Axes]
    """Mesh axes that divide them."""

    over: Axes
    """Mesh axes over which whole matrices are divided: a device has others along these, and deals them out apart."""

    padding: Padding

    dtype: jnp.dtype

    @property
    def scale(self) -> float:
        """Factor of an orthogonal matrix whose root mean square is to be `RMS`."""
        return RMS * math.sqrt(max(self.shape))

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns rows and columns over tp devices, padding included."""
        dims = list(self.shape)
        for dim, split in self.padding:
            dims[dim] = split.padded(tp)
        return tuple(dims)


@dataclass(frozen=True)
class Member:
    """The matrices of one parameter, `[..., in, out]`, in a `Kind`."""

    path: str
    transposed: bool
    count: int
    """Number of matrices that a device has a part of."""


def scale_by_muon(beta: float) -> optax.GradientTransformationExtraArgs:
    """Returns Optax's `scale_by_muon` with its state, in which the matrices are dealt out to be orthogonalised.

    Its updates are scaled. It takes arrays by dotted path, padded and split as the variables are that its `update` may
    be given by the same paths; without variables all arrays are whole.
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
    """Returns the matrices of parameters by kind."""
    found: dict[Kind, list[Member]] = {}
    for path, variable in variables.items():
        kind, transposed = _kind(variable)
        count = math.prod(variable.shape[:-2]) // parts(sizes, kind.over)
        found.setdefault(kind, []).append(Member(path, transposed, count))
    return found


def _kind(variable: nnx.Variable[Any]) -> tuple[Kind, bool]:
    """Returns the kind of a parameter's matrices, and whether they are transposed in it."""
    *others, rows_over, columns_over = split_dims(variable)
    shape, axes, padding = logical_shape(variable)[-2:], (rows_over, columns_over), padding_of(variable)
    transposed = (axes[1], shape[1]) < (axes[0], shape[0])
    if transposed:
        shape, axes, padding = shape[::-1], axes[::-1], tuple((-3 - dim, split) for dim, split in padding)
    (rows, columns), (over_rows, over_columns) = shape, axes
    over = tuple(chain(*others))
    return Kind((rows, columns), (over_rows, over_columns), over, padding, jnp.dtype(variable.dtype)), transposed


def _orthogonalised(matrices: Arrays, variables: Mapping[str, nnx.Variable[Any]]) -> Arrays:
    """Returns the scaled orthogonalised matrices of each array `[..., in, out]`."""
    result: Arrays = {}
    for kind, members in kinds(variables, mesh_sizes(current_mesh())).items():
        specs = [spec_of(variables[member.path]) for member in members]
        view = device_view(partial(_of_kind, kind, members), MUON, in_specs=(specs,), out_specs=specs)
        made = view([matrices[member.path] for member in members])
        result |= {member.path: array for member, array in zip(members, made, strict=True)}
    return result


def _of_kind(kind: Kind, members: Sequence[Member], shards: Sequence[Array]) -> list[Array]:
    """Returns what `_orthogonalised` does of the members of one kind, on one device of those that deal them out."""
    tp = axis_size(TP)
    turned = [shard.mT if member.transposed else shard for member, shard in zip(members, shards, strict=True)]
    stack = jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in turned])  # [n, rows/parts, columns/parts]
    whole = cut(_deal(stack, kind.axes), kind.padding, tp)
    scaled = pad(kind.scale * _newton_schulz(whole), kind.padding, tp)
    made = jnp.split(_give_back(scaled, kind.axes), list(accumulate(member.count for member in members)))
    results = [part.reshape(x.shape) for part, x in zip(made, turned, strict=False)]  # what is left is padding
    return [x.mT if member.transposed else x for member, x in zip(members, results, strict=True)]


def _newton_schulz(stack: Array) -> Array:
    """Returns matrices `[n, in, out]` orthogonalised in their place, one after the other: each fills a device."""

    def one(i: Array, stack: Array) -> Array:
        matrix = lax.dynamic_slice_in_dim(stack, i, 1)
        orthogonal, _ = _NEWTON_SCHULZ.update(matrix, _NEWTON_SCHULZ.init(matrix))
        return lax.dynamic_update_slice_in_dim(stack, orthogonal, i, 0)

    return lax.fori_loop(0, len(stack), one, stack)


def _deal(stack: Array, axes: tuple[Axes, Axes]) -> Array:
    """Returns this device's share of matrices, whole, from its part of each of them."""
    over_rows, over_columns = (axis_size(*names) for names in axes)
    devices = over_rows * over_columns
    n, rows, columns = stack.shape
    stack = jnp.pad(stack, ((0, -n % devices), (0, 0), (0, 0)))
    if devices > 1:
        stack = lax.optimization_barrier(stack)  # else XLA for CPUs may take its parts for operands of several layouts
        stack = all_to_all(stack, *axes[0], *axes[1], split=0, join=0)
    blocks = stack.reshape(over_rows, over_columns, -1, rows, columns)
    return blocks.transpose(2, 0, 3, 1, 4).reshape(-1, over_rows * rows, over_columns * columns)


def _give_back(whole: Array, axes: tuple[Axes, Axes]) -> Array:
    """Returns this device's part of each matrix, from its share of them."""
    over_rows, over_columns = (axis_size(*names) for names in axes)
    n, rows, columns = whole.shape
    blocks = whole.reshape(n, over_rows, rows // over_rows, over_columns, columns // over_columns)
    stack = blocks.transpose(1, 3, 0, 2, 4).reshape(-1, rows // over_rows, columns // over_columns)
    return all_to_all(stack, *axes[0], *axes[1], split=0, join=0) if over_rows * over_columns > 1 else stack


@dataclass(frozen=True)
class Owned:
    """The matrices of one kind that a device orthogonalises: what that moves, computes and holds."""

    kind: Kind
    count: int
    """Number of matrices, those of zeros included."""
    devices: int
    """Devices among which they are dealt out."""
    tp: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole matrices, with their padding: as much is sent from all devices to all."""
        return self.count * math.prod(self.kind.stored(self.tp)) * self.kind.dtype.itemsize

    def moves(self, module: str, sizes: Mapping[str, int]) -> Iterator[tuple[Collective, int]]:
        """Yields the collectives, to the owners and back."""
        axes = tuple(axis for axis in sizes if sizes[axis] > 1 and axis in (*self.kind.axes[0], *self.kind.axes[1]))
        if self.devices > 1:
            yield Collective(ALL_TO_ALL, axes, self.devices, self.bytes, module), 2

    def products(self) -> Iterator[Product]:
        """Yields the products of all steps: `a = x @ x.T`, `a @ a`, and their sum times x."""
        short, long = sorted(self.kind.shape)
        for shape in ((short, long, short), (short, short, short), (short, short, long)):
            yield Product.of("newton-schulz", shape, self.kind.dtype.itemsize, STEPS * self.count)

    @property
    def working(self) -> int:
        """Returns the bytes of the matrices, and of a step of Newton-Schulz on one of them: x, its successor, and two
        matrices of its shorter side."""
        short, long = sorted(self.kind.shape)
        return self.bytes + 2 * short * (long + short) * self.kind.dtype.itemsize


def owned(variables: Mapping[str, nnx.Variable[Any]], sizes: Mapping[str, int]) -> list[Owned]:
    """Returns what each device of a mesh orthogonalises of the matrices of parameters, by kind."""
    found = []
    for kind, members in kinds(variables, sizes).items():
        devices = parts(sizes, (*kind.axes[0], *kind.axes[1]))
        count = -(-sum(member.count for member in members) // devices)
        found.append(Owned(kind, count, devices, sizes[TP]))
    return found
