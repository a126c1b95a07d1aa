"""The feed-forward layer, gated (Shazeer, arXiv 2002.05202) or plain."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from flax import nnx
from jax import Array

from jaxtp.config import Count
from jaxtp.layers.activations import SequenceParallel
from jaxtp.layers.branch import BranchConfig, Padded, PositionwiseBranch, Small
from jaxtp.layers.context import Sequences
from jaxtp.layers.costs import Cost, Kept, Share, Streamed, Working, itemsize
from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import LoraConfig, Target
from jaxtp.layers.parameter import Precision, Split
from jaxtp.layers.rings import Overlap

_MIN_FEATURES = 48
MLP_TARGETS: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
"""Projections of an MLP that can have adapters."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


@dataclass(frozen=True, kw_only=True)
class MLPConfig(BranchConfig):
    """Settings of a block's MLP."""

    d_ff: Count = 384
    """Hidden width of the MLP; padded inside the layer where mesh.tp does not divide it."""

    mlp: Literal["gated", "plain"] = "gated"
    """Kind of MLP: gated is down(activation(gate(x)) * up(x)), plain down(activation(up(x)))."""

    activation: Activation = "silu"
    """Activation function; gelu_tanh is the approximation by tanh."""

    mlp_bias: bool = False
    """Biases on the MLP's projections."""

    def padding(self, tp: int) -> Iterator[Padded]:
        """Yields the sizes of the block that tp devices pad."""
        yield from super().padding(tp)
        yield "d_ff", self.d_ff, Split((self.d_ff,)).padded(tp)

    def smaller(self, small: Small) -> dict[str, Any]:
        """Returns the settings of a small MLP of the same structure, and those of the other branches."""
        return {"d_ff": small.size(self.d_ff, _MIN_FEATURES), **super().smaller(small)}


class MLP(PositionwiseBranch):
    """An MLP whose hidden features are split over tp.

    Args:
      d_model: D.
      config: hidden width F, padded where tp does not divide it, kind, activation, biases.
      sequence_parallel: activations outside are split over tp along the sequence.
      overlap: whether the projections gather and sum while they multiply; see `layers.rings`.
      lora: adapters of the projections that it names.
      precision: the dtypes.
      rngs: source of the `params` key.

    Shapes: `[B, T, D] -> [B, T, D]`. Kernels: gate and up `[D, F]` (`gate_up.kernels` 0, 1), or up alone
    (`up.kernels` 0), and down `[F, D]`.
    """

    def __init__(
        self,
        d_model: int,
        config: MLPConfig,
        *,
        sequence_parallel: SequenceParallel = False,
        overlap: Overlap = "none",
        lora: LoraConfig = LoraConfig(),
        precision: Precision = Precision(),
        rngs: nnx.Rngs,
    ):
        self.config, self.precision, self.hidden = config, precision, Split((config.d_ff,))
        over_tp: dict[str, Any] = {"sequence_parallel": sequence_parallel, "overlap": overlap}
        shared: dict[str, Any] = {**over_tp, "precision": precision, "rngs": rngs}
        biased: dict[str, Any] = {"use_bias": config.mlp_bias, "lora": lora, **shared}
        if config.mlp == "gated":
            adapted = lora.adapted("gate_proj", "up_proj")
            self.gate_up = ColumnParallelLinear(d_model, (self.hidden, self.hidden), adapted=adapted, **biased)
        else:
            self.up = ColumnParallelLinear(d_model, (self.hidden,), adapted=lora.adapted("up_proj"), **biased)
        self.down = RowParallelLinear(
            self.hidden, d_model, use_bias=config.mlp_bias, lora=lora.only("down_proj"), **shared
        )

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Transforms each position of `[B, T, D]`."""
        activate = ACTIVATIONS[self.config.activation]
        if self.config.mlp == "plain":
            (hidden_BTF,) = self.up(x_BTD)
            return self.down(activate(hidden_BTF))
        gate_BTF, up_BTF = self.gate_up(x_BTD)
        return self.down(activate(gate_BTF) * up_BTF)

    def costs(self, share: Share, *, read: bool) -> Iterator[Cost]:
        """Yields what it costs: beside the projections, the activation and the gate.

        Without remat a gated one keeps gate and up, sigmoid, silu, its derivative and the product, a plain one three.
        """
        gated = self.config.mlp == "gated"
        features = share.tokens * (self.hidden.padded(share.tp) // share.tp) * itemsize(self.precision.compute)
        if gated:
            yield from self.gate_up.costs(share, "gate, up")
        else:
            yield from self.up.costs(share, "up")
        yield Streamed((3 if gated else 2) * features)
        yield Working((6 if gated else 3) * features)
        if share.remat == "none":
            yield Kept((6 if gated else 3) * features)
        yield from self.down.costs(share, "down", read=read)
