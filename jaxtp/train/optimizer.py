"""The optimizer, composed from Optax.

It has clipping, rule, weight decay, learning rate, and groups by patterns of paths.

Names distinguish vectors from matrices, because stacked layers give vectors a second dim. Only the
rule determines state paths in a checkpoint, and `first_moment` a dtype; other settings may change
on resuming.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.tree_util import KeyPath, keystr, tree_map_with_path

from jaxtp.collectives import axis_size
from jaxtp.config.hints import matches
from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import Padding, Variable, pad, padding_of
from jaxtp.mesh import TP
from jaxtp.train.config import GroupConfig, OptimizerConfig
from jaxtp.train.sharded_optimizer import OnPaddedArrays

_VECTORS = {
    "scale",
    "bias",
    "biases",
    "alpha_p",
    "alpha_n",
    "sinks",
    "q_conv",
    "k_conv",
    "v_conv",
    "decay_log",
}
_TABLES = {"embedding", "head"}


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns linear warm-up from zero, then the schedule until the last step.

    `wsd` (warm-up, stable, decay; arXiv 2404.06395) is constant, then linear over the last
    `decay_fraction` of steps.
    """
    peak = config.learning_rate
    end = config.learning_rate * config.final_fraction
    warmup = min(config.warmup_steps, steps)
    rest = max(steps - warmup, 1)
    decay = min(max(round(config.decay_fraction * steps), 1), rest)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "constant": lambda: optax.constant_schedule(peak),
        "wsd": lambda: optax.linear_schedule(peak, end, decay, transition_begin=rest - decay),
    }[config.schedule]()
    return (
        after
        if warmup == 0
        else optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])
    )


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns the chain: clip, scale by the rule, decay weights, scale by the learning rate."""
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _rule(config),
        _decayed(config),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
        _scaled_by_group(config),
    )
    return OnPaddedArrays(*chain) if is_modelled(config) else chain


def is_modelled(config: OptimizerConfig) -> bool:
    """Returns whether the rule's communication and memory are known."""
    # Adafactor's means are over global arrays, and XLA chooses the collectives.
    return config.name != "adafactor"


def by_path(
    groups: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Returns an `optax.partition` that updates parameters by patterns of their paths.

    The first pattern that matches the path of a parameter decides.

    Example, with a frozen embedding, which has no state::

        by_path({
            "embedding.*": optax.set_to_zero(),
            "*.bias|*.scale": optax.adamw(1e-3, weight_decay=0.0),
            "*": optax.adamw(3e-4),
        })

    Args:
      groups: by pattern, as in the shell; `|` separates alternatives. Each needs a parameter of its
        own.

    Raises:
      ConfigError: at `init`, for a pattern without parameters, or a parameter without a pattern.
    """

    def labels(params: optax.Params) -> optax.Params:
        paths = tree_map_with_path(lambda path, _: keystr(path, simple=True, separator="."), params)
        check_patterns("by_path", groups, jax.tree.leaves(paths))
        if rest := [path for path in jax.tree.leaves(paths) if _first_match(groups, path) is None]:
            raise ConfigError(
                f"by_path: no pattern matches {', '.join(rest)}; end with the pattern '*'"
            )
        return jax.tree.map(lambda path: _first_match(groups, path), paths)

    return optax.partition(groups, labels)


def check_patterns(setting: str, patterns: Iterable[str], paths: Sequence[str]) -> None:
    """Raises ConfigError unless each pattern is some path's first match."""
    for pattern in patterns:
        matched = matching(setting, pattern, paths)
        if all(_first_match(patterns, path) != pattern for path in matched):
            raise ConfigError(
                f"{setting}: earlier patterns match everything that {pattern!r} matches; the first "
                "matching pattern applies, so put it earlier"
            )


def matching(setting: str, pattern: str, paths: Sequence[str]) -> list[str]:
    """Returns the paths that match; raises ConfigError if none."""
    matched = [path for path in paths if matches(pattern, path)]
    if not matched:
        raise ConfigError(
            f"{setting}: the pattern {pattern!r} matches no trained parameter; there are:\n  "
            + "\n  ".join(paths)
        )
    return matched


def _first_match(patterns: Iterable[str], path: str) -> str | None:
    return next((pattern for pattern in patterns if matches(pattern, path)), None)


def current_learning_rate(state: optax.OptState) -> Array | None:
    """Returns the `learning_rate` of the last update, or None.

    The Optax state has one `optax.inject_hyperparams`.

    Optax stores no other rate. A later factor, such as `reduce_on_plateau`'s, is not in it.
    """
    found = optax.tree.get_all_with_path(
        state, "learning_rate", filtering=lambda _, leaf: isinstance(leaf, Array)
    )
    return found[0][1] if len(found) == 1 else None


def is_matrix(path: str) -> bool:
    """Returns whether the parameter is a matrix, which decays."""
    names = path.split(".")
    # Names such as gate_bias and router_scale count as well.
    return not _VECTORS & {*names, *(name.rpartition("_")[2] for name in names)}


def is_orthogonalised(path: str) -> bool:
    """Returns whether muon updates the parameter: a matrix in a block."""
    return is_matrix(path) and not _TABLES & set(path.split("."))


def round_stochastically(array: Array, noise: Array) -> Array:
    """Rounds float32 to bfloat16, up with the probability that keeps the mean.

    `noise` is uniform in uint32.

    To nearest, a decay that changes less than half a last digit would never change it.
    """
    bits = (lax.bitcast_convert_type(array, jnp.uint32) + (noise >> 16)) >> 16
    rounded = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(array), rounded, array.astype(jnp.bfloat16))


def noise_of(seed: Array, shape: Sequence[int], padding: Padding = ()) -> Array:
    """Returns uint32 by an element's index without padding: equal on every mesh."""
    # A hash: with threefry, an update on a CPU takes four times as long, and XLA stores three words
    # for each element.
    splits = dict(padding)
    for dim in range(-len(shape), 0):
        split = splits.get(dim)
        index = lax.iota(jnp.uint32, shape[dim] if split is None else split.size)
        index = index if split is None else pad(index, ((-1, split),), axis_size(TP))
        step = jnp.uint32(pow(0x9E3779B1, -dim, 2**32))  # odd: no two indices of a dim coincide
        seed = seed + (index * step).reshape(-1, *(1,) * (-dim - 1))
    return _hash(seed)


def _hash(x: Array) -> Array:
    # Wellons' lowbias32: a change of any bit changes each bit of the result in half of all cases.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def _in_bfloat16(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    # Stateless: count, path and index decide how an element of the first moment is rounded.
    def with_mu(state: optax.OptState, dtype: str) -> optax.OptState:
        return state._replace(mu=optax.tree.cast(state.mu, dtype))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params = None,
        *,
        variables: Mapping[str, Variable] | None = None,
        **_: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        wide = optax.with_extra_args_support(rule).update
        updates, state = wide(updates, with_mu(state, "float32"), params, variables=variables)

        def rounded(path: KeyPath, array: Array) -> Array:
            name = keystr(path, simple=True)
            seed = _hash(state.count.astype(jnp.uint32) ^ jnp.uint32(zlib.crc32(name.encode())))
            padding = () if variables is None else padding_of(variables[name])
            return round_stochastically(array, noise_of(seed, array.shape, padding))

        return updates, state._replace(mu=tree_map_with_path(rounded, state.mu))

    return optax.GradientTransformationExtraArgs(
        lambda params: with_mu(rule.init(params), "bfloat16"), update
    )


def _rule(config: OptimizerConfig) -> optax.GradientTransformation:
    stored = _in_bfloat16 if config.first_moment == "bfloat16" else optax.with_extra_args_support
    adam = stored(optax.scale_by_adam(config.beta1, config.beta2, config.eps))
    if config.name == "adamw":  # Loshchilov and Hutter, arXiv 1711.05101
        return adam
    if config.name == "lion":  # Chen et al., arXiv 2302.06675
        return stored(optax.scale_by_lion(config.beta1, config.beta2))
    if config.name == "adafactor":
        # Shazeer and Stern, arXiv 1804.04235, with the decoupled decay and clipping of this file
        # instead of its own: its root mean squares over a table would count the rows that pad a
        # vocabulary.
        return _with_float32_state(optax.scale_by_factored_rms())
    from jaxtp.train.muon import MUON, scale_by_muon

    def label(params: dict[str, Any]) -> dict[str, str]:
        return {path: MUON if is_orthogonalised(path) else "adam" for path in params}

    return optax.partition(
        {MUON: optax.chain(stored(scale_by_muon(config.beta1))), "adam": adam}, label
    )


def _with_float32_state(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    # Adafactor's decay approaches 1: after a thousand steps it changes a moment by less than
    # bfloat16's last bit.

    def cast(params: object) -> Any:
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
        lambda updates, params: {
            path: decayed(path, u, params[path]) for path, u in updates.items()
        }
    )


def _scaled_by_group(config: OptimizerConfig) -> optax.GradientTransformation:
    def scaled(path: str, update: Any) -> Any:
        scale = _group_of(config, path).learning_rate_scale
        return update if scale == 1 else scale * update

    return optax.stateless(
        lambda updates, _: {path: scaled(path, u) for path, u in updates.items()}
    )


def _group_of(config: OptimizerConfig, path: str) -> GroupConfig:
    pattern = _first_match(config.groups, path)
    return GroupConfig() if pattern is None else config.groups[pattern]
