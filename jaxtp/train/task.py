"""The parts of a run that a user may bring: model, plan, loss, batches, optimizer, callbacks.

A part is a plain function or value. `load_task` reads the parts that settings name
(`--model.build FILE.py:build`), so the command and a script start the same run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import optax
from flax import nnx
from jax import Array, ShapeDtypeStruct

from jaxtp.config.python_object import (
    check_arguments,
    check_call,
    describe_value,
    load_object,
    reference_to,
    signature_of,
    user_code,
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


@dataclass(frozen=True)
class Task:
    """The parts of a run that you bring. A part that is None comes from the settings."""

    model: Callable[..., nnx.Module] | ModelConfig | None = None
    """A function that returns a Flax NNX model, or a model's class; a parameter `rngs` gets
    `nnx.Rngs(run.seed)`. Or the settings of jaxtp's decoder, or of a subclass."""

    loss: Loss | None = None
    """By default the cross-entropy of the decoder's next token. It may be a callable dataclass of
    settings, such as `DPO(beta=0.2)`."""

    batches: object = None
    """A function of the step that returns a dict of all rows in NumPy, a dataset with `__len__` and
    `__getitem__`, an iterable of such dicts, a list of iterables, or a function that returns one of
    these (`data/sources.py`)."""

    optimizer: (
        optax.GradientTransformation
        | optax.MultiSteps
        | Callable[..., Any]
        | OptimizerConfig
        | None
    ) = None
    """An Optax transformation, or a function that returns one; a parameter `steps` gets the number
    of updates in the whole run. The transformation sees the parameters as a dict by dotted path,
    `{"blocks.0.mlp.kernel": ...}` (see `jaxtp.by_path`)."""

    plan: Mapping[str, Any] | None = None
    """Styles by pattern of module paths, for `parallelize`. By default the model's specs, or the
    plan of `propose_plan` if it has none."""

    validation: object = None
    """Batches to evaluate on, as `batches`."""

    callbacks: Sequence[Callback] = ()

    @property
    def has_own_model(self) -> bool:
        """Whether the model is not a Decoder; known once `load_task` has built it."""
        return self.model is not None and not isinstance(self.model, ModelConfig)

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
_REFERENCES = {
    "model": "model.build",
    "loss": "train.loss",
    "batches": "data.batches",
    "optimizer": "optimizer.build",
    "plan": "model.plan",
    "validation": "data.validation_batches",
}
"""The setting that names each part."""
_WEIGHTS_OF_LOSS = {"z_loss", "balance_loss", "router_z_loss", "selection_bias_rate"}
_REPLACED: dict[str, tuple[str, set[str]]] = {
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
    for part, setting in _REFERENCES.items():
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


def load_task(config: TrainConfig, task: Task = Task()) -> Task:
    """Returns the task with all parts: its own, and the parts that settings name.

    A function that makes a Decoder is replaced by the Decoder's settings.

    Raises:
      ConfigError: a name that cannot be imported, or settings without effect.
    """
    parts: dict[str, Any] = {}
    for part, setting in _REFERENCES.items():
        reference = value_of(config, setting)
        is_settings = part == "model" and not config.is_foreign
        if reference is not None and getattr(task, part) is None and not is_settings:
            parts[part] = load_object(reference, f"--{setting}".replace("_", "-"))
    loss = parts.get("loss", task.loss)
    if isinstance(loss, type) or (callable(loss) and config.train.loss_arguments):
        parts["loss"] = _with_arguments(loss, config.train)
    if config.is_foreign:
        from jaxtp.models.own_decoder import decoder_settings

        settings = decoder_settings(parts.get("model", task.model), config.origin)
        if settings is not None:
            parts["model"] = settings
    parts["callbacks"] = (
        *task.callbacks,
        *(load_object(name, "--train.callbacks") for name in config.train.callbacks),
    )
    loaded = replace(task, **parts)
    check(config, loaded)
    return loaded


def _with_arguments(loss: Callable[..., object], settings: LoopConfig) -> Loss:
    name = settings.loss or repr(loss)
    arguments = settings.loss_arguments
    defaults = recordable_arguments(loss)
    # If the loss is an instance of a dataclass, its fields are the defaults.
    if defaults is not None:
        loss = type(loss)
        arguments = {**defaults, **arguments}
    elif not isinstance(loss, type):
        check_arguments(name, partial(loss, None, None, None), LOSS_ARGUMENTS, arguments)
        return cast(Loss, partial(loss, **arguments))
    with user_code(name, ConfigError):
        if is_dataclass(loss):
            return cast(Loss, validate(loss, arguments, source=LOSS_ARGUMENTS))
        check_arguments(name, loss, LOSS_ARGUMENTS, arguments)
        return cast(Loss, loss(**arguments))


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


def with_parts(config: TrainConfig, task: Task) -> TrainConfig:
    """Returns the configuration with all settings of the task's loss, and of its Decoder.

    The settings of a Decoder count only if `model.build` makes it.
    """
    arguments = recordable_arguments(task.loss)
    if arguments is not None:
        config = replace_nested(config, {LOSS_ARGUMENTS: arguments})
    has_decoder = config.is_foreign and isinstance(task.model, ModelConfig)
    return replace_nested(config, task.settings()) if has_decoder else config


def check(config: TrainConfig, task: Task) -> None:
    """Raises ConfigError if a part has the wrong type, or a setting has no effect with it."""
    own = task.has_own_model
    if task.loss is not None:
        _check_function("loss", task.loss, ("model", "batch", "key"))
    for callback in task.callbacks:
        if isinstance(callback, type):
            raise ConfigError(
                f"callback {reference_to(callback)} is a class; name a function (trainer, step)"
            )
        _check_function("callback", callback, ("trainer", "step"))
    if task.loss is None and config.train.loss_arguments:
        raise ConfigError(
            f"{LOSS_ARGUMENTS}={dict(config.train.loss_arguments)} need a loss: set --train.loss"
        )
    if task.plan is not None and not isinstance(task.plan, Mapping):
        raise ConfigError(
            f"a plan is a dict from patterns to styles, not {describe_value(task.plan)}"
        )
    if task.plan is not None and not own:
        raise ConfigError(
            "a plan splits a model of your own (--model.build); the decoder has its own "
            "PartitionSpecs"
        )
    if own and task.loss is None:
        raise ConfigError(
            "a model of your own needs a loss (--train.loss FILE.py:loss): a function (model, "
            "batch, key) that returns a sum over the batch's rows and its weight"
        )
    if own and task.batches is None and config.data.path is None and not config.data.mixture:
        raise ConfigError(
            "a model of your own needs batches (--data.batches FILE.py:batches), or a dataset of "
            "tokens (--data.path)"
        )
    if task.validation is not None and task.batches is None:
        raise ConfigError("validation batches need batches to train on (--data.batches)")
    unused = [f"\n  {setting}" for setting in _unused(config, task)]
    if unused:
        raise ConfigError(f"these settings have no effect:{''.join(unused)}")


def _check_function(part: str, function: object, parameters: Sequence[str]) -> None:
    if not callable(function):
        raise ConfigError(
            f"{part} must be a function ({', '.join(parameters)}), not {describe_value(function)}"
        )
    check_call(f"{part} {reference_to(function)}", function, parameters)


def _unused(config: TrainConfig, task: Task) -> Iterator[str]:
    # Yields settings that are not at their default, and that a part replaces.
    matmul = config.model.precision.matmul
    if task.has_own_model and matmul != "compute":
        yield (
            f"model.precision.matmul={matmul}: it applies to projections of jaxtp's decoder, and "
            "the model is your own"
        )
    if config.is_foreign:
        used = {"build", "arguments"}
        if task.has_own_model:
            used |= {"plan", "precision"}
        reason = "the model is your own; its function takes model.arguments"
        for setting in _changed(config, "model", used):
            yield f"{setting}: {reason}"
    for section, (part, used) in _REPLACED.items():
        if getattr(task, part) is not None and part not in task.settings():
            reason = f"the {part} {'are' if part == 'batches' else 'is'} your own"
            for setting in _changed(config, section, used):
                yield f"{setting}: {reason}"


def _changed(config: TrainConfig, section: str, used: Set[str]) -> Iterator[str]:
    # Yields the settings of a section that are not at their default, except the `used` ones.
    before = dict(leaves(to_plain(TrainConfig())[section]))
    for keys, value in leaves(to_plain(config)[section]):
        if keys[0] not in used and value != before.get(keys):
            yield f"{section}.{'.'.join(keys)}={value}"


def is_replaced(config: TrainConfig, name: str) -> bool:
    """Returns whether a part that the configuration names replaces a setting."""
    section, _, key = name.partition(".")
    if section not in _REPLACED:
        return False
    part, used = _REPLACED[section]
    return key not in used and value_of(config, _REFERENCES[part]) is not None


def transformation(
    task: Task, steps: int
) -> optax.GradientTransformation | optax.MultiSteps | None:
    """Returns the task's Optax transformation, if it has one.

    Args:
      steps: number of updates in the whole run, for a function with this parameter.

    Raises:
      ConfigError: the optimizer is not an Optax transformation, or the function fails.
    """
    optimizer = task.optimizer
    if optimizer is None or isinstance(optimizer, OptimizerConfig):
        return None
    if callable(optimizer):
        signature = signature_of(optimizer)
        takes_steps = signature is not None and "steps" in signature.parameters
        with user_code("optimizer"):
            optimizer = optimizer(steps) if takes_steps else optimizer()
    if not isinstance(optimizer, optax.GradientTransformation | optax.MultiSteps):
        raise ConfigError(
            "optimizer must be an Optax transformation, such as optax.adamw(3e-4), not "
            f"{describe_value(optimizer)}"
        )
    return optimizer
