"""Causal self-attention with the heads split over tp."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxtp.collectives import batch_spec, device_view
from jaxtp.layers.cache import LAYER_SPEC, insert, visible
from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.precision import Precision
from jaxtp.layers.qk_norm import QKNorm, QKNormKind
from jaxtp.layers.rope import UNSCALED, RopeScaling, apply_rope
from jaxtp.layers.segments import segment_mask, segment_positions
from jaxtp.layers.sequence import SequenceParallel
from jaxtp.mesh import TP

Implementation = Literal["xla", "cudnn"]


class CausalSelfAttention(nnx.Module):
    """Grouped-query causal attention: each device computes `num_heads / tp` query heads.

    Args:
      d_model: D.
      num_heads: N query heads, divisible by tp and by `num_kv_heads`.
      num_kv_heads: K key and value heads. K and tp divide one another; where K < tp, a head is held and its
        gradient summed by the tp / K devices that share it.
      head_dim: H, independent of D / N.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are lowered for long contexts.
      sliding_window: how many positions each one sees, itself and those before it; None for all.
      qk_norm: normalises queries and keys before rotation, "head" by head or over the whole "projection".
      norm_eps: of that normalisation.
      use_bias: adds biases to the query, key and value projections.
      use_out_bias: adds a bias to the output projection.
      implementation: of `jax.nn.dot_product_attention`: "xla" runs everywhere, "cudnn" on NVIDIA GPUs in
        bfloat16 without ever holding `[T, T]` scores; it raises where it cannot run.
      sequence_parallel: activations outside are split over tp along the sequence.
      lora: adapters of the projections that it names.
      precision: the dtypes.
      rngs: source of the `params` key.

    Shapes: `[B, T, D] -> [B, T, D]`; segments `[B, T]`, see `layers/segments.py`. Kernels: q `[D, N*H]`, k and v
    `[D, K*H]` (`qkv.kernels` 0, 1, 2) and out `[N*H, D]`, heads contiguous.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling = UNSCALED,
        sliding_window: int | None = None,
        qk_norm: QKNormKind = "none",
        norm_eps: float = 1e-6,
        use_bias: bool = False,
        use_out_bias: bool = False,
        implementation: Implementation = "xla",
        sequence_parallel: SequenceParallel = False,
        lora: LoraConfig = LoraConfig(),
        precision: Precision = Precision(),
        rngs: nnx.Rngs,
    ):
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.sliding_window = sliding_window
        self.implementation = implementation
        self.qkv = ColumnParallelLinear(
            d_model,
            (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim),
            use_bias=use_bias,
            unit=head_dim,
            sequence_parallel=sequence_parallel,
            lora=lora,
            adapted=lora.adapted("q_proj", "k_proj", "v_proj"),
            precision=precision,
            rngs=rngs,
        )
        self.qk_norms = nnx.List(
            QKNorm(qk_norm, heads, head_dim, eps=norm_eps, precision=precision)
            for heads in (num_heads, num_kv_heads)
            if qk_norm != "none"
        )
        self.out = RowParallelLinear(
            num_heads * head_dim,
            d_model,
            use_bias=use_out_bias,
            sequence_parallel=sequence_parallel,
            lora=lora.only("o_proj"),
            precision=precision,
            rngs=rngs,
        )

    def __call__(self, x_BTD: Array, segments_BT: Array | None = None) -> Array:
        """Attends from each position of `[B, T, D]` to itself and those before it, of its segment if there are any."""
        heads = batch_spec(None, TP)
        scales = [norm.scale[...] for norm in self.qk_norms]
        segments = [] if segments_BT is None else [segments_BT]
        specs = [heads] * 3 + [norm.spec for norm in self.qk_norms] + [batch_spec(None) for _ in segments]
        attend = device_view(self._attend, "attend", in_specs=tuple(specs), out_specs=heads)
        return self.out(attend(*self.qkv(x_BTD), *scales, *segments))

    def extend(
        self, x_BTD: Array, keys: Array, values: Array, positions_BT: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """As `__call__`, for tokens that come after those of a cache (`layers/cache.py`).

        Args:
          x_BTD: of the new tokens.
          keys: of all tokens before them, `[B, S, K, H]`.
          values: as `keys`.
          positions_BT: of the new tokens, which are their slots too.

        Returns:
          The result `[B, T, D]`, and the keys and values of the new tokens, `[B, T, K, H]`.
        """
        heads = batch_spec(None, TP)
        attend = device_view(
            self._attend_cached,
            "attend",
            in_specs=(*[heads] * 3, LAYER_SPEC, LAYER_SPEC, batch_spec(None), *(norm.spec for norm in self.qk_norms)),
            out_specs=(heads, (LAYER_SPEC, LAYER_SPEC)),
        )
        scales = [norm.scale[...] for norm in self.qk_norms]
        y, new = attend(*self.qkv(x_BTD), keys, values, positions_BT, *scales)
        return self.out(y), new

    def _attend(self, q: Array, k: Array, v: Array, *rest: Array) -> Array:
        scales, segments = rest[: len(self.qk_norms)], next(iter(rest[len(self.qk_norms) :]), None)
        positions = jnp.arange(q.shape[1]) if segments is None else segment_positions(segments)
        q, k, v = self._heads(q, k, v, positions, scales)
        mask = None if segments is None else segment_mask(segments)
        window = None if self.sliding_window is None else (self.sliding_window - 1, 0)  # to the left, to the right
        y = jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, local_window_size=window, implementation=self.implementation
        )
        return y.reshape(*y.shape[:2], -1)

    def _attend_cached(
        self, q: Array, k: Array, v: Array, keys: Array, values: Array, positions: Array, *scales: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        q, k, v = self._heads(q, k, v, positions, scales)
        mask = visible(positions, keys.shape[1], self.sliding_window)
        keys, values = insert(keys, k, positions), insert(values, v, positions)  # [B/(dp*fsdp), S, K/tp, H]
        # xla whatever trains: T is 1 or a chunk, so that the scores [T, S] are small.
        y = jax.nn.dot_product_attention(q, keys, values, mask=mask, implementation="xla")
        return y.reshape(*y.shape[:2], -1), (k, v)

    def _heads(
        self, q: Array, k: Array, v: Array, positions: Array, scales: Sequence[Array]
    ) -> tuple[Array, Array, Array]:
        """The heads of this device, queries and keys normalised and rotated."""
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in (q, k, v))  # [B/(dp*fsdp), T, N/tp, H]
        if scales:
            q, k = (norm(x, scale) for norm, x, scale in zip(self.qk_norms, (q, k), scales, strict=True))
        q, k = (apply_rope(x, positions, self.rope_theta, self.rope_scaling) for x in (q, k))
        return q, k, v
