"""Distributed Muon: each matrix is orthogonalized on one of the devices that hold its shards.

Newton-Schulz multiplies whole matrices, but parameters are split over fsdp and tp. One all-to-all
gives each device some whole matrices, and a second one returns shards of the results. All other
parts of the update work on shards. If an axis splits the stack of matrices, as tp splits the
experts, each device exchanges only its own matrices. Replicas along dp repeat the work, because
sharing it would send the whole update over dp.

Jordan et al. 2024; scale from Liu et al., arXiv 2502.16982.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from jaxtp.analysis.step_costs import StepCosts
from jaxtp.checkpoint.logical import Arrays, padded_shape, split_dims
from jaxtp.collectives import all_to_all, axis_size, device_view
from jaxtp.layers.parameter import Padding, Variable, logical_shape, pad, padding_of, spec_of, unpad
from jaxtp.mesh import TP, Sizes, current_mesh, mesh_sizes, parts
from jaxtp.train.state import OPTIMIZER_SCOPE

MUON = "muon"
STEPS = 5  # Steps of Newton-Schulz
RMS = 0.2  # Root mean square of a full-rank update, as for Adam

_NEWTON_SCHULZ = optax.contrib.scale_by_muon(
    ns_steps=STEPS,
    beta=0.0,
    nesterov=False,
    weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
)
"""On a stack `[n, in, out]`: without momentum, Optax's muon is Newton-Schulz."""


@dataclass(frozen=True)
class Kind:
    """Matrices with the same shape and sharding, possibly transposed."""

    # Rows and columns without padding
    shape: tuple[int, int]
    # Mesh axes that split rows and columns
    axes: tuple[Axes, Axes]
    # Mesh axes that split the stack of matrices
    stack_axes: Axes
    padding: Padding
    dtype: jnp.dtype


@dataclass(frozen=True)
class Member:
    """The matrices of one parameter `[..., in, out]`."""

    path: str
    transposed: bool
    # Number of matrices that have a shard on a device
    count: int


def scale_by_muon(beta: float) -> optax.GradientTransformationExtraArgs:
    """Returns Optax's `scale_by_muon` for sharded matrices, with the same state.

    It also scales updates to `RMS`. Arrays are by dotted path. `update` reads specs and padding
    from `variables`; without variables, arrays are not sharded.
    """

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        variables: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        # Nesterov's momentum
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        current = optax.tree.bias_correction(updates, beta, count)
        momentum = optax.tree.add(
            optax.tree.scale(beta, ahead), optax.tree.scale(1 - beta, current)
        )
        momentum = optax.tree.cast_like(momentum, updates)
        matrices = {path: m for path, m in momentum.items() if not isinstance(m, optax.MaskedNode)}
        owners = {
            path: nnx.Param(matrix) if variables is None else variables[path]
            for path, matrix in matrices.items()
        }
        return {**updates, **_orthogonalised(matrices, owners)}, state._replace(count=count, mu=mu)

    return optax.GradientTransformationExtraArgs(
        optax.contrib.scale_by_muon(ns_steps=STEPS, beta=beta).init, update
    )


def kinds(variables: Mapping[str, Variable], sizes: Sizes) -> dict[Kind, list[Member]]:
    """Groups the matrices of parameters by kind."""
    groups = defaultdict[Kind, list[Member]](list)
    for path, variable in variables.items():
        kind, transposed = _kind(variable)
        count = math.prod(variable.shape[:-2]) // parts(sizes, kind.stack_axes)
        groups[kind].append(Member(path, transposed, count))
    return groups


def _kind(variable: Variable) -> tuple[Kind, bool]:
    # Also returns whether the matrices have to be transposed.
    *stack_axes, row_axes, column_axes = split_dims(variable)
    *_, rows, columns = logical_shape(variable)
    padding = padding_of(variable)
    transposed = (column_axes, columns) < (row_axes, rows)
    if transposed:
        rows, columns = columns, rows
        row_axes, column_axes = column_axes, row_axes
        padding = tuple((-3 - dim, split) for dim, split in padding)
    axes = (row_axes, column_axes)
    dtype = jnp.dtype(variable.dtype)
    return Kind((rows, columns), axes, tuple(chain(*stack_axes)), padding, dtype), transposed


def _orthogonalised(matrices: Arrays, variables: Mapping[str, Variable]) -> Arrays:
    result: Arrays = {}
    for kind, members in kinds(variables, mesh_sizes(current_mesh())).items():
        specs = [spec_of(variables[member.path]) for member in members]
        view = device_view(
            partial(_orthogonalised_kind, kind, members), MUON, in_specs=(specs,), out_specs=specs
        )
        arrays = view([matrices[member.path] for member in members])
        result |= {member.path: array for member, array in zip(members, arrays, strict=True)}
    return result


def _orthogonalised_kind(
    kind: Kind, members: Sequence[Member], shards: Sequence[Array]
) -> list[Array]:
    # Runs once per device, on its shards. Makes one stack of the matrices from all layers and
    # projections, because the number of layers is rarely a multiple of the number of devices. Zero
    # matrices fill the stack, so with fewer matrices than devices some devices wait.
    tp = axis_size(TP)
    pairs = zip(members, shards, strict=True)
    transposed = [shard.mT if member.transposed else shard for member, shard in pairs]
    # The stack is [n, rows/parts, columns/parts].
    stack = jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in transposed])
    whole = unpad(_to_whole(stack, kind.axes), kind.padding, tp)
    # An orthogonal matrix has a root mean square of 1 / sqrt(max(shape)).
    scale = RMS * math.sqrt(max(kind.shape))
    scaled = pad(scale * _newton_schulz(whole), kind.padding, tp)
    ends = list(accumulate(member.count for member in members))
    # The last of these parts is the padding.
    *results, _ = jnp.split(_to_shards(scaled, kind.axes), ends)
    updates = []
    for member, x, result in zip(members, transposed, results, strict=True):
        update = result.reshape(x.shape)
        updates.append(update.mT if member.transposed else update)
    return updates


def _newton_schulz(stack: Array) -> Array:
    # Works on a stack `[n, in, out]` in place, one matrix at a time, because a single matrix can
    # keep a device busy.
    def orthogonalise(i: Array, stack: Array) -> Array:
        matrix = lax.dynamic_slice_in_dim(stack, i, 1)
        orthogonal, _ = _NEWTON_SCHULZ.update(matrix, _NEWTON_SCHULZ.init(matrix))
        return lax.dynamic_update_slice_in_dim(stack, orthogonal, i, 0)

    return lax.fori_loop(0, len(stack), orthogonalise, stack)


def _to_whole(stack: Array, axes: tuple[Axes, Axes]) -> Array:
    # Exchanges a shard of each matrix for some whole matrices.
    over_rows = axis_size(*axes[0])
    over_columns = axis_size(*axes[1])
    devices = over_rows * over_columns
    n, rows, columns = stack.shape
    stack = jnp.pad(stack, ((0, -n % devices), (0, 0), (0, 0)))
    if devices > 1:
        # Without this barrier, XLA on CPUs may see operands with different layouts.
        stack = lax.optimization_barrier(stack)
        # One exchange over both axes sends as little as half of the bytes of two exchanges.
        stack = all_to_all(stack, *axes[0], *axes[1], split=0, join=0)
    blocks = stack.reshape(over_rows, over_columns, -1, rows, columns)
    return blocks.transpose(2, 0, 3, 1, 4).reshape(-1, over_rows * rows, over_columns * columns)


def _to_shards(whole: Array, axes: tuple[Axes, Axes]) -> Array:
    # The inverse of `_to_whole`.
    over_rows = axis_size(*axes[0])
    over_columns = axis_size(*axes[1])
    n, rows, columns = whole.shape
    rows //= over_rows
    columns //= over_columns
    blocks = whole.reshape(n, over_rows, rows, over_columns, columns)
    stack = blocks.transpose(1, 3, 0, 2, 4).reshape(-1, rows, columns)
    if over_rows * over_columns > 1:
        stack = all_to_all(stack, *axes[0], *axes[1], split=0, join=0)
    return stack


def with_muon(costs: StepCosts, variables: Mapping[str, Variable], sizes: Sizes) -> StepCosts:
    """Adds the costs of the update of `variables` on one device, with matrices of zeros."""
    traffic = Counter(costs.traffic)
    products = []
    working = 0
    for kind, members in kinds(variables, sizes).items():
        axes = tuple(axis for axis in sizes if sizes[axis] > 1 and axis in chain(*kind.axes))
        devices = parts(sizes, axes)
        itemsize = kind.dtype.itemsize
        count = -(-sum(member.count for member in members) // devices)
        dims = padded_shape(kind.shape, kind.padding, sizes[TP])
        whole = count * math.prod(dims) * itemsize
        if devices > 1:
            traffic[Collective(ALL_TO_ALL, axes, devices, whole, f"{OPTIMIZER_SCOPE}/{MUON}")] += 2
        short, long = sorted(kind.shape)
        # The products are x x^T, its square, and a polynomial of both times x.
        for shape in ((short, long, short), (short, short, short), (short, short, long)):
            products.append(Product.of("optimizer's newton-schulz", shape, itemsize, STEPS * count))
        # The memory is x, its successor, and two [short, short].
        working = max(working, whole + 2 * short * (long + short) * itemsize)
    return replace(costs, traffic=traffic, update=tuple(products), owned=working)
