"""Attention kernels and the choice of `model.attention: auto`; `pick_scan`.

One table has their capabilities and costs.

No kernel gets a `[T, T]` mask, which tp would not split: `blockwise` and `fused` take the first and
last key of each query (`activations.key_ranges`). cuDNN is the fastest on Hopper only: 1.7 to 2.3
times as fast as FlashAttention on an H100, 0.82 to 1.00 on an A100, A10G, L40S and RTX PRO 6000
(huggingface/transformers#48163). On GPUs a run checks its kernel against plain products, and times
the candidates of `auto` (`train/self_check.py`).
"""

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxtp.layers.kernels.blockwise_attention import (
    MOST_IN_BLOCK,
    block_size,
    blockwise_attention,
    num_visited,
)
from jaxtp.layers.kernels.delta_rule import Scan
from jaxtp.layers.sequence_parallel import Part, key_ranges, segment_mask
from jaxtp.mesh import platform_of

KernelName = Literal["cudnn", "fused", "blockwise", "xla"]
KernelChoice = Literal["auto", KernelName]

_AMPERE = 8
_HOPPER = 9
_BLACKWELL = 10  # major compute capabilities; consumer cards of Blackwell have 12

_WIDE_ON_BLACKWELL = (9, 25)
"""The first cuDNN with a backward pass for head_dim 256 on Blackwell; JAX accepts older ones.
NVIDIA/TransformerEngine#3056 names 9.23 and 9.25."""

LEAST_CAPABILITY = {"float8": 8.9, "mxfp8": 10.0}
"""Least compute capability of an NVIDIA GPU with products in that dtype: Ada and Blackwell."""

CAPABILITIES = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), "8.0"),
    **dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), "8.0"),
    **dict.fromkeys(("NVIDIA L4", "NVIDIA L40", "NVIDIA L40S", "NVIDIA GeForce RTX 4090"), "8.9"),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"), "9.0"),
    **dict.fromkeys(("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"), "9.0"),
    **dict.fromkeys(("NVIDIA B200", "NVIDIA GB200"), "10.0"),
}
"""Compute capability by `jax.Device.device_kind`, for devices of an abstract mesh:
developer.nvidia.com/cuda-gpus."""

_SHORT = MOST_IN_BLOCK
"""Longest sequence whose scores fit into one block: xla then stores no more of them than
blockwise."""


def architecture_of(device: Any) -> str:
    """Returns the platform, with the compute capability of an NVIDIA GPU if known: `cuda 9.0`."""
    if (platform := platform_of(device)) != "cuda":
        return platform
    capability = getattr(device, "compute_capability", None) or _capability(device.device_kind)
    return f"{platform} {capability}" if capability else platform


def matmul_problem(matmul: str, architecture: str) -> str | None:
    """Returns why a device has no products in the dtype of `Precision.matmul`, or None.

    `architecture_of` gives the device.
    """
    platform, _, capability = architecture.partition(" ")
    least = LEAST_CAPABILITY.get(matmul, 0.0)
    if (
        not least
        or platform == "cpu"
        or (platform == "cuda" and float(capability or least) >= least)
    ):
        return None
    works = "compute" if matmul == "float8" or matmul_problem("float8", architecture) else "float8"
    return (
        f"model.precision.matmul={matmul}: {architecture} would multiply in 16 bits; it needs cuda "
        f"{least} or newer; use model.precision.matmul={works}"
    )


def _capability(kind: str) -> str | None:
    here = jax.devices()[0]
    return (
        getattr(here, "compute_capability", None)
        if here.device_kind == kind
        else CAPABILITIES.get(kind.strip())
    )


@dataclass(frozen=True, kw_only=True)
class Use:
    """Properties of an attention call that decide its kernel.

    None means unknown and excludes no kernel.
    """

    head_dim: int
    value_head_dim: int | None = None  # if it is not head_dim
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None  # `factor`, if it is not head_dim ** -0.5
    sinks: bool = False
    dtype: str | None = None  # the compute dtype
    length: int | None = None  # tokens in a sequence
    packed: bool | None = None  # a sequence holds several documents that do not see each other
    part: bool | None = None  # a device holds a part of the queries of a sequence
    # The platform: cpu, rocm, tpu, or cuda with a compute capability, as in `cuda 9.0`
    platform: str | None = None

    @property
    def family(self) -> str | None:
        """cpu, cuda, rocm or tpu; None if unknown."""
        return self.platform and self.platform.partition(" ")[0]

    @property
    def capability(self) -> tuple[int, ...] | None:
        """Compute capability of an NVIDIA GPU; None if unknown."""
        _, _, numbers = (self.platform or "").partition(" ")
        return tuple(map(int, numbers.split("."))) if numbers else None

    @property
    def widest(self) -> int:
        """Width of queries and keys, or of values if they are wider."""
        return max(self.head_dim, self.value_head_dim or 0)

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def scores(self) -> dict[str, Any]:
        """Keyword arguments of a kernel that affect its scores."""
        return {"scale": self.factor, "softcap": self.softcap}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of causal attention and its capabilities."""

    name: KernelName

    run: Callable[..., Array]
    """Attends with queries, keys, values and segments; see `blockwise_attention`."""

    blocks: Callable[[Sequence[range], int | None], tuple[int, int, int]]
    """Returns the number of products that compute a head's scores, and the queries and keys of each
    product. Arguments: the chunks of positions of a device's queries, and a window."""

    stores_scores: bool = False  # all of them, `[T, T]`, in memory
    # Whether it writes scores to memory between products, all at once or block by block
    streams_scores: bool = False
    can_save_result: bool = True
    """Remat policies can save its output and log-sum-exp, so that the backward pass does not run it
    again."""

    platforms: tuple[str, ...] | None = None  # None: everywhere
    sixteen_bits: bool = False  # computes in 16 bits only
    head_dims: Callable[[Use], tuple[int, int]] | None = None
    """Returns the largest head_dim for a use, and a number that must divide head_dim."""

    packed: bool = True  # keeps documents apart without a `[T, T]` mask
    softcap: bool = True  # can squash scores
    sinks: bool = True  # they can join its softmax
    part: bool = True  # can take a part of the queries of a sequence

    def problems(self, use: Use) -> Iterator[str]:
        """Yields why the kernel does not support a use."""
        if self.platforms and use.family not in (None, *self.platforms):
            yield f"it runs on {' and '.join(self.platforms)}, not on {use.family}"
        if self.sixteen_bits and use.dtype not in (None, "bfloat16", "float16"):
            yield f"it computes in 16 bits, and model.precision.compute is {use.dtype}"
        most, multiple = self.head_dims(use) if self.head_dims else (use.widest, 1)
        if use.widest > most or use.widest % multiple:
            yield (
                f"it takes a head_dim of at most {most}, a multiple of {multiple}, not {use.widest}"
            )
        if use.packed and not self.packed:
            yield "packed documents (data.packing=documents) would give it a [T, T] mask"
        if use.softcap is not None and not self.softcap:
            yield "it has no model.attention_softcap"
        if use.sinks and not self.sinks:
            yield "it has no model.attention_sinks"
        if use.part and not self.part:
            yield (
                "it needs whole sequences, which devices have with mesh.context=ulysses, but not "
                "with gather"
            )


def num_scores(chunks: Sequence[range], window: int | None) -> float:
    """Returns the number of unmasked scores per head, with half of the diagonal.

    `chunks` are the positions of a device's queries.
    """

    def before(position: int) -> float:  # scores of all queries before it
        reach = position if window is None else min(window, position)
        return reach * position - reach**2 / 2

    return sum(before(chunk.stop) - before(chunk.start) for chunk in chunks)


def _exact(chunks: Sequence[range], window: int | None) -> tuple[int, int, int]:
    length = sum(map(len, chunks))
    return 1, length, max(1, int(num_scores(chunks, window) // length))


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
    **without: None,
) -> Array:  # never with `return_residual`: its log-sum-exp has no gradient
    del segments_BT, without  # `Kernel.problems` excludes documents, softcaps, sinks and parts
    reach = None if window is None else (window - 1, 0)
    width = max(q.shape[3], v.shape[3])
    # cuDNN takes narrower values on Hopper, but JAX's function does not.
    q, k, v_padded = (jnp.pad(x, (*[(0, 0)] * 3, (0, width - x.shape[3]))) for x in (q, k, v))
    y = jax.nn.dot_product_attention(
        q, k, v_padded, scale=scale, is_causal=True, local_window_size=reach, implementation="cudnn"
    )
    return y[..., : v.shape[3]]


@cache
def installed_cudnn() -> tuple[int, ...] | None:
    """Returns the cuDNN version that pip installed, or None."""
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with suppress(importlib.metadata.PackageNotFoundError, ValueError):
            return tuple(map(int, importlib.metadata.version(package).split(".")))
    return None


def _heads_of_cudnn(use: Use) -> tuple[int, int]:
    """Returns the widest head with a backward pass: JAX's check, corrected for Blackwell."""
    major = _HOPPER if use.capability is None else use.capability[0]
    if major == _BLACKWELL:
        return (256 if (installed_cudnn() or _WIDE_ON_BLACKWELL) >= _WIDE_ON_BLACKWELL else 128), 8
    return (256 if major == _HOPPER else 128), 8


def _fused(*arrays: Any, **settings: Any) -> Array:
    # Pallas takes a while to import.
    from jaxtp.layers.kernels.fused_attention import fused_attention

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
    sinks: Array | None = None,
) -> Array:
    plain = softcap is None and sinks is None and q.shape[3] == v.shape[3]  # as JAX has it
    if plain and part is None:
        mask = None if segments_BT is None else segment_mask(segments_BT)
        reach = None if window is None else (window - 1, 0)
        return _jax_attention(
            q, k, v, mask=mask, scale=scale, is_causal=True, local_window_size=reach
        )
    first, last = (
        x[:, :, None] for x in key_ranges(q.shape[:2], k.shape[1], window, segments_BT, part)
    )
    at = jnp.arange(k.shape[1])
    sees_any = first <= last
    seen = ((first <= at) & (at <= last)) | ~sees_any  # a softmax over nothing would be NaN
    if plain:
        y = _jax_attention(q, k, v, mask=seen[:, None], scale=scale)
    else:
        y = masked_attention(
            q, (k.swapaxes(1, 2), v.swapaxes(1, 2)), seen, scale=scale, softcap=softcap, sinks=sinks
        )
    return jnp.where(sees_any[..., None], y, 0)


def _jax_attention(q: Array, k: Array, v: Array, **settings: Any) -> Array:
    """Attends with JAX; float16 via float32.

    JAX requests a float16 product that CPUs lack.
    """
    wide = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    return jax.nn.dot_product_attention(*(x.astype(wide) for x in (q, k, v)), **settings).astype(
        q.dtype
    )


def masked_attention(
    q_BTNH: Array,
    keys_values: tuple[Array, Array],
    seen_BTS: Array,
    *,
    scale: float,
    softcap: float | None,
    sinks: Array | None = None,
) -> Array:
    """Attends to keys and values `[B, K, S, H]` with an explicit mask.

    Each query must see a key.
    """
    k_BKSH, v_BKSH = keys_values
    rows, length, heads, width = q_BTNH.shape
    groups = q_BTNH.reshape(rows, length, k_BKSH.shape[1], -1, width)
    scores = scale * jnp.einsum(
        "btkgh,bksh->bkgts", groups, k_BKSH, preferred_element_type=jnp.float32
    )
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen_BTS[:, None, None], scores, -jnp.inf)
    if sinks is None:
        shares = jax.nn.softmax(scores)
    else:
        sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
        highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
        shares = jnp.exp(scores - highest)
        shares /= shares.sum(-1, keepdims=True) + jnp.exp(sinks - highest)
    # The output dims follow the operands' order; otherwise XLA for CPUs transposes the values.
    y = jnp.einsum(
        "bkgts,bksh->bkgth", shares.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
    )
    return jnp.moveaxis(y, 3, 1).astype(q_BTNH.dtype).reshape(rows, length, heads, -1)


KERNELS: dict[KernelName, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="cudnn",
            run=_cudnn,
            blocks=_exact,
            can_save_result=False,
            platforms=("cuda",),
            sixteen_bits=True,
            head_dims=_heads_of_cudnn,
            packed=False,
            softcap=False,
            sinks=False,
            part=False,
        ),
        Kernel(
            name="fused",
            run=_fused,
            blocks=_exact,
            platforms=("cuda",),
            head_dims=lambda use: (256, 2),
        ),
        Kernel(name="blockwise", run=blockwise_attention, blocks=_by_blocks, streams_scores=True),
        Kernel(
            name="xla",
            run=_xla,
            blocks=_whole,
            stores_scores=True,
            streams_scores=True,
            can_save_result=False,
        ),
    )
}
"""By name, in the order in which `auto` prefers them; cudnn comes last except on Hopper."""

# The fastest of `candidates`, and the measurement
_MEASURED: dict[Use, tuple[KernelName, str]] = {}


def record_fastest(use: Use, name: KernelName, why: str) -> None:
    """Makes `auto` use the kernel that was measured fastest."""
    _MEASURED[use] = (name, why)


def candidates(requested: KernelChoice, use: Use) -> list[Kernel]:
    """Returns the chosen kernel, then kernels that may be faster, to time them."""
    kernel, _ = pick_kernel(requested, use)
    others = (
        []
        if requested != "auto" or kernel.platforms is None
        else [KERNELS["cudnn"], KERNELS["fused"]]
    )
    return [
        kernel,
        *(other for other in others if other != kernel and not any(other.problems(use))),
    ]


def pick_kernel(requested: KernelChoice, use: Use) -> tuple[Kernel, str]:
    """Returns the kernel and the reason; `unsupported` checks a requested kernel."""
    if requested != "auto":
        return KERNELS[requested], "as configured"
    if use in _MEASURED:
        name, why = _MEASURED[use]
        return KERNELS[name], why
    if use.family != "cuda" and use.length is not None and use.length <= _SHORT:
        return KERNELS["xla"], f"up to {_SHORT} tokens its scores are small"
    reasons = []
    on_hopper = use.capability is not None and use.capability[0] == _HOPPER
    for kernel in sorted(
        KERNELS.values(), key=lambda kernel: kernel.name == "cudnn" and not on_hopper
    ):
        problem = next(kernel.problems(use), None)
        if problem is None:
            break
        reasons.append(f"{kernel.name}: {problem}")
    return kernel, "; ".join(
        reasons
    ) or f"cudnn is preferred on Hopper{'' if on_hopper else ' only'}"


def unsupported(requested: KernelChoice, use: Use) -> Iterator[str]:
    """Yields why the requested kernel cannot run."""
    if requested == "auto":
        return
    supported = [
        f"{kernel.name} on {' and '.join(kernel.platforms)}"
        if kernel.platforms and use.platform is None
        else kernel.name
        for kernel in KERNELS.values()
        if not any(kernel.problems(use))
    ]
    for problem in KERNELS[requested].problems(use):
        yield f"model.attention={requested}: {problem}; use auto ({' or '.join(supported)})"


def pick_scan(key_dim: int, platform: str | None) -> tuple[Scan | None, str]:
    """Returns what computes the states of Gated DeltaNet, None for `lax`, and the reason.

    Platform None is unknown.
    """
    use = Use(head_dim=key_dim, platform=platform)
    if use.family not in (None, "cuda"):
        return None, f"pallas runs only on cuda, not on {use.family}"
    if use.capability and use.capability[0] < _AMPERE:
        return None, f"pallas runs only from compute capability {_AMPERE}.0 on, not on {platform}"
    # Pallas takes a while to import.
    from jaxtp.layers.kernels.delta_kernels import MOST_KEY_DIM, chunk_states

    if key_dim > MOST_KEY_DIM:
        return None, f"pallas takes a delta_key_dim of at most {MOST_KEY_DIM}, not {key_dim}"
    return chunk_states, "it keeps each state on the chip"
