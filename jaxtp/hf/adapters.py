"""Where a decoder's adapters are, and a decoder without them that computes the same."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
from flax import nnx
from jax import Array

from jaxtp.checkpoint.logical import filled, named_variables
from jaxtp.config import ConfigError
from jaxtp.layers.lora import TARGETS, LoraConfig, LoraParam, Target
from jaxtp.mesh import current_mesh
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder

_KERNELS: Mapping[Target, str] = {
    "q_proj": "blocks.attention.qkv.kernels.0",
    "k_proj": "blocks.attention.qkv.kernels.1",
    "v_proj": "blocks.attention.qkv.kernels.2",
    "o_proj": "blocks.attention.out.kernel",
    "gate_proj": "blocks.mlp.gate_up.kernels.0",
    "up_proj": "blocks.mlp.gate_up.kernels.1",
    "down_proj": "blocks.mlp.down.kernel",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter of every layer, and the kernel that it is beside, by their dotted paths."""

    target: Target
    kernel: str
    lora: str
    """`.a` is `[L, in, rank]`, `.b` is `[L, rank, out]`."""


def adapters(config: ModelConfig) -> Iterator[Adapter]:
    """Those of a model."""
    before: Counter[str] = Counter()
    for target in TARGETS:
        if config.lora.adapted(target):
            layer = _KERNELS[target].partition(".kernel")[0]
            yield Adapter(target, _KERNELS[target], f"{layer}.loras.{before[layer]}")
            before[layer] += 1


def add_adapters(model: Decoder, lora: LoraConfig, *, seed: int = 0) -> Decoder:
    """A model with adapters that begin as nothing, split like the kernels that they are beside; its arrays are shared.

    Args:
      model: without adapters, on the mesh in context or on one device without one.
      lora: their rank, and where they are.
      seed: of what is random in them.

    Raises:
      ConfigError: the model has adapters, which would be lost, or there would be none.
    """
    if model.config.lora.rank:
        raise ConfigError("the model has adapters already; add them to their kernels by merge_adapters first")
    if not (lora.rank and lora.targets):
        raise ConfigError(f"lora.rank={lora.rank} and lora.targets={lora.targets} are no adapters; rank=8 is usual")
    config = replace(model.config, lora=lora)
    graph, abstract = abstract_decoder(config)
    own = nnx.filter_state(abstract, LoraParam)

    def create() -> nnx.State:
        return nnx.filter_state(nnx.state(Decoder(config, rngs=nnx.Rngs(seed))), LoraParam)

    shardings = None if current_mesh() is None else nnx.get_named_sharding(own, jax.sharding.get_mesh())
    created: nnx.State = jax.jit(create, out_shardings=shardings)()
    adapted: Decoder = nnx.merge(graph, nnx.merge_state(nnx.state(model), created))
    return adapted


def merge_adapters(model: Decoder) -> Decoder:
    """A model without adapters: each kernel with what its adapter adds to it; other arrays are shared with `model`.

    The sum is made in the dtype of the parameters, where the adapter adds to the product in the compute dtype.
    """
    config, found = model.config, nnx.state(model, nnx.Param)
    arrays = {path: variable[...] for path, variable in named_variables(found).items()}
    for adapter in adapters(config):
        kernel, a, b = (arrays[path] for path in (adapter.kernel, f"{adapter.lora}.a", f"{adapter.lora}.b"))
        arrays[adapter.kernel] = _add(config.lora.alpha / config.lora.rank, kernel, a, b)
    graph, abstract = abstract_decoder(replace(config, lora=LoraConfig()))
    merged: Decoder = nnx.merge(graph, filled(abstract, arrays))
    return merged


def _add(scale: float, kernel: Array, a: Array, b: Array) -> Array:
    added: Array = jax.jit(_sum, out_shardings=kernel.sharding)(scale, kernel, a, b)
    return added


def _sum(scale: float, kernel: Array, a: Array, b: Array) -> Array:
    return (kernel + scale * (a @ b)).astype(kernel.dtype)
