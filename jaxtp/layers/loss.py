"""Cross-entropy over a vocabulary split over tp, fused with the head.

Chunks of a device's tokens are projected, reduced to one number per token, and projected again in the backward pass, so
whole logits never exist (Liger Kernel, arXiv 2410.10989). Over tp a token costs three floats: maximum, sum of
exponentials and label logit (Megatron-LM, arXiv 1909.08053, section 3).
"""

from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, all_reduce_max, axis_index, device_view, enter_parallel, token_spec
from jaxtp.layers.embedding import HeadConfig
from jaxtp.layers.sequence_parallel import activation_spec, sequence_dim
from jaxtp.mesh import TOKENS, TP

LOSS = "vocab_parallel_cross_entropy"

IGNORE = -100  # the label of a position that the loss ignores

_REDUCED = "softmax_reduction"


def vocab_parallel_cross_entropy(
    x_BTD: Array,
    table_VD: Array,
    labels_BT: Array,
    head: HeadConfig,
    bias_V: Array | None = None,
    *,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the summed cross-entropy, in nats, under `softmax(x @ table.T + bias)`, and the number of labels.

    Both are float32 scalars over the *global* batch.

    Args:
      x_BTD: final hidden states.
      table_VD: the (tied) embedding or head, `[V padded, D]`.
      labels_BT: integers; `IGNORE` (-100) does not count.
      head: V, scale, softcap, tokens projected at a time.
      bias_V: `[V padded]`.
      z_loss: adds `z_loss * log(sum(exp(logits)))^2` per token (PaLM, arXiv 2204.02311, section 5).
    """

    def total(statistics: _Statistics, labels: Array) -> tuple[Array, Array]:
        log_normaliser, label_logit, _ = statistics
        losses = log_normaliser - label_logit + z_loss * jnp.square(log_normaliser)
        valid = labels != IGNORE
        sums = jnp.stack([jnp.sum(losses, where=valid), jnp.sum(valid, dtype=jnp.float32)])
        loss_sum, num_valid = all_reduce(sums, *TOKENS)
        return loss_sum, num_valid

    return _on_devices(total, (P(), P()), (x_BTD, table_VD, labels_BT, bias_V), head)


def vocab_parallel_token_losses(
    x_BTD: Array, table_VD: Array, labels_BT: Array, head: HeadConfig, bias_V: Array | None = None
) -> tuple[Array, Array]:
    """Returns the cross-entropy of each label in nats, and whether no token has a higher logit, both `[B, T]`.

    `IGNORE` gives 0 and False. Arguments: see `vocab_parallel_cross_entropy`.
    """

    def each(statistics: _Statistics, labels: Array) -> tuple[Array, Array]:
        log_normaliser, label_logit, highest = statistics
        valid = labels != IGNORE
        return jnp.where(valid, log_normaliser - label_logit, 0), valid & (label_logit >= highest)

    return _on_devices(each, (token_spec(), token_spec()), (x_BTD, table_VD, labels_BT, bias_V), head)


_Statistics = tuple[Array, Array, Array]
"""Log-normaliser, label logit and highest logit of each token, over the whole vocabulary."""


def _on_devices(
    reduce: Callable[[_Statistics, Array], tuple[Array, Array]],
    out_specs: tuple[P, P],
    arrays: tuple[Array, Array, Array, Array | None],
    head: HeadConfig,
) -> tuple[Array, Array]:
    """Returns `reduce(statistics, labels)` of each device's tokens.

    `arrays` are hidden states, table, labels and bias.
    """
    x_BTD, _, labels_BT, bias_V = arrays
    chex.assert_equal_shape_prefix((x_BTD, labels_BT), 2)
    precision, sequence = head.context.precision, sequence_dim(head.context.sequence_parallel, x_BTD.shape)

    def run(x: Array, shard: Array, labels: Array, bias: Array | None) -> tuple[Array, Array]:
        x = enter_parallel(x.astype(precision.compute), sequence)
        # Gathered: if each device used its D/fsdp columns, logits would be summed over fsdp, three times (fsdp-1)*V/tp
        # floats per token, which is less than the table only where a device has fewer than about D/(2*fsdp) tokens.
        table = precision.load(shard, 1, accumulate="float32")  # chunks accumulate gradients in float32
        bias = None if bias is None else precision.load(bias, None, accumulate="float32")
        token_statistics = partial(_token_statistics, head, table, bias)
        # [tokens, D] and [tokens]: nothing is copied
        statistics = _map_chunks(token_statistics, x.reshape(-1, x.shape[-1]), labels.reshape(-1), head.chunk_size)
        return reduce(jax.tree.map(lambda each: each.reshape(labels.shape), statistics), labels)

    in_specs = (activation_spec(sequence), head.table_spec, token_spec(), None if bias_V is None else head.bias_spec)
    return device_view(run, LOSS, in_specs, out_specs)(*arrays)


def _token_statistics(head: HeadConfig, table: Array, bias: Array | None, x: Array, labels: Array) -> _Statistics:
    precision = head.context.precision
    logits = jnp.einsum("td,vd->tv", x, table.astype(precision.compute), preferred_element_type=precision.logits)
    logits = logits.astype(jnp.float32)
    logits = head.finish(logits if bias is None else logits + bias)
    start = axis_index(TP) * table.shape[0]
    local_vocab = start + jnp.arange(table.shape[0])
    logits = jnp.where(local_vocab < head.vocab_size, logits, -jnp.inf)
    # The maximum is -inf on a device that holds only padding.
    highest = checkpoint_name(all_reduce_max(jnp.max(logits, axis=-1), TP), _REDUCED)
    exp_sum = jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1)
    is_label = labels[..., None] == local_vocab  # a one-hot sum: the gradient needs no scatter of [tokens, V/tp]
    label_logit = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    # One sum: XLA may run two independent sums in any order, and on CPUs confuses them.
    exp_sum, label_logit = checkpoint_name(all_reduce(jnp.stack([exp_sum, label_logit]), TP), _REDUCED)
    return jnp.log(exp_sum) + highest, label_logit, highest


def _map_chunks(fn: Callable[[Array, Array], _Statistics], x: Array, labels: Array, chunk_size: int) -> _Statistics:
    """Maps over chunks; the backward pass needs only a few floats per token."""
    fn = jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(_REDUCED))
    num_chunks, rest = divmod(x.shape[0], chunk_size)

    def chunked(a: Array) -> Array:  # [tokens, ...] -> [num_chunks, chunk_size, ...]
        return a[: num_chunks * chunk_size].reshape(num_chunks, chunk_size, *a.shape[1:])

    pieces: list[_Statistics] = []
    if num_chunks:
        statistics = jax.lax.map(lambda chunk: fn(*chunk), (chunked(x), chunked(labels)))
        pieces.append(jax.tree.map(jnp.ravel, statistics))
    if rest:
        pieces.append(fn(x[-rest:], labels[-rest:]))
    joined: _Statistics = jax.tree.map(lambda *parts: jnp.concatenate(parts), *pieces)
    return joined
