"""Checks of a user's loss: before the first step on abstract arrays, and in it on a few rows."""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr

from jaxtp.collectives import batch_spec, constrain
from jaxtp.config.entry import UserError
from jaxtp.config.hints import by_dotted_path
from jaxtp.config.python_object import user_code
from jaxtp.config.schema import ConfigError
from jaxtp.data.columns import WEIGHTS
from jaxtp.guards.hook import Hook, Loop, NextStep
from jaxtp.mesh import batch_parts, mesh_sizes
from jaxtp.train.loss import STATEFUL, Terms, Traits, call, changeable, check_columns, terms_of
from jaxtp.train.state import Blueprint, rng_state
from jaxtp.train.task import Loss, Shapes

if TYPE_CHECKING:
    from jaxtp.train.setup import Run


def inspect_loss(loss: Loss, model: nnx.Module, batch: Shapes) -> Traits:
    """Traces a loss on abstract arrays, under the mesh in context.

    Raises:
      ConfigError: a column that the loss names is missing; or the loss fails, or does not return
        sums.
    """
    check_columns(loss, batch)
    weights = jax.ShapeDtypeStruct(next(iter(batch.values())).shape[:1], jnp.float32)
    reads_weights = False
    if WEIGHTS not in batch:
        # A loss may pass all columns to a function that does not take this one.
        with contextlib.suppress(UserError), user_code("the loss"):
            reads_weights = _trace(loss, model, {**batch, WEIGHTS: weights}).reads(WEIGHTS)
    shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in batch.items())
    with user_code(f"the loss, on a batch of {shapes},", UserError):
        trace = _trace(loss, model, {**batch, WEIGHTS: weights} if reads_weights else batch)
    # The user's own column may have another meaning.
    if WEIGHTS in batch:
        reads_weights = trace.reads(WEIGHTS)
    return Traits(
        is_random=trace.reads(_KEY),
        reads_weights=reads_weights,
        changes=_changes(trace),
        metrics=tuple(trace.terms.metrics),
        warning=_warning(trace.results),
    )


_KEY = "the random key"


@dataclass(frozen=True)
class _Trace:
    """A loss as a jaxpr, whose last inputs and outputs are the leaves of `state` and `params`."""

    jaxpr: Any
    # Names of the first inputs: the random key, and the batch's columns
    names: tuple[str, ...]
    # Shapes of the terms, and of the sum and the weight that the loss returned
    terms: Terms
    results: tuple[jax.ShapeDtypeStruct, ...]
    # The model's variables and parameters before the call
    state: nnx.State
    params: nnx.State

    def reads(self, name: str) -> bool:
        """Whether the results depend on an input."""
        return _is_used(self.jaxpr, range(len(self.jaxpr.outvars)))[self.names.index(name)]


def _trace(loss: Loss, model: nnx.Module, batch: Shapes) -> _Trace:
    graph, params, rngs, state, constants = nnx.split(  # type: ignore[misc]
        model, nnx.Param, nnx.RngState, STATEFUL, ...
    )

    def run(
        key: Array, batch: dict[str, Array], state: nnx.State, params: nnx.State
    ) -> tuple[object, ...]:
        merged = nnx.merge(graph, params, rng_state(rngs, key), state, constants, copy=True)
        result: Any = loss(merged, dict(batch), key)
        terms = terms_of(result)
        return terms, result[:2], changeable(merged, state), nnx.state(merged, nnx.Param)

    arguments = (jax.random.key(0), dict(batch), state, params)
    jaxpr, (terms, results, *_) = jax.make_jaxpr(run, return_shape=True)(*arguments)
    # JAX sorts the keys of a dict.
    return _Trace(jaxpr.jaxpr, (_KEY, *sorted(batch)), terms, results, state, params)


def _is_used(jaxpr: Any, outputs: Collection[int]) -> list[bool]:
    # Whether some outputs depend on each input.
    return dce_jaxpr(jaxpr, [index in outputs for index in range(len(jaxpr.outvars))])[1]


def _changes(trace: _Trace) -> tuple[str, ...]:
    # Returns the variables that the loss changes; raises ConfigError if it may not change them.
    params = nnx.to_flat_state(trace.params)
    variables = by_dotted_path([*nnx.to_flat_state(trace.state), *params])
    names_of_params = by_dotted_path(params)
    names: list[str] = []
    for name, variable in variables.items():
        names += [name] * len(jax.tree.leaves(variable))
    inputs = trace.jaxpr.invars[-len(names) :]
    outputs = trace.jaxpr.outvars[-len(names) :]
    changes = []
    for index, name in enumerate(names, start=-len(names)):
        if _is_returned(trace.jaxpr, index):
            continue
        if name in names_of_params:
            raise ConfigError(
                f"the loss assigns the parameter {name}, which only the optimizer changes; make it "
                "another nnx.Variable"
            )
        old = inputs[index].aval.str_short()
        new = outputs[index].aval.str_short()
        if old != new:
            raise ConfigError(
                f"a call of the model changes {name} from {old} to {new}; keep its shape and dtype"
            )
        changes.append(name)
    return tuple(changes)


def _is_returned(jaxpr: Any, index: int) -> bool:
    # Whether an output is the input at the same index from the end. Calls, scans and recomputation
    # return each variable of a module, also if they do not change it.
    inputs = jaxpr.invars
    if jaxpr.outvars[index] is inputs[index]:
        return True
    needed, _ = dce_jaxpr(jaxpr, [var is jaxpr.outvars[index] for var in jaxpr.outvars])
    return needed.invars == [inputs[index]] and not _computes(needed)


def _computes(jaxpr: Any) -> bool:
    bodies = [equation.params.get("jaxpr") for equation in jaxpr.eqns]
    return any(body is None or _computes(getattr(body, "jaxpr", body)) for body in bodies)


def _warning(results: tuple[jax.ShapeDtypeStruct, ...]) -> str | None:
    # Returns a warning if the sum or the weight has 16 bits: bfloat16 has three digits, and no odd
    # number above 256.
    narrow = []
    for name, result in zip(("sum", "weight"), results, strict=True):
        if result.dtype != np.bool_ and result.dtype.itemsize <= 2:
            narrow.append(f"its {name} in {result.dtype}")
    if not narrow:
        return None
    return (
        f"WARNING: the loss returns {' and '.join(narrow)}, which has too few digits for a sum "
        "over a batch; convert the terms to float32 before the sum, as in "
        "losses.astype(jnp.float32).sum()"
    )


def require_sums(
    loss: Loss,
    blueprint: Blueprint,
    state: nnx.State,
    batch: Mapping[str, Array],
    accumulation: int,
) -> str | None:
    """Checks that a loss is a sum over rows: twice the rows have to give twice the sum.

    Reads one row on each device. Call it with the run's mesh in context.

    Returns:
      A warning if the loss is not a sum over rows.

    Raises:
      ConfigError: the loss returns a mean instead of a sum, or a weight that does not count rows;
        or accumulation would change the loss.
    """
    devices = batch_parts(mesh_sizes(blueprint.mesh))

    def terms(batch: Mapping[str, Array], copies: int, key: Array) -> Terms:
        def rows(array: Array) -> Array:
            row_shape = array.shape[1:]
            first = array.reshape(devices, -1, *row_shape)[:, :1]
            return constrain(jnp.repeat(first, copies, 1).reshape(-1, *row_shape), batch_spec())

        model = blueprint.merge(state, key).model
        model.eval()
        return call(loss, model, {name: rows(array) for name, array in batch.items()}, key)

    def run(batch: Mapping[str, Array], key: Array) -> tuple[Terms, Terms]:
        return terms(batch, 1, key), terms(batch, 2, key)

    key = jax.random.key(0)
    try:
        traced = jax.jit(run).trace(dict(batch), key)
        once, twice = jax.device_get(traced.lower().compile()(dict(batch), key))
    # The loss may only take batches of the run's size.
    except Exception:
        return None
    # The first results are the sum and the weight, which is random in masked language models; the
    # last argument is the key.
    *_, loss_is_random = _is_used(traced.jaxpr.jaxpr, [0])
    *_, weight_is_random = _is_used(traced.jaxpr.jaxpr, [1])
    if weight_is_random:
        return None
    warning = _compare(_numbers(once), _numbers(twice), loss_is_random=loss_is_random)
    if warning and accumulation > 1:
        raise ConfigError(
            f"{warning}. Micro-batches change it: use --train.accumulation 1, or sum over rows"
        )
    return warning and f"WARNING: {warning}. If it should be a sum, look for a mistake in shapes"


Numbers = dict[str, tuple[float, float]]  # The loss and each metric, with their weights


def _numbers(terms: Terms) -> Numbers:
    numbers = {}
    for name, (total, weight) in terms.pairs.items():
        label = name if name == "loss" else f"metric {name!r}"
        numbers[label] = (float(total), float(weight))
    return numbers


def _compare(once: Numbers, twice: Numbers, *, loss_is_random: bool) -> str | None:
    # Compares sums over some rows with sums over each of these rows twice. Returns a warning.
    warning = None
    for name, (a, n) in once.items():
        b, m = twice[name]
        measured = (
            f"it is {a:.6g} with weight {n:g} for some rows, and {b:.6g} with weight {m:g} "
            "for each of them twice"
        )
        grows = _close(2 * n, m)
        if name == "loss" and not grows:
            raise ConfigError(
                f"the weight of the loss does not grow with the rows: {measured}. Return the sum "
                "over rows, and the number of rows (or tokens) in the sum"
            )
        if a and _close(a, b) and grows:
            hint = ""
            if name != "loss":
                hint = "; for a number that is not a mean over rows return a pair (number, 1)"
            raise ConfigError(
                f"the {name} is a mean: {measured}. Return the sum over rows; the step divides it "
                f"by the weight{hint}"
            )
        if name == "loss" and not loss_is_random and not _close(2 * a, b):
            warning = f"the loss is not a sum over rows: {measured}"
    return warning


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b))


class SumsCheck(Hook):
    """Checks before the first step that a user's loss is a sum over rows."""

    def __init__(self, run: "Run"):
        self._run = run
        self._first = run.step + 1

    def before_step(self, loop: Loop, step: NextStep) -> None:
        """Raises ConfigError if the loss is a mean, or depends on the micro-batches."""
        run = self._run
        if step.index != self._first:
            return
        with loop.lost_to("start"):
            warning = require_sums(
                run.objective, run.blueprint, run.state, step.batch, run.config.train.accumulation
            )
        if warning:
            loop.line(warning)
