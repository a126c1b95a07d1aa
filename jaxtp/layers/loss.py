"""Cross-entropy and log-probabilities over a vocabulary split over tp, fused with the head.

Whole logits never exist (Liger Kernel, arXiv 2410.10989). For each chunk of a device's tokens:

    forward     logits = x @ table.T              [tokens, V/tp], dropped
                numbers = reduce(logits)          a few floats per token; those reduced over tp are
                                                  kept for the backward pass
    backward    logits = x @ table.T              computed again
                grad of x = grad of logits @ table
                grad of table += grad of logits.T @ x   summed over chunks in float32

Over tp the cross-entropy of a token costs three floats: maximum, sum of exponentials and label
logit (Megatron-LM, arXiv 1909.08053, section 3).
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
    swap_sequence,
    token_spec,
)
from jaxtp.layers.embedding import HeadConfig
from jaxtp.layers.parameter import DType
from jaxtp.layers.transport import activation_spec, sequence_dim
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
    /,
    *,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the summed cross-entropy, in nats, and the number of labels.

    Both are float32 scalars over the *global* batch. The probabilities are
    `softmax(x @ table.T + bias)`.

    Args:
      x_BTD: final hidden states.
      table_VD: the (tied) embedding or head, `[V padded, D]`.
      labels_BT: integers; `IGNORE` (-100) does not count.
      head: V, scale, softcap, tokens projected at a time.
      bias_V: `[V padded]`.
      z_loss: adds `z_loss * log(sum(exp(logits)))^2` per token (PaLM, arXiv 2204.02311, section 5).
    """

    def total(tokens: TokenStatistics, labels: Array) -> tuple[Array, Array]:
        losses = tokens.log_normaliser - tokens.label_logit
        losses += z_loss * jnp.square(tokens.log_normaliser)
        valid = labels != IGNORE
        loss_sum = jnp.sum(losses, where=valid)
        num_valid = jnp.sum(valid, dtype=jnp.float32)
        loss_sum, num_valid = all_reduce(jnp.stack([loss_sum, num_valid]), *TOKENS)
        return loss_sum, num_valid

    reduce_logits = partial(_statistics, entropy=False)
    projection = (table_VD, head, bias_V)
    return _on_devices(reduce_logits, total, (P(), P()), x_BTD, projection, labels_BT)


def vocab_parallel_statistics(
    x_BTD: Array,
    projection: Projection,
    labels: Array,
    *,
    entropy: bool = False,
) -> TokenStatistics:
    """Returns the statistics of each token.

    `labels` are `[B, T]`, or `[B, T, K]` for K ids per token.
    """
    reduce_logits = partial(_statistics, entropy=entropy)
    return _on_devices(reduce_logits, _first, token_spec(), x_BTD, projection, labels)


def vocab_parallel_top_k(x_BTD: Array, projection: Projection, k: int) -> tuple[Array, Array]:
    """Returns each token's k highest log-probabilities and their ids, `[B, T, k]`.

    They are descending, and without a gradient.
    """
    return _on_devices(partial(_top_k, k), _first, token_spec(), x_BTD, projection)


def _first(numbers: _PerToken, *labels: Array) -> _PerToken:
    return numbers


def _on_devices(
    reduce_logits: Callable[..., _PerToken],
    finish: Callable[..., _Result],
    out_specs: P | tuple[P, P],
    x_BTD: Array,
    projection: Projection,
    *labels: Array,
) -> _Result:
    """Returns `finish(numbers, *labels)` of each device's tokens.

    The numbers are `reduce_logits(logits, *labels)` of each chunk, whose logits are over the
    device's part of the vocabulary, `[tokens, V/tp]`.
    """
    table_VD, head, bias_V = projection
    chex.assert_equal_shape_prefix((x_BTD, *labels), 2)
    precision = head.context.precision
    split_dim = sequence_dim(head.context.sequence_parallel, x_BTD.shape)

    def run(x: Array, shard: Array, bias: Array | None, labels: tuple[Array, ...]) -> _Result:
        x = enter_parallel(x.astype(precision.compute), split_dim)
        # Gathered: if each device used its D/fsdp columns, logits would be summed over fsdp, three
        # times (fsdp-1)*V/tp floats per token, which is less than the table only where a device has
        # fewer than about D/(2*fsdp) tokens. Chunks accumulate gradients in float32.
        accumulator = precision.load(shard, 1, accumulate="float32")  # [V/tp, D]
        if bias is not None:
            bias = precision.load(bias, None, accumulate="float32")
        # Cast once, not in each chunk
        operand = jax.lax.stop_gradient(accumulator.astype(precision.compute))
        table = _Table(operand, accumulator)

        def reduce_chunk(x: Array, *labels: Array) -> _PerToken:
            return reduce_logits(_logits(head, table, bias, x), *labels)

        arrays = swap_sequence((x, *labels), split_dim)
        numbers = _map_chunks(reduce_chunk, arrays, head.chunk_size)
        return finish(swap_sequence(numbers, split_dim), *labels)

    in_specs = (activation_spec(split_dim), head.table_spec, head.bias_spec, token_spec())
    return device_view(run, LOSS, in_specs, out_specs)(x_BTD, table_VD, bias_V, labels)


class _Table(NamedTuple):
    """A device's part of the table, `[V/tp, D]`, as products read it and as autodiff sees it."""

    operand: Array  # in the compute dtype, without a gradient
    # The same numbers in float32: no product reads it, but the gradients of all chunks add up in it
    accumulator: Array


def _logits(head: HeadConfig, table: _Table, bias: Array | None, x: Array) -> Array:
    logits = _project(head.context.precision.logits, x, *table).astype(jnp.float32)
    if bias is not None:
        logits += bias
    logits = head.finish(logits)
    num_ids = logits.shape[-1]
    if num_ids * axis_size(TP) == head.vocab_size:
        return logits
    ids = _first_id(logits) + jnp.arange(num_ids)
    return jnp.where(ids < head.vocab_size, logits, -jnp.inf)


@jax.custom_vjp
def _with_gradient(operand: Array, accumulator: Array) -> Array:
    """Returns `operand`, as a function of `accumulator`.

    The backward pass of `_project` reads the table too, and so a second derivative has to reach
    `accumulator` from there.
    """
    return operand


_with_gradient.defvjp(
    lambda operand, _: (operand, None), lambda _, grad: (None, grad.astype(jnp.float32))
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(dtype: DType, x: Array, operand: Array, accumulator: Array) -> Array:
    """Returns `x @ operand.T` in `dtype`; `accumulator` has the gradient of the table.

    Gradients of logits are rounded to the compute dtype: products of float32 took 2.5 times as long
    on an H200.
    """
    return jnp.einsum("td,vd->tv", x, operand, preferred_element_type=dtype)


def _project_backward(
    dtype: DType, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, None, Array]:
    x, operand = residuals
    grad = grad.astype(x.dtype)
    table_grad = jnp.einsum("tv,td->vd", grad, x, preferred_element_type=jnp.float32)
    return jnp.einsum("tv,vd->td", grad, operand), None, table_grad


_project.defvjp(
    lambda dtype, x, *table: (_project(dtype, x, *table), (x, _with_gradient(*table))),
    _project_backward,
)


def _first_id(logits: Array) -> Array | int:
    return axis_index(TP) * logits.shape[-1]


def _statistics(logits: Array, labels: Array, *, entropy: bool) -> TokenStatistics:
    # The maximum is -inf on a device that holds only padding.
    local_max = jnp.max(logits, axis=-1)
    highest = checkpoint_name(all_reduce_max(local_max, TP), _REDUCED)
    shifted = logits - highest[:, None]
    exp = jnp.exp(shifted)
    ids = labels.reshape(len(labels), -1) - _first_id(logits)  # [tokens, K]
    pick = _logit_of if ids.shape[1] == 1 else _logits_of
    label_logits = pick(logits, ids).T
    sums = [jnp.sum(exp, axis=-1)]
    if entropy:
        sums.append(jnp.sum(exp * jnp.maximum(shifted, _LOWEST), axis=-1))
    # One sum: XLA may run two independent sums in any order, and on CPUs confuses them.
    summands = jnp.concatenate([jnp.stack(sums), label_logits])
    reduced = checkpoint_name(all_reduce(summands, TP), _REDUCED)
    (exp_sum, *weighted), label_logits = jnp.split(reduced, [len(sums)])
    log_sum = jnp.log(exp_sum)
    entropies = log_sum - weighted[0] / exp_sum if entropy else None
    log_normaliser = log_sum + highest
    label_logit = label_logits.T.reshape(labels.shape)
    return TokenStatistics(log_normaliser, label_logit, highest, entropies)


def _logits_of(logits: Array, ids: Array) -> Array:
    """Returns the logits of ids `[tokens, K]`, 0 for ids of other devices."""
    chosen = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
    return jnp.where((ids >= 0) & (ids < logits.shape[1]), chosen, 0)


@jax.custom_gradient  # type: ignore[untyped-decorator]
def _logit_of(logits: Array, ids: Array) -> tuple[Array, Callable[[Array], tuple[Array, None]]]:
    """`_logits_of` one id per token, whose gradient needs no scatter into `[tokens, V/tp]`."""

    def backward(grad: Array) -> tuple[Array, None]:
        return jnp.where(ids == jnp.arange(logits.shape[1]), grad, 0), None

    return _logits_of(logits, ids), backward


def _top_k(k: int, logits: Array) -> tuple[Array, Array]:
    logits = jax.lax.stop_gradient(logits)
    values, ids = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    # Both in one gather, whose order by device is by id: of equal logits the lowest ids come first,
    # as on one device.
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    candidates = jnp.stack([bits, ids + _first_id(logits)])
    bits, ids = all_gather(candidates, TP, dim=2, to="invarying")
    values, order = jax.lax.top_k(jax.lax.bitcast_convert_type(bits, jnp.float32), k)
    exp = jnp.exp(logits - values[:, :1])
    exp_sum = all_reduce(jnp.sum(exp, axis=-1, keepdims=True), TP)
    log_normaliser = jnp.log(exp_sum) + values[:, :1]
    return values - log_normaliser, jnp.take_along_axis(ids, order, axis=1)


def _map_chunks(
    fn: Callable[..., _PerToken], arrays: tuple[Array, ...], chunk_size: int
) -> _PerToken:
    """Maps over chunks of the tokens of arrays `[b, t, ...]`, and returns `[b, t, ...]`.

    The backward pass computes a chunk again, from the few numbers per token that `_REDUCED` names:
    to reduce logits again would send these numbers over tp a second time.
    """
    save_reduced = jax.checkpoint_policies.save_only_these_names(_REDUCED)
    fn = jax.checkpoint(fn, policy=save_reduced, prevent_cse=False)
    lead = arrays[0].shape[:2]
    # No array is copied.
    tokens = [_merge_dims(x) for x in arrays]
    num_chunks, remainder = divmod(len(tokens[0]), chunk_size)
    pieces: list[_PerToken] = []
    if num_chunks:
        size = num_chunks * chunk_size
        chunks = [x[:size].reshape(num_chunks, chunk_size, *x.shape[1:]) for x in tokens]
        numbers = jax.lax.map(lambda chunk: fn(*chunk), chunks)
        pieces.append(jax.tree.map(_merge_dims, numbers))
    if remainder:
        pieces.append(fn(*(x[-remainder:] for x in tokens)))
    numbers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *pieces)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), numbers)


def _merge_dims(x: Array) -> Array:
    """Merges the first two dims."""
    return x.reshape(-1, *x.shape[2:])
