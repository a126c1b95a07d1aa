"""The decoder: embedding, blocks under one scan, final norm, head."""

import functools

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxtp.layers.attention import CausalSelfAttention
from jaxtp.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_logits
from jaxtp.layers.loss import vocab_parallel_cross_entropy
from jaxtp.layers.mlp import SwiGLU
from jaxtp.layers.norm import RMSNorm
from jaxtp.models import remat
from jaxtp.models.config import ModelConfig


class DecoderBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. Shapes: `[B, T, D] -> [B, T, D]`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        norm = functools.partial(
            RMSNorm,
            config.d_model,
            eps=config.norm_eps,
            sequence_parallel=config.sequence_parallel,
            precision=config.precision,
        )
        self.attention_norm = norm()
        self.attention = CausalSelfAttention(
            config.d_model,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            use_bias=config.attention_bias,
            use_out_bias=config.attention_out_bias,
            implementation=config.attention,
            sequence_parallel=config.sequence_parallel,
            precision=config.precision,
            rngs=rngs,
        )
        self.mlp_norm = norm()
        self.mlp = SwiGLU(
            config.d_model,
            config.d_ff,
            use_bias=config.mlp_bias,
            sequence_parallel=config.sequence_parallel,
            precision=config.precision,
            rngs=rngs,
        )

    def __call__(self, x_BTD: Array) -> Array:
        """Runs the block on `[B, T, D]`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: its sizes.
      rngs: source of the `params` key; the same key gives the same weights on every mesh.

    The blocks' parameters are stacked: each has a leading dim L, which is not split.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = VocabParallelEmbedding(
            config.vocab_size,
            config.d_model,
            sequence_parallel=config.sequence_parallel,
            precision=config.precision,
            rngs=rngs,
        )
        self.blocks = _stack_blocks(config, rngs)
        self.norm = RMSNorm(
            config.d_model,
            eps=config.norm_eps,
            sequence_parallel=config.sequence_parallel,
            precision=config.precision,
        )
        self.head = (
            None
            if config.tie_embeddings
            else VocabParallelHead(config.vocab_size, config.d_model, precision=config.precision, rngs=rngs)
        )

    def __call__(self, ids_BT: Array) -> Array:
        """Logits `[B, T, V]` in float32 of the token after each position; `ids_BT` are integers below V."""
        return vocab_parallel_logits(
            self.hidden(ids_BT),
            self._head_table(),
            self.config.vocab_size,
            sequence_parallel=self.config.sequence_parallel,
            precision=self.config.precision,
        )

    def loss(self, ids_BT: Array, labels_BT: Array) -> tuple[Array, Array]:
        """Summed cross-entropy in nats, and the number of labels that count (not -100); float32 scalars.

        `labels_BT[b, t]` is the token that follows `ids_BT[b, t]`. The logits are never whole: see `layers.loss`.
        """
        return vocab_parallel_cross_entropy(
            self.hidden(ids_BT),
            self._head_table(),
            labels_BT,
            vocab_size=self.config.vocab_size,
            chunk_size=self.config.loss_chunk,
            sequence_parallel=self.config.sequence_parallel,
            precision=self.config.precision,
        )

    def hidden(self, ids_BT: Array) -> Array:
        """The final, normalised hidden states `[B, T, D]`."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(policy=remat.policy(self.config.remat), prevent_cse=False)
        def run_blocks(x_BTD: Array, block: DecoderBlock) -> Array:
            return block(x_BTD)

        return self.norm(run_blocks(self.embedding(ids_BT), self.blocks))

    def _head_table(self) -> Array:
        table = self.embedding.embedding if self.head is None else self.head.kernel
        return jnp.asarray(table[...])


def _stack_blocks(config: ModelConfig, rngs: nnx.Rngs) -> DecoderBlock:
    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs: nnx.Rngs) -> DecoderBlock:
        return DecoderBlock(config, rngs=rngs)

    stacked: DecoderBlock = create(rngs)
    return stacked
