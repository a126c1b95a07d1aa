"""Attention kernels, their capabilities and costs in one table, and the choice of `auto`.

No kernel gets a `[T, T]` mask, which tp would not split: `blockwise`, `fused` and `tokamax` take
the first and last key of each query (`positions.key_ranges`). cuDNN is the fastest on Hopper only:
1.7 to 2.3 times as fast as FlashAttention on an H100, 0.82 to 1.00 on an A100, A10G, L40S and RTX
PRO 6000 (huggingface/transformers#48163). On GPUs a run checks its kernel against plain products
(`guards/self_check.py`). `pick_scan` chooses the scan of Gated DeltaNet.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxtp.layers.kernels.blockwise_attention import (
    MAX_BLOCK,
    block_size,
    blockwise_attention,
    num_visited,
)
from jaxtp.layers.kernels.delta_rule import Scan
from jaxtp.layers.kernels.padding import pad_to
from jaxtp.layers.positions import Part, key_ranges, segment_mask
from jaxtp.mesh import current_platform, platform_of

KernelName = Literal["cudnn", "fused", "blockwise", "xla", "tokamax"]
KernelChoice = Literal["auto", KernelName]

# Major compute capabilities
_AMPERE = 8
_HOPPER = 9
_BLACKWELL = 10  # data centre cards; consumer cards of Blackwell have 12

_WIDE_ON_BLACKWELL = (9, 25)
"""The first cuDNN with a backward pass for head_dim 256 on Blackwell; JAX accepts older ones.
NVIDIA/TransformerEngine#3056 names 9.23 and 9.25."""

FLOAT8_CAPABILITY = 8.9
"""Minimum compute capability of an NVIDIA GPU with products in float8: Ada."""

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

_SHORT = MAX_BLOCK
"""Longest sequence whose scores fit into one block: xla then stores no more of them than
blockwise."""


def architecture_of(device: Any) -> str:
    """Returns the platform, with the compute capability of an NVIDIA GPU if known: `cuda 9.0`."""
    platform = platform_of(device)
    if platform != "cuda":
        return platform
    capability = getattr(device, "compute_capability", None) or _capability(device.device_kind)
    return f"{platform} {capability}" if capability else platform


def matmul_problem(matmul: str, architecture: str) -> str | None:
    """Returns why a device has no products in the dtype of `Precision.matmul`, or None.

    `architecture_of` gives the device.
    """
    platform, _, capability = architecture.partition(" ")
    if matmul == "compute" or platform == "cpu":
        return None
    if platform == "cuda" and float(capability or FLOAT8_CAPABILITY) >= FLOAT8_CAPABILITY:
        return None
    return (
        f"{architecture} would multiply in 16 bits; it needs cuda {FLOAT8_CAPABILITY} or newer; "
        "use compute"
    )


def _capability(kind: str) -> str | None:
    device = jax.devices()[0]
    if device.device_kind == kind:
        return getattr(device, "compute_capability", None)
    return CAPABILITIES.get(kind.strip())


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


class Products(NamedTuple):
    """The products that compute a head's scores on a device."""

    number: int
    num_queries: int  # of each product
    num_keys: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of causal attention and its capabilities."""

    name: KernelName

    run: Callable[..., Array]
    """Attends with queries, keys, values and segments; see `blockwise_attention`."""

    products: Callable[[Sequence[range], int | None], Products]
    """Returns its products for a device's queries, given as chunks of positions, and a window."""

    stores_scores: bool = False  # all of them, `[T, T]`, in memory
    # Whether it writes scores to memory between products, all at once or block by block
    streams_scores: bool = False
    can_save_result: bool = True
    """Remat policies can save its output and log-sum-exp, so that the backward pass does not run it
    again."""

    platforms: tuple[str, ...] | None = None  # None: everywhere
    # Computes only in 16 bits, for whole sequences of one document, without softcap and sinks
    plain: bool = False
    # Unlike other plain kernels, takes packed documents and a softcap
    by_document: bool = False
    head_dims: Callable[[Use], tuple[int, int]] | None = None
    """Returns the largest head_dim for a use, and a number that must divide head_dim."""
    capabilities: tuple[int, ...] | None = None  # major ones of NVIDIA GPUs; None: all
    package: str | None = None  # the package that it needs, and its extra

    def problems(self, use: Use) -> Iterator[str]:
        """Yields why the kernel does not support a use."""
        if self.platforms and use.family not in (None, *self.platforms):
            yield f"it runs on {' and '.join(self.platforms)}, not on {use.family}"
        if self.plain and use.dtype not in (None, "bfloat16", "float16"):
            yield f"it computes in 16 bits, not in {use.dtype}"
        if self.head_dims:
            width = use.widest
            max_width, multiple = self.head_dims(use)
            if width > max_width or width % multiple:
                yield (
                    f"it takes a head_dim of at most {max_width}, a multiple of {multiple}, not "
                    f"{width}"
                )
        if self.capabilities and use.capability and use.capability[0] not in self.capabilities:
            majors = " and ".join(map(str, self.capabilities))
            yield f"it runs on compute capabilities {majors}, not on {use.platform}"
        if self.package and importlib.util.find_spec(self.package) is None:
            yield f"it is not installed: pip install 'jaxtp[{self.package}]'"
        if not self.plain:
            return
        if use.packed and not self.by_document:
            yield "packed documents would give it a [T, T] mask"
        if use.softcap is not None and not self.by_document:
            yield "it has no attention_softcap"
        if use.sinks:
            yield "it has no attention_sinks"
        if use.part:
            yield (
                "it needs whole sequences, which devices have with the context ulysses, but not "
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


def _exact(chunks: Sequence[range], window: int | None) -> Products:
    length = sum(map(len, chunks))
    return Products(1, length, max(1, int(num_scores(chunks, window) // length)))


def _by_blocks(chunks: Sequence[range], window: int | None) -> Products:
    block = block_size(sum(map(len, chunks)))
    return Products(num_visited(tuple(chunks), window), block, block)


def _whole(chunks: Sequence[range], window: int | None) -> Products:
    del window
    return Products(1, sum(map(len, chunks)), max(chunk.stop for chunk in chunks))


def _cudnn(
    q: Array,
    k: Array,
    v: Array,
    segments_BT: None,
    *,
    scale: float,
    window: int | None,
    **excluded: None,
) -> Array:
    # `Kernel.problems` excludes documents, softcaps, sinks and parts. Never with `return_residual`:
    # its log-sum-exp has no gradient.
    del segments_BT, excluded
    value_width = v.shape[3]
    # cuDNN takes narrower values on Hopper, but JAX's function does not.
    width = {3: max(q.shape[3], value_width)}
    y = jax.nn.dot_product_attention(
        pad_to(q, width),
        pad_to(k, width),
        pad_to(v, width),
        scale=scale,
        is_causal=True,
        local_window_size=_reach(window),
        implementation="cudnn",
    )
    return y[..., :value_width]


def _reach(window: int | None) -> tuple[int, int] | None:
    """Returns how many positions before and after its own a query sees; None for all before."""
    return None if window is None else (window - 1, 0)


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
    is_wide = major == _HOPPER
    if major == _BLACKWELL:
        version = installed_cudnn() or _WIDE_ON_BLACKWELL
        is_wide = version >= _WIDE_ON_BLACKWELL
    return 256 if is_wide else 128, 8


def _fused(*arrays: Any, **settings: Any) -> Array:
    # Pallas takes a while to import.
    from jaxtp.layers.kernels.fused_attention import fused_attention

    return fused_attention(*arrays, **settings)


def _tokamax(*arrays: Any, **settings: Any) -> Array:
    from jaxtp.layers.kernels.tokamax_attention import tokamax_attention

    return tokamax_attention(*arrays, **settings)


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
    jax_supports = softcap is None and sinks is None and q.shape[3] == v.shape[3]
    if jax_supports and part is None:
        mask = None if segments_BT is None else segment_mask(segments_BT)
        return _jax_attention(
            q, k, v, mask=mask, scale=scale, is_causal=True, local_window_size=_reach(window)
        )
    num_keys = k.shape[1]
    ranges = key_ranges(q.shape[:2], num_keys, window, segments_BT, part)
    first, last = (x[:, :, None] for x in ranges)  # [b, T, 1]
    index = jnp.arange(num_keys)
    sees_any = first <= last
    # A query without keys sees all of them, as a softmax over nothing would be NaN.
    visible = ((first <= index) & (index <= last)) | ~sees_any  # [b, T, S]
    if jax_supports:
        y = _jax_attention(q, k, v, mask=visible[:, None], scale=scale)
    else:
        keys_values = (k.swapaxes(1, 2), v.swapaxes(1, 2))
        y = masked_attention(q, keys_values, visible, scale=scale, softcap=softcap, sinks=sinks)
    return jnp.where(sees_any[..., None], y, 0)


def _jax_attention(q: Array, k: Array, v: Array, **settings: Any) -> Array:
    """Attends with JAX; float16 via float32.

    JAX requests a float16 product that CPUs lack.
    """
    wide = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    y = jax.nn.dot_product_attention(*(x.astype(wide) for x in (q, k, v)), **settings)
    return y.astype(q.dtype)


def masked_attention(
    q_BTNH: Array,
    keys_values: tuple[Array, Array],
    visible_BTS: Array,
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
    # Each of K kv heads has N / K query heads: [B, T, K, N / K, H].
    groups = q_BTNH.reshape(rows, length, k_BKSH.shape[1], -1, width)
    dims = "btkgh"
    if current_platform() != "cpu":
        # With the scores' dims in this order XLA for GPUs computes their softmax in one kernel. XLA
        # for CPUs would transpose the keys.
        groups = jnp.moveaxis(groups, 1, 3)
        dims = "bkgth"
    products = jnp.einsum(f"{dims},bksh->bkgts", groups, k_BKSH, preferred_element_type=jnp.float32)
    scores = scale * products
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible_BTS[:, None, None], scores, -jnp.inf)
    if sinks is None:
        probabilities = jax.nn.softmax(scores)
    else:
        sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
        max_score = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
        max_score = jax.lax.stop_gradient(max_score)
        probabilities = jnp.exp(scores - max_score)
        probabilities /= probabilities.sum(-1, keepdims=True) + jnp.exp(sinks - max_score)
    probabilities = probabilities.astype(v_BKSH.dtype)
    # The output dims follow the operands' order; otherwise XLA for CPUs transposes the values.
    y = jnp.einsum("bkgts,bksh->bkgth", probabilities, v_BKSH, preferred_element_type=jnp.float32)
    y = jnp.moveaxis(y, 3, 1).astype(q_BTNH.dtype)
    return y.reshape(rows, length, heads, -1)


_KERNELS = (
    Kernel(
        name="cudnn",
        run=_cudnn,
        products=_exact,
        can_save_result=False,
        platforms=("cuda",),
        plain=True,
        head_dims=_heads_of_cudnn,
    ),
    Kernel(
        name="fused",
        run=_fused,
        products=_exact,
        platforms=("cuda",),
        # Blocks of wider heads do not fit a GPU's shared memory.
        head_dims=lambda use: (256, 2),
    ),
    Kernel(name="blockwise", run=blockwise_attention, products=_by_blocks, streams_scores=True),
    Kernel(
        name="xla",
        run=_xla,
        products=_whole,
        stores_scores=True,
        streams_scores=True,
        can_save_result=False,
    ),
    Kernel(
        name="tokamax",
        run=_tokamax,
        # Its backward pass computes the scores outside of a window too.
        products=lambda chunks, window: _exact(chunks, None),
        platforms=("cuda",),
        plain=True,
        # With 256 a backward kernel spills 2 KB of a thread's registers.
        head_dims=lambda use: (128, 8),
        by_document=True,
        capabilities=(_HOPPER, _BLACKWELL),
        package="tokamax",
    ),
)
KERNELS: dict[KernelName, Kernel] = {kernel.name: kernel for kernel in _KERNELS}
"""By name, in the order in which `auto` prefers them; cudnn comes last except on Hopper. `auto`
takes none that follows xla, which supports all uses."""


def pick_kernel(requested: KernelChoice, use: Use) -> tuple[Kernel, str]:
    """Returns the kernel and the reason; `unsupported` checks a requested kernel."""
    if requested != "auto":
        return KERNELS[requested], "as configured"
    if use.family != "cuda" and use.length is not None and use.length <= _SHORT:
        return KERNELS["xla"], f"up to {_SHORT} tokens its scores are small"
    on_hopper = use.capability is not None and use.capability[0] == _HOPPER
    by_preference = sorted(
        KERNELS.values(), key=lambda kernel: kernel.name == "cudnn" and not on_hopper
    )
    reasons = []
    for kernel in by_preference:
        problem = next(kernel.problems(use), None)
        if problem is None:
            break
        reasons.append(f"{kernel.name}: {problem}")
    only = "" if on_hopper else " only"
    return kernel, "; ".join(reasons) or f"cudnn is preferred on Hopper{only}"


def unsupported(requested: KernelChoice, use: Use) -> Iterator[str]:
    """Yields why the requested kernel cannot run."""
    if requested == "auto":
        return
    supported: list[str] = []
    for kernel in KERNELS.values():
        if any(kernel.problems(use)):
            continue
        if kernel.platforms and use.platform is None:
            supported.append(f"{kernel.name} on {' and '.join(kernel.platforms)}")
        else:
            supported.append(kernel.name)
    for problem in KERNELS[requested].problems(use):
        yield f"{problem}; use auto ({' or '.join(supported)})"


def pick_scan(key_dim: int, platform: str | None) -> tuple[Scan | None, str]:
    """Returns the scan of Gated DeltaNet's states, None for plain `lax`, and the reason.

    `platform` None means unknown.
    """
    use = Use(head_dim=key_dim, platform=platform)
    if use.family not in (None, "cuda"):
        return None, f"pallas runs only on cuda, not on {use.family}"
    if use.capability and use.capability[0] < _AMPERE:
        return None, f"pallas runs only from compute capability {_AMPERE}.0 on, not on {platform}"
    # Pallas takes a while to import.
    from jaxtp.layers.kernels.delta_kernels import MAX_KEY_DIM, chunk_states

    if key_dim > MAX_KEY_DIM:
        return None, f"pallas takes a delta_key_dim of at most {MAX_KEY_DIM}, not {key_dim}"
    return chunk_states, "it keeps each state on the chip"
