"""The feed-forward layer, gated (Shazeer, arXiv 2002.05202) or plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import device_view, token_spec
from jaxtp.config.schema import Count, Positive, Settings, of_length
from jaxtp.layers.branch import PositionwiseBranch
from jaxtp.layers.context import Sequences
from jaxtp.layers.linear import ColumnParallelLinear, LayerContext, RowParallelLinear
from jaxtp.layers.norm import scaled
from jaxtp.layers.parameter import DType, PaddedDim, parameter, spec_of
from jaxtp.mesh import TP

XIELU = "xielu"
_BETA = 0.5
# The epsilon of xielu
_EPS = -1e-6

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]
# Each maps 0 to 0, so padded features get no gradients.
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@dataclass(frozen=True, kw_only=True)
class MLPConfig(Settings):
    """Settings of a block's MLP."""

    d_ff: Count = 384
    """Hidden width of the MLP; padded inside the layer where mesh.tp does not divide it."""

    mlp: Literal["gated", "plain"] = "gated"
    """Kind of MLP: gated is down(activation(gate(x)) * up(x)), plain down(activation(up(x)))."""

    activation: Activation = "silu"
    """Activation function of the MLP. gelu_tanh is the approximation by tanh, quick_gelu x *
    sigmoid(1.702 x), relu2 the square of relu (arXiv 2109.08668); xielu has two learned scalars in
    each layer (arXiv 2411.13010)."""

    swiglu_limit: Positive | None = None
    """Limits a gated MLP (gpt-oss): gate(x) to at most this, up(x) to between minus this and this,
    and adds 1 to it."""

    mlp_scales: Annotated[tuple[Positive, ...], of_length(2)] = (1.0, 1.0)
    """Factors of gate(x), and of the MLP's output (Falcon-H1)."""

    mlp_bias: bool = False
    """Biases on the MLP's projections."""


class MLP(PositionwiseBranch):
    """An MLP whose hidden features, F, are split over tp.

    Kernels: gate and up `[D, F]` (`gate_up.kernels` 0, 1) or only up (`up.kernels` 0), and down
    `[F, D]`; for xielu `alpha_p` and `alpha_n` `[1]`, before the softplus.
    """

    def __init__(
        self,
        d_model: int,
        config: MLPConfig = MLPConfig(),
        context: LayerContext = LayerContext(),
        *,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.caller_communicates = context.caller_communicates
        self.precision = context.precision
        self.hidden = PaddedDim((config.d_ff,))
        column = partial(
            ColumnParallelLinear,
            d_model,
            # In the backward pass attention runs after the columns. XLA would delay the reduction
            # of their gradients until then, and copy the gradients: see `reduce_in_layer`.
            context=replace(context, reduce_in_layer=True),
            use_bias=config.mlp_bias,
            rngs=rngs,
        )
        if config.mlp == "gated":
            self.gate_up = column((self.hidden, self.hidden), targets=("gate_proj", "up_proj"))
        else:
            self.up = column((self.hidden,), targets=("up_proj",))
        self.down = RowParallelLinear(
            self.hidden,
            d_model,
            context,
            use_bias=config.mlp_bias,
            target="down_proj",
            rngs=rngs,
        )
        if config.activation == XIELU:
            self.alpha_p = _initial_alpha(0.8, self.precision.param)
            self.alpha_n = _initial_alpha(0.8 - _BETA, self.precision.param)

    @property
    def columns(self) -> ColumnParallelLinear:
        """Gate and up, or only up."""
        return self.up if self.config.mlp == "plain" else self.gate_up

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """See `Branch`."""
        activation = self.config.activation
        activate = self._xielu if activation == XIELU else ACTIVATIONS[activation]
        products_BTF = [*self.columns(x_BTD)]
        products_BTF[0] = scaled(products_BTF[0], self.config.mlp_scales[0])
        return self.down(hidden_features(activate, products_BTF, self.config.swiglu_limit))

    def _xielu(self, x_BTF: Array) -> Array:
        in_float32 = replace(self.precision, compute="float32")

        def activate(x: Array, alpha_p: Array, alpha_n: Array) -> Array:
            load = partial(in_float32.load, storage_dim=None, used_by_all_tp=True)
            return xielu(x, load(alpha_p), load(alpha_n))

        spec = token_spec(TP)
        alphas = (self.alpha_p, self.alpha_n)
        in_specs = (spec, *map(spec_of, alphas))
        run = device_view(activate, XIELU, in_specs, out_specs=spec)
        return run(x_BTF, *(jnp.asarray(alpha[...]) for alpha in alphas))


def _initial_alpha(slope: float, dtype: DType) -> Any:
    initial = jnp.log(jnp.expm1(jnp.full(1, slope, dtype)))
    return parameter(XIELU, initial, P(None))


def hidden_features(
    activate: Callable[[Array], Array], products: Sequence[Array], limit: float | None = None
) -> Array:
    """Returns activation(gate) * up of a gated MLP's products, activation(up) of a plain MLP's.

    `limit` is `MLPConfig.swiglu_limit`. Padded features stay 0, as activation(0) is 0.
    """
    if len(products) == 1:
        return activate(products[0])
    gate, up = products
    if limit is not None:
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit) + 1
    return activate(gate) * up


def xielu(x: Array, alpha_p: Array, alpha_n: Array) -> Array:
    """Returns xIELU, computed in float32, in the dtype of `x`; alphas are before the softplus."""
    x32 = x.astype(jnp.float32)
    # As in transformers expm1 takes no more than eps, except at 0, so that padded features stay 0.
    limit = jnp.where(x32 == 0, 0.0, _EPS)
    slope = _BETA + jax.nn.softplus(alpha_n)
    limited = jnp.where(x32 < limit, x32, limit)
    negative = slope * (jnp.expm1(limited) - x32)
    is_positive = x32 > 0
    positive = jax.nn.softplus(alpha_p) * jnp.square(x32)
    y = jnp.where(is_positive, positive, negative)
    return (y + _BETA * x32).astype(x.dtype)
