"""Loads the parts of a run, from a task or by their names in the settings.

`load_parts` imports a user's code. After it a run has a source of its model and an objective, and
no code asks whether they are jaxtp's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, cast

import optax

from jaxtp.config.python_object import (
    check_arguments,
    check_call,
    describe_value,
    load_object,
    reference_to,
    signature_of,
    user_code,
)
from jaxtp.config.schema import ConfigError, replace_nested, validate, value_of
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.loss import NextToken, Objective
from jaxtp.train.model_source import ModelSource, model_source
from jaxtp.train.step import StepSettings
from jaxtp.train.task import (
    LOSS_ARGUMENTS,
    REFERENCES,
    REPLACED,
    Callback,
    Task,
    changed,
    recordable_arguments,
    refuse_unused,
)


@dataclass(frozen=True)
class Parts:
    """The parts of a run after `load_parts`; jaxtp's are the defaults."""

    model: ModelSource = ModelSource()
    loss: Objective = NextToken()
    """`step_settings` gives it the settings of a run."""
    batches: object = None
    """A user's, instead of jaxtp's token data."""
    validation: object = None
    optimizer: object = None
    """A user's Optax transformation, or a function that returns it."""
    callbacks: Sequence[Callback] = ()


def load_parts(config: TrainConfig, task: Task = Task()) -> tuple[TrainConfig, Parts]:
    """Loads the parts of a task, and the parts that settings name.

    Returns the configuration with all settings of the loss and of a user's Decoder, and the parts.

    Raises:
      ConfigError: a name cannot be imported, a part has the wrong type, or settings have no effect
        with it.
    """
    parts: dict[str, Any] = {}
    for part, setting in REFERENCES.items():
        parts[part] = getattr(task, part)
        reference = value_of(config, setting)
        if reference is not None and parts[part] is None and part != "model":
            flag = f"--{setting}".replace("_", "-")
            if reference.startswith("<"):
                raise ConfigError(
                    f"{setting}={reference}: a program gave this {part} to its Trainer, and it has "
                    f"no name there; name it in a file, and set {flag} FILE.py:NAME"
                )
            parts[part] = load_object(reference, flag)
    loss = _with_arguments(parts["loss"], config.train)
    callbacks = (
        *task.callbacks,
        *(load_object(name, "--train.callbacks") for name in config.train.callbacks),
    )
    _check_functions(loss, callbacks)
    if parts["validation"] is not None and parts["batches"] is None:
        raise ConfigError("validation batches need batches to train on (--data.batches)")
    refuse_unused(_unused(config, parts))
    described, model = model_source(config).load(config, parts["model"], parts["plan"])
    objective = model.default_loss() if loss is None else Objective.of(loss)
    if parts["batches"] is None:
        model.check_data(config)
    arguments = recordable_arguments(loss)
    if arguments is not None:
        described = replace_nested(described, {LOSS_ARGUMENTS: arguments})
    return described, Parts(
        model=model,
        loss=objective,
        batches=parts["batches"],
        validation=parts["validation"],
        optimizer=None if isinstance(parts["optimizer"], OptimizerConfig) else parts["optimizer"],
        callbacks=callbacks,
    )


def _with_arguments(loss: Any, settings: LoopConfig) -> Any:
    # Returns the loss with `train.loss_arguments`.
    arguments = settings.loss_arguments
    if not isinstance(loss, type) and not (callable(loss) and arguments):
        if arguments and loss is None:
            raise ConfigError(f"{LOSS_ARGUMENTS}={dict(arguments)} need a loss: set --train.loss")
        return loss
    name = settings.loss or repr(loss)
    defaults = recordable_arguments(loss)
    # If the loss is an instance of a dataclass, its fields are the defaults.
    if defaults is not None:
        loss = type(loss)
        arguments = {**defaults, **arguments}
    elif not isinstance(loss, type):
        check_arguments(name, partial(loss, None, None, None), LOSS_ARGUMENTS, arguments)
        return partial(loss, **arguments)
    with user_code(name, ConfigError):
        if is_dataclass(loss):
            return validate(cast(type[Any], loss), arguments, source=LOSS_ARGUMENTS)
        check_arguments(name, loss, LOSS_ARGUMENTS, arguments)
        return loss(**arguments)


def _check_functions(loss: object, callbacks: Sequence[object]) -> None:
    if loss is not None:
        _check_function("loss", loss, ("model", "batch", "key"))
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigError(
                f"callback {reference_to(callback)} is a class; name a function (trainer, step)"
            )
        _check_function("callback", callback, ("trainer", "step"))


def _check_function(part: str, function: object, parameters: Sequence[str]) -> None:
    if not callable(function):
        raise ConfigError(
            f"{part} must be a function ({', '.join(parameters)}), not {describe_value(function)}"
        )
    check_call(f"{part} {reference_to(function)}", function, parameters)


def _unused(config: TrainConfig, parts: Mapping[str, object]) -> Iterator[str]:
    # Yields settings that are not at their default, and that a part replaces.
    for section, (part, used) in REPLACED.items():
        if parts[part] is not None and not isinstance(parts[part], OptimizerConfig):
            reason = f"the {part} {'are' if part == 'batches' else 'is'} your own"
            for setting in changed(config, section, used):
                yield f"{setting}: {reason}"


def build_optimizer(
    config: TrainConfig, parts: Parts
) -> optax.GradientTransformation | optax.MultiSteps:
    """Returns the optimizer of a run.

    Raises:
      ConfigError: the optimizer is not an Optax transformation, or the function fails.
    """
    optimizer: Any = parts.optimizer
    steps = config.train.steps
    if optimizer is None:
        return optimizers.build(config.optimizer, steps)
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


def step_settings(config: TrainConfig, parts: Parts = Parts()) -> StepSettings:
    """Returns the settings of a run's steps and evaluations."""
    schedule = None
    if parts.optimizer is None:
        schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
    return StepSettings(
        objective=parts.loss.configured(config.train, config.mesh.context),
        accumulation=config.train.accumulation,
        precision=config.model.precision,
        seed=config.run.seed,
        skips_allowed=config.train.skips_allowed,
        norm_groups=config.metrics.norm_groups,
        learning_rate=schedule,
    )
