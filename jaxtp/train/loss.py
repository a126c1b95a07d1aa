"""The objective of a run: the next token, or a user's loss, which is checked before the first step.

Step, evaluation and checks know an `Objective` only, whichever loss it has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from jaxtp.config.python_object import user_code
from jaxtp.config.schema import ConfigError
from jaxtp.data.loader import Batch
from jaxtp.data.rows import PAIRS, SEGMENTS
from jaxtp.layers.balance import Balance, Routing
from jaxtp.layers.context import Context
from jaxtp.mesh import abstract_mesh, as_current, mesh_shape
from jaxtp.models.decoder import Decoder
from jaxtp.train.config import LoopConfig, TrainConfig
from jaxtp.train.metrics import check_names, describe_type
from jaxtp.train.state import MakeModel
from jaxtp.train.task import Loss, Result, Shapes

T = TypeVar("T")
Example = NDArray[np.generic] | jax.ShapeDtypeStruct

Choices = list[tuple[Array, Array] | None] | None
"""The router's choices and their margin for each kind of block, if they are recorded."""

Experts = tuple[Array | None, ...] | None
"""Experts that replace the router's choices, `[B, layers, T, k]`, for each kind of block."""

ONE_DEVICE = abstract_mesh(mesh_shape())

STATEFUL = nnx.All(nnx.Variable, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
"""Filter of the variables that a model may change during a step, such as the statistics of
`nnx.BatchNorm`."""

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
    has_formulas: ClassVar[bool] = False
    """Whether the formulas of `memory.py` and `performance.py` describe its step."""

    def __init__(self, loss: Loss):
        self._loss = loss

    @property
    def function(self) -> Loss:
        """The loss as its author wrote it."""
        return self._loss

    @classmethod
    def of(cls, loss: Loss) -> "Objective":
        """Returns the objective of a loss."""
        return loss if isinstance(loss, Objective) else cls(loss)

    def configured(self, weights: LoopConfig, context: Context) -> "Objective":
        """Returns the objective with the settings of a run."""
        return self

    def attribute(self, name: str, default: T) -> T:
        """Returns an optional attribute of the loss, such as `columns`.

        `train.loss_arguments` may complete the loss.
        """
        function = self.function.func if isinstance(self.function, partial) else self.function
        with user_code(f"the loss's attribute {name}"):
            return getattr(function, name, default)

    def example(self, rows: int, config: TrainConfig) -> dict[str, Example]:
        """Returns an example of a decoder's batch, for use without data.

        The loss makes it (`example_batch`), or it has abstract ids, labels and segments.
        """
        make: Callable[[int, int, TrainConfig], Mapping[str, Example]] = self.attribute(
            "example_batch", NextToken.example_batch
        )
        return dict(make(rows, config.data.sequence_length, config))

    def __call__(self, model: Any, batch: Mapping[str, Array], key: Array) -> Result:
        """See `Loss`."""
        return self.function(model, batch, key)

    def inspect(self, make_model: MakeModel, batch: Shapes) -> "Traits":
        """Returns facts about the loss; raises ConfigError if it does not take the batch."""
        from jaxtp.train.loss_checks import inspect_loss

        with as_current(ONE_DEVICE):
            return inspect_loss(self.function, on_one_device(make_model), batch)

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
    has_formulas = True

    def configured(self, weights: LoopConfig, context: Context) -> "NextToken":
        """See `Objective`."""
        return replace(self, weights=weights, context=context)

    @property
    def function(self) -> "NextToken":
        """The loss, which is the objective itself."""
        return self

    def __call__(self, model: Decoder, batch: Mapping[str, Array], key: Array) -> Result:
        """Returns the cross-entropy alone, without dropout."""
        return model.loss(
            batch["inputs"],
            batch["labels"],
            segments=batch.get(SEGMENTS),
            context=self.context,
        )

    def inspect(self, make_model: MakeModel, batch: Shapes) -> "Traits":
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


def on_one_device(make_model: MakeModel) -> nnx.Module:
    """Returns an abstract model, not split; call it under `ONE_DEVICE`."""
    from jaxtp.plans.parallelize import abstract_model

    return abstract_model(lambda: make_model(nnx.Rngs(0)))


def row_keys(key: Array, rows: Array) -> Array:
    """Returns a random key per row index `[B]`."""
    return jax.vmap(partial(jax.random.fold_in, key))(rows)


def _choices(routing: Routing | None) -> tuple[Array, Array] | None:
    if routing is None or routing.experts is None or routing.margin is None:
        return None
    return routing.experts.swapaxes(0, 1), routing.margin.swapaxes(0, 1)


def call(loss: Loss, model: nnx.Module, batch: Mapping[str, Array], key: Array) -> Terms:
    """Returns the terms of a loss in float32; raises ConfigError for other results."""
    return terms_of(loss(model, dict(batch), key))


def terms_of(result: Any) -> Terms:
    """Returns the terms that a loss returned, in float32; raises ConfigError for other results."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ConfigError(f"the loss returns {describe_type(result)}; it {_FORM}")
    total, weight, metrics = (*result, {})[:3]
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"the third result of the loss is {describe_type(metrics)}; it should be a dict of "
            "metrics"
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
            f"the {name} of the loss is {describe_type(value)}, not a number; the loss {_FORM}"
        )
    return array.astype(jnp.float32)


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
    columns: tuple[str, ...] = Objective.of(loss).attribute("columns", ())
    for name in columns:
        if name not in batch:
            how = _ORIGINS.get(name, "bring batches that have it (--data.batches)")
            raise ConfigError(
                f"the loss needs {name!r}, and batches have {', '.join(batch)}: {how}"
            )


def changeable(model: nnx.Module, like: nnx.State) -> nnx.State:
    """Returns the variables at the paths of `like` that are neither parameters nor random keys."""
    variables = dict(nnx.to_flat_state(nnx.state(model, STATEFUL)))
    paths = [path for path, _ in nnx.to_flat_state(like)]
    return nnx.from_flat_state([(path, variables[path]) for path in paths if path in variables])
