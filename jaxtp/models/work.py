"""What a training step of the decoder computes on one device: every matrix product, and what else goes through memory.

Forward, again where the remat policy does not keep what the backward pass reads, and backward (two products for each,
one where the kernel is frozen):

| product              | forward again under                       |
|----------------------|-------------------------------------------|
| q, k, v; gate, up    | `save_gathered`, `full`, `offload`        |
| scores, their values | all but `none`                            |
| attention out        | `full`, `offload`                         |
| down                 | never: nothing of the backward pass reads it |
| head                 | always: logits are made chunk by chunk    |

FLOPs are exact for the Llama shapes (the compiled program's are compared with them in a test). An adapter's A and B are
trained; forward again B is as its projection, A as q, k, v. Bytes through memory outside of products are a model: each
elementwise operation reads and writes once, as fused kernels do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxtp.layers.lora import Target
from jaxtp.layers.sequence import is_split
from jaxtp.mesh import DP, FSDP, TP
from jaxtp.models.config import ModelConfig
from jaxtp.models.remat import RematPolicy

_AGAIN: dict[str, tuple[RematPolicy, ...]] = {
    "column": ("save_gathered", "full", "offload"),
    "scores": ("save_dots", "save_gathered", "full", "offload"),
    "out": ("full", "offload"),
    "down": (),
    "a": ("save_gathered", "full", "offload"),
}
FLOAT32 = 4

SCORE_PASSES = 5
"""Times that float32 scores go through memory outside of products, forward and backward, where they exist: mask and
maximum, exponentials, division; backward the product with the probabilities, and the difference. Modelled."""

LOGIT_PASSES = 6
"""The same for float32 logits: maximum, exponentials, label; backward again, and the difference. Modelled."""


@dataclass(frozen=True)
class Product:
    """Matrix products `[m, k] x [k, n]` of one shape on one device."""

    name: str
    """What is multiplied."""

    m: int
    k: int
    n: int

    count: int
    """In a step."""

    bytes: float
    """Of operands and result of each, through memory."""

    @property
    def flops(self) -> float:
        """Of all of them: 2 for a multiplication and its sum."""
        return 2.0 * self.m * self.k * self.n * self.count


@dataclass(frozen=True)
class Work:
    """What one device computes in a step, the update apart."""

    products: tuple[Product, ...]
    """With weights."""

    attention: tuple[Product, ...]
    """Scores, and the values weighted by them."""

    elementwise: float
    """Bytes through memory outside of products, but for attention scores and logits."""

    scores: float
    """Bytes of attention scores through memory outside of products; 0 for a kernel that never holds them."""

    logits: float
    """Bytes of logits through memory outside of products."""

    itemsize: int
    """Bytes of an element of the compute dtype."""

    @property
    def flops(self) -> float:
        """Of all products."""
        return sum(product.flops for product in (*self.products, *self.attention))


def step_work(
    config: ModelConfig, mesh: Mapping[str, int], *, batch_size: int, sequence_length: int, accumulation: int = 1
) -> Work:
    """What each device computes in a training step.

    Args:
      config: the model.
      mesh: devices along each axis.
      batch_size: sequences in the step, over all devices and micro-batches.
      sequence_length: tokens in a sequence.
      accumulation: micro-batches.
    """
    rows = batch_size // (mesh[DP] * mesh[FSDP] * accumulation)
    heads = config.num_heads // mesh[TP]
    scores = 0.0 if config.attention == "cudnn" else float(rows * heads * sequence_length**2 * FLOAT32)
    logits = rows * sequence_length * _vocabulary(config, mesh[TP]) * FLOAT32
    passes = accumulation * config.num_layers
    return Work(
        (
            *_products(config, mesh[TP], rows, sequence_length, accumulation),
            *_adapters(config, mesh[TP], rows * sequence_length, passes),
        ),
        tuple(_attention(config, rows, sequence_length, heads, passes)),
        passes * _elementwise(config, mesh[TP], rows, sequence_length),
        passes * scores * SCORE_PASSES,
        float(accumulation * logits * LOGIT_PASSES),
        jnp.dtype(config.precision.compute).itemsize,
    )


def _products(config: ModelConfig, tp: int, rows: int, length: int, accumulation: int) -> Iterator[Product]:
    tokens, d_model, d_ff = rows * length, config.d_model, config.d_ff // tp
    heads, kv_heads = config.num_heads // tp, max(1, config.num_kv_heads // tp)
    inner = heads * config.head_dim
    itemsize = jnp.dtype(config.precision.compute).itemsize
    backward = 1 if config.lora.rank else 2
    layers = accumulation * config.num_layers

    def product(name: str, kind: str, k: int, n: int) -> Product:
        passes = 1 + (config.remat in _AGAIN[kind]) + backward
        return Product(name, tokens, k, n, layers * passes, (tokens * (k + n) + k * n) * itemsize)

    yield product("q, k, v", "column", d_model, inner + 2 * kv_heads * config.head_dim)
    yield product("attention out", "out", inner, d_model)
    yield product("gate, up", "column", d_model, 2 * d_ff)
    yield product("down", "down", d_ff, d_model)
    vocabulary = _vocabulary(config, tp)
    head = tokens * (d_model * itemsize + vocabulary * FLOAT32) + d_model * vocabulary * itemsize
    yield Product("head", tokens, d_model, vocabulary, accumulation * (2 + backward), head)


def adapted(config: ModelConfig, tp: int = 1) -> Iterator[tuple[str, int, int]]:
    """Of each projection that has an adapter, in a layer: its kind, and features in and out on one of tp devices."""
    heads, kv_heads = config.num_heads // tp, max(1, config.num_kv_heads // tp)
    wide, kv, d_ff = heads * config.head_dim, kv_heads * config.head_dim, config.d_ff // tp
    shapes: dict[Target, tuple[str, int, int]] = {
        "q_proj": ("column", config.d_model, wide),
        "k_proj": ("column", config.d_model, kv),
        "v_proj": ("column", config.d_model, kv),
        "o_proj": ("out", wide, config.d_model),
        "gate_proj": ("column", config.d_model, d_ff),
        "up_proj": ("column", config.d_model, d_ff),
        "down_proj": ("down", d_ff, config.d_model),
    }
    return (shape for name, shape in shapes.items() if config.lora.adapted(name))


def adapter_parameters(config: ModelConfig) -> int:
    """Elements of every A and B, over all layers."""
    return config.num_layers * config.lora.rank * sum(inner + outer for _, inner, outer in adapted(config))


def _adapters(config: ModelConfig, tp: int, tokens: int, layers: int) -> Iterator[Product]:
    rank, itemsize = config.lora.rank, jnp.dtype(config.precision.compute).itemsize
    for kind, inner, outer in adapted(config, tp):
        for name, again, k, n in (("A", "a", inner, rank), ("B", kind, rank, outer)):
            passes = 3 + (config.remat in _AGAIN[again])
            yield Product(f"adapter's {name}", tokens, k, n, layers * passes, (tokens * (k + n) + k * n) * itemsize)


def _attention(config: ModelConfig, rows: int, length: int, heads: int, layers: int) -> Iterator[Product]:
    """Scores and the weighted values: as whole squares, or their causal half in a kernel that does not hold them."""
    itemsize = jnp.dtype(config.precision.compute).itemsize
    in_one_kernel = config.attention == "cudnn"
    again = in_one_kernel or config.remat in _AGAIN["scores"]  # such a kernel always makes its scores again
    keys = length // 2 if in_one_kernel else length
    moved = 2 * length * config.head_dim * itemsize + (0 if in_one_kernel else length * keys * FLOAT32)
    count = layers * (1 + again + 2) * rows * heads
    yield Product("scores", length, config.head_dim, keys, count, moved)
    yield Product("weighted values", length, keys, config.head_dim, count, moved)


def _elementwise(config: ModelConfig, tp: int, rows: int, length: int) -> float:
    """Bytes of norms, residual sums, rotations and gate in one layer: forward, again, and backward as 1.5 times."""
    tokens, itemsize = rows * length, jnp.dtype(config.precision.compute).itemsize
    between = tokens // tp if is_split(config.sequence_parallel, length, tp) else tokens
    rotated = (config.num_heads + config.num_kv_heads) * config.head_dim // tp
    forward = between * 10 * config.d_model + tokens * (2 * rotated + 3 * config.d_ff // tp)
    return forward * itemsize * (2.5 if config.remat == "none" else 3.5)


def _vocabulary(config: ModelConfig, tp: int) -> int:
    """Of a device, padding included."""
    return -(-config.vocab_size // tp)
