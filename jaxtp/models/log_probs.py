"""Log-probabilities of a decoder's tokens, for losses such as DPO and distillation.

They are exact on every mesh, and logits exist for `loss_chunk` tokens at a time, also in the
backward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxtp.config.schema import ConfigError
from jaxtp.layers.loss import IGNORE, vocab_parallel_statistics, vocab_parallel_top_k
from jaxtp.models.decoder import Decoder


def token_log_probs(
    model: Decoder,
    ids_BT: Array,
    labels: Array,
    /,
    *,
    segments: Array | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Array | tuple[Array, Array]:
    """Returns the log-probability of each label, given the ids up to its position.

    Returns a float32 array in the shape of `labels`.

    Args:
      labels: next tokens `[B, T]`, or K ids for each position, `[B, T, K]`; -100 gives 0.
      segments: documents of packed rows, `[B, T]`.
      temperature: divides the logits.
      entropy: also returns the entropy of every position's distribution, in nats, `[B, T]`.
    """
    sequences = model.sequences(ids_BT, segments=segments)
    x_BTD = model.hidden(ids_BT, sequences=sequences)
    labels = sequences.local_tokens(labels)
    results = hidden_log_probs(model, x_BTD, labels, temperature=temperature, entropy=entropy)
    return jax.tree.map(sequences.natural, results)


def hidden_log_probs(
    model: Decoder,
    x_BTD: Array,
    labels: Array,
    /,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Array | tuple[Array, Array]:
    """Like `token_log_probs`, from hidden states.

    Labels and results are in the order of `model.hidden`. Several temperatures or labels can share
    the hidden states.
    """
    head = model.projection(temperature)
    statistics = vocab_parallel_statistics(x_BTD, head, labels, entropy=entropy)
    normaliser = statistics.log_normaliser
    if labels.ndim == 3:
        normaliser = normaliser[..., None]
    log_probs = jnp.where(labels == IGNORE, 0, statistics.label_logit - normaliser)
    if statistics.entropy is None:
        return log_probs
    return log_probs, statistics.entropy


def top_log_probs(
    model: Decoder,
    ids_BT: Array,
    k: int,
    /,
    *,
    segments: Array | None = None,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """Returns the k highest log-probabilities at each position, and their int32 ids.

    Both are `[B, T, k]`, the most probable id first. They have no gradient; `token_log_probs` of
    the ids has one.
    """
    if not 1 <= k <= model.config.vocab_size:
        raise ConfigError(
            f"k={k}: the vocabulary has {model.config.vocab_size} ids, so k can be 1 to that"
        )
    sequences = model.sequences(ids_BT, segments=segments)
    values, ids = vocab_parallel_top_k(
        model.hidden(ids_BT, sequences=sequences), model.projection(temperature), k
    )
    return sequences.natural(values), sequences.natural(ids)
