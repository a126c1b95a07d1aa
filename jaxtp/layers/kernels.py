"""The kernels of attention: what each can do, and which of them `model.attention: auto` takes.

All that a kernel can do stands in one table, with the products that it makes: `auto`, the summary, refusals, memory and
work read it. A kernel is never used for what it would do by a `[T, T]` mask: cuDNN makes such a mask of packed
documents, and it is not even divided by tp. `blockwise` (`lax`) and `fused` (Pallas, Triton) take the first and the
last key that each query sees instead (`activations.seen_keys`). That covers causality, windows, documents and parts of
a sequence, and says which blocks to leave out. On GPUs a run compares its kernel with plain products before it starts
(`train/attention_check.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxtp.layers.activations import Part, seen_keys, segment_mask
from jaxtp.layers.blockwise_attention import MOST_IN_BLOCK, block_size, blockwise_attention, num_visited

KernelName = Literal["cudnn", "fused", "blockwise", "xla"]
Implementation = Literal["auto", KernelName]

_SHORT = MOST_IN_BLOCK
"""Tokens up to which scores are no larger than one block of them: xla then holds no more than blockwise."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A use of attention; None is not known yet, and hinders nothing."""

    head_dim: int
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    """`factor`, where it is not head_dim ** -0.5."""
    dtype: str | None = None
    """The compute dtype."""
    length: int | None = None
    """Tokens in a sequence."""
    packed: bool | None = None
    """Whether a sequence holds several documents that do not see each other."""
    part: bool | None = None
    """Whether a device holds a part of the queries of a sequence."""
    platform: str | None = None
    """cpu, cuda, rocm or tpu."""

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of causal attention, and what it can do."""

    name: KernelName

    run: Callable[..., Array]
    """Returns `[B, T, N, H]` of queries, keys, values and segments, as `blockwise_attention` does."""

    blocks: Callable[[Sequence[range], int | None], tuple[int, int, int]]
    """Returns the number of products of which the scores of a head are made, and the queries and keys of each, for
    the chunks of a sequence that a device has, the positions of its queries, and a window. Keys are those from
    position 0 to the last query's; of packed documents it may make fewer."""

    holds_scores: bool = False
    """Whether scores `[T, T]` lie in memory."""

    streams_scores: bool = False
    """Whether scores go through memory between products, all at once or block by block."""

    keeps_result: bool = True
    """Whether its result and log-sum-exp can be kept for the backward pass, which then does not run it again."""

    platforms: tuple[str, ...] | None = None
    """Where it runs; None is everywhere."""

    sixteen_bits: bool = False
    """Whether it computes in 16 bits alone."""

    head_dims: tuple[int, int] | None = None
    """The widest head, and what its width is a multiple of."""

    packed: bool = True
    """Whether it keeps documents apart without a `[T, T]` mask."""

    softcap: bool = True
    """Whether it can squash scores."""

    part: bool = True
    """Whether it can take a part of the queries of a sequence."""

    def problems(self, use: Use) -> Iterator[str]:
        """Yields why it cannot do what is asked."""
        if self.platforms and use.platform not in (None, *self.platforms):
            yield f"it runs on {' and '.join(self.platforms)}, not on {use.platform}"
        if self.sixteen_bits and use.dtype not in (None, "bfloat16", "float16"):
            yield f"it computes in 16 bits, and model.precision.compute is {use.dtype}"
        if self.head_dims and (use.head_dim > self.head_dims[0] or use.head_dim % self.head_dims[1]):
            most, multiple = self.head_dims
            yield f"it takes a head_dim of at most {most}, a multiple of {multiple}, not {use.head_dim}"
        if use.packed and not self.packed:
            yield "packed documents (data.packing=documents) would give it a [T, T] mask"
        if use.softcap is not None and not self.softcap:
            yield "it has no model.attention_softcap"
        if use.part and not self.part:
            yield "it attends from whole sequences, and with mesh.context=gather a device has a part, with ulysses all"


def seen(chunks: Sequence[range], window: int | None) -> float:
    """Returns the number of scores of a head that causality and a window leave, half of the diagonal counted.

    Args:
      chunks: positions of the queries that a device has.
      window: positions that each one sees; None for all.
    """

    def before(position: int) -> float:  # by all queries up to there
        reach = position if window is None else min(window, position)
        return reach * position - reach**2 / 2

    return sum(before(chunk.stop) - before(chunk.start) for chunk in chunks)


def _exact(chunks: Sequence[range], window: int | None) -> tuple[int, int, int]:
    length = sum(map(len, chunks))
    return 1, length, max(1, int(seen(chunks, window) // length))


def _by_blocks(chunks: Sequence[range], window: int | None) -> tuple[int, int, int]:
    block = block_size(sum(map(len, chunks)))
    return num_visited(chunks, window), block, block


def _whole(chunks: Sequence[range], window: int | None) -> tuple[int, int, int]:
    del window
    return 1, sum(map(len, chunks)), max(chunk.stop for chunk in chunks)


def _cudnn(
    q: Array,
    k: Array,
    v: Array,
    segments_BT: None,
    *,
    scale: float,
    window: int | None,
    softcap: None,
    part: None = None,
) -> Array:  # never with `return_residual`: its log-sum-exp has no gradient
    del segments_BT, softcap, part
    reach = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=reach, implementation="cudnn"
    )


def _fused(*arrays: Any, **settings: Any) -> Array:
    from jaxtp.layers.fused_attention import fused_attention  # Pallas takes a while to import

    return fused_attention(*arrays, **settings)


def _xla(
    q: Array,
    k: Array,
    v: Array,
    segments_BT: Array | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    part: Part | None = None,
) -> Array:
    if softcap is None and part is None:
        mask = None if segments_BT is None else segment_mask(segments_BT)
        reach = None if window is None else (window - 1, 0)
        return _jax_attention(q, k, v, mask=mask, scale=scale, is_causal=True, local_window_size=reach)
    first, last = (x[:, :, None] for x in seen_keys(q.shape[:2], k.shape[1], window, segments_BT, part))
    at, some = jnp.arange(k.shape[1]), first <= last
    seen = ((first <= at) & (at <= last)) | ~some  # a softmax over nothing would not be a number
    if softcap is None:
        y = _jax_attention(q, k, v, mask=seen[:, None], scale=scale)
    else:
        y = masked_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen, scale=scale, softcap=softcap)
    return jnp.where(some[..., None], y, 0)


def _jax_attention(q: Array, k: Array, v: Array, **settings: Any) -> Array:
    """Attends as JAX does; in float16 by way of float32, as JAX asks for a product that CPUs do not have in it."""
    wide = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    return jax.nn.dot_product_attention(*(x.astype(wide) for x in (q, k, v)), **settings).astype(q.dtype)


def masked_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKSH: Array, seen_BTS: Array, *, scale: float, softcap: float | None
) -> Array:
    """Returns the values weighted by attention, like the queries.

    Args:
      q_BTNH: queries; head n attends to kv head n // (N // K).
      k_BKSH: keys, a matrix for each head.
      v_BKSH: values, alike.
      seen_BTS: whether a query sees a key; each sees one at least.
      scale: factor of the scores.
      softcap: squashes each score s to `softcap * tanh(s / softcap)`.
    """
    rows, length, _, width = q_BTNH.shape
    groups = q_BTNH.reshape(rows, length, k_BKSH.shape[1], -1, width)
    scores = scale * jnp.einsum("btkgh,bksh->bkgts", groups, k_BKSH, preferred_element_type=jnp.float32)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    shares = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], scores, -jnp.inf)).astype(v_BKSH.dtype)
    # In the order of its operands: of another, XLA for CPUs makes a product that takes the values transposed.
    y = jnp.einsum("bkgts,bksh->bkgth", shares, v_BKSH, preferred_element_type=jnp.float32)
    return jnp.moveaxis(y, 3, 1).astype(q_BTNH.dtype).reshape(q_BTNH.shape)


KERNELS: dict[KernelName, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="cudnn",
            run=_cudnn,
            blocks=_exact,
            keeps_result=False,
            platforms=("cuda",),
            sixteen_bits=True,
            head_dims=(128, 8),
            packed=False,
            softcap=False,
            part=False,
        ),
        Kernel(name="fused", run=_fused, blocks=_exact, platforms=("cuda",), head_dims=(256, 2)),
        Kernel(name="blockwise", run=blockwise_attention, blocks=_by_blocks, streams_scores=True),
        Kernel(
            name="xla",
            run=_xla,
            blocks=_whole,
            holds_scores=True,
            streams_scores=True,
            keeps_result=False,
        ),
    )
}
"""By name, the one that `auto` would rather take first."""


def chosen(asked: Implementation, use: Use) -> tuple[Kernel, str]:
    """Returns the kernel that attention runs, and why: that which is asked for, whether or not it can (`refused`)."""
    if asked != "auto":
        return KERNELS[asked], "as configured"
    if use.platform != "cuda" and use.length is not None and use.length <= _SHORT:
        return KERNELS["xla"], f"up to {_SHORT} tokens its scores are small"
    reasons = []
    for kernel in KERNELS.values():
        problem = next(kernel.problems(use), None)
        if problem is None:
            break
        reasons.append(f"{kernel.name}: {problem}")
    return kernel, "; ".join(reasons) or "it is preferred where it can be used"


def refused(asked: Implementation, use: Use) -> Iterator[str]:
    """Yields why the kernel that is asked for cannot do it, with those that can."""
    if asked == "auto":
        return
    able = [
        f"{kernel.name} on {' and '.join(kernel.platforms)}"
        if kernel.platforms and use.platform is None
        else kernel.name
        for kernel in KERNELS.values()
        if not any(kernel.problems(use))
    ]
    for problem in KERNELS[asked].problems(use):
        yield f"model.attention={asked}: {problem}; use auto ({' or '.join(able)})"
