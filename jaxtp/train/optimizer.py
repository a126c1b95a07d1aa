"""The optimizer of a run, composed from Optax: clipping, a rule, weight decay, the learning rate, groups.

Parameters are told apart by name, because the stacking of layers gives every vector a second dim.

The chain has the same parts whatever the settings: the rule alone decides the paths of its state in a checkpoint, so
any other setting may change when a run resumes.
"""

import fnmatch
from typing import Any

import optax

from jaxtp.config import ConfigError
from jaxtp.train.config import GroupConfig, OptimizerConfig
from jaxtp.train.muon import MUON, scale_by_muon
from jaxtp.train.optimizer_state import OnLogicalShapes

_VECTORS = {"scale", "bias", "biases"}
_TABLES = {"embedding", "head"}


def warmup_steps(config: OptimizerConfig, steps: int) -> int:
    """Returns the number of warm-up steps in a run of `steps`: that of the configuration, cut to the run."""
    return min(config.warmup_steps, steps)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns linear warm-up from zero, cut to the run where it is longer, then the schedule until the last step.

    `wsd` is warm-up, stable, decay: constant until the last `decay_fraction` of the steps, then linear (arXiv
    2404.06395).
    """
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = warmup_steps(config, steps)
    rest = max(steps - warmup, 1)
    decay = max(round(config.decay_fraction * steps), 1)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "constant": lambda: optax.constant_schedule(peak),
        "wsd": lambda: optax.linear_schedule(peak, end, decay, transition_begin=max(rest - decay, 0)),
    }[config.schedule]()
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns the transformation of gradients into updates: clip, scale by the rule, decay, scale by the rate."""
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _rule(config),
        _decayed(config),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
        _scaled_by_group(config),
    )
    return chain if is_modelled(config) else OnLogicalShapes(*chain)


def is_modelled(config: OptimizerConfig) -> bool:
    """Returns whether all that the rule moves, computes and holds is known.

    Adafactor's means are written on global arrays without padding, and the compiler chooses their collectives.
    """
    return config.name != "adafactor"


def check_groups(config: OptimizerConfig, parameters: list[str]) -> None:
    """Checks that every pattern of `optimizer.groups` is the first to match some parameter.

    Raises:
      ConfigError: one is not; the message lists what there is.
    """
    for pattern in config.groups:
        matched = matching("optimizer.groups", pattern, parameters)
        if all(_first_match(config, path) != pattern for path in matched):
            raise ConfigError(
                f"optimizer.groups: what the pattern {pattern!r} matches is taken by patterns before it; "
                "the first that matches a parameter holds, so put it earlier"
            )


def matching(setting: str, pattern: str, parameters: list[str]) -> list[str]:
    """Returns the paths that a pattern matches.

    Raises:
      ConfigError: none; the message lists what there is.
    """
    matched = [path for path in parameters if fnmatch.fnmatchcase(path, pattern)]
    if not matched:
        raise ConfigError(
            f"{setting}: the pattern {pattern!r} matches no parameter that is trained; there are:\n  "
            + "\n  ".join(parameters)
        )
    return matched


def is_matrix(path: str) -> bool:
    """Returns whether a parameter is a matrix, which decays and may be orthogonalised: no norm scale and no bias."""
    return not _VECTORS & set(path.split("."))


def is_orthogonalised(path: str) -> bool:
    """Returns whether a parameter is muon's: a matrix of a block; vectors, and embedding and head, are Adam's."""
    return is_matrix(path) and not _TABLES & set(path.split("."))


def _rule(config: OptimizerConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    if config.name == "adamw":  # Loshchilov and Hutter, arXiv 1711.05101
        return adam
    if config.name == "lion":  # Chen et al., arXiv 2302.06675
        return optax.scale_by_lion(config.beta1, config.beta2)
    if config.name == "adafactor":
        # Shazeer and Stern, arXiv 1804.04235, with the decoupled decay and clipping of this file instead of its own:
        # its root mean squares over a table would count the rows that pad a vocabulary.
        return _with_float32_state(optax.scale_by_factored_rms())
    return optax.partition({MUON: optax.chain(scale_by_muon(config.beta1)), "adam": adam}, _muon_labels)


def _with_float32_state(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a rule whose state is in float32 whatever its parameters are in.

    Adafactor's decay goes to 1: after a thousand steps it changes a moment by less than the last digit of a bfloat16.
    """

    def cast(params: Any) -> Any:
        return optax.tree.cast(params, "float32")

    return optax.GradientTransformation(
        lambda params: rule.init(cast(params)),
        lambda updates, state, params=None: rule.update(updates, state, cast(params)),
    )


def _muon_labels(params: Any) -> Any:
    """Labels each parameter by the rule that it is updated by."""
    return {path: MUON if is_orthogonalised(path) else "adam" for path in params}


def _decayed(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adds to each update its parameter's weight decay times the parameter."""

    def decayed(path: str, update: Any, param: Any) -> Any:
        own = _group_of(config, path).weight_decay
        decay = own if own is not None else config.weight_decay if is_matrix(path) else 0.0
        return update + decay * param if decay else update

    return optax.stateless(
        lambda updates, params: {path: decayed(path, u, params[path]) for path, u in updates.items()}
    )


def _scaled_by_group(config: OptimizerConfig) -> optax.GradientTransformation:
    """Multiplies each update by its group's scale of the learning rate."""

    def scaled(path: str, update: Any) -> Any:
        scale = _group_of(config, path).learning_rate_scale
        return update if scale == 1 else scale * update

    return optax.stateless(lambda updates, _: {path: scaled(path, u) for path, u in updates.items()})


def _group_of(config: OptimizerConfig, path: str) -> GroupConfig:
    """Returns the group of the first pattern that matches a parameter; the default group if none does."""
    pattern = _first_match(config, path)
    return GroupConfig() if pattern is None else config.groups[pattern]


def _first_match(config: OptimizerConfig, path: str) -> str | None:
    return next((pattern for pattern in config.groups if fnmatch.fnmatchcase(path, pattern)), None)
