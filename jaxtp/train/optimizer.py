"""The optimizer, composed from Optax: clipping, rule, weight decay, learning rate, groups.

Names distinguish vectors from matrices, because stacked layers give vectors a second dim. Only the rule determines
state paths in a checkpoint; other settings may change on resuming.
"""

import fnmatch
from typing import Any

import optax

from jaxtp.config.schema import ConfigError
from jaxtp.train.config import GroupConfig, OptimizerConfig
from jaxtp.train.state import OnLogicalShapes

_VECTORS = {"scale", "bias", "biases"}
_TABLES = {"embedding", "head"}


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns linear warm-up from zero, then the schedule until the last step.

    `wsd` (warm-up, stable, decay; arXiv 2404.06395) is constant, then linear over the last `decay_fraction` of all
    steps.
    """
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = min(config.warmup_steps, steps)
    rest = max(steps - warmup, 1)
    decay = min(max(round(config.decay_fraction * steps), 1), rest)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "constant": lambda: optax.constant_schedule(peak),
        "wsd": lambda: optax.linear_schedule(peak, end, decay, transition_begin=rest - decay),
    }[config.schedule]()
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns the chain: clip, scale by the rule, decay weights, scale by the learning rate."""
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _rule(config),
        _decayed(config),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
        _scaled_by_group(config),
    )
    return chain if is_modelled(config) else OnLogicalShapes(*chain)


def is_modelled(config: OptimizerConfig) -> bool:
    """Returns whether the rule's communication and memory are known."""
    # Adafactor's means are over global arrays, and XLA chooses the collectives.
    return config.name != "adafactor"


def check_groups(config: OptimizerConfig, parameters: list[str]) -> None:
    """Raises ConfigError unless each pattern of `optimizer.groups` is some parameter's first match."""
    for pattern in config.groups:
        matched = matching("optimizer.groups", pattern, parameters)
        if all(_first_match(config, path) != pattern for path in matched):
            raise ConfigError(
                f"optimizer.groups: earlier patterns match everything that {pattern!r} matches; the first matching "
                "pattern applies, so put it earlier"
            )


def matching(setting: str, pattern: str, parameters: list[str]) -> list[str]:
    """Returns the paths that match; raises ConfigError if none."""
    matched = [path for path in parameters if fnmatch.fnmatchcase(path, pattern)]
    if not matched:
        raise ConfigError(
            f"{setting}: the pattern {pattern!r} matches no trained parameter; there are:\n  " + "\n  ".join(parameters)
        )
    return matched


def is_matrix(path: str) -> bool:
    """Returns whether the parameter is a matrix, which decays."""
    return not _VECTORS & set(path.split("."))


def is_orthogonalised(path: str) -> bool:
    """Returns whether muon updates the parameter: a matrix in a block."""
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
    from jaxtp.train.muon import MUON, scale_by_muon

    def label(params: dict[str, Any]) -> dict[str, str]:
        return {path: MUON if is_orthogonalised(path) else "adam" for path in params}

    return optax.partition({MUON: optax.chain(scale_by_muon(config.beta1)), "adam": adam}, label)


def _with_float32_state(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    # Adafactor's decay approaches 1: after a thousand steps it changes a moment by less than bfloat16's last bit.

    def cast(params: Any) -> Any:
        return optax.tree.cast(params, "float32")

    return optax.GradientTransformation(
        lambda params: rule.init(cast(params)),
        lambda updates, state, params=None: rule.update(updates, state, cast(params)),
    )


def _decayed(config: OptimizerConfig) -> optax.GradientTransformation:
    def decayed(path: str, update: Any, param: Any) -> Any:
        decay = _group_of(config, path).weight_decay
        if decay is None:
            decay = config.weight_decay if is_matrix(path) else 0.0
        return update + decay * param if decay else update

    return optax.stateless(
        lambda updates, params: {path: decayed(path, u, params[path]) for path, u in updates.items()}
    )


def _scaled_by_group(config: OptimizerConfig) -> optax.GradientTransformation:
    def scaled(path: str, update: Any) -> Any:
        scale = _group_of(config, path).learning_rate_scale
        return update if scale == 1 else scale * update

    return optax.stateless(lambda updates, _: {path: scaled(path, u) for path, u in updates.items()})


def _group_of(config: OptimizerConfig, path: str) -> GroupConfig:
    pattern = _first_match(config, path)
    return GroupConfig() if pattern is None else config.groups[pattern]


def _first_match(config: OptimizerConfig, path: str) -> str | None:
    return next((pattern for pattern in config.groups if fnmatch.fnmatchcase(path, pattern)), None)
