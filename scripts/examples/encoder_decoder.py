"""An encoder-decoder transformer (arXiv 1706.03762), written for one device, without a mesh.

    python scripts/examples/encoder_decoder.py --mesh fsdp=2,tp=4

It learns to reverse a sequence of symbols. The plan is in `encoder_decoder_plan.py`, the training loop in
`train.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

VOCABULARY, LENGTH, START = 16, 8, 0


class Attention(nnx.Module):
    """Attention of `x [B, T, D]` to `memory [B, S, D]`."""

    def __init__(self, width: int, num_heads: int, causal: bool, rngs: nnx.Rngs):
        self.num_heads, self.causal = num_heads, causal
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: Array, memory: Array) -> Array:
        q, k, v = (self.heads(h) for h in (self.query(x), self.key(memory), self.value(memory)))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.reshape(*x.shape[:2], -1))

    def heads(self, h: Array) -> Array:
        return h.reshape(*h.shape[:2], self.num_heads, -1)


class Mlp(nnx.Module):
    """Two layers on the last dim."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.relu(self.up(x)))


class EncoderBlock(nnx.Module):
    """Self-attention and MLP, pre-norm."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, num_heads, causal=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = Mlp(width, 4 * width, rngs)

    def __call__(self, x: Array) -> Array:
        h = self.attention_norm(x)
        x = x + self.attention(h, h)
        return x + self.mlp(self.mlp_norm(x))


class DecoderBlock(nnx.Module):
    """Causal self-attention, attention to the encoder's output, and MLP, pre-norm."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, num_heads, causal=True, rngs=rngs)
        self.cross_norm = nnx.LayerNorm(width, rngs=rngs)
        self.cross_attention = Attention(width, num_heads, causal=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = Mlp(width, 4 * width, rngs)

    def __call__(self, x: Array, memory: Array) -> Array:
        h = self.attention_norm(x)
        x = x + self.attention(h, h)
        x = x + self.cross_attention(self.cross_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class EncoderDecoder(nnx.Module):
    """Maps source ids `[B, S]` and target ids `[B, T]` to next-token logits `[B, T, V]`."""

    def __init__(self, width: int = 32, num_heads: int = 8, depth: int = 2, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, width, rngs=rngs)
        self.encoder = nnx.List([EncoderBlock(width, num_heads, rngs) for _ in range(depth)])
        self.encoder_norm = nnx.LayerNorm(width, rngs=rngs)
        self.decoder = nnx.List([DecoderBlock(width, num_heads, rngs) for _ in range(depth)])
        self.decoder_norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, source: Array, target: Array) -> Array:
        memory = self.embed(source)
        for encoder_block in self.encoder:
            memory = encoder_block(memory)
        memory = self.encoder_norm(memory)
        x = self.embed(target)
        for decoder_block in self.decoder:
            x = decoder_block(x, memory)
        return self.head(self.decoder_norm(x))

    def embed(self, ids: Array) -> Array:
        return self.embedding(ids) + self.positions(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))


def build() -> EncoderDecoder:
    return EncoderDecoder(rngs=nnx.Rngs(0))


def loss(model: EncoderDecoder, source: Array, target: Array) -> Array:
    before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    return optax.softmax_cross_entropy_with_integer_labels(model(source, before), target).mean()


def batch(random: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns source and target `[size, 8]` int32: the target is the reversed source."""
    source = random.integers(1, VOCABULARY, size=(size, LENGTH), dtype=np.int32)
    return source, source[:, ::-1]


if __name__ == "__main__":
    import train
    from encoder_decoder_plan import PLAN

    train.main(build, loss, batch, PLAN)
