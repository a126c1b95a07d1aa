"""Costs of a layer without formulas, from a trace of its forward and backward pass.

Collectives are exact, and products that XLA computes. The memory estimate assumes residuals divided over all devices. A
trace takes about a second, a formula a millisecond (`layer_costs.py`).
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh

from jaxtp.analysis.census import count_collectives, equations
from jaxtp.analysis.collective import Collective
from jaxtp.analysis.costs import (
    CachedBytes,
    CollectiveCost,
    Cost,
    ElementwiseTraffic,
    Product,
    SavedActivations,
    Weight,
    Workload,
    Workspace,
    itemsize,
)
from jaxtp.layers import remat
from jaxtp.layers.branch import Branch
from jaxtp.layers.context import Sequences
from jaxtp.layers.parameter import PARAMETERS, Precision, logical_shape, mark_unreduced, padding_of, spec_of
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import STORAGE, TP, abstract_mesh, axes_of, batch_parts


def traced_costs(branch: Branch, work: Workload, features: int, precision: Precision, *, read: bool) -> Iterator[Cost]:
    """Yields the costs of a branch.

    Args:
      branch: has abstract arrays, made for the workload's tp.
      features: D.
      read: as in `branch_costs`.
    """
    yield from _weights(branch, precision)
    sizes = dict(work.sizes)
    rows = work.rows * batch_parts(sizes)
    x = jax.ShapeDtypeStruct((rows, work.length, features), precision.compute)
    graph, *states = nnx.split(branch, nnx.Param, ...)
    trained, others = states
    sequences = Sequences(context=work.context, zigzag=work.zigzag)

    def forward(policy: RematPolicy) -> Any:
        def run(x: Array, trained: nnx.State, others: nnx.State) -> Array:
            y = nnx.merge(graph, trained, others)(x, sequences)
            return y * y if read else y

        # Offloading needs a device with pinned memory; it computes what full does.
        return jax.checkpoint(run, policy=remat.policy("full" if policy == "offload" else policy))

    def step(x: Array, trained: nnx.State, others: nnx.State) -> Any:
        run = forward(work.remat)
        if not work.training:
            return run(x, trained, others)
        if work.accumulation > 1:  # copies are summed after the last micro-batch, which `Weight.collectives` counts
            trained = mark_unreduced(trained)
        y, backward = jax.vjp(lambda x, trained: run(x, trained, others), x, trained)
        return y, backward(y)

    def residuals(policy: RematPolicy) -> float:
        def save(x: Array, trained: nnx.State, others: nnx.State) -> list[Array]:
            run = forward(policy)
            return jax.tree.leaves(jax.vjp(lambda x, trained: run(x, trained, others), x, trained)[1])

        jaxpr = jax.make_jaxpr(save)(x, trained, others).jaxpr
        saved: dict[int, Any] = {id(v): v.aval for v in jaxpr.outvars if v not in jaxpr.invars}
        return sum(aval.size * aval.dtype.itemsize for aval in saved.values()) / math.prod(sizes.values())

    none, mesh = AbstractMesh((), ()), abstract_mesh(sizes)  # a context mesh cannot change its size directly
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(step)(x, trained, others)
        saved, everything = residuals(work.remat), residuals("none")
        cache = jax.eval_shape(lambda: nnx.merge(graph, trained, others).init_cache(rows, work.length))
    cached = sum(array.size * array.dtype.itemsize for array in cache)
    yield CachedBytes(cached / math.prod(sizes.values()))
    yield SavedActivations(saved)
    yield Workspace(everything)
    yield ElementwiseTraffic(everything)
    for one, times in count_collectives(jaxpr, sizes).items():
        yield CollectiveCost(Collective(one.kind, one.axes, one.group, one.bytes, one.module), times)
    yield from _products(jaxpr)


def _weights(branch: Branch, precision: Precision) -> Iterator[Weight]:
    for _, variable in nnx.to_flat_state(nnx.state(branch, PARAMETERS)):
        axes = [axis for entry in spec_of(variable) for axis in axes_of(entry)]
        split = next((split for _, split in padding_of(variable)), None)
        yield Weight(
            module=type(branch).__name__,
            size=math.prod(logical_shape(variable)),
            precision=precision,
            split=split,
            tp=TP in axes,
            fsdp=bool({*STORAGE} & {*axes}),
            adapter=isinstance(variable, nnx.LoRAParam),
            traced=True,
        )


def _products(jaxpr: Any) -> Iterator[Product]:
    for equation, times in equations(jaxpr.jaxpr):
        if equation.primitive.name != "dot_general":
            continue
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, right = (v.aval for v in equation.invars)
        result = equation.outvars[0].aval
        k = math.prod(left.shape[dim] for dim in contracted)
        m = left.size // k  # batch dims count as rows
        n = result.size // m
        moved = sum(aval.size * itemsize(str(aval.dtype)) for aval in (left, right, result))
        yield Product("products", m, k, n, times, moved)
