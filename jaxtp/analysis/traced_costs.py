"""Costs of a layer without formulas, from a trace of its forward and backward pass.

Collectives are exact, and products that XLA computes. The memory estimate assumes residuals divided over all devices. A
trace takes about a second, a formula a millisecond (`layer_costs.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh

from jaxtp.analysis.census import arrays, count_collectives, equations
from jaxtp.analysis.collective import Collective
from jaxtp.analysis.layer_costs import Bytes, CollectiveCost, Cost, Product, Weight, Workload, itemsize
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
    yield Bytes("cached", cached / math.prod(sizes.values()))
    yield Bytes("saved", saved)
    yield Bytes("workspace", everything)
    yield Bytes("elementwise", everything)
    for one, times in count_collectives(jaxpr, sizes).items():
        yield CollectiveCost(Collective(one.kind, one.axes, one.group, one.bytes, one.module), times)
    yield from _products(jaxpr.jaxpr)


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


def _products(jaxpr: Jaxpr) -> Iterator[Product]:
    for equation, times in equations(jaxpr):
        if rule := _RULES.get(equation.primitive.name):
            shape, each, in_kernel = rule(equation)
            moved = sum(a.size * itemsize(str(a.dtype)) for a in arrays(*equation.invars, *equation.outvars))
            yield Product("products", *shape, times * each, moved, in_kernel=in_kernel)


Rule = Callable[[JaxprEqn], tuple[tuple[int, int, int], int, bool]]
"""Returns `(m, k, n)` of an equation's products, their number, and whether a kernel of its own computes them."""


def _dot(equation: JaxprEqn) -> tuple[tuple[int, int, int], int, bool]:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = arrays(equation.invars[0], equation.outvars[0])
    k = math.prod(left.shape[dim] for dim in contracted)
    m = left.size // k  # batch dims count as rows
    return (m, k, result.size // m), 1, False


def _ragged_dot(equation: JaxprEqn) -> tuple[tuple[int, int, int], int, bool]:
    # XLA multiplies every row with the matrix of every group, except on TPUs.
    left, right, sizes = arrays(*equation.invars)
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    k = math.prod(left.shape[dim] for dim in contracted)
    matrices = math.prod(right.shape[dim] for dim in numbers.rhs_group_dimensions)
    return (sizes.size * left.size // k, k, right.size // (k * matrices)), 1, False


def _kernel(equation: JaxprEqn) -> tuple[tuple[int, int, int], int, bool]:
    name = equation.params["name"]
    *operands, result = arrays(*equation.invars, equation.outvars[0])
    if name.startswith("grouped_"):  # each row with the matrix of its group, or its part of the matrix's gradient
        return (*operands[-2].shape, result.shape[-1]), 1, True
    if name not in _ATTENTION:
        raise ValueError(f"the products of the kernel {name!r} are not known; add a rule to {__name__}")
    rows, length, heads, width = operands[0].shape
    return (rows * heads * length, width, operands[1].shape[1] // 2), _ATTENTION[name], True  # half: it is causal


_ATTENTION = {"attention_forward": 2, "attention_queries": 2, "attention_keys": 3}
"""Products of the kernels of attention; what both kernels of the backward pass compute counts once."""

_RULES: Mapping[str, Rule] = {"dot_general": _dot, "ragged_dot_general": _ragged_dot, "pallas_call": _kernel}
