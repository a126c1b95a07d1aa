"""A gated causal convolution, which the package lacks, with its settings and a model.

It computes `out(silu(gate) * convolution(values))`. One column layer computes gate and values; the
convolution mixes each feature over earlier positions of its document, and divides by the norm of
all features, a sum over tp; `out` is a row layer.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.collectives import all_reduce, batch_spec, constrain, device_view, token_spec
from jaxtp.config.hints import not_divisible
from jaxtp.config.schema import Count
from jaxtp.layers.branch import Branch, BranchConfig
from jaxtp.layers.cache import LAYER_SPEC
from jaxtp.layers.context import Sequences
from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.mlp import MLP
from jaxtp.layers.parameter import parameter, params_and_specs
from jaxtp.layers.positions import segment_positions
from jaxtp.mesh import TP
from jaxtp.models.block import BlockConfig

CONVOLUTION = "causal_convolution"


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(BranchConfig):
    """Settings of a block's convolution."""

    conv_features: Count = 64
    """Number of convolved features, divisible by mesh.tp."""

    conv_width: Count = 3
    """Width of the convolution in positions, including the current one."""

    def problems(self, sizes):
        yield from not_divisible(
            "model.conv_features", self.conv_features, {f"mesh.{TP}": sizes[TP]}
        )

    def shrink(self, small):
        return {"conv_features": small.size(self.conv_features, 16)}


class CausalConvolution(nnx.Module):
    """A depthwise convolution with taps `[W, F]`; features are split over tp."""

    def __init__(self, config, precision, rngs):
        self.precision = precision
        taps = 0.1 * jax.random.normal(
            rngs.params(), (config.conv_width, config.conv_features), precision.param
        )
        self.taps = parameter("taps", taps, P(None, TP))

    def __call__(self, values_BTF, segments_BT=None):
        weights, specs = params_and_specs(self)
        features = token_spec(TP)
        in_specs = (specs, features, batch_spec(None))
        convolve = device_view(self._convolve, CONVOLUTION, in_specs, features)
        return convolve(weights, values_BTF, segments_BT)

    def decode(self, values_BTF, cache, new):
        weights, specs = params_and_specs(self)
        features = token_spec(TP)
        in_specs = (specs, features, LAYER_SPEC, batch_spec(None))
        out_specs = (features, LAYER_SPEC)
        return device_view(self._decode, CONVOLUTION, in_specs, out_specs)(
            weights, values_BTF, cache, new
        )

    def _convolve(self, weights, values, segments):
        length = values.shape[1]
        positions = jnp.arange(length)[None] if segments is None else segment_positions(segments)
        before = lambda k: jnp.pad(values, ((0, 0), (k, 0), (0, 0)))[:, :length]
        return self._sum(weights, lambda k: jnp.where(positions[..., None] >= k, before(k), 0))

    def _decode(self, weights, values, cache, new):
        cache = new.write(cache, values[..., None])
        rows = jnp.arange(cache.shape[0])[:, None] if new.rows is None else new.rows
        before = lambda k: cache.at[rows, :, new.positions - k, 0].get(mode="clip")
        return self._sum(
            weights, lambda k: jnp.where(new.positions[..., None] >= k, before(k), 0)
        ), cache

    def _sum(self, weights, before):
        taps = self.precision.load(weights["taps"], None)
        y_BTF = sum(taps[k] * before(k) for k in range(taps.shape[0]))
        return y_BTF / jnp.sqrt(1 + self._total(jnp.sum(y_BTF * y_BTF, axis=-1, keepdims=True)))

    def _total(self, squares):
        return all_reduce(squares, TP)


class GatedConvolution(Branch):
    """The branch. It reads earlier positions on its own device only, so it does not declare
    `over_cp`, and cp refuses a model with it.
    """

    def __init__(self, d_model, config, context, *, rngs):
        self.config = config
        self.precision = context.precision
        self.enter = ColumnParallelLinear(
            d_model, (config.conv_features, config.conv_features), context, rngs=rngs
        )
        self.convolution = CausalConvolution(config, self.precision, rngs)
        self.out = RowParallelLinear(config.conv_features, d_model, context, rngs=rngs)

    def __call__(self, x_BTD, sequences=Sequences()):
        gate_BTF, values_BTF = self.enter(x_BTD)
        return self.out(jax.nn.silu(gate_BTF) * self.convolution(values_BTF, sequences.segments))

    def init_cache(self, num_rows, num_slots):
        shape = (num_rows, self.config.conv_features, num_slots, 1)
        return (constrain(jnp.zeros(shape, self.precision.compute), LAYER_SPEC),)

    def decode(self, x_BTD, cache, new):
        gate_BTF, values_BTF = self.enter(x_BTD)
        y_BTF, values = self.convolution.decode(values_BTF, cache[0], new)
        return self.out(jax.nn.silu(gate_BTF) * y_BTF), (values,)


@dataclass(frozen=True, kw_only=True)
class ToyBlock(ConvolutionConfig, BlockConfig):
    """A convolution and an MLP."""


@dataclass(frozen=True, kw_only=True)
class ToyModel(jaxtp.ModelConfig, ToyBlock):
    """A decoder of convolutions and MLPs."""

    layer = GatedConvolution

    def branches(self, block, rngs):
        layers = {"convolution": self.layer, "mlp": MLP}
        return {
            name: layer(self.d_model, block, self.layer_context, rngs=rngs)
            for name, layer in layers.items()
        }


class LocallyNormed(CausalConvolution):
    """Wrong: divides by the norm of a device's own features."""

    def _total(self, squares):
        return squares


class WrongConvolution(GatedConvolution):
    """A convolution that is correct on one device only."""

    def __init__(self, d_model, config, context, *, rngs):
        super().__init__(d_model, config, context, rngs=rngs)
        self.convolution = LocallyNormed(config, context.precision, rngs)


@dataclass(frozen=True, kw_only=True)
class WrongModel(ToyModel):
    """A decoder of wrong convolutions."""

    layer = WrongConvolution
