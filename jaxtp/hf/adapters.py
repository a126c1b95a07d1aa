"""Adds adapters to a decoder, and merges them into its kernels."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxtp.checkpoint.logical import named_variables, replace_arrays
from jaxtp.config.schema import ConfigError
from jaxtp.layers.lora import TARGETS, LoraConfig, Target, freeze_state
from jaxtp.layers.parameter import DType
from jaxtp.mesh import current_mesh
from jaxtp.models.config import BlockConfig, ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder, create_decoder

_KERNELS: Mapping[Target, str] = {
    "q_proj": "attention.qkv.kernels.0",
    "k_proj": "attention.qkv.kernels.1",
    "v_proj": "attention.qkv.kernels.2",
    "o_proj": "attention.out.kernel",
    "gate_proj": "mlp.gate_up.kernels.0",
    "up_proj": "mlp.gate_up.kernels.1",
    "down_proj": "mlp.down.kernel",
}
_PLAIN: Mapping[Target, str | None] = {"gate_proj": None, "up_proj": "mlp.up.kernels.0"}
"""Replacements for `_KERNELS` in an MLP without a gate."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of stacked layers and its kernel, as dotted paths."""

    target: Target
    kernel: str
    lora: str
    """`.a` is `[L, in, rank]`, `.b` is `[L, rank, out]`."""
    layers: range


def adapters(config: ModelConfig) -> Iterator[Adapter]:
    """Yields the adapters of a model."""
    counts: Counter[str] = Counter()
    for target in filter(config.lora.adapted, TARGETS):
        for stack, layers, block in config.kinds():
            for kernel in _kernels(target, block):
                module = f"{stack}.{kernel.partition('.kernel')[0]}"
                yield Adapter(target, f"{stack}.{kernel}", f"{module}.loras.{counts[module]}", layers)
                counts[module] += 1


def _kernels(target: Target, block: BlockConfig) -> Iterator[str]:
    """Yields the kernels of a target; attention and MLP may both have a gate_proj."""
    if target == "gate_proj" and block.attention_gate:
        yield f"attention.qkv.kernels.{2 if block.value_is_key else 3}"
    kernel = {**_KERNELS, **(_PLAIN if block.mlp == "plain" else {})}[target]
    if kernel is not None and not (target == "v_proj" and block.value_is_key):
        yield kernel


def add_adapters(model: Decoder, lora: LoraConfig, *, seed: int = 0) -> Decoder:
    """Returns a copy of a model, sharing its arrays, with new adapters that initially add zero.

    The model must be on the mesh in context or on one device.

    Raises:
      ConfigError: the model has adapters, or `lora` has none.
    """
    if model.config.lora.rank:
        raise ConfigError("the model has adapters already; add them to their kernels by merge_adapters first")
    if not (lora.rank and lora.targets):
        raise ConfigError(f"lora.rank={lora.rank} and lora.targets={lora.targets} make no adapters; rank=8 is usual")
    config = replace(model.config, lora=lora)
    graph, abstract = abstract_decoder(config)
    factors = nnx.filter_state(abstract, nnx.LoRAParam)

    def create() -> nnx.State:
        return nnx.filter_state(nnx.state(create_decoder(config, rngs=nnx.Rngs(seed))), nnx.LoRAParam)

    shardings = None if current_mesh() is None else nnx.get_named_sharding(factors, jax.sharding.get_mesh())
    created: nnx.State = jax.jit(create, out_shardings=shardings)()
    adapted: Decoder = nnx.merge(graph, nnx.merge_state(freeze_state(nnx.state(model)), created))
    return adapted


def merge_adapters(model: Decoder, *, dtype: DType | None = None) -> Decoder:
    """Returns a model with adapters merged in float32, rounded once to `dtype`, by default the frozen weights' dtype.

    Outputs may differ slightly: an unmerged adapter is added to the layer's output, in the compute dtype.
    """
    config = model.config
    dtype = dtype or config.precision.param
    arrays = {path: variable[...] for path, variable in named_variables(nnx.state(model)).items()}
    for adapter in adapters(config):
        kernel, a, b = (arrays[path] for path in (adapter.kernel, f"{adapter.lora}.a", f"{adapter.lora}.b"))
        add = jax.jit(_sum, static_argnums=4, out_shardings=kernel.sharding)
        arrays[adapter.kernel] = add(config.lora.scale, kernel, a, b, dtype)
    plain = replace(config, lora=LoraConfig(), precision=replace(config.precision, param=dtype))
    graph, abstract = abstract_decoder(plain)
    cast = {path: arrays[path].astype(variable.dtype) for path, variable in named_variables(abstract).items()}
    merged: Decoder = nnx.merge(graph, replace_arrays(abstract, cast))
    return merged


def _sum(scale: float, kernel: Array, a: Array, b: Array, dtype: DType) -> Array:
    added = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    return (kernel.astype(jnp.float32) + scale * added).astype(dtype)
