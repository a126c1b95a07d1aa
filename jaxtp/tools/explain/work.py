"""Counts the matrix products of a traced program on one device, and the bytes of its results there.

Inside `shard_map` shapes are local. Elsewhere they are global: the batch is assumed to be divided over dp, fsdp and cp.
The features that a column layer splits stay divided over tp as far as `propagation_rules.py` passes them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.core import Atom
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal  # type: ignore[attr-defined] # jax 0.12: another name
from jax.sharding import PartitionSpec

from jaxtp.analysis.census import equations, runs, trip_count
from jaxtp.mesh import TOKENS, TP, axes_of, parts
from jaxtp.tools.explain.dataflow import inner_jaxpr, open_jaxpr, scan_arguments
from jaxtp.tools.explain.propagation_rules import Blocked, pass_through, shape_of


@dataclass(frozen=True)
class Product:
    """Matrix products of one shape on one device, in all their runs."""

    flops: float
    bytes: float
    """Bytes of operands and results."""
    itemsize: int
    """Bytes of an element of the larger operand dtype."""


@dataclass(frozen=True)
class _Split:
    dim: int | None  # over tp
    parts: int  # devices that have different parts


def count_work(jaxpr: ClosedJaxpr, sizes: Mapping[str, int]) -> tuple[list[Product], list[float]]:
    """Returns the products of a closed jaxpr, and the bytes of each of its results."""
    counter = _Counter(sizes)
    splits = counter.run(jaxpr.jaxpr, [counter.batch] * len(jaxpr.jaxpr.invars), 1)
    results = [_bytes(variable) / split.parts for variable, split in zip(jaxpr.jaxpr.outvars, splits, strict=True)]
    return counter.products, results


class _Counter:
    def __init__(self, sizes: Mapping[str, int]):
        self.sizes, self.batch = sizes, _Split(None, parts(sizes, TOKENS))
        self.products: list[Product] = []

    def run(self, jaxpr: Jaxpr, splits: Sequence[_Split], times: int) -> list[_Split]:
        known = dict(zip(jaxpr.invars, splits, strict=True))

        def read(variable: Atom) -> _Split:
            return self.batch if isinstance(variable, Literal) else known.get(variable, self.batch)

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(v) for v in equation.invars], times)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation: JaxprEqn, splits: list[_Split], times: int) -> list[_Split]:
        name, params = equation.primitive.name, equation.params
        if name == "shard_map":
            self.multiply(params["jaxpr"], times)
            return [self.of_spec(spec) for spec in params["out_specs"]]
        if name == "sharding_constraint":
            return [self.of_spec(params["sharding"].spec)]
        if name == "optimization_barrier":
            return splits
        if name == "scan":
            return self.scan(equation, splits, times)
        if name == "cond":  # every branch counts, as in the census
            branches = [self.run(open_jaxpr(branch), splits[1:], times) for branch in params["branches"]]
            return branches[0]
        if name == "while":
            self.multiply(params["body_jaxpr"], times * runs(trip_count(equation), "")[0])
        elif body := inner_jaxpr(equation):
            return self.run(body, splits, times)
        return self.operation(equation, splits, times)

    def operation(self, equation: JaxprEqn, splits: list[_Split], times: int) -> list[_Split]:
        dims, over_tp = [split.dim for split in splits], replace(self.batch, parts=self.batch.parts * self.sizes[TP])
        if all(dim is None for dim in dims):
            self.count(equation, times, self.batch.parts)
            return [self.batch] * len(equation.outvars)
        self.count(equation, times, over_tp.parts)
        try:
            results = pass_through(equation, dims)
        except Blocked:
            return [self.batch] * len(equation.outvars)
        return [self.batch if dim is None else replace(over_tp, dim=dim) for dim in results]

    def scan(self, equation: JaxprEqn, splits: list[_Split], times: int) -> list[_Split]:
        body = open_jaxpr(equation.params["jaxpr"])
        consts, carries = scan_arguments(equation, body)
        rows = [_shift(split, -1) for split in splits[consts + carries :]]
        carry, times = splits[consts : consts + carries], times * equation.params["length"]
        before = len(self.products)
        after = self.run(body, [*splits[:consts], *carry, *rows], times)
        del self.products[before:]  # the carry may be split only after the first turn
        carry = [a if a.dim is not None else b for a, b in zip(after, carry, strict=False)]
        after = self.run(body, [*splits[:consts], *carry, *rows], times)
        return [*after[:carries], *(_shift(split, 1) for split in after[carries:])]

    def multiply(self, jaxpr: Jaxpr | ClosedJaxpr, times: int) -> None:
        for equation, each, *_ in equations(open_jaxpr(jaxpr), times):
            self.count(equation, each, 1)

    def count(self, equation: JaxprEqn, times: int, among: int) -> None:
        """Counts a product that `among` devices divide."""
        if (terms := _terms(equation)) is not None:
            flops = 2.0 * math.prod(shape_of(equation.outvars[0])) * terms
            moved = sum(map(_bytes, (*equation.invars, *equation.outvars)))
            itemsize = max(v.aval.dtype.itemsize for v in equation.invars[:2])  # type: ignore[attr-defined]
            self.products.append(Product(flops * times / among, moved * times / among, itemsize))

    def of_spec(self, spec: PartitionSpec) -> _Split:
        axes = [axes_of(entry) for entry in spec]
        dim = next((i for i, names in enumerate(axes) if TP in names), None)
        return _Split(dim, math.prod(parts(self.sizes, names) for names in axes))


def _terms(equation: JaxprEqn) -> int | None:
    """Returns the terms that an element of the result sums; None if the equation is no product."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return math.prod(shape_of(equation.invars[0])[dim] for dim in params["dimension_numbers"][0][0])
    if name == "conv_general_dilated":
        kernel = shape_of(equation.invars[1])
        return math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
    return None


def _shift(split: _Split, by: int) -> _Split:
    dim = None if split.dim is None or split.dim + by < 0 else split.dim + by
    return replace(split, dim=dim)


def _bytes(variable: Atom) -> float:
    return float(math.prod(shape_of(variable)) * variable.aval.dtype.itemsize)  # type: ignore[attr-defined]
