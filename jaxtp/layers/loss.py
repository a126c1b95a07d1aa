"""Cross-entropy over a vocabulary split over tp, fused with the head.

Chunks of a device's tokens are projected, reduced to one number per token, and projected again in the backward pass, so
whole logits never exist (Liger Kernel, arXiv 2410.10989). Over tp a token costs three floats: maximum, sum of
exponentials and label logit (Megatron-LM, arXiv 1909.08053, section 3).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Required, TypedDict, Unpack

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, all_reduce_max, axis_index, device_view, enter_parallel, token_spec
from jaxtp.layers.activations import SequenceParallel, activation_spec, sequence_dim
from jaxtp.layers.embedding import TABLE_SPEC, softcapped
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import TOKENS, TP

LOSS = "vocab_parallel_cross_entropy"

CHUNK_SIZE = 2048
"""Tokens of a chunk by default. For each chunk a float32 gradient of the table's size is read and written: with so many
tokens that is a quarter of the time of their products, by the numbers of an H100."""

IGNORE = -100
"""The label of a position that does not count."""

_REDUCED = "softmax_reduction"


class Head(TypedDict, total=False):
    """How hidden states become logits; see `vocab_parallel_cross_entropy`."""

    vocab_size: Required[int]
    table_spec: P
    chunk_size: int
    softcap: float | None
    sequence_parallel: SequenceParallel
    precision: Precision


def vocab_parallel_cross_entropy(
    x_BTD: Array, table_VD: Array, labels_BT: Array, *, z_loss: float = 0.0, **head: Unpack[Head]
) -> tuple[Array, Array]:
    """Returns the summed cross-entropy, in nats, under `softmax(x @ table.T)`, and the number of labels.

    Both are float32 scalars over the *global* batch.

    Args:
      x_BTD: final hidden states.
      table_VD: the (tied) embedding or head, `[V padded, D]`.
      labels_BT: integers; `IGNORE` (-100) does not count.
      z_loss: adds `z_loss * log(sum(exp(logits)))^2` per token (PaLM, arXiv 2204.02311, section 5).
      vocab_size: V.
      chunk_size: tokens projected at a time on each device.
      softcap: squashes each logit l to `softcap * tanh(l / softcap)`.
      sequence_parallel: the input is split over tp along the sequence.
    """

    def summed(losses: Array, labels: Array) -> tuple[Array, Array]:
        valid = labels.reshape(-1) != IGNORE
        sums = jnp.stack([jnp.sum(losses, where=valid), jnp.sum(valid, dtype=jnp.float32)])
        loss_sum, num_valid = all_reduce(sums, *TOKENS)
        return loss_sum, num_valid

    token_loss = partial(_token_loss, z_loss=z_loss)
    return _map_tokens(token_loss, summed, (P(), P()), x_BTD, table_VD, labels_BT, **head)


def vocab_parallel_token_losses(
    x_BTD: Array, table_VD: Array, labels_BT: Array, **head: Unpack[Head]
) -> tuple[Array, Array]:
    """Returns the cross-entropy of each label in nats, and whether no other token is likelier, both `[B, T]`.

    `IGNORE` gives 0 and False. Arguments: see `vocab_parallel_cross_entropy`.
    """

    def each(scores: Array, labels: Array) -> tuple[Array, Array]:
        loss, likeliest = jnp.moveaxis(scores.reshape(*labels.shape, 2), -1, 0)  # [B/(dp*fsdp), T/cp]
        valid = labels != IGNORE
        return jnp.where(valid, loss, 0), valid & (likeliest > 0)

    return _map_tokens(_token_score, each, (token_spec(), token_spec()), x_BTD, table_VD, labels_BT, **head)


def _map_tokens(
    score: Callable[..., Array],
    finish: Callable[[Array, Array], tuple[Array, Array]],
    out_specs: tuple[P, P],
    x_BTD: Array,
    table_VD: Array,
    labels_BT: Array,
    *,
    vocab_size: int,
    table_spec: P = TABLE_SPEC,
    chunk_size: int = CHUNK_SIZE,
    softcap: float | None = None,
    sequence_parallel: SequenceParallel = False,
    precision: Precision = Precision(),
) -> tuple[Array, Array]:
    chex.assert_equal_shape_prefix((x_BTD, labels_BT), 2)
    sequence = sequence_dim(sequence_parallel, x_BTD.shape)

    def run(x: Array, shard: Array, labels: Array) -> tuple[Array, Array]:
        x = enter_parallel(x.astype(precision.compute), sequence)
        # Gathered: if each device used its D/fsdp columns, logits would be summed over fsdp, three times (fsdp-1)*V/tp
        # floats per token, which is less than the table only where a device has fewer than about D/(2*fsdp) tokens.
        table = precision.load(shard, 1, accumulate="float32")  # chunks accumulate gradients in float32
        token_score = partial(score, table=table, vocab_size=vocab_size, softcap=softcap, precision=precision)
        # [tokens, D] and [tokens]: nothing is copied
        return finish(_map_chunks(token_score, x.reshape(-1, x.shape[-1]), labels.reshape(-1), chunk_size), labels)

    in_specs = (activation_spec(sequence), table_spec, token_spec())
    return device_view(run, LOSS, in_specs, out_specs)(x_BTD, table_VD, labels_BT)


def _token_loss(x: Array, labels: Array, *, z_loss: float, **head: Any) -> Array:
    log_normaliser, label_logit, _ = _normalised(x, labels, **head)
    return log_normaliser - label_logit + z_loss * jnp.square(log_normaliser)


def _token_score(x: Array, labels: Array, **head: Any) -> Array:
    """Returns (cross-entropy, 1 if no other token is likelier else 0), `[t, 2]`."""
    log_normaliser, label_logit, highest = _normalised(x, labels, **head)
    return jnp.stack([log_normaliser - label_logit, (label_logit >= highest).astype(jnp.float32)], axis=-1)


def _normalised(
    x: Array, labels: Array, *, table: Array, vocab_size: int, softcap: float | None, precision: Precision
) -> tuple[Array, Array, Array]:
    """Returns log-normaliser, label logit and highest logit over the whole vocabulary, each `[t]`."""
    logits = jnp.einsum("td,vd->tv", x, table.astype(precision.compute), preferred_element_type=precision.logits)
    logits = softcapped(logits.astype(jnp.float32), softcap)
    start = axis_index(TP) * table.shape[0]
    local_vocab = start + jnp.arange(table.shape[0])
    logits = jnp.where(local_vocab < vocab_size, logits, -jnp.inf)
    # The maximum is -inf on a device that holds only padding.
    highest = checkpoint_name(all_reduce_max(jnp.max(logits, axis=-1), TP), _REDUCED)
    exp_sum = jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1)
    is_label = labels[..., None] == local_vocab  # a one-hot sum: the gradient needs no scatter of [tokens, V/tp]
    label_logit = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    # One sum: XLA may run two independent sums in any order, and on CPUs confuses them.
    exp_sum, label_logit = checkpoint_name(all_reduce(jnp.stack([exp_sum, label_logit]), TP), _REDUCED)
    return jnp.log(exp_sum) + highest, label_logit, highest


def _map_chunks(token_loss: Callable[[Array, Array], Array], x: Array, labels: Array, chunk_size: int) -> Array:
    """Maps over chunks; the backward pass needs only a few floats per token."""
    token_loss = jax.checkpoint(token_loss, policy=jax.checkpoint_policies.save_only_these_names(_REDUCED))
    num_chunks, rest = divmod(x.shape[0], chunk_size)

    def chunked(a: Array) -> Array:  # [tokens, ...] -> [num_chunks, chunk_size, ...]
        return a[: num_chunks * chunk_size].reshape(num_chunks, chunk_size, *a.shape[1:])

    pieces = []
    if num_chunks:
        losses = jax.lax.map(lambda chunk: token_loss(*chunk), (chunked(x), chunked(labels)))
        pieces.append(losses.reshape(-1, *losses.shape[2:]))
    if rest:
        pieces.append(token_loss(x[-rest:], labels[-rest:]))
    return jnp.concatenate(pieces)
