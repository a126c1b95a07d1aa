"""Chooses the next token from logits; each filter is a small function on the logits of one row.

A filter sets the logits of tokens that it leaves out to -inf, so that filters compose in any order. Tokens of equal
probability stay or go together, whatever the order they are sorted in.

A row's random numbers follow from its seed and its length, not from the batch or the mesh.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import batch_spec, constrain, device_view
from jaxtp.generate.settings import GenerationSettings

_LEAST = float(jnp.finfo(jnp.float32).tiny)
"""The smallest normal float32; a smaller number is 0 on a device."""


def sample(
    logits_BV: Array,
    seen_BV: Array | None,
    seeds_B: Array,
    positions_B: Array,
    *,
    settings: GenerationSettings,
    num_ids: int,
) -> tuple[Array, Array, Array | None]:
    """Chooses the next token of each row; each device does so for its own rows.

    Args:
      logits_BV: logits of the model.
      seen_BV: whether the row has a token already, for the repetition penalty; None where there is none.
      seeds_B: the seed of each row.
      positions_B: number of tokens in each row; with its seed it alone decides the row's random numbers.
      settings: the filters.
      num_ids: number of ids that have a meaning; none from there on is chosen.

    Returns:
      The tokens `[B]` int32; their log-probabilities `[B]` under the model as it is, without penalty, temperature and
      filters; both are on every device; and `seen_BV` with the tokens in it.
    """
    row, rows = batch_spec(), batch_spec(None)
    seen_spec = None if seen_BV is None else rows
    choose = device_view(
        jax.vmap(partial(_choose, settings=settings, num_ids=num_ids)),
        "sample",
        in_specs=(rows, seen_spec, row, row),
        out_specs=(row, row, seen_spec),
    )
    tokens, logprobs, seen_BV = choose(logits_BV, seen_BV, seeds_B, positions_B)
    return constrain(tokens, P()), constrain(logprobs, P()), None if seen_BV is None else constrain(seen_BV, rows)


def _choose(
    logits: Array, seen: Array | None, seed: Array, position: Array, *, settings: GenerationSettings, num_ids: int
) -> tuple[Array, Array, Array | None]:
    """Chooses the next token of one row, from its logits `[V]`."""
    logits = jnp.where(jnp.arange(logits.size) < num_ids, logits.astype(jnp.float32), -jnp.inf)
    filtered = apply_filters(logits, seen, settings)
    if settings.temperature == 0:
        token = jnp.argmax(filtered)
    else:
        token = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), filtered)
    now = None if seen is None else seen | (jnp.arange(seen.size) == token)
    return token.astype(jnp.int32), jax.nn.log_softmax(logits)[token], now


def apply_filters(logits: Array, seen: Array | None, settings: GenerationSettings) -> Array:
    """Returns the logits `[V]` to draw from; filters that are off cost nothing."""
    if settings.repetition_penalty != 1 and seen is not None:
        logits = penalise(logits, seen, settings.repetition_penalty)
    if settings.temperature > 0:
        logits = (logits - jnp.max(logits)) / max(settings.temperature, _LEAST)
    if settings.top_k:
        logits = keep_top_k(logits, settings.top_k)
    if settings.top_p < 1:
        logits = keep_top_p(logits, settings.top_p)
    if settings.min_p > 0:
        logits = keep_min_p(logits, settings.min_p)
    return logits


def penalise(logits: Array, seen: Array, penalty: float) -> Array:
    """Makes tokens that the row has less likely (Keskar et al., arXiv 1909.05858, section 4.1)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Array, k: int) -> Array:
    """Keeps the k largest logits, and those that equal the last of them."""
    return _at_least(logits, jnp.sort(logits)[-min(k, logits.size)])


def keep_top_p(logits: Array, p: float) -> Array:
    """Keeps a token if those more probable have less than p together (Holtzman et al., arXiv 1904.09751)."""
    ordered = jnp.sort(logits, descending=True)
    probabilities = jax.nn.softmax(ordered)
    before = jnp.cumsum(probabilities) - probabilities
    return _at_least(logits, jnp.min(jnp.where(before < max(p, _LEAST), ordered, jnp.inf)))


def keep_min_p(logits: Array, p: float) -> Array:
    """Keeps a token if it has at least p times the largest probability (Nguyen et al., arXiv 2407.01082)."""
    return _at_least(logits, jnp.max(logits) + jnp.log(p))


def _at_least(logits: Array, least: Array) -> Array:
    return jnp.where(logits >= least, logits, -jnp.inf)
