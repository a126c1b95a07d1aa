"""The decoder: embedding, blocks under one scan, final norm, head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtp.layers.attention import CausalSelfAttention
from jaxtp.layers.cache import KVCache, empty_cache
from jaxtp.layers.dropout import dropout
from jaxtp.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_logits
from jaxtp.layers.loss import vocab_parallel_cross_entropy
from jaxtp.layers.mlp import SwiGLU
from jaxtp.layers.norm import RMSNorm
from jaxtp.layers.sequence import activation_spec, sequence_dim
from jaxtp.mesh import AXES, current_mesh, mesh_sizes
from jaxtp.models import remat
from jaxtp.models.config import ModelConfig, checked


class DecoderBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. Shapes: `[B, T, D] -> [B, T, D]`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = _norm(config)
        self.attention = CausalSelfAttention(
            config.d_model,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            sliding_window=config.sliding_window,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            use_bias=config.attention_bias,
            use_out_bias=config.attention_out_bias,
            implementation=config.attention,
            sequence_parallel=config.sequence_parallel,
            lora=config.lora,
            precision=config.precision,
            rngs=rngs,
        )
        self.mlp_norm = _norm(config)
        self.mlp = SwiGLU(
            config.d_model,
            config.d_ff,
            use_bias=config.mlp_bias,
            sequence_parallel=config.sequence_parallel,
            lora=config.lora,
            precision=config.precision,
            rngs=rngs,
        )

    def __call__(self, x_BTD: Array, dropout_keys: Array | None = None, segments_BT: Array | None = None) -> Array:
        """Runs the block on `[B, T, D]`; keys, one for each row, turn dropout on."""
        keys = (None, None) if dropout_keys is None else split_keys(dropout_keys, 2)
        x_BTD = checkpoint_name(x_BTD, remat.BLOCK_INPUT)
        with jax.named_scope("attention"):
            x_BTD = x_BTD + self._dropout(self.attention(self.attention_norm(x_BTD), segments_BT), keys[0])
        with jax.named_scope("mlp"):
            return x_BTD + self._dropout(self.mlp(self.mlp_norm(x_BTD)), keys[1])

    def extend(
        self, x_BTD: Array, keys: Array, values: Array, positions_BT: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Runs the block on tokens that come after those of a cache; see `CausalSelfAttention.extend`."""
        with jax.named_scope("attention"):
            y_BTD, new = self.attention.extend(self.attention_norm(x_BTD), keys, values, positions_BT)
            x_BTD = x_BTD + y_BTD
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD)), new

    def _dropout(self, y_BTD: Array, keys: Array | None) -> Array:
        spec = activation_spec(sequence_dim(self.config.sequence_parallel, y_BTD.shape))
        return dropout(y_BTD, self.config.dropout, keys, spec)


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: its sizes.
      rngs: source of the `params` key; the same key gives the same weights on every mesh.

    The blocks' parameters are stacked: each has a leading dim L, which is not split.

    Raises:
      ConfigError: a value of the configuration cannot be, or does not fit the others and the mesh.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        mesh = current_mesh()
        self.config = config = checked(config, dict.fromkeys(AXES, 1) if mesh is None else mesh_sizes(mesh))
        self.embedding = VocabParallelEmbedding(
            config.vocab_size,
            config.d_model,
            sequence_parallel=config.sequence_parallel,
            precision=config.precision,
            rngs=rngs,
        )
        self.blocks = _stack_blocks(config, rngs)
        self.norm = _norm(config)
        self.head = (
            None
            if config.tie_embeddings
            else VocabParallelHead(config.vocab_size, config.d_model, precision=config.precision, rngs=rngs)
        )

    def __call__(self, ids_BT: Array, segments_BT: Array | None = None) -> Array:
        """Logits `[B, T, V]` of the token after each position; `ids_BT` are integers below V.

        `segments_BT` tell apart the documents of a row (`layers/segments.py`): none sees another.
        """
        return self.logits_of_hidden(self.hidden(ids_BT, segments_BT=segments_BT))

    def logits_of_hidden(self, x_BTD: Array) -> Array:
        """Logits `[B, T, V]` from final hidden states `[B, T, D]`, of any positions."""
        return vocab_parallel_logits(
            x_BTD,
            self._head_table(),
            self.config.vocab_size,
            sequence_parallel=self.config.sequence_parallel,
            precision=self.config.precision,
        )

    def loss(
        self,
        ids_BT: Array,
        labels_BT: Array,
        *,
        segments_BT: Array | None = None,
        z_loss: float = 0.0,
        dropout_keys: Array | None = None,
    ) -> tuple[Array, Array]:
        """Summed cross-entropy in nats, and the number of labels that count (not -100); float32 scalars.

        The logits are never whole: see `layers.loss`.

        Args:
          ids_BT: `[B, T]` integers below V.
          labels_BT: `labels_BT[b, t]` is the token that follows `ids_BT[b, t]`, or -100.
          segments_BT: tell apart the documents of a row.
          z_loss: weight of the squared log-normaliser.
          dropout_keys: one for each row, `[B]`, turn dropout on, for training.
        """
        return self.loss_of_hidden(self.hidden(ids_BT, dropout_keys, segments_BT), labels_BT, z_loss=z_loss)

    def loss_of_hidden(self, x_BTD: Array, labels_BT: Array, *, z_loss: float = 0.0) -> tuple[Array, Array]:
        """As `loss`, from the final hidden states `[B, T, D]`."""
        return vocab_parallel_cross_entropy(
            x_BTD,
            self._head_table(),
            labels_BT,
            vocab_size=self.config.vocab_size,
            chunk_size=self.config.loss_chunk,
            z_loss=z_loss,
            sequence_parallel=self.config.sequence_parallel,
            precision=self.config.precision,
        )

    def hidden(self, ids_BT: Array, dropout_keys: Array | None = None, segments_BT: Array | None = None) -> Array:
        """The final, normalised hidden states `[B, T, D]`."""
        config = self.config
        keys = None if dropout_keys is None else split_keys(dropout_keys, config.num_layers)
        run = _run_scanned if config.scan_layers else _run_unrolled
        x_BTD = self.embedding(ids_BT)
        return self.norm(run(self.blocks, x_BTD, keys, segments_BT, remat.policy(config.remat)))

    def empty_cache(self, batch_size: int, num_slots: int) -> KVCache:
        """A cache for rows of up to `num_slots` tokens; call it under `jax.jit`."""
        config = self.config
        sizes = (config.num_layers, batch_size, num_slots, config.num_kv_heads, config.head_dim)
        return empty_cache(*sizes, config.precision.compute)

    def extend(self, cache: KVCache, ids_BT: Array, counts_B: Array) -> tuple[KVCache, Array]:
        """Reads tokens that come after those of a cache.

        Args:
          cache: the tokens before.
          ids_BT: the next tokens of each row, from its first on; padding after them may be any ids below V.
          counts_B: how many of `ids_BT` are tokens, 0 to T.

        Returns:
          The cache with the tokens in it, and their final hidden states `[B, T, D]`; those of padding mean nothing.
        """
        x_BTD, (keys, values) = _run_cached(self.blocks, self.embedding(ids_BT), cache)
        return cache.extended(keys, values, counts_B), self.norm(x_BTD)

    def _head_table(self) -> Array:
        table = self.embedding.embedding if self.head is None else self.head.kernel
        return jnp.asarray(table[...])


def abstract_decoder(config: ModelConfig) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """How to build a decoder from its arrays, and their shapes, dtypes and declared splits; nothing is computed.

    Call it where the decoder is to be: under its mesh, or without one.
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return graph, abstract


def layer(blocks: DecoderBlock, index: int) -> DecoderBlock:
    """One block of the stacked ones."""
    graph, state = nnx.split(blocks)
    block: DecoderBlock = nnx.merge(graph, jax.tree.map(lambda stacked: stacked[index], state))
    return block


def _run_scanned(
    blocks: DecoderBlock, x_BTD: Array, keys: Array | None, segments: Array | None, policy: Callable[..., bool]
) -> Array:
    @nnx.scan(in_axes=(nnx.Carry, 0, 0, None), out_axes=nnx.Carry)
    @nnx.remat(policy=policy, prevent_cse=False)
    def run(x_BTD: Array, block: DecoderBlock, keys: Array | None, segments: Array | None) -> Array:
        return block(x_BTD, keys, segments)

    result: Array = run(x_BTD, blocks, keys, segments)
    return result


def _run_unrolled(
    blocks: DecoderBlock, x_BTD: Array, keys: Array | None, segments: Array | None, policy: Callable[..., bool]
) -> Array:
    @nnx.remat(policy=policy)
    def run(x_BTD: Array, block: DecoderBlock, keys: Array | None, segments: Array | None) -> Array:
        return block(x_BTD, keys, segments)

    for index in range(blocks.config.num_layers):
        with jax.named_scope(f"layer_{index}"):
            x_BTD = run(x_BTD, layer(blocks, index), None if keys is None else keys[index], segments)
    return x_BTD


def _run_cached(blocks: DecoderBlock, x_BTD: Array, cache: KVCache) -> tuple[Array, tuple[Array, Array]]:
    """Reads the cache and gives back the new keys and values `[L, B, T, K, H]`: the cache itself is written once."""

    @nnx.scan(in_axes=(nnx.Carry, 0, 0, 0, None), out_axes=(nnx.Carry, 0))
    def run(
        x_BTD: Array, block: DecoderBlock, keys: Array, values: Array, positions: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        return block.extend(x_BTD, keys, values, positions)

    result: tuple[Array, tuple[Array, Array]] = run(
        x_BTD, blocks, cache.keys, cache.values, cache.positions(x_BTD.shape[1])
    )
    return result


def _stack_blocks(config: ModelConfig, rngs: nnx.Rngs) -> DecoderBlock:
    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs: nnx.Rngs) -> DecoderBlock:
        return DecoderBlock(config, rngs=rngs)

    stacked: DecoderBlock = create(rngs)
    return stacked


def split_keys(keys_B: Array, count: int) -> Array:
    """`[B] -> [count, B]`: other keys for each of so many uses."""
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys_B)


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(
        config.d_model, eps=config.norm_eps, sequence_parallel=config.sequence_parallel, precision=config.precision
    )
