"""The parts of a run that a user may bring: model, plan, loss, batches, optimizer, callbacks.

A part is a plain function or value. `parts.py` reads the parts that settings name
(`--model.build FILE.py:build`), so the command and a script start the same run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import optax
from flax import nnx
from jax import Array, ShapeDtypeStruct

from jaxtp.config.python_object import (
    reference_to,
)
from jaxtp.config.schema import (
    ConfigError,
    leaves,
    replace_nested,
    to_plain,
    validate,
    value_of,
)
from jaxtp.models.config import ModelConfig
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig

Shapes = Mapping[str, ShapeDtypeStruct]
"""A global batch of abstract arrays."""

Metrics = Mapping[str, Array | tuple[Array, Array]]
"""By name, a sum over the rows of a batch, which the step divides by the loss's weight; or a pair
of a sum and its own weight."""

Result = tuple[Array, Array] | tuple[Array, Array, Metrics]
Loss = Callable[[Any, Any, Array], Result]
"""Takes a model, a batch and a random key; returns a sum over the batch's rows, and the weight by
which the step divides it.

The loss must not return a mean. The step divides the sum over all micro-batches by their total
weight, so a token has the same weight in every micro-batch, on every mesh."""

Callback = Callable[[Any, Any], object]
"""Takes the `Trainer` and its `Step`. Every process calls it after each step, because it may use
all devices."""

ModelPart: TypeAlias = Callable[..., nnx.Module] | ModelConfig
OptimizerPart: TypeAlias = (
    optax.GradientTransformation | optax.MultiSteps | Callable[..., Any] | OptimizerConfig
)


@dataclass(frozen=True)
class Task:
    """The parts of a run that you bring. A part that is None comes from the settings."""

    model: ModelPart | None = None
    """A function that returns a Flax NNX model, or a model's class; a parameter `rngs` gets
    `nnx.Rngs(run.seed)`. Or the settings of jaxtp's decoder, or of a subclass."""

    loss: Loss | None = None
    """By default the cross-entropy of the decoder's next token. It may be a callable dataclass of
    settings, such as `DPO(beta=0.2)`."""

    batches: object = None
    """A function of the step that returns a dict of all rows in NumPy, a dataset with `__len__` and
    `__getitem__`, an iterable of such dicts, a list of iterables, or a function that returns one of
    these (`data/sources.py`)."""

    optimizer: OptimizerPart | None = None
    """An Optax transformation, or a function that returns one; a parameter `steps` gets the number
    of updates in the whole run. The transformation sees the parameters as a dict by dotted path,
    `{"blocks.0.mlp.kernel": ...}` (see `jaxtp.by_path`)."""

    plan: Mapping[str, Any] | None = None
    """Styles by pattern of module paths, for `parallelize`. By default the model's specs, or the
    plan of `propose_plan` if it has none."""

    validation: object = None
    """Batches to evaluate on, as `batches`."""

    callbacks: Sequence[Callback] = ()

    def settings(self) -> dict[str, ModelConfig | OptimizerConfig]:
        """Returns the parts that are settings, by section."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {
            name: part
            for name, part in parts.items()
            if isinstance(part, ModelConfig | OptimizerConfig)
        }


def _recorded(config: ModelConfig) -> dict[str, object]:
    if type(config) is ModelConfig:
        return {"model": config, "model.build": None, "model.arguments": {}}
    from jaxtp.models.own_decoder import recorded

    return recorded(config)


LOSS_ARGUMENTS = "train.loss_arguments"
REFERENCES = {
    "model": "model.build",
    "loss": "train.loss",
    "batches": "data.batches",
    "optimizer": "optimizer.build",
    "plan": "model.plan",
    "validation": "data.validation_batches",
}
"""The setting that names each part."""
_WEIGHTS_OF_LOSS = {"z_loss", "balance_loss", "router_z_loss", "selection_bias_rate"}
REPLACED: dict[str, tuple[str, set[str]]] = {
    "optimizer": ("optimizer", {"build"}),
    "data": ("batches", {"batches", "validation_batches", "global_batch_size"}),
    "train": ("loss", {field.name for field in fields(LoopConfig)} - _WEIGHTS_OF_LOSS),
}
"""For each section, the part that replaces its settings, and the settings that keep an effect."""


def with_references(
    config: TrainConfig, task: Task, explicit: Set[str] = frozenset()
) -> TrainConfig:
    """Returns the configuration with the names of a task's parts, which other commands can load.

    Raises:
      ConfigError: an explicit setting names a part that the task has too.
    """
    names: dict[str, object] = dict(task.settings())
    if isinstance(task.model, ModelConfig):
        names |= _recorded(task.model)
    elif config.origin.build is None:
        names |= _recorded(config.model)
    functions = [part for part in (task.model, task.loss, task.batches) if callable(part)]
    for part, setting in REFERENCES.items():
        value = getattr(task, part)
        if value is None:
            continue
        arguments = recordable_arguments(value) if part == "loss" else None
        for name in explicit:
            is_argument = f"{name}.".startswith(f"{setting}_arguments.")
            if name == setting or (is_argument and arguments is not None):
                raise ConfigError(
                    f"{name} is set, and the task has a {part} too; leave one of them out"
                )
        if part in task.settings():
            continue
        names[setting] = reference_to(value if arguments is None else type(value), functions)
        if arguments is not None:
            names[LOSS_ARGUMENTS] = arguments
    return replace_nested(config, names)


def recordable_arguments(loss: object) -> dict[str, object] | None:
    """Returns the fields of a loss that is a dataclass, if a file can hold them; otherwise None."""
    if not is_dataclass(loss) or isinstance(loss, type):
        return None
    try:
        arguments = to_plain(loss)
        return arguments if validate(type(loss), arguments, source="") == loss else None
    # Pydantic cannot read a field, or a field is an array.
    except Exception:
        return None


def changed(config: TrainConfig, section: str, used: Set[str]) -> Iterator[str]:
    """Yields the settings of a section that are not at their default, except the `used` ones."""
    before = dict(leaves(to_plain(TrainConfig())[section]))
    for keys, value in leaves(to_plain(config)[section]):
        if keys[0] not in used and value != before.get(keys):
            yield f"{section}.{'.'.join(keys)}={value}"


def refuse_unused(settings: Iterable[str]) -> None:
    """Raises ConfigError if there are settings without effect."""
    lines = [f"\n  {setting}" for setting in settings]
    if lines:
        raise ConfigError(f"these settings have no effect:{''.join(lines)}")


def is_replaced(config: TrainConfig, name: str) -> bool:
    """Returns whether a part that the configuration names replaces a setting."""
    section, _, key = name.partition(".")
    if section not in REPLACED:
        return False
    part, used = REPLACED[section]
    return key not in used and value_of(config, REFERENCES[part]) is not None
