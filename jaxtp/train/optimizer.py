"""The optimizer, composed from Optax: clipping, rule, weight decay, learning rate and groups.

Names distinguish vectors from matrices, because stacked layers give vectors a second dim. The rule
determines the paths of the state in a checkpoint, and `first_moment` a dtype; all other settings
may change when a run resumes.
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
    "taps",
    "decay_log",
}
_TABLES = {"embedding", "head"}


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a schedule with a linear warm-up from zero.

    After the warm-up, `wsd` (warm-up, stable, decay; arXiv 2404.06395) is constant, then linear
    over the last `decay_fraction` of the steps.
    """
    peak = config.learning_rate
    end = peak * config.final_fraction
    warmup = min(config.warmup_steps, steps)
    remaining = max(steps - warmup, 1)
    match config.schedule:
        case "cosine":
            after = optax.cosine_decay_schedule(peak, remaining, alpha=config.final_fraction)
        case "linear":
            after = optax.linear_schedule(peak, end, remaining)
        case "constant":
            after = optax.constant_schedule(peak)
        case "wsd":
            decay = min(max(round(config.decay_fraction * steps), 1), remaining)
            after = optax.linear_schedule(peak, end, decay, transition_begin=remaining - decay)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns the Optax chain."""
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
    # Adafactor takes means over global arrays, for which XLA chooses the collectives.
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
      groups: transformations by pattern, as in a shell; `|` separates alternatives. Each pattern
        must be the first match of some parameter.

    Raises:
      ConfigError: at `init`, if a pattern has no parameter, or a parameter no pattern.
    """

    def labels(params: optax.Params) -> optax.Params:
        paths = tree_map_with_path(lambda path, _: keystr(path, simple=True, separator="."), params)
        names = jax.tree.leaves(paths)
        check_patterns("by_path", groups, names)
        unmatched = [name for name in names if _first_match(groups, name) is None]
        if unmatched:
            raise ConfigError(
                f"by_path: no pattern matches {', '.join(unmatched)}; end with the pattern '*'"
            )
        return jax.tree.map(lambda path: _first_match(groups, path), paths)

    return optax.partition(groups, labels)


def check_patterns(setting: str, patterns: Iterable[str], paths: Sequence[str]) -> None:
    """Raises ConfigError unless each pattern is the first match of some path."""
    for pattern in patterns:
        matched = matching(setting, pattern, paths)
        if all(_first_match(patterns, path) != pattern for path in matched):
            raise ConfigError(
                f"{setting}: earlier patterns match everything that {pattern!r} matches; the first "
                "matching pattern applies, so put this one earlier"
            )


def matching(setting: str, pattern: str, paths: Sequence[str]) -> list[str]:
    """Returns the paths that match; raises ConfigError if there are none."""
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
    """Returns the last update's `learning_rate` if the state has one `optax.inject_hyperparams`.

    Otherwise returns None, because Optax stores no other rate. The rate does not include later
    factors, such as the factor of `reduce_on_plateau`.
    """
    rates = optax.tree.get_all_with_path(
        state, "learning_rate", filtering=lambda _, leaf: isinstance(leaf, Array)
    )
    return rates[0][1] if len(rates) == 1 else None


def is_matrix(path: str) -> bool:
    """Returns whether the parameter is a matrix, and therefore decays."""
    names = path.split(".")
    # Names such as gate_bias and router_scale count as well.
    return not _VECTORS & {*names, *(name.rpartition("_")[2] for name in names)}


def is_orthogonalised(path: str) -> bool:
    """Returns whether muon updates the parameter: a matrix in a block."""
    return is_matrix(path) and not _TABLES & set(path.split("."))


def round_stochastically(array: Array, noise: Array) -> Array:
    """Rounds float32 to bfloat16 stochastically, so that the expected value stays the same.

    With round-to-nearest, a decay below half an ulp would never have an effect.

    Args:
      noise: uniform random numbers in uint32.
    """
    # bfloat16 is the upper half of float32. The lower half is the distance to the lower neighbour,
    # in 2**-16 of the distance between both neighbours: adding uniform 16 bits carries into the
    # upper half with this probability.
    bits = (lax.bitcast_convert_type(array, jnp.uint32) + (noise >> 16)) >> 16
    rounded = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(array), rounded, array.astype(jnp.bfloat16))


def noise_of(seed: Array, shape: Sequence[int], padding: Padding = ()) -> Array:
    """Returns a pseudorandom uint32 for each element of an array, equal on every mesh.

    The numbers depend on the seed and on the element's index without padding alone:
    `_hash(seed + i_1 * g + i_2 * g**2 + ...)`, where dim 1 is the last. Modulo 2**32, multiplying
    by the odd g is a bijection, so numbers along a dim are distinct. g is 2**32 divided by the
    golden ratio, as in Fibonacci hashing.
    """
    # With threefry, an update on a CPU would take four times as long, and XLA would store three
    # words for each element.
    dims = dict(padding)
    for dim in range(-len(shape), 0):
        if dim in dims:
            # A stored element has the noise of its logical index.
            index = pad(lax.iota(jnp.uint32, dims[dim].size), ((-1, dims[dim]),), axis_size(TP))
        else:
            index = lax.iota(jnp.uint32, shape[dim])
        step = jnp.uint32(pow(0x9E3779B1, -dim, 2**32))
        seed = seed + (index * step).reshape(-1, *(1,) * (-dim - 1))
    return _hash(seed)


def _hash(x: Array) -> Array:
    # Wellons' lowbias32, which makes neighbouring indices independent: a change of any bit changes
    # each bit of the result in half of all cases.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def _in_bfloat16(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    # The count of updates, the path and the index determine the noise of an element of the first
    # moment, so a checkpoint needs no random state.
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
    if config.name == "adamw":
        # Loshchilov and Hutter, arXiv 1711.05101
        return adam
    if config.name == "lion":
        # Chen et al., arXiv 2302.06675
        return stored(optax.scale_by_lion(config.beta1, config.beta2))
    if config.name == "adafactor":
        # Shazeer and Stern, arXiv 1804.04235, but with the decoupled decay and the clipping of this
        # file: Adafactor's own would count the rows that pad a vocabulary, in root mean squares
        # over a table.
        return _with_float32_state(optax.scale_by_factored_rms())
    from jaxtp.train.muon import MUON, scale_by_muon

    def label(params: dict[str, Any]) -> dict[str, str]:
        return {path: MUON if is_orthogonalised(path) else "adam" for path in params}

    return optax.partition(
        {MUON: optax.chain(stored(scale_by_muon(config.beta1))), "adam": adam}, label
    )


def _with_float32_state(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    # Adafactor's decay approaches 1: after a thousand steps, an update changes a moment by less
    # than the last bit of bfloat16.
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
            path: decayed(path, updates[path], params[path]) for path in updates
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
