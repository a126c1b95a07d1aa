"""Samples the next token from logits, on the devices.

Each filter sets the removed logits of a row to -inf, so filters compose. Tokens of equal
probability are kept or removed together, whatever the sort order. A row's random numbers depend
only on its seed and length, not on the batch or the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from pydantic import Field

from jaxtp.collectives import batch_spec, constrain, device_view
from jaxtp.config import schema
from jaxtp.config.affects import REPEATED
from jaxtp.config.schema import ConfigError, Count, CountOrZero, Fraction, Share

# The smallest normal float32; devices flush smaller numbers to 0
_TINY = float(jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class Settings(schema.Settings):
    """Sampling settings; filters are applied in field order."""

    max_tokens: Count = 128
    """Maximum number of tokens to generate."""

    samples: Count = 1
    """Texts for each prompt, which is read once for all that are generated together."""

    seed: CountOrZero = 0
    """Seed of the first text; each further sample or prompt uses the next seed. A seed gives a
    prompt the same text in any batch."""

    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides positive and multiplies negative logits of tokens that are in the prompt or text
    (CTRL); 1 is off."""

    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Randomness of the choice: divides the logits; 0 always takes the most likely token."""

    top_k: CountOrZero = 0
    """Chooses only among the k most likely tokens; 0 is off."""

    top_p: Fraction = 1.0
    """Chooses only among the most likely tokens whose probabilities add up to p; 1 is off."""

    min_p: Share = 0.0
    """Chooses only among tokens with at least p times the probability of the most likely one; 0 is
    off."""

    stop: Annotated[tuple[str, ...], REPEATED] = ()
    """Text that ends the output and is not part of it; can be given several times."""


def check_settings(settings: Settings) -> None:
    """Raises `ConfigError` listing every value without effect, or that ends texts at once."""
    if problems := list(settings_problems(settings)):
        raise ConfigError("; ".join(problems))


def settings_problems(
    settings: Settings,
    spell: Callable[[str, object], str] = lambda name, value: f"{name}={value}",
) -> Iterator[str]:
    """Yields a message for each valid setting without effect, or that ends texts at once.

    `spell` formats a setting.
    """
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    unused = [
        spell(name, getattr(settings, name)) for name in off if getattr(settings, name) != off[name]
    ]
    if settings.temperature == 0 and unused:
        values = f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'}"
        yield (
            f"{values} no effect at temperature 0, which takes the most likely token; set a "
            "temperature"
        )
    if settings.temperature == 0 and settings.samples > 1:
        yield (
            f"{spell('samples', settings.samples)} would be equal texts at temperature 0; set a "
            "temperature"
        )
    if "" in settings.stop:
        yield f"{spell('stop', repr(''))} would end every text at once; remove it"


def sample(
    logits_BV: Array,
    seen_BV: Array | None,
    seeds_B: Array,
    positions_B: Array,
    *,
    settings: Settings,
    num_ids: int,
) -> tuple[Array, Array]:
    """Samples the next token of each row, on the row's device.

    Args:
      seen_BV: tokens already in a row; None without repetition penalty.
      positions_B: number of tokens in each row, folded into its seed.
      num_ids: vocabulary size of the tokenizer; higher ids are padding and never sampled.

    Returns:
      tokens `[B]` int32 and their log-probabilities `[B]` before penalty, temperature and filters,
      both replicated.
    """
    row = batch_spec()
    rows = batch_spec(None)
    sample_rows = device_view(
        jax.vmap(partial(_sample_row, settings=settings, num_ids=num_ids)),
        "sample",
        in_specs=(rows, None if seen_BV is None else rows, row, row),
        out_specs=(row, row),
    )
    tokens, logprobs = sample_rows(logits_BV, seen_BV, seeds_B, positions_B)
    return constrain(tokens, P()), constrain(logprobs, P())


def _sample_row(
    logits: Array,
    used: Array | None,
    seed: Array,
    position: Array,
    *,
    settings: Settings,
    num_ids: int,
) -> tuple[Array, Array]:
    logits = jnp.where(jnp.arange(logits.size) < num_ids, logits.astype(jnp.float32), -jnp.inf)
    filtered = apply_filters(logits, used, settings)
    if settings.temperature == 0:
        token = jnp.argmax(filtered)
    else:
        token = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), filtered)
    return token.astype(jnp.int32), jax.nn.log_softmax(logits)[token]


def apply_filters(logits: Array, used: Array | None, settings: Settings) -> Array:
    """Returns the logits `[V]` to sample from; disabled filters cost nothing."""
    if used is not None:
        logits = penalise(logits, used, settings.repetition_penalty)
    if settings.temperature > 0:
        logits = (logits - jnp.max(logits)) / max(settings.temperature, _TINY)
    if settings.top_k:
        logits = keep_top_k(logits, settings.top_k)
    if settings.top_p < 1:
        logits = keep_top_p(logits, settings.top_p)
    if settings.min_p > 0:
        logits = keep_min_p(logits, settings.min_p)
    return logits


def penalise(logits: Array, used: Array, penalty: float) -> Array:
    """Makes used tokens less likely (Keskar et al., arXiv 1909.05858, section 4.1)."""
    return jnp.where(used, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Array, k: int) -> Array:
    """Keeps the k largest logits, and ties with the last."""
    return _keep_from(logits, jnp.sort(logits)[-min(k, logits.size)])


def keep_top_p(logits: Array, p: float) -> Array:
    """Keeps a token if the more likely tokens add up to less than p.

    See Holtzman et al., arXiv 1904.09751.
    """
    ordered = jnp.sort(logits, descending=True)
    probabilities = jax.nn.softmax(ordered)
    before = jnp.cumsum(probabilities) - probabilities
    return _keep_from(logits, jnp.min(jnp.where(before < max(p, _TINY), ordered, jnp.inf)))


def keep_min_p(logits: Array, p: float) -> Array:
    """Keeps a token with at least p times the largest probability.

    See Nguyen et al., arXiv 2407.01082.
    """
    return _keep_from(logits, jnp.max(logits) + jnp.log(p))


def _keep_from(logits: Array, threshold: Array) -> Array:
    return jnp.where(logits >= threshold, logits, -jnp.inf)
