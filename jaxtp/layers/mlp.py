"""The feed-forward layer, gated (Shazeer, arXiv 2002.05202) or plain."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from flax import nnx
from jax import Array

from jaxtp.config.schema import Count
from jaxtp.layers.branch import BranchConfig, Padded, PositionwiseBranch, ShrinkSpec
from jaxtp.layers.context import Sequences
from jaxtp.layers.linear import ColumnParallelLinear, LayerContext, RowParallelLinear
from jaxtp.layers.lora import Target
from jaxtp.layers.parameter import PaddedDim

_MIN_FEATURES = 48
MLP_TARGETS: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")  # projections of an MLP that can have adapters

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# Each maps 0 to 0, so padded features get no gradients.
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
        """See `BranchConfig`."""
        yield from super().padding(tp)
        yield "d_ff", self.d_ff, PaddedDim((self.d_ff,)).padded(tp)

    def shrink(self, small: ShrinkSpec) -> dict[str, Any]:
        """See `BranchConfig`."""
        return {"d_ff": small.size(self.d_ff, _MIN_FEATURES), **super().shrink(small)}


class MLP(PositionwiseBranch):
    """An MLP whose hidden features, F, are split over tp.

    Kernels: gate and up `[D, F]` (`gate_up.kernels` 0, 1) or only up (`up.kernels` 0), and down `[F, D]`.
    """

    def __init__(self, d_model: int, config: MLPConfig, context: LayerContext = LayerContext(), *, rngs: nnx.Rngs):
        self.config, self.precision = config, context.precision
        self.hidden, bias = PaddedDim((config.d_ff,)), config.mlp_bias
        column = partial(ColumnParallelLinear, d_model, context=context, use_bias=bias, rngs=rngs)
        if config.mlp == "gated":
            self.gate_up = column((self.hidden, self.hidden), targets=("gate_proj", "up_proj"))
        else:
            self.up = column((self.hidden,), targets=("up_proj",))
        self.down = RowParallelLinear(self.hidden, d_model, context, use_bias=bias, target="down_proj", rngs=rngs)

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """See `Branch`."""
        activate = ACTIVATIONS[self.config.activation]
        if self.config.mlp == "plain":
            (hidden_BTF,) = self.up(x_BTD)
            return self.down(activate(hidden_BTF))
        gate_BTF, up_BTF = self.gate_up(x_BTD)
        return self.down(activate(gate_BTF) * up_BTF)
