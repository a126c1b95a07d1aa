"""The objective of a run: the next token, or a user's loss, which is checked before the first step.

Step, evaluation and checks know an `Objective` only, whichever loss it has.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec, constrain
from jaxtp.config.entry import UserError
from jaxtp.config.hints import by_dotted_path
from jaxtp.config.python_object import describe_value, user_code
from jaxtp.config.schema import ConfigError
from jaxtp.data.columns import WEIGHTS
from jaxtp.data.loader import Batch
from jaxtp.data.rows import PAIRS, SEGMENTS
from jaxtp.layers.balance import Balance, Routing
from jaxtp.layers.context import Context
from jaxtp.mesh import as_current, batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.train.config import LoopConfig, TrainConfig
from jaxtp.train.state import Blueprint, rng_state
from jaxtp.train.task import Loss, Result, Shapes, Task

T = TypeVar("T")
Example = NDArray[np.generic] | jax.ShapeDtypeStruct

Choices = list[tuple[Array, Array] | None] | None
"""The router's choices and their margin for each kind of block, if they are recorded."""

Experts = tuple[Array | None, ...] | None
"""Experts that replace the router's choices, `[B, layers, T, k]`, for each kind of block."""

STATEFUL = nnx.All(nnx.Variable, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
"""Filter of the variables that a model may change during a step, such as the statistics of
`nnx.BatchNorm`."""

_RESERVED = {
    "step",
    "loss",
    "eval_loss",
    "eval_perplexity",
    "learning_rate",
    "grad_norm",
    "param_norm",
    "skipped",
    "loss_tokens",
    "loss_weight",
    "tokens",
    "rows",
    "data_wait_seconds",
    "goodput",
    "mfu",
    "memory_bytes",
    "memory_peak_bytes",
}
_RESERVED_GROUPS = (
    "grad_norm/",
    "param_norm/",
    "lost_to_",
    "step_seconds",
    "tokens_per_second",
    "rows_per_second",
)
"""Prefixes of names."""
_FORM = "should return (sum, weight) or (sum, weight, metrics), with sums over the batch's rows"

_TOP = "jaxtp score --top-k 64 makes it, and data.scores FOLDER reads it"
_TOKENS = "rename your token ids [B, T], or bring a loss that reads them (--train.loss)"
_ORIGINS = {
    "inputs": _TOKENS,
    "labels": _TOKENS,
    PAIRS: "jaxtp prepare --preference makes a dataset of pairs",
    "log_probs": "jaxtp score makes it, and data.scores FOLDER reads it",
    "top_ids": _TOP,
    "top_log_probs": _TOP,
    SEGMENTS: "data.packing documents has it",
}
"""How to get each column that jaxtp's losses read."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Terms:
    """The terms of a loss: sums, which add up over parts of a batch."""

    loss: Array
    """The float32 sum that is logged."""
    weight: Array
    """The divisor of the sum over all parts, such as the number of labels."""
    metrics: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    """Sums and their weights."""
    objective: Array | None = None
    """The sum that is minimised, if it is not `loss`."""
    balance: Balance | None = None

    @property
    def pairs(self) -> dict[str, tuple[Array, Array]]:
        """The loss and the metrics: sums and their weights."""
        return {"loss": (self.loss, self.weight), **self.metrics}

    def scalars(self) -> dict[str, Array]:
        """Returns the metrics of a whole batch."""
        balance = {} if self.balance is None else self.balance.scalars(self.weight)
        return balance | {name: total / weight for name, (total, weight) in self.metrics.items()}


class Micro(NamedTuple):
    """A micro-batch of a step."""

    batch: Batch
    # [B], indices in the whole batch
    rows: Array
    experts: Experts = None


class Objective:
    """A loss to minimise, and what a run has to know of it; by default of a user's loss.

    An instance is a `Loss` itself, whose results an evaluation logs.
    """

    is_by_row: ClassVar[bool] = False
    """Whether it is a sum over rows that do not depend on each other, so it changes no variables,
    and only jaxtp's layers read parameters."""
    reads_only_tokens: ClassVar[bool] = False
    """Whether it ignores the pairs and the scores of a dataset."""
    is_in_nats: ClassVar[bool] = False
    """Whether the exponential of the mean is a perplexity."""

    def __init__(self, function: Loss):
        self.function = function

    def __call__(self, model: Any, batch: Mapping[str, Array], key: Array) -> Result:
        """See `Loss`."""
        return self.function(model, batch, key)

    def inspect(self, config: TrainConfig, task: Task, batch: Shapes) -> "Traits":
        """Returns facts about the loss; raises ConfigError if it does not take the batch."""
        from jaxtp.train.user_step import ONE_DEVICE, on_one_device

        with as_current(ONE_DEVICE):
            return inspect_loss(self.function, on_one_device(config, task), batch)

    def terms(
        self, model: Any, micro: Micro, key: Array, *, step_key: Array, record: bool = False
    ) -> tuple[Terms, Choices]:
        """Returns the terms of a micro-batch in training.

        Args:
          key: the micro-batch's random key.
          step_key: the step's random key, the same for all its micro-batches.
          record: also return the routers' choices.
        """
        return call(self, model, micro.batch, key), None

    def after_update(self, model: Any, terms: Terms) -> None:
        """Changes variables that no optimizer sees, once per update."""


@dataclass(frozen=True)
class NextToken(Objective):
    """The cross-entropy of a decoder's next token; in training with the weights of `LoopConfig`."""

    weights: LoopConfig = LoopConfig()
    context: Context = "auto"

    columns: ClassVar[tuple[str, ...]] = ("inputs", "labels")
    is_by_row = True
    reads_only_tokens = True
    is_in_nats = True

    def __call__(self, model: Decoder, batch: Mapping[str, Array], key: Array) -> Result:
        """Returns the cross-entropy alone, without dropout."""
        return model.loss(
            batch["inputs"],
            batch["labels"],
            segments=batch.get(SEGMENTS),
            context=self.context,
        )

    def inspect(self, config: TrainConfig, task: Task, batch: Shapes) -> "Traits":
        """Checks the columns, without a trace."""
        check_columns(self, batch)
        for name in self.columns:
            if batch[name].ndim != 2:
                raise ConfigError(
                    f"{name!r} is {list(batch[name].shape)} in a batch, and the decoder's loss "
                    "reads token ids [B, T]"
                )
        return Traits(is_random=True)

    def terms(
        self, model: Decoder, micro: Micro, key: Array, *, step_key: Array, record: bool = False
    ) -> tuple[Terms, Choices]:
        """See `Objective`. Dropout has a key for each row, so no mesh changes it."""
        batch = micro.batch
        keys = row_keys(step_key, micro.rows) if model.config.dropout else None
        sequences = model.sequences(
            batch["inputs"], segments=batch.get(SEGMENTS), context=self.context
        )
        hidden_BTD, routings = model.with_routing(
            batch["inputs"], keys, replace(sequences, record=record), micro.experts
        )
        loss, count = model.loss_of_hidden(
            hidden_BTD, sequences.local_tokens(batch["labels"]), z_loss=self.weights.z_loss
        )
        balance = model.balance_of(routings, batch["labels"])
        total = None
        if balance is not None:
            total = loss + self.weights.balance_loss * balance.balance_loss
            total += self.weights.router_z_loss * balance.router_z_loss
        choices = [_choices(routing) for routing in routings] if record else None
        return Terms(loss, count, objective=total, balance=balance), choices

    def after_update(self, model: Decoder, terms: Terms) -> None:
        """Moves selection biases, which are frozen under adapters."""
        if terms.balance is not None and not model.config.lora.rank:
            model.move_selection_biases(terms.balance, self.weights.selection_bias_rate)

    @staticmethod
    def example_batch(rows: int, length: int, config: TrainConfig) -> dict[str, Example]:
        """Returns abstract ids, labels and segments."""
        names = ("inputs", "labels", *((SEGMENTS,) if config.data.packed else ()))
        return {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in names}


def objective_of(loss: Loss | None, config: TrainConfig) -> Objective:
    """Returns the objective of a loss, which by default is the next token's."""
    if loss is None:
        return NextToken(config.train, config.mesh.context)
    return loss if isinstance(loss, Objective) else Objective(loss)


def row_keys(key: Array, rows: Array) -> Array:
    """Returns a random key per row index `[B]`."""
    return jax.vmap(partial(jax.random.fold_in, key))(rows)


def _choices(routing: Routing | None) -> tuple[Array, Array] | None:
    if routing is None or routing.experts is None or routing.margin is None:
        return None
    return routing.experts.swapaxes(0, 1), routing.margin.swapaxes(0, 1)


def attribute(loss: Loss | None, name: str, default: T) -> T:
    """Returns an optional attribute of a loss, such as `columns`.

    `train.loss_arguments` may complete the loss.
    """
    function = loss.func if isinstance(loss, partial) else loss
    with user_code(f"the loss's attribute {name}"):
        return getattr(function, name, default)


def example_batch(loss: Loss | None, config: TrainConfig, rows: int) -> dict[str, Example]:
    """Returns an example of a decoder's batch, for use without data.

    The loss makes it (`example_batch`), or it has abstract ids, labels and segments.
    """
    make: Callable[[int, int, TrainConfig], Mapping[str, Example]] = attribute(
        loss, "example_batch", NextToken.example_batch
    )
    return dict(make(rows, config.data.sequence_length, config))


def check_names(metrics: Iterable[object], who: str) -> None:
    """Raises ConfigError if a metric has the name of a metric that a run logs itself."""
    for name in metrics:
        if not isinstance(name, str):
            raise ConfigError(f"{who} a metric named {name!r}; a name must be a string")
        if name in _RESERVED or name.startswith(_RESERVED_GROUPS):
            raise ConfigError(
                f"{who} a metric named {name!r}, which a run logs itself; give it another name"
            )


def logged_numbers(metrics: object, who: str) -> dict[str, float]:
    """Returns a user's metrics as floats; raises ConfigError unless they are numbers by name."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{who} {describe_value(metrics)}; metrics are a dict of numbers by name")
    check_names(metrics, who)
    return {name: _number(name, value, who) for name, value in metrics.items()}


def _number(name: str, value: Any, who: str) -> float:
    is_text = isinstance(value, str | bytes)
    if not is_text and tuple(getattr(value, "shape", ())) == ():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    text = f"{describe_value(value)}, a {type(value).__name__}" if is_text else _describe(value)
    raise ConfigError(
        f"{who} a metric {name!r} that is {text}; it should be a number, or an array of shape ()"
    )


def call(loss: Loss, model: nnx.Module, batch: Mapping[str, Array], key: Array) -> Terms:
    """Returns the terms of a loss in float32; raises ConfigError for other results."""
    result: Any = loss(model, dict(batch), key)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ConfigError(f"the loss returns {_describe(result)}; it {_FORM}")
    total, weight, metrics = (*result, {})[:3]
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"the third result of the loss is {_describe(metrics)}; it should be a dict of metrics"
        )
    check_names(metrics, "the loss returns")
    loss_sum = _scalar("sum", total)
    count = _scalar("weight", weight)
    pairs = {}
    for name, value in metrics.items():
        eval_name = f"eval_{name}"
        if eval_name in metrics:
            raise ConfigError(
                f"the loss returns metrics named {name!r} and {eval_name!r}, and an evaluation "
                f"logs {name!r} as {eval_name!r}; rename one of them"
            )
        pair = value if isinstance(value, tuple) else (value, weight)
        if len(pair) != 2 or pair[0] is None or pair[1] is None:
            raise ConfigError(
                f"metric {name!r} is {value!r}; it should be a number, or a pair (sum, weight)"
            )
        pairs[name] = _scalar(name, pair[0]), _scalar(f"weight of {name}", pair[1])
    return Terms(loss_sum, count, pairs)


def _scalar(name: str, value: object) -> Array:
    array = jnp.asarray(value)
    if array.shape or not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise ConfigError(
            f"the {name} of the loss is {_describe(value)}, not a number; the loss {_FORM}"
        )
    return array.astype(jnp.float32)


def _describe(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Traits:
    """Facts about a loss."""

    # Whether the results depend on the random key
    is_random: bool
    # Whether the loss reads the weights of rows (`WEIGHTS`)
    reads_weights: bool = False
    # Dotted paths of the model's variables that the loss changes
    changes: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    # A warning about the dtypes of the results
    warning: str | None = None


def check_columns(loss: Loss, batch: Shapes) -> None:
    """Raises ConfigError if a batch lacks a column that the loss lists."""
    columns: tuple[str, ...] = attribute(loss, "columns", ())
    for name in columns:
        if name not in batch:
            how = _ORIGINS.get(name, "bring batches that have it (--data.batches)")
            raise ConfigError(
                f"the loss needs {name!r}, and batches have {', '.join(batch)}: {how}"
            )


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
            reads_weights = _trace(loss, model, batch, weights).reads(1)
    shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in batch.items())
    with user_code(f"the loss, on a batch of {shapes},", UserError):
        trace = _trace(loss, model, batch, *([weights] if reads_weights else []))
    # The user's own column may have another meaning.
    if WEIGHTS in batch:
        reads_weights = trace.reads(1 + sorted(batch).index(WEIGHTS))
    return Traits(
        is_random=_depends(trace.jaxpr, trace.jaxpr.outvars, trace.jaxpr.invars[0]),
        reads_weights=reads_weights,
        changes=_changes(trace),
        metrics=trace.metrics,
        warning=_warning(trace.results),
    )


@dataclass(frozen=True)
class _Trace:
    """A loss as a jaxpr.

    Its inputs are the random key, the weights of rows (if the loss gets them), the batch's columns,
    variables and parameters. Its outputs are the terms, variables and parameters.
    """

    jaxpr: Any
    # Variables and parameters before the call
    state: nnx.State
    params: nnx.State
    metrics: tuple[str, ...]
    # The sum and the weight that the loss returned
    results: tuple[object, ...]

    @property
    def num_state(self) -> int:
        """Number of variables and parameters."""
        return len(jax.tree.leaves([self.state, self.params]))

    def reads(self, index: int) -> bool:
        """Whether the terms depend on an input."""
        terms = self.jaxpr.outvars[: len(self.jaxpr.outvars) - self.num_state]
        return _depends(self.jaxpr, terms, self.jaxpr.invars[index])


def _trace(
    loss: Loss,
    model: nnx.Module,
    batch: Shapes,
    *weights: jax.ShapeDtypeStruct,
) -> _Trace:
    graph, params, rngs, state, constants = nnx.split(  # type: ignore[misc]
        model, nnx.Param, nnx.RngState, STATEFUL, ...
    )
    metrics: tuple[str, ...] = ()
    results: tuple[object, ...] = ()

    def recorded(*arguments: Any) -> Any:
        nonlocal results
        result: Any = loss(*arguments)
        results = result[:2] if isinstance(result, tuple) else ()
        return result

    def run(
        key: Array,
        weights: list[Array],
        batch: dict[str, Array],
        state: nnx.State,
        params: nnx.State,
    ) -> tuple[object, object]:
        nonlocal metrics
        merged = nnx.merge(graph, params, rng_state(rngs, key), state, constants, copy=True)
        terms = call(recorded, merged, batch | dict(zip([WEIGHTS], weights, strict=False)), key)
        metrics = tuple(terms.metrics)
        return terms, (changeable(merged, state), nnx.state(merged, nnx.Param))

    arguments = (jax.random.key(0), list(weights), dict(batch), state, params)
    jaxpr = jax.make_jaxpr(run)(*arguments).jaxpr
    return _Trace(jaxpr, state, params, metrics, results)


def _changes(trace: _Trace) -> tuple[str, ...]:
    # Returns the variables that the loss changes; raises ConfigError if it may not change them.
    params = nnx.to_flat_state(trace.params)
    variables = by_dotted_path([*nnx.to_flat_state(trace.state), *params])
    names_of_params = by_dotted_path(params)
    names: list[str] = []
    for name, variable in variables.items():
        names += [name] * len(jax.tree.leaves(variable))
    inputs = trace.jaxpr.invars[len(trace.jaxpr.invars) - trace.num_state :]
    outputs = trace.jaxpr.outvars[len(trace.jaxpr.outvars) - trace.num_state :]
    changes = []
    for name, before, output in zip(names, inputs, outputs, strict=True):
        after = _origin(output, trace.jaxpr)
        if after is before:
            continue
        if name in names_of_params:
            raise ConfigError(
                f"the loss assigns the parameter {name}, which only the optimizer changes; make it "
                "another nnx.Variable"
            )
        old = before.aval.str_short()
        new = after.aval.str_short()
        if old != new:
            raise ConfigError(
                f"a call of the model changes {name} from {old} to {new}; keep its shape and dtype"
            )
        changes.append(name)
    return tuple(changes)


def _warning(results: tuple[object, ...]) -> str | None:
    # Returns a warning if the sum or the weight has 16 bits: bfloat16 has three digits, and no odd
    # number above 256.
    narrow = []
    for name, result in zip(("sum", "weight"), results, strict=False):
        dtype = getattr(result, "dtype", None)
        if dtype is not None and dtype != np.bool_ and jnp.dtype(dtype).itemsize <= 2:
            narrow.append(f"its {name} in {dtype}")
    if not narrow:
        return None
    return (
        f"WARNING: the loss returns {' and '.join(narrow)}, which has too few digits for a sum "
        "over a batch; convert the terms to float32 before the sum, as in "
        "losses.astype(jnp.float32).sum()"
    )


def changeable(model: nnx.Module, like: nnx.State) -> nnx.State:
    """Returns the variables at the paths of `like` that are neither parameters nor random keys."""
    variables = dict(nnx.to_flat_state(nnx.state(model, STATEFUL)))
    paths = [path for path, _ in nnx.to_flat_state(like)]
    return nnx.from_flat_state([(path, variables[path]) for path in paths if path in variables])


def _depends(jaxpr: Any, outputs: list[Any], variable: Any) -> bool:
    # Whether the outputs depend on a variable of the jaxpr. Literals have a `val`; variables do
    # not.
    needed = {var for var in outputs if not hasattr(var, "val")}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed |= {var for var in equation.invars if not hasattr(var, "val")}
    return variable in needed


def _origin(var: object, jaxpr: Any) -> Any:
    # Follows `var` to the variable whose value it has: calls and scans may return an input
    # unchanged.
    for equation in reversed(jaxpr.eqns):
        body = getattr(equation.params.get("jaxpr"), "jaxpr", equation.params.get("jaxpr"))
        if body is None or var not in equation.outvars:
            continue
        index = equation.outvars.index(var)
        inner = _origin(body.outvars[index], body)
        if inner not in body.invars:
            break
        place = body.invars.index(inner)
        if equation.primitive.name == "scan":
            # Constants and carry precede what is sliced.
            unsliced = _num_unsliced(equation.invars, body.invars)
            carries = _num_unsliced(equation.outvars, body.outvars)
            is_stacked = index >= carries
            if not (place >= unsliced if is_stacked else place == unsliced - carries + index):
                break
        var = equation.invars[place]
    return var


def _num_unsliced(outer: list[Any], inner: list[Any]) -> int:
    # Compares ranks, because the parameters of a scan differ between versions of JAX.
    return sum(o.aval.ndim == i.aval.ndim for o, i in zip(outer, inner, strict=True))


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
        once, twice = jax.device_get(jax.jit(run)(dict(batch), key))
        jaxpr = jax.make_jaxpr(lambda key: terms(batch, 1, key))(key).jaxpr
    # The loss may only take batches of the run's size.
    except Exception:
        return None
    random_key = jaxpr.invars[0]
    loss_sum, weight, *_ = jaxpr.outvars
    # The weight is random in masked language models.
    if _depends(jaxpr, [weight], random_key):
        return None
    loss_is_random = _depends(jaxpr, [loss_sum], random_key)
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
