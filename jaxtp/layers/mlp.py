"""The gated feed-forward layer SwiGLU (Shazeer, arXiv 2002.05202)."""

import jax
from flax import nnx
from jax import Array

from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.precision import Precision
from jaxtp.layers.sequence import SequenceParallel


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`, the hidden features split over tp.

    Args:
      d_model: D.
      d_ff: F, divisible by tp.
      use_bias: adds biases to all three projections.
      sequence_parallel: activations outside are split over tp along the sequence.
      lora: adapters of the projections that it names.
      precision: the dtypes.
      rngs: source of the `params` key.

    Shapes: `[B, T, D] -> [B, T, D]`. Kernels: gate and up `[D, F]` (`gate_up.kernels` 0, 1), down `[F, D]`.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        use_bias: bool = False,
        sequence_parallel: SequenceParallel = False,
        lora: LoraConfig = LoraConfig(),
        precision: Precision = Precision(),
        rngs: nnx.Rngs,
    ):
        self.gate_up = ColumnParallelLinear(
            d_model,
            (d_ff, d_ff),
            use_bias=use_bias,
            sequence_parallel=sequence_parallel,
            lora=lora,
            adapted=lora.adapted("gate_proj", "up_proj"),
            precision=precision,
            rngs=rngs,
        )
        self.down = RowParallelLinear(
            d_ff,
            d_model,
            use_bias=use_bias,
            sequence_parallel=sequence_parallel,
            lora=lora.only("down_proj"),
            precision=precision,
            rngs=rngs,
        )

    def __call__(self, x_BTD: Array) -> Array:
        """Transforms each position of `[B, T, D]`."""
        gate_BTF, up_BTF = self.gate_up(x_BTD)
        return self.down(jax.nn.silu(gate_BTF) * up_BTF)
