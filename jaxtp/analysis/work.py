"""Counts one device's matrix products, collectives and residuals in a traced step.

Shapes are local inside `shard_map`, and global elsewhere. Global arrays are assumed to be split
over dp, fsdp and cp. The output of a column layer stays split over tp as far as the rules of
`propagation_rules.py` allow.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.core import Atom
from jax.extend.core import ClosedJaxpr, JaxprEqn  # type: ignore[attr-defined] # jax 0.12: another name of Jaxpr
from jax.sharding import PartitionSpec

from jaxtp.analysis.census import (
    array_bytes,
    count_collectives,
    equations,
    products_of,
    runs_rarely,
)
from jaxtp.analysis.collective import Traffic
from jaxtp.analysis.propagation_rules import Blocked, Walk, open_jaxpr, pass_through
from jaxtp.layers.parameter import is_variable, spec_of
from jaxtp.mesh import TOKENS, TP, Sizes, axes_of, parts
from jaxtp.plans.layouts import dim_over

Objective = Callable[..., Array]  # Takes parameters and further inputs; returns a scalar
# Scope of operations that `jax.checkpoint` computes again
_RECOMPUTATION = "rematted_computation"


@dataclass(frozen=True)
class Product:
    """Matrix products of one shape on one device, in all their runs."""

    flops: float
    bytes: float  # Bytes of operands and results
    itemsize: int  # Bytes of an element of the larger operand dtype
    recomputed: bool  # Whether `jax.checkpoint` computes them again in the backward pass
    repeated: bool  # Whether all devices of a tp group compute the same


@dataclass(frozen=True)
class Work:
    """A forward and backward pass on a device."""

    traffic: Traffic
    products: tuple[Product, ...]
    saved: float
    """Bytes of residuals: arrays that the forward pass saves for the backward pass."""


@dataclass(frozen=True)
class _Split:
    dim: int | None  # over tp
    parts: int  # number of different shards


def gradient(objective: Objective) -> Callable[..., tuple[list[Array], Any]]:
    """Returns a function that returns an objective's residuals and gradient.

    The gradient is with respect to the first argument.
    """

    def compute(params: object, *inputs: object) -> tuple[list[Array], Any]:
        total, backward = jax.vjp(lambda params: objective(params, *inputs), params)
        return jax.tree.leaves(backward), backward(jnp.ones_like(total))[0]

    return compute


def work_of(objective: Objective, sizes: Sizes, params: object, *inputs: object) -> Work:
    """Returns the work of an objective and its gradient.

    Traces them under the mesh in context, whose axes have these `sizes`.
    """
    closed = jax.make_jaxpr(gradient(objective))(params, *inputs)
    products, results = count_work(closed, sizes, (params, *inputs))
    jaxpr = closed.jaxpr
    computed = {*map(id, chain.from_iterable(equation.outvars for equation in jaxpr.eqns))}
    num_residuals = len(jaxpr.outvars) - len(jax.tree.leaves(params))
    # By id: a result that is returned twice is saved once, and a literal cannot be hashed.
    residuals = dict(zip(map(id, jaxpr.outvars[:num_residuals]), results, strict=False))
    saved = sum(size for variable, size in residuals.items() if variable in computed)
    return Work(count_collectives(closed, sizes), tuple(products), saved)


def count_work(
    jaxpr: ClosedJaxpr, sizes: Sizes, inputs: object
) -> tuple[list[Product], list[float]]:
    """Returns the products of a closed jaxpr, and the bytes of each result.

    Variables among `inputs` have specs.
    """
    counter = _Counter(sizes)
    splits: list[_Split] = []
    for leaf in jax.tree.leaves(inputs, is_leaf=is_variable):
        splits += [counter.of_input(leaf)] * len(jax.tree.leaves(leaf))
    splits = counter.run(jaxpr.jaxpr, splits, 1)
    results = [
        _bytes(variable) / split.parts
        for variable, split in zip(jaxpr.jaxpr.outvars, splits, strict=True)
    ]
    return counter.result, results


class _Counter(Walk[_Split, list[Product]]):
    def __init__(self, sizes: Sizes):
        super().__init__(_Split(None, parts(sizes, TOKENS)), list)
        self.sizes = sizes
        self.recomputing = False

    def _equation(self, equation: JaxprEqn, facts: list[_Split], times: int) -> list[_Split]:
        outer = self.recomputing
        self.recomputing |= _RECOMPUTATION in str(equation.source_info.name_stack)
        splits = self._counted(equation, facts, times)
        self.recomputing = outer
        return splits

    def _counted(self, equation: JaxprEqn, facts: list[_Split], times: int) -> list[_Split]:
        name = equation.primitive.name
        params = equation.params
        if name == "shard_map":
            uses_tp = any(map(_names_tp, params["in_specs"]))
            self.count_body(params["jaxpr"], times, repeated=not uses_tp)
            return list(map(self.of_spec, params["out_specs"]))
        if name == "sharding_constraint":
            return [self.of_spec(params["sharding"].spec)]
        if name == "while":
            runs = times * (not runs_rarely(equation))
            self.count_body(params["body_jaxpr"], runs, repeated=True)
        return super()._equation(equation, facts, times)

    def _operation(self, equation: JaxprEqn, facts: list[_Split], times: int) -> list[_Split]:
        dims = [split.dim for split in facts]
        splits = [self.unknown] * len(equation.outvars)
        if set(dims) <= {None}:
            self.count(equation, times, self.unknown.parts, repeated=True)
            return splits
        num_shards = self.unknown.parts * self.sizes[TP]
        self.count(equation, times, num_shards, repeated=False)
        with suppress(Blocked):
            for i, dim in enumerate(pass_through(equation, dims)):
                if dim is not None:
                    splits[i] = _Split(dim, num_shards)
        return splits

    def _join(self, facts: Sequence[_Split], variable: Atom, times: int) -> _Split:
        return next((split for split in reversed(facts) if split.dim is not None), facts[0])

    def _shift(self, fact: _Split, by: int) -> _Split:
        if fact.dim is None:
            return fact
        dim = fact.dim + by
        return replace(fact, dim=dim if dim >= 0 else None)

    def count_body(self, jaxpr: object, times: int, *, repeated: bool) -> None:
        for equation, num_runs, _, scope in equations(open_jaxpr(jaxpr), times):
            self.count(equation, num_runs, 1, repeated=repeated, scope=scope)

    def count(
        self, equation: JaxprEqn, times: int, num_shards: int, *, repeated: bool, scope: str = ""
    ) -> None:
        if flops := _flops(equation):
            moved = sum(map(_bytes, (*equation.invars, *equation.outvars)))
            itemsize = max(v.aval.dtype.itemsize for v in equation.invars[:2])  # type: ignore[attr-defined]
            share = times / num_shards
            recomputed = self.recomputing or _RECOMPUTATION in scope
            self.result.append(
                Product(flops * share, moved * share, itemsize, recomputed, repeated)
            )

    def of_input(self, leaf: object) -> _Split:
        if isinstance(leaf, nnx.Variable) and _names_tp(spec_of(leaf)):
            return self.of_spec(spec_of(leaf))
        return self.unknown

    def of_spec(self, spec: PartitionSpec) -> _Split:
        axes = chain.from_iterable(map(axes_of, spec))
        return _Split(dim_over(TP, spec), parts(self.sizes, tuple(axes)))


def _names_tp(spec: PartitionSpec) -> bool:
    return dim_over(TP, spec) is not None


def repeated_work(products: Sequence[Product], tp: int) -> Iterator[str]:
    """Yields a note if tp divides less than a quarter of a model's FLOPs."""
    repeated = divided = 0.0
    for product in products:
        if product.repeated:
            repeated += product.flops
        else:
            divided += product.flops
    divided *= tp
    if tp > 1 and repeated > 3 * divided:
        yield (
            f"tp does not divide {repeated / (repeated + divided):.0%} of this model's FLOPs: "
            f"the {tp} devices of a tp group all compute the same; use more dp or fsdp, and less tp"
        )


def _flops(equation: JaxprEqn) -> float:
    """Returns the FLOPs of products; 0 for other equations."""
    return 2.0 * math.prod(products_of(equation) or (0,))


def _bytes(variable: Atom) -> float:
    return float(array_bytes(variable.aval))
