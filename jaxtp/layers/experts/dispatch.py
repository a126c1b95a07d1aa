"""Rows: copies of tokens, one for each choice of an expert on this device, sorted by expert.

A grouped product (`layers/kernels/grouped.py`) multiplies each row with the kernel of its expert.
Two tokens, which choose experts (0, 2) and (0, 1), on a device that has experts 0 and 1:

    choices        t0->0   t0->2   t1->0   t1->1
    index            0       1       2       3       token * k + number of the choice
    row              0       -       1       2       `row_of_choice`; `-` is the index N * k
    rows           t0->0   t1->0   t1->1     -
    choice_of_row    0       2       3       -
    sizes          [2, 1]                            rows of each expert

Both maps are stored, so that copies of tokens to rows and sums of rows to tokens, which are each
other's transposes, are both gathers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxtp.collectives import vary_alike, vary_like
from jaxtp.layers.parameter import Weights

# Named scope of loops that rarely run; cost analysis counts zero iterations
RARELY = "jaxtp_rarely"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Maps N tokens' k choices to rows sorted by expert, and back.

    The index N * k means none: a choice of another device's expert has no row, and surplus rows
    have no choice.
    """

    sizes: Array  # rows of each expert, `[experts]` int32
    row_of_choice: Array  # `[N, k]`
    choice_of_row: Array  # `[rows]`, N * k in all

    @classmethod
    def of(cls, experts: Array, count: int) -> "Rows":
        """Sorts choices `[N, k]` of `count` experts; expert `count` means none."""
        choices = experts.reshape(-1)  # [N * k]
        none = choices.size
        order = jnp.argsort(choices, stable=True).astype(jnp.int32)
        places = jnp.zeros_like(choices)
        index = jnp.arange(none, dtype=choices.dtype)
        places = places.at[order].set(index, unique_indices=True)
        sizes = jnp.sum(jax.nn.one_hot(choices, count, dtype=jnp.int32), axis=0)
        is_surplus = jnp.arange(none) >= jnp.sum(sizes)
        row_of_choice = jnp.where(choices < count, places, none).reshape(experts.shape)
        return cls(sizes, row_of_choice, jnp.where(is_surplus, none, order))

    def part(self, begin: Array | int, size: int) -> "Rows":
        """Returns `size` rows from `begin` on."""
        ends = jnp.cumsum(self.sizes)
        none = self.row_of_choice.size
        index = jnp.arange(size, dtype=jnp.int32)
        sizes = jnp.diff(jnp.clip(ends - begin, 0, size), prepend=0)
        places = self.row_of_choice - begin
        choice_of_row = jnp.take(self.choice_of_row, begin + index, mode="fill", fill_value=none)
        is_outside = (places < 0) | (places >= size)
        return Rows(sizes, jnp.where(is_outside, none, places), choice_of_row)

    def spread(self, x: Array) -> Array:
        """Copies tokens to their rows: `[N, D] -> [rows, D]`."""
        return _spread(x, self.row_of_choice, self.choice_of_row)

    def collect(self, rows: Array) -> Array:
        """Sums each token's rows in float32: `[rows, D] -> [N, D]`."""
        return _collect(rows, self.row_of_choice, self.choice_of_row)

    def of_experts(self, values: Array) -> Array:
        """Copies values of experts to their rows: `[experts, F] -> [rows, F]`."""
        row = jnp.arange(self.choice_of_row.size)
        is_later = row[:, None] >= jnp.cumsum(self.sizes)  # [rows, experts]
        return _of_experts(values, jnp.sum(is_later, axis=1), self.sizes)

    def of_choices(self, values: Array) -> Array:
        """Copies values of choices to their rows: `[N * k] -> [rows]`."""
        column = values[:, None]
        row_of_choice = self.row_of_choice.reshape(-1, 1)
        return _spread(column, row_of_choice, self.choice_of_row)[:, 0]


@jax.custom_vjp
def _spread(x: Array, row_of_choice: Array, choice_of_row: Array) -> Array:
    """Gathers rows. The hand-written transpose gathers too; JAX's would scatter-add row by row."""
    token_of_row = choice_of_row // row_of_choice.shape[1]
    return _take(x, token_of_row)


@jax.custom_vjp
def _collect(rows: Array, row_of_choice: Array, choice_of_row: Array) -> Array:
    # XLA fuses the sum over the rows of choices, [N, k, D].
    chosen = _take(rows, row_of_choice).astype(jnp.float32)
    return jnp.sum(chosen, axis=1).astype(rows.dtype)


_spread.defvjp(
    lambda x, *maps: (_spread(x, *maps), maps),
    lambda maps, grad: (_collect(grad, *maps), None, None),
)
_collect.defvjp(
    lambda rows, *maps: (_collect(rows, *maps), maps),
    lambda maps, grad: (_spread(grad, *maps), None, None),
)


@jax.custom_vjp
def _of_experts(values: Array, expert_of_row: Array, sizes_E: Array) -> Array:
    """As `_spread`, but the transpose is a product."""
    return _take(values, expert_of_row)


def _sum_by_expert(indices: tuple[Array, Array], grad: Array) -> tuple[Array, None, None]:
    expert_of_row, sizes_E = indices
    is_of_expert = jax.nn.one_hot(expert_of_row, len(sizes_E), dtype=grad.dtype)  # [rows, experts]
    sums = jnp.einsum("me,mf->ef", is_of_expert, grad, preferred_element_type=jnp.float32)
    return sums.astype(grad.dtype), None, None


_of_experts.defvjp(
    lambda values, *indices: (_of_experts(values, *indices), indices), _sum_by_expert
)


def _take(x: Array, index: Array) -> Array:
    """Gathers rows; 0 for an index that does not exist."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


class Operands(NamedTuple):
    """The operands of products that have a gradient."""

    x: Array  # tokens `[N, D]`
    gates: Array  # `[N, k]`
    weights: Weights


_Backward = Callable[[Array], tuple[Operands]]
_Residuals = tuple[_Backward, Operands, Weights, Rows]
_T = TypeVar("_T")


def sum_over_parts(
    run: Callable[[Operands, Weights, Rows], Array],
    size: int,
    operands: Operands,
    frozen: Weights,
    rows: Rows,
) -> Array:
    """Returns the sum of `run(operands, frozen, part)` over parts of `size` rows.

    A device has room for the rows of all choices, but on average few of them are its own:

        |==== rows of the device's experts ====|-------- surplus rows, of no expert --------|
        |      part 0      |      part 1      |      part 2      |      part 3      |
          always computed    in a loop, which    never computed
                             ends with the rows

    Autodiff handles part 0. A `while_loop` has no transpose in JAX, and would have to save the
    residuals of an unknown number of parts, so the backward pass has a loop of its own, which
    computes each further part again.
    """
    if size == rows.row_of_choice.size:
        return run(operands, frozen, rows)

    def forward(operands: Operands, frozen: Weights, rows: Rows) -> tuple[Array, _Residuals]:
        part = rows.part(0, size)
        y, pullback = jax.vjp(lambda operands: run(operands, frozen, part), operands)
        y = _add_parts(y, partial(run, operands, frozen), size, rows)
        return y, (pullback, operands, frozen, rows)

    def backward(residuals: _Residuals, grad: Array) -> tuple[Operands, None, None]:
        first_pullback, operands, frozen, rows = residuals

        def gradients(part: Rows) -> Operands:
            _, pullback = jax.vjp(lambda operands: run(operands, frozen, part), operands)
            return pullback(grad)[0]

        return _add_parts(first_pullback(grad)[0], gradients, size, rows), None, None

    summed = jax.custom_vjp(lambda *args: forward(*args)[0])
    summed.defvjp(forward, backward)
    # Loops carry sums that vary over the axes of every operand.
    return summed(*vary_alike((operands, frozen, rows)))


def _add_parts(first: _T, compute: Callable[[Rows], _T], size: int, rows: Rows) -> _T:
    """Adds `compute(part)` of all parts but the first to `first`, the first part's result."""

    def add_part(state: tuple[Array, _T]) -> tuple[Array, _T]:
        begin, sums = state
        part = rows.part(begin, size)
        return begin + size, jax.tree.map(jnp.add, sums, compute(part))

    with jax.named_scope(RARELY):
        begin = vary_like(jnp.int32(size), rows.sizes)
        total = jnp.sum(rows.sizes)
        _, sums = jax.lax.while_loop(lambda state: state[0] < total, add_part, (begin, first))
        return sums
