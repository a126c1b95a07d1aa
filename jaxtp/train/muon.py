"""Distributed Muon.

Each matrix is orthogonalized whole, on one of the devices that hold its shards.

Newton-Schulz multiplies whole matrices, but parameters are split over fsdp and tp. One all-to-all
gives each device some whole matrices, and a second returns shards of the results; the rest of the
update works on shards. If an axis splits the stack of matrices, such as tp the experts, each device
exchanges only its own. Replicas along dp repeat the work: sharing it would send the whole update
over dp.

Jordan et al. 2024; scale from Liu et al., arXiv 2502.16982.
"""

import math
from collections import Counter
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
from jaxtp.checkpoint.logical import Arrays, split_dims
from jaxtp.collectives import all_to_all, axis_size, device_view
from jaxtp.layers.parameter import Padding, Variable, logical_shape, pad, padding_of, spec_of, unpad
from jaxtp.mesh import TP, current_mesh, mesh_sizes, parts
from jaxtp.train.state import OPTIMIZER_SCOPE

MUON = "muon"
STEPS = 5  # Steps of Newton-Schulz
RMS = 0.2  # Root mean square of a full-rank update, as Adam's

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

    shape: tuple[int, int]  # Rows and columns without padding
    axes: tuple[Axes, Axes]  # Mesh axes that split rows and columns
    over: Axes  # Mesh axes that split the stack of matrices
    padding: Padding
    dtype: jnp.dtype


@dataclass(frozen=True)
class Member:
    """The matrices of one parameter `[..., in, out]`, and how many have a shard on a device."""

    path: str
    transposed: bool
    count: int


def scale_by_muon(beta: float) -> optax.GradientTransformationExtraArgs:
    """Returns Optax's `scale_by_muon` for sharded matrices.

    The state is the same. It also scales updates to `RMS`.

    Takes arrays by dotted path. `update` reads specs and padding from `variables`; without them,
    arrays are unsharded.
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
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))  # Nesterov's
        here = optax.tree.bias_correction(updates, beta, count)
        momentum = optax.tree.add(optax.tree.scale(beta, ahead), optax.tree.scale(1 - beta, here))
        momentum = optax.tree.cast_like(momentum, updates)
        matrices = {path: m for path, m in momentum.items() if not isinstance(m, optax.MaskedNode)}
        owners = {
            path: nnx.Param(m) if variables is None else variables[path]
            for path, m in matrices.items()
        }
        return {**updates, **_orthogonalised(matrices, owners)}, state._replace(count=count, mu=mu)

    return optax.GradientTransformationExtraArgs(
        optax.contrib.scale_by_muon(ns_steps=STEPS, beta=beta).init, update
    )


def kinds(variables: Mapping[str, Variable], sizes: Mapping[str, int]) -> dict[Kind, list[Member]]:
    """Groups the matrices of parameters by kind."""
    found: dict[Kind, list[Member]] = {}
    for path, variable in variables.items():
        kind, transposed = _kind(variable)
        count = math.prod(variable.shape[:-2]) // parts(sizes, kind.over)
        found.setdefault(kind, []).append(Member(path, transposed, count))
    return found


def _kind(variable: Variable) -> tuple[Kind, bool]:
    # Also returns whether the matrices have to be transposed.
    *others, rows_over, columns_over = split_dims(variable)
    shape = logical_shape(variable)[-2:]
    axes = (rows_over, columns_over)
    padding = padding_of(variable)
    transposed = (axes[1], shape[1]) < (axes[0], shape[0])
    if transposed:
        shape = shape[::-1]
        axes = axes[::-1]
        padding = tuple((-3 - dim, split) for dim, split in padding)
    rows, columns = shape
    over_rows, over_columns = axes
    over = tuple(chain(*others))
    return Kind(
        (rows, columns), (over_rows, over_columns), over, padding, jnp.dtype(variable.dtype)
    ), transposed


def _orthogonalised(matrices: Arrays, variables: Mapping[str, Variable]) -> Arrays:
    result: Arrays = {}
    for kind, members in kinds(variables, mesh_sizes(current_mesh())).items():
        specs = [spec_of(variables[member.path]) for member in members]
        view = device_view(
            partial(_orthogonalised_kind, kind, members), MUON, in_specs=(specs,), out_specs=specs
        )
        made = view([matrices[member.path] for member in members])
        result |= {member.path: array for member, array in zip(members, made, strict=True)}
    return result


def _orthogonalised_kind(
    kind: Kind, members: Sequence[Member], shards: Sequence[Array]
) -> list[Array]:
    # Runs once per device, on its shards.
    # Matrices from all layers and projections together, because their number is rarely a multiple
    # of the devices; zeros fill the rest, so with fewer matrices than devices some devices wait.
    tp = axis_size(TP)
    turned = [
        shard.mT if member.transposed else shard
        for member, shard in zip(members, shards, strict=True)
    ]
    # The stack is [n, rows/parts, columns/parts].
    stack = jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in turned])
    whole = unpad(_to_whole(stack, kind.axes), kind.padding, tp)
    # An orthogonal matrix has a root mean square of 1 / sqrt(max(shape)).
    scale = RMS * math.sqrt(max(kind.shape))
    scaled = pad(scale * _newton_schulz(whole), kind.padding, tp)
    made = jnp.split(
        _to_shards(scaled, kind.axes), list(accumulate(member.count for member in members))
    )
    # The rest of the results is padding.
    results = [part.reshape(x.shape) for part, x in zip(made, turned, strict=False)]
    return [x.mT if member.transposed else x for member, x in zip(members, results, strict=True)]


def _newton_schulz(stack: Array) -> Array:
    # `[n, in, out]`, in place and one matrix at a time: a single one can fill a device's
    # multipliers.

    def one(i: Array, stack: Array) -> Array:
        matrix = lax.dynamic_slice_in_dim(stack, i, 1)
        orthogonal, _ = _NEWTON_SCHULZ.update(matrix, _NEWTON_SCHULZ.init(matrix))
        return lax.dynamic_update_slice_in_dim(stack, orthogonal, i, 0)

    return lax.fori_loop(0, len(stack), one, stack)


def _to_whole(stack: Array, axes: tuple[Axes, Axes]) -> Array:
    # From a shard of each matrix to some whole matrices.
    over_rows, over_columns = (axis_size(*names) for names in axes)
    devices = over_rows * over_columns
    n, rows, columns = stack.shape
    stack = jnp.pad(stack, ((0, -n % devices), (0, 0), (0, 0)))
    if devices > 1:
        # Otherwise XLA on CPUs may see operands with different layouts.
        stack = lax.optimization_barrier(stack)
        # One exchange over both axes sends down to half as much as two in turn.
        stack = all_to_all(stack, *axes[0], *axes[1], split=0, join=0)
    blocks = stack.reshape(over_rows, over_columns, -1, rows, columns)
    return blocks.transpose(2, 0, 3, 1, 4).reshape(-1, over_rows * rows, over_columns * columns)


def _to_shards(whole: Array, axes: tuple[Axes, Axes]) -> Array:
    # The inverse of `_to_whole`.
    over_rows, over_columns = (axis_size(*names) for names in axes)
    n, rows, columns = whole.shape
    blocks = whole.reshape(n, over_rows, rows // over_rows, over_columns, columns // over_columns)
    stack = blocks.transpose(1, 3, 0, 2, 4).reshape(-1, rows // over_rows, columns // over_columns)
    return (
        all_to_all(stack, *axes[0], *axes[1], split=0, join=0)
        if over_rows * over_columns > 1
        else stack
    )


def with_muon(
    costs: StepCosts, variables: Mapping[str, Variable], sizes: Mapping[str, int]
) -> StepCosts:
    """Adds the costs of the update of `variables` on one device.

    It also orthogonalizes zeros.
    """
    traffic = Counter(costs.traffic)
    products = []
    working = 0
    for kind, members in kinds(variables, sizes).items():
        axes = tuple(axis for axis in sizes if sizes[axis] > 1 and axis in chain(*kind.axes))
        devices = parts(sizes, axes)
        itemsize = kind.dtype.itemsize
        count = -(-sum(member.count for member in members) // devices)
        dims = list(kind.shape)
        for dim, split in kind.padding:
            dims[dim] = split.padded(sizes[TP])
        whole = count * math.prod(dims) * itemsize
        if devices > 1:
            traffic[Collective(ALL_TO_ALL, axes, devices, whole, f"{OPTIMIZER_SCOPE}/{MUON}")] += 2
        short, long = sorted(kind.shape)
        # The products are x x^T, its square, and that times x.
        for shape in ((short, long, short), (short, short, short), (short, short, long)):
            products.append(Product.of("optimizer's newton-schulz", shape, itemsize, STEPS * count))
        # The memory is x, its successor, and two [short, short].
        working = max(working, whole + 2 * short * (long + short) * itemsize)
    return replace(costs, traffic=traffic, update=tuple(products), owned=working)
