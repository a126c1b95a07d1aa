"""Cross-entropy and log-probabilities over a vocabulary split over tp, fused with the head.

Chunks of a device's tokens are projected, reduced to a few numbers per token, and projected again
in the backward pass, so whole logits never exist (Liger Kernel, arXiv 2410.10989). Over tp the
cross-entropy of a token costs three floats: maximum, sum of exponentials and label logit
(Megatron-LM, arXiv 1909.08053, section 3).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    axis_index,
    axis_size,
    device_view,
    enter_parallel,
    token_spec,
)
from jaxtp.compiler_hints import sequence_first
from jaxtp.layers.embedding import HeadConfig
from jaxtp.layers.parameter import DType
from jaxtp.layers.sequence_parallel import activation_spec, sequence_dim
from jaxtp.mesh import TOKENS, TP

LOSS = "vocab_parallel_cross_entropy"

IGNORE = -100  # the label of a position that the loss ignores
_REDUCED = "softmax_reduction"
# A finite logit, relative to the highest, whose probability is 0 in float32; 0 * -inf would be NaN
_LOWEST = -1e4

Projection = tuple[Array, HeadConfig, Array | None]
"""The (tied) embedding or head `[V padded, D]`, its settings, and its bias `[V padded]`, if any."""

_PerToken = TypeVar("_PerToken")
_Result = TypeVar("_Result")


class TokenStatistics(NamedTuple):
    """Float32 numbers of each token, over the whole vocabulary."""

    log_normaliser: Array  # log(sum(exp(logits))), `[B, T]`
    label_logit: Array  # of each label; 0 where it is `IGNORE`
    highest: Array  # highest logit, `[B, T]`, without a gradient
    entropy: Array | None  # in nats, `[B, T]`, if requested


def vocab_parallel_cross_entropy(
    x_BTD: Array,
    table_VD: Array,
    labels_BT: Array,
    head: HeadConfig,
    bias_V: Array | None = None,
    *,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the summed cross-entropy, in nats, and the number of labels.

    The probabilities are `softmax(x @ table.T + bias)`.

    Both are float32 scalars over the *global* batch.

    Args:
      x_BTD: final hidden states.
      table_VD: the (tied) embedding or head, `[V padded, D]`.
      labels_BT: integers; `IGNORE` (-100) does not count.
      head: V, scale, softcap, tokens projected at a time.
      bias_V: `[V padded]`.
      z_loss: adds `z_loss * log(sum(exp(logits)))^2` per token (PaLM, arXiv 2204.02311, section 5).
    """

    def total(tokens: TokenStatistics, labels: Array) -> tuple[Array, Array]:
        losses = (
            tokens.log_normaliser - tokens.label_logit + z_loss * jnp.square(tokens.log_normaliser)
        )
        valid = labels != IGNORE
        sums = jnp.stack([jnp.sum(losses, where=valid), jnp.sum(valid, dtype=jnp.float32)])
        loss_sum, num_valid = all_reduce(sums, *TOKENS)
        return loss_sum, num_valid

    of_chunk = partial(_statistics, entropy=False)
    projection = (table_VD, head, bias_V)
    return _on_devices(of_chunk, total, (P(), P()), x_BTD, projection, labels_BT)


def vocab_parallel_statistics(
    x_BTD: Array, projection: Projection, labels: Array, *, entropy: bool = False
) -> TokenStatistics:
    """Returns the statistics of each token.

    `labels` are `[B, T]`, or `[B, T, K]` for K ids per token.
    """
    of_chunk = partial(_statistics, entropy=entropy)
    return _on_devices(of_chunk, lambda tokens, _: tokens, token_spec(), x_BTD, projection, labels)


def vocab_parallel_top_k(x_BTD: Array, projection: Projection, k: int) -> tuple[Array, Array]:
    """Returns each token's k highest log-probabilities and their ids, `[B, T, k]`.

    They are descending, and without a gradient.
    """
    return _on_devices(partial(_top_k, k), lambda top: top, token_spec(), x_BTD, projection)


def _on_devices(
    of_chunk: Callable[..., _PerToken],
    finish: Callable[..., _Result],
    out_specs: P | tuple[P, P],
    x_BTD: Array,
    projection: Projection,
    *labels: Array,
) -> _Result:
    """Returns `finish(numbers, *labels)` of each device's tokens.

    The numbers are from `of_chunk(logits, *labels)`.

    Logits are a chunk's, over the device's part of the vocabulary, `[tokens, V/tp]`.
    """
    table_VD, head, bias_V = projection
    chex.assert_equal_shape_prefix((x_BTD, *labels), 2)
    precision = head.context.precision
    sequence = sequence_dim(head.context.sequence_parallel, x_BTD.shape)

    def run(x: Array, shard: Array, bias: Array | None, *labels: Array) -> _Result:
        x = enter_parallel(x.astype(precision.compute), sequence)
        # Gathered: if each device used its D/fsdp columns, logits would be summed over fsdp, three
        # times (fsdp-1)*V/tp floats per token, which is less than the table only where a device has
        # fewer than about D/(2*fsdp) tokens. Chunks accumulate gradients in float32.
        table = precision.load(shard, 1, accumulate="float32")
        bias = None if bias is None else precision.load(bias, None, accumulate="float32")
        # The table is cast once, not in each chunk.
        tables = jax.lax.stop_gradient(table.astype(precision.compute)), table
        first = sequence_first((x, *labels), sequence)
        lead = first[0].shape[:2]

        def of_logits(x: Array, *labels: Array) -> _PerToken:
            return of_chunk(_logits(head, tables, bias, x), *labels)

        tokens = [each.reshape(-1, *each.shape[2:]) for each in first]  # nothing is copied
        numbers = _map_chunks(of_logits, tokens, head.chunk_size)
        numbers = jax.tree.map(lambda each: each.reshape(*lead, *each.shape[1:]), numbers)
        return finish(sequence_first(numbers, sequence), *labels)

    bias_spec = None if bias_V is None else head.bias_spec
    in_specs = (
        activation_spec(sequence),
        head.table_spec,
        bias_spec,
        *(token_spec() for _ in labels),
    )
    return device_view(run, LOSS, in_specs, out_specs)(x_BTD, table_VD, bias_V, *labels)


def _logits(head: HeadConfig, tables: tuple[Array, Array], bias: Array | None, x: Array) -> Array:
    logits = _project(head.context.precision.logits, x, *tables).astype(jnp.float32)
    logits = head.finish(logits if bias is None else logits + bias)
    if logits.shape[-1] * axis_size(TP) == head.vocab_size:
        return logits
    return jnp.where(
        _first_id(logits) + jnp.arange(logits.shape[-1]) < head.vocab_size, logits, -jnp.inf
    )


@jax.custom_vjp
def _as_read(table: Array, carrier: Array) -> Array:
    return table  # Without this, second derivatives would lose what the backward pass reads.


_as_read.defvjp(lambda table, _: (table, None), lambda _, grad: (None, grad.astype(jnp.float32)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(dtype: DType, x: Array, table: Array, carrier: Array) -> Array:
    """Returns `x @ table.T` in `dtype`; `carrier`, whose values the table has, has its gradient.

    Gradients of logits are rounded to the compute dtype: products of float32 took 2.5 times as long
    on an H200.
    """
    return jnp.einsum("td,vd->tv", x, table, preferred_element_type=dtype)


def _project_backward(
    dtype: DType, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, None, Array]:
    x, table = residuals
    grad = grad.astype(x.dtype)
    table_grad = jnp.einsum("tv,td->vd", grad, x, preferred_element_type=jnp.float32)
    return jnp.einsum("tv,vd->td", grad, table), None, table_grad


_project.defvjp(
    lambda dtype, x, table, carrier: (
        _project(dtype, x, table, carrier),
        (x, _as_read(table, carrier)),
    ),
    _project_backward,
)


def _first_id(logits: Array) -> Array | int:
    return axis_index(TP) * logits.shape[-1]


def _statistics(logits: Array, labels: Array, *, entropy: bool) -> TokenStatistics:
    # The maximum is -inf on a device that holds only padding.
    highest = checkpoint_name(all_reduce_max(jnp.max(logits, axis=-1), TP), _REDUCED)
    shifted = logits - highest[:, None]
    exp = jnp.exp(shifted)
    ids = labels.reshape(len(labels), -1) - _first_id(logits)
    label_logits = (_logit_of if ids.shape[1] == 1 else _logits_of)(logits, ids).T
    sums = [jnp.sum(exp, axis=-1)]
    if entropy:
        sums.append(jnp.sum(exp * jnp.maximum(shifted, _LOWEST), axis=-1))
    # One sum: XLA may run two independent sums in any order, and on CPUs confuses them.
    reduced = all_reduce(jnp.concatenate([jnp.stack(sums), label_logits]), TP)
    (exp_sum, *weighted), label_logits = jnp.split(checkpoint_name(reduced, _REDUCED), [len(sums)])
    log_sum = jnp.log(exp_sum)
    entropies = log_sum - weighted[0] / exp_sum if entropy else None
    return TokenStatistics(
        log_sum + highest, label_logits.T.reshape(labels.shape), highest, entropies
    )


def _logits_of(logits: Array, ids: Array) -> Array:
    found = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
    return jnp.where((ids >= 0) & (ids < logits.shape[1]), found, 0)


@jax.custom_gradient  # type: ignore[untyped-decorator]
def _logit_of(logits: Array, ids: Array) -> tuple[Array, Callable[[Array], tuple[Array, None]]]:
    # Of one id per token: the gradient needs no scatter of [tokens, V/tp].
    return _logits_of(logits, ids), lambda grad: (
        jnp.where(ids == jnp.arange(logits.shape[1]), grad, 0),
        None,
    )


def _top_k(k: int, logits: Array) -> tuple[Array, Array]:
    logits = jax.lax.stop_gradient(logits)
    values, ids = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    # Both in one gather, whose order by device is by id: of equal logits the lowest ids come first,
    # as on one device.
    candidates = jnp.stack(
        [jax.lax.bitcast_convert_type(values, jnp.int32), ids + _first_id(logits)]
    )
    values, ids = all_gather(candidates, TP, dim=2, to="invarying")
    values, order = jax.lax.top_k(jax.lax.bitcast_convert_type(values, jnp.float32), k)
    exp_sum = all_reduce(jnp.sum(jnp.exp(logits - values[:, :1]), axis=-1, keepdims=True), TP)
    return values - (jnp.log(exp_sum) + values[:, :1]), jnp.take_along_axis(ids, order, axis=1)


def _map_chunks(fn: Callable[..., _PerToken], tokens: list[Array], chunk_size: int) -> _PerToken:
    """Maps over chunks; the backward pass needs only a few floats per token."""
    fn = jax.checkpoint(
        fn, policy=jax.checkpoint_policies.save_only_these_names(_REDUCED), prevent_cse=False
    )
    num_chunks, rest = divmod(len(tokens[0]), chunk_size)
    pieces: list[_PerToken] = []
    if num_chunks:
        whole = [
            each[: len(each) - rest].reshape(num_chunks, chunk_size, *each.shape[1:])
            for each in tokens
        ]
        numbers = jax.lax.map(lambda chunk: fn(*chunk), whole)
        pieces.append(jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), numbers))
    if rest:
        pieces.append(fn(*(each[-rest:] for each in tokens)))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *pieces)
