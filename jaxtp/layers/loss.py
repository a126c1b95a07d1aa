"""Cross-entropy over a vocabulary split over tp, fused with the head.

Neither the logits of the whole vocabulary nor those of all tokens ever exist on a device: its tokens `[b, T]` are one
list, of which a chunk at a time is projected, reduced to one number per token, and projected again in the backward
pass. So logits take the same memory however many sequences a device has. Over tp a token costs three floats: the
maximum, the sum of exponentials, and the label's logit. Megatron-LM, arXiv 1909.08053, section 3 (vocabulary-parallel
cross-entropy); chunking as in Liger Kernel, arXiv 2410.10989.
"""

from collections.abc import Callable, Iterator
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
from jaxtp.layers.costs import FLOAT32, Cost, Product, Scores, Share, Working, enter, itemsize, sums_over
from jaxtp.layers.embedding import TABLE_SPEC, softcapped, table_weight
from jaxtp.layers.parameter import Precision, Split
from jaxtp.mesh import STORAGE, TOKENS, TP, parts

LOSS = "vocab_parallel_cross_entropy"

LOGIT_PASSES = 6
"""Times that float32 logits go through memory outside of products: maximum, exponentials, label; backward again, and
the difference. Modelled."""

CHUNK_SIZE = 2048
"""Tokens of a chunk by default. For each chunk a float32 gradient of the table's size is read and written: with so many
tokens that is a quarter of the time of their products, by the numbers of an H100."""

IGNORE = -100
"""The label of a position that does not count."""

_REDUCED = "softmax_reduction"


class Head(TypedDict, total=False):
    """How logits are made of hidden states; see `vocab_parallel_cross_entropy`."""

    vocab_size: Required[int]
    table_spec: P
    chunk_size: int
    softcap: float | None
    sequence_parallel: SequenceParallel
    precision: Precision


def vocab_parallel_cross_entropy(
    x_BTD: Array, table_VD: Array, labels_BT: Array, *, z_loss: float = 0.0, **head: Unpack[Head]
) -> tuple[Array, Array]:
    """The summed cross-entropy of the labels under `softmax(x @ table.T)`, in nats.

    Args:
      x_BTD: final hidden states `[B, T, D]`.
      table_VD: the (tied) embedding or head, `[V padded, D]`.
      labels_BT: `[B, T]` integers; `IGNORE` (-100) marks a position that does not count.
      z_loss: adds `z_loss * log(sum(exp(logits)))^2` to each token's loss, which keeps the softmax's normaliser
        near 1 (PaLM, arXiv 2204.02311, section 5).
      vocab_size: V, without padding.
      table_spec: how the table is split.
      chunk_size: tokens projected at a time on each device.
      softcap: squashes each logit l to `softcap * tanh(l / softcap)`.
      sequence_parallel: the input is split over tp along the sequence.
      precision: the dtypes; logits and softmax are float32.

    Returns:
      The sum over the valid tokens of the *global* batch and their number, both float32 scalars: divide them
      for the mean.
    """

    def summed(losses: Array, labels: Array) -> tuple[Array, Array]:
        valid = labels.reshape(-1) != IGNORE
        sums = jnp.stack([jnp.sum(losses, where=valid), jnp.sum(valid, dtype=jnp.float32)])
        loss_sum, num_valid = all_reduce(sums, *TOKENS)
        return loss_sum, num_valid

    token_loss = partial(_token_loss, z_loss=z_loss)
    return _scored(token_loss, summed, (P(), P()), x_BTD, table_VD, labels_BT, **head)


def vocab_parallel_token_losses(
    x_BTD: Array, table_VD: Array, labels_BT: Array, **head: Unpack[Head]
) -> tuple[Array, Array]:
    """The cross-entropy of each label in nats, for evaluations; arguments as of `vocab_parallel_cross_entropy`.

    Returns:
      The loss of each label `[B, T]` float32, and whether no other token is likelier `[B, T]`; 0 and False where a
      label is `IGNORE`.
    """

    def each(scores: Array, labels: Array) -> tuple[Array, Array]:
        loss, likeliest = jnp.moveaxis(scores.reshape(*labels.shape, 2), -1, 0)  # [B/(dp*fsdp), T/cp]
        valid = labels != IGNORE
        return jnp.where(valid, loss, 0), valid & (likeliest > 0)

    return _scored(_token_score, each, (token_spec(), token_spec()), x_BTD, table_VD, labels_BT, **head)


def _scored(
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
    """Returns what `finish` makes of the scores of a device's tokens and of their labels; see those that call it."""
    chex.assert_equal_shape_prefix((x_BTD, labels_BT), 2)
    sequence = sequence_dim(sequence_parallel, x_BTD.shape)

    def run(x: Array, shard: Array, labels: Array) -> tuple[Array, Array]:
        x = enter_parallel(x.astype(precision.compute), sequence)
        # Gathered: if each device used its D/fsdp columns, logits would be summed over fsdp, three times (fsdp-1)*V/tp
        # floats per token, which is less than the table only where a device has fewer than about D/(2*fsdp) tokens.
        table = precision.load(shard, 1, accumulate="float32")  # in which chunks add up their gradients
        token_score = partial(score, table=table, vocab_size=vocab_size, softcap=softcap, precision=precision)
        # [tokens, D] and [tokens]: nothing is copied
        return finish(_map_chunks(token_score, x.reshape(-1, x.shape[-1]), labels.reshape(-1), chunk_size), labels)

    in_specs = (activation_spec(sequence), table_spec, token_spec())
    return device_view(run, LOSS, in_specs, out_specs)(x_BTD, table_VD, labels_BT)


def loss_costs(
    share: Share,
    vocab_size: int,
    features: int,
    chunk_size: int,
    precision: Precision,
    setting: SequenceParallel,
    *,
    tied: bool,
) -> Iterator[Cost]:
    """Yields what head and loss cost: over tp the entry of a column layer, and three floats per token.

    They hold two float32 arrays of the table's size (the gradient's sum, and what a chunk adds to it) and one in the
    compute dtype, and the logits of a chunk and their gradient in float32. A frozen head has no gradient: its table is
    there in float32 only if it is gathered over fsdp, for it is stored so otherwise.
    """
    compute, tokens = itemsize(precision.compute), share.tokens
    local = Split((vocab_size,)).padded(share.tp) // share.tp
    yield table_weight(LOSS, vocab_size, features, precision, tied=tied)
    size = tokens * features * compute
    yield from enter(LOSS, share, size, split=share.is_split(setting), again=False)
    chunks = -(-tokens // chunk_size)
    for floats in (1, 2):  # the maximum; the sum of exponentials and the label's logit
        yield sums_over(LOSS, (TP,), share.sizes, floats * tokens * FLOAT32 / chunks, chunks)
    yield sums_over(LOSS, TOKENS, share.sizes, 2 * FLOAT32)
    moved = tokens * (features * compute + local * FLOAT32) + chunks * features * local * compute
    yield Product("head", tokens, features, local, share.passes(True, share.gradients), moved)
    yield Scores("logits", tokens * local * FLOAT32 * LOGIT_PASSES)
    whole = int(parts(share.sizes, STORAGE) > 1) if share.frozen else 2
    logits = min(chunk_size, tokens) * local
    yield Working((whole * FLOAT32 + compute) * local * features + 2 * FLOAT32 * logits)


def _token_loss(x: Array, labels: Array, *, z_loss: float, **head: Any) -> Array:
    """Cross-entropy of each token of a chunk `[t, D]`; arguments as of `_normalised`."""
    log_normaliser, label_logit, _ = _normalised(x, labels, **head)
    return log_normaliser - label_logit + z_loss * jnp.square(log_normaliser)


def _token_score(x: Array, labels: Array, **head: Any) -> Array:
    """Cross-entropy of each token of a chunk, and 1 where no other token is likelier, else 0: `[t, 2]` float32."""
    log_normaliser, label_logit, highest = _normalised(x, labels, **head)
    return jnp.stack([log_normaliser - label_logit, (label_logit >= highest).astype(jnp.float32)], axis=-1)


def _normalised(
    x: Array, labels: Array, *, table: Array, vocab_size: int, softcap: float | None, precision: Precision
) -> tuple[Array, Array, Array]:
    """Log-normaliser, logit of the label and highest logit of each token of a chunk `[t, D]`, each `[t]`.

    They are of the whole vocabulary, of which this device has a part `[V/tp, D]`.
    """
    logits = jnp.einsum("td,vd->tv", x, table.astype(precision.compute), preferred_element_type=precision.logits)
    logits = softcapped(logits.astype(jnp.float32), softcap)
    start = axis_index(TP) * table.shape[0]
    local_vocab = start + jnp.arange(table.shape[0])
    logits = jnp.where(local_vocab < vocab_size, logits, -jnp.inf)
    # A device that holds only padding has no maximum of its own: -inf loses against any other.
    highest = checkpoint_name(all_reduce_max(jnp.max(logits, axis=-1), TP), _REDUCED)
    exp_sum = jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1)
    is_label = labels[..., None] == local_vocab  # a one-hot sum: the gradient needs no scatter of [tokens, V/tp]
    label_logit = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    # In one sum: XLA runs two that do not wait for each other in any order, and on CPUs mistakes one for the other.
    exp_sum, label_logit = checkpoint_name(all_reduce(jnp.stack([exp_sum, label_logit]), TP), _REDUCED)
    return jnp.log(exp_sum) + highest, label_logit, highest


def _map_chunks(token_loss: Callable[[Array, Array], Array], x: Array, labels: Array, chunk_size: int) -> Array:
    """`token_loss` of all tokens, a chunk of them at a time, nothing larger than a few floats per token kept."""
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
