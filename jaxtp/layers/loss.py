"""Cross-entropy and log-probabilities over a vocabulary split over tp, fused with the head.

Whole logits never exist (Liger Kernel, arXiv 2410.10989). The cross-entropy is a sum, whose
cotangent is one number. For each chunk of a device's tokens:

    forward     logits = x @ table.T                    [tokens, V/tp], dropped
                loss += sum over the chunk's tokens
                grad of x = grad of logits @ table
                grad of table += grad of logits.T @ x   in float32
    backward    both gradients times the cotangent

A frozen table has no gradient, and an evaluation computes the logits alone. Numbers of each token
(log-probabilities, entropy) have a cotangent each, so the backward pass computes logits again, from
numbers that were reduced over tp:

    forward     numbers = reduce(x @ table.T)           a few floats per token
    backward    logits = x @ table.T, and both gradients

Over tp a token costs three floats: maximum, sum of exponentials and label logit (Megatron-LM,
arXiv 1909.08053, section 3). Second derivatives differentiate these passes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

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
    vary_like,
)
from jaxtp.layers.embedding import HeadConfig
from jaxtp.layers.parameter import DType
from jaxtp.layers.products import perturbed, primals
from jaxtp.layers.transport import activation_spec, sequence_dim
from jaxtp.mesh import TOKENS, TP

LOSS = "vocab_parallel_cross_entropy"

IGNORE = -100  # the label of a position that the loss ignores
_REDUCED = "softmax_reduction"
# A finite logit, relative to the highest, whose probability is 0 in float32; 0 * -inf would be NaN
_LOWEST = -1e4

Projection = tuple[Array, HeadConfig, Array | None]
"""The (tied) embedding or head `[V padded, D]`, its settings, and its bias `[V padded]`, if any."""

_Gradients = list[Any]  # arrays, or None
_PerToken = TypeVar("_PerToken")
_Sums = TypeVar("_Sums")
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

    def loss_of(logits: Array, labels: Array) -> Array:
        tokens = _statistics(logits, labels, entropy=False)
        losses = tokens.log_normaliser - tokens.label_logit
        losses += z_loss * jnp.square(tokens.log_normaliser)
        return jnp.sum(losses, where=labels != IGNORE)

    def total(table: Array, bias: Array | None, x: Array, labels: Array) -> tuple[Array, Array]:
        loss_sum = _sum_with_gradients(loss_of, head)(table, bias, x, labels)
        num_valid = jnp.sum(labels != IGNORE, dtype=jnp.float32)
        loss_sum, num_valid = all_reduce(jnp.stack([loss_sum, num_valid]), *TOKENS)
        return loss_sum, num_valid

    def on_devices(x_BTD: Array, table_VD: Array, bias_V: Array | None, labels_BT: Array) -> Any:
        return _on_devices(total, (P(), P()), x_BTD, (table_VD, head, bias_V), labels_BT)

    # Outside of a jit JAX does not say within a shard_map which arguments need gradients.
    loss_sum, num_valid = jax.jit(on_devices, inline=True)(x_BTD, table_VD, bias_V, labels_BT)
    return loss_sum, num_valid


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
    return _by_token(reduce_logits, x_BTD, projection, labels)


def vocab_parallel_top_k(x_BTD: Array, projection: Projection, k: int) -> tuple[Array, Array]:
    """Returns each token's k highest log-probabilities and their ids, `[B, T, k]`.

    They are descending, and without a gradient.
    """
    return _by_token(partial(_top_k, k), x_BTD, projection)


def _on_devices(
    evaluate: Callable[..., _Result],
    out_specs: P | tuple[P, P],
    x_BTD: Array,
    projection: Projection,
    *labels: Array,
) -> _Result:
    """Returns `evaluate(table, bias, x, *labels)` of each device.

    `table` `[V/tp, D]` and `bias` `[V/tp]` are float32 numbers of the compute dtype, so that the
    gradients of all chunks add up in float32. `x` and the labels are swapped (`swap_sequence`).
    """
    table_VD, head, bias_V = projection
    chex.assert_equal_shape_prefix((x_BTD, *labels), 2)
    precision = head.context.precision
    split_dim = _split_dim(x_BTD, head)

    def run(x: Array, shard: Array, bias: Array | None, labels: tuple[Array, ...]) -> _Result:
        x = enter_parallel(x.astype(precision.compute), split_dim)
        # Gathered: if each device used its D/fsdp columns, logits would be summed over fsdp, three
        # times (fsdp-1)*V/tp floats per token, which is less than the table only where a device has
        # fewer than about D/(2*fsdp) tokens.
        table = precision.load(shard, 1, accumulate="float32")
        if bias is not None:
            bias = precision.load(bias, None, accumulate="float32")
        return evaluate(table, bias, *swap_sequence((x, *labels), split_dim))

    in_specs = (activation_spec(split_dim), head.table_spec, head.bias_spec, token_spec())
    return device_view(run, LOSS, in_specs, out_specs)(x_BTD, table_VD, bias_V, labels)


def _split_dim(x_BTD: Array, head: HeadConfig) -> int | None:
    return sequence_dim(head.context.sequence_parallel, x_BTD.shape)


def _sum_with_gradients(loss_of: Callable[..., Array], head: HeadConfig) -> Callable[..., Array]:
    """Returns a function that sums `loss_of(logits, labels)` over chunks of a device's tokens.

    Its forward pass also computes the gradients of the arguments that need one.
    """
    precision = head.context.precision

    def run(
        needs: Sequence[bool], table: Array, bias: Array | None, x: Array, labels: Array
    ) -> tuple[Array, _Gradients]:
        operand = table.astype(precision.compute)  # cast once, not in each chunk

        def kept(arrays: Sequence[Array | None]) -> _Gradients:
            return [array if need else None for array, need in zip(arrays, needs, strict=False)]

        def add_chunk(sums: _Gradients, x: Array, labels: Array) -> tuple[_Gradients, Array | None]:
            products = _product(precision.logits, x, operand)
            loss, (grad, bias_grad) = jax.value_and_grad(
                lambda products, bias: loss_of(_logits(head, products, bias), labels), (0, 1)
            )(products, bias)
            x_grad, table_grad = _gradients(x, operand, grad)
            # A product whose result is left out is not computed.
            *grads, x_grad = kept([table_grad, bias_grad, x_grad])
            return jax.tree.map(jnp.add, sums, [loss, *grads]), x_grad

        zeros = jax.tree.map(lambda array: vary_like(jnp.zeros_like(array), x), [table, bias])
        start = [vary_like(jnp.zeros(()), labels), *kept(zeros)]
        (loss, *grads), x_grad = _map_chunks(add_chunk, start, (x, labels), head.chunk_size)
        return loss, [*grads, x_grad]

    def forward(*args: Any) -> tuple[Array, _Gradients]:
        needs = [arg is not None and perturbed(arg) for arg in args]
        return run(needs, *primals(args))

    def backward(grads: _Gradients, cotangent: Array) -> tuple[Array | None, ...]:
        scaled = jax.tree.map(lambda grad: (cotangent * grad).astype(grad.dtype), grads)
        return (*scaled, None)

    total = jax.custom_vjp(lambda *args: run([False] * 3, *args)[0])
    total.defvjp(forward, backward, symbolic_zeros=True)
    return total


def _by_token(
    reduce_logits: Callable[..., _PerToken], x_BTD: Array, projection: Projection, *labels: Array
) -> _PerToken:
    """Returns `reduce_logits(logits, *labels)` of each token.

    The logits are of one chunk, over the device's part of the vocabulary, `[tokens, V/tp]`.
    """
    head = projection[1]
    precision = head.context.precision

    def evaluate(table: Array, bias: Array | None, *arrays: Array) -> _PerToken:
        # The products read the operand, and autodiff sees the table.
        operand = jax.lax.stop_gradient(table.astype(precision.compute))

        def reduce_chunk(sums: tuple[()], x: Array, *labels: Array) -> tuple[tuple[()], _PerToken]:
            products = _project(precision.logits, x, operand, table)
            return sums, reduce_logits(_logits(head, products, bias), *labels)

        _, numbers = _map_chunks(reduce_chunk, (), arrays, head.chunk_size)
        return swap_sequence(numbers, _split_dim(x_BTD, head))

    return _on_devices(evaluate, token_spec(), x_BTD, projection, *labels)


def _logits(head: HeadConfig, products: Array, bias: Array | None) -> Array:
    logits = products.astype(jnp.float32)
    if bias is not None:
        logits += bias
    logits = head.finish(logits)
    num_ids = logits.shape[-1]
    if num_ids * axis_size(TP) == head.vocab_size:
        return logits
    ids = _first_id(logits) + jnp.arange(num_ids)
    return jnp.where(ids < head.vocab_size, logits, -jnp.inf)


def _product(dtype: DType, x: Array, operand: Array) -> Array:
    return jnp.einsum("td,vd->tv", x, operand, preferred_element_type=dtype)


def _gradients(x: Array, operand: Array, grad: Array) -> tuple[Array, Array]:
    """Returns the gradients of `x` and, in float32, of the table.

    Gradients of logits are rounded to the compute dtype: products of float32 took 2.5 times as long
    on an H200.
    """
    grad = grad.astype(x.dtype)
    table_grad = jnp.einsum("tv,td->vd", grad, x, preferred_element_type=jnp.float32)
    return jnp.einsum("tv,vd->td", grad, operand), table_grad


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
    """Returns `x @ operand.T` in `dtype`; `accumulator` has the gradient of the table."""
    return _product(dtype, x, operand)


def _project_backward(
    dtype: DType, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, None, Array]:
    x_grad, table_grad = _gradients(*residuals, grad)
    return x_grad, None, table_grad


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
    fn: Callable[..., tuple[_Sums, _PerToken]],
    sums: _Sums,
    arrays: tuple[Array, ...],
    chunk_size: int,
) -> tuple[_Sums, _PerToken]:
    """Maps `sums, numbers = fn(sums, *chunk)` over chunks of the tokens of arrays `[b, t, ...]`.

    Returns the last sums, and the numbers of all tokens, `[b, t, ...]`. A derivative computes a
    chunk again, from the few numbers per token that `_REDUCED` names: to reduce logits again would
    send these numbers over tp a second time.
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
        sums, numbers = jax.lax.scan(lambda sums, chunk: fn(sums, *chunk), sums, chunks)
        pieces.append(jax.tree.map(_merge_dims, numbers))
    if remainder:
        sums, numbers = fn(sums, *(x[-remainder:] for x in tokens))
        pieces.append(numbers)
    numbers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *pieces)
    return sums, jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), numbers)


def _merge_dims(x: Array) -> Array:
    """Merges the first two dims."""
    return x.reshape(-1, *x.shape[2:])
