"""Seconds of a transformer block's matrix products, and of a column and a row layer beside what they compute.

A pair of layers over tp computes on each device what the same layers with `1/tp` of the hidden features compute on one
device without a mesh, where nothing moves: the difference between the two is communication.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from jaxtp.bench.timing import Program, Repeats, medians
from jaxtp.layers.activations import activation_spec, sequence_dim
from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.mesh import current_mesh, make_mesh, sized
from jaxtp.models.config import ModelConfig
from jaxtp.models.costs import step_costs


@dataclass(frozen=True)
class TimedProduct:
    """A product `[m, k] x [k, n]` of a block on one of `tp` devices, and its time."""

    tp: int
    """Devices that share the block."""

    name: str
    """Name of the product."""

    m: int
    k: int
    n: int

    seconds: float
    """Median."""

    @property
    def flops(self) -> float:
        """2 for a multiplication and its sum."""
        return 2.0 * self.m * self.k * self.n


@dataclass(frozen=True)
class Pair:
    """A column and a row layer at one tp: forward and backward, gradients of input and kernels."""

    tp: int
    """Devices that share it."""

    seconds: float
    """Median."""

    computing: float
    """Median of the same on one device, with its share of the hidden features and nothing to wait for."""

    @property
    def moving(self) -> float:
        """Seconds that are not computing; 0 where noise makes them less."""
        return max(0.0, self.seconds - self.computing)


def measure_products(
    model: ModelConfig, tps: Sequence[int], rows: int, length: int, repeats: Repeats
) -> Iterator[TimedProduct]:
    """Times each product of a block with weights, on one device, at every tp.

    Args:
      model: the sizes, and the dtype that multiplies.
      tps: devices that share a block.
      rows: sequences on a device.
      length: tokens in each.
      repeats: how often.
    """
    for tp in tps:
        costs = step_costs(model, sized(tp=tp), batch_size=rows, sequence_length=length)
        shapes = {product.name: (product.m, product.k, product.n) for product in costs.products}
        del shapes["head"]  # no part of a block
        programs = {name: _product(*shape, model.precision.compute) for name, shape in shapes.items()}
        seconds = medians(programs, repeats.rounds, calls=repeats.in_a_row)
        for name, shape in shapes.items():
            yield TimedProduct(tp, name, *shape, seconds[name])


def measure_pairs(model: ModelConfig, tps: Sequence[int], rows: int, length: int, repeats: Repeats) -> Iterator[Pair]:
    """Times the pair at every tp, over the first so many devices, in turn with its computing alone; see above."""
    width = hidden_width(model)
    for tp in tps:
        programs = {"computing": pair_program(model, width // tp, rows, length)}
        if tp > 1:
            with jax.set_mesh(make_mesh(tp=tp)):
                programs["all"] = pair_program(model, width, rows, length)
        seconds = medians(programs, repeats.rounds, calls=repeats.in_a_row)
        yield Pair(tp, seconds.get("all", seconds["computing"]), seconds["computing"])


def _product(m: int, k: int, n: int, dtype: str) -> Program:
    left, right = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(left, (m, k), dtype), jax.random.normal(right, (k, n), dtype)
    return partial(jax.jit(jnp.matmul), x, w)


def hidden_width(model: ModelConfig) -> int:
    """Returns the number of features that the last row layer of a block takes of a token, or its experts together."""
    costs = step_costs(model, sized(), batch_size=1, sequence_length=1)
    down = [product for product in costs.products if product.name.endswith("down")][-1]
    return round(down.m * down.k * down.counted)


def pair_program(model: ModelConfig, width: int, rows: int, length: int) -> partial[Any]:
    """Compiles both layers, forward and backward, on random data, for the mesh in context or for one device."""
    over_tp: dict[str, Any] = {"sequence_parallel": model.sequence_parallel, "overlap": model.overlap}
    shared: dict[str, Any] = {**over_tp, "precision": model.precision}
    layers = (
        ColumnParallelLinear(model.d_model, width, rngs=nnx.Rngs(0), **shared),
        RowParallelLinear(width, model.d_model, rngs=nnx.Rngs(1), **shared),
    )
    graph, kernels = nnx.split(layers)
    x, grad = (_activation(model, rows, length, seed) for seed in (0, 1))
    compiled = jax.jit(partial(_forward_and_backward, graph)).lower(kernels, x, grad).compile()
    return partial(compiled, kernels, x, grad)


def _forward_and_backward(graph: Any, kernels: Any, x: Array, grad: Array) -> Any:
    """Returns the gradients, and the output, so that no reduction is dead code."""

    def apply(kernels: Any, x: Array) -> Array:
        column, row = nnx.merge(graph, kernels)
        y: Array = row(column(x))
        return y

    y, pull = jax.vjp(apply, kernels, x)
    return y, pull(grad)


def _activation(model: ModelConfig, rows: int, length: int, seed: int) -> Array:
    """Returns random `[rows, length, d_model]` in the compute dtype, split as between layers."""
    shape = (rows, length, model.d_model)
    key, dtype = jax.random.key(seed), model.precision.compute
    if current_mesh() is None:
        return jax.random.normal(key, shape, dtype)
    spec = activation_spec(sequence_dim(model.sequence_parallel, shape))
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)
    made: Array = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)(key, shape, dtype)
    return made
