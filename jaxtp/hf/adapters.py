"""Where a decoder's adapters are, and a decoder without them that computes the same."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxtp.checkpoint.logical import filled, named_variables
from jaxtp.config import ConfigError
from jaxtp.layers.lora import TARGETS, LoraConfig, LoraParam, Target
from jaxtp.mesh import current_mesh
from jaxtp.models.config import BLOCKS, ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder

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
"""Kernels by target, in an MLP that has no gate."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of stacked layers, and the kernel that it is beside, by their dotted paths."""

    target: Target
    kernel: str
    lora: str
    """`.a` is `[L, in, rank]`, `.b` is `[L, rank, out]`."""
    layers: range
    """Numbers of the layers."""


def target_of(kernel: str) -> Target | None:
    """Returns what an adapter beside a kernel is called, by the path that a family's table has; None if none can be."""
    named = [*_KERNELS.items(), *_PLAIN.items()]
    return next((target for target, path in named if path and kernel == f"{BLOCKS}.{path}"), None)


def adapters(config: ModelConfig) -> Iterator[Adapter]:
    """Yields the adapters of a model."""
    before: Counter[str] = Counter()
    for target in filter(config.lora.adapted, TARGETS):
        for stack, layers, block in config.kinds():
            kernel = {**_KERNELS, **(_PLAIN if block.mlp == "plain" else {})}[target]
            if kernel is not None:
                module = f"{stack}.{kernel.partition('.kernel')[0]}"
                yield Adapter(target, f"{stack}.{kernel}", f"{module}.loras.{before[module]}", layers)
                before[module] += 1


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

    The sum is made in float32 and rounded once, to the dtype of the kernel; an adapter that is not merged adds to the
    product, in the compute dtype.
    """
    config = model.config
    arrays = {path: variable[...] for path, variable in named_variables(nnx.state(model)).items()}
    for adapter in adapters(config):
        kernel, a, b = (arrays[path] for path in (adapter.kernel, f"{adapter.lora}.a", f"{adapter.lora}.b"))
        arrays[adapter.kernel] = _add(config.lora.scale, kernel, a, b)
    graph, abstract = abstract_decoder(replace(config, lora=LoraConfig()))
    merged: Decoder = nnx.merge(graph, filled(abstract, arrays))
    return merged


def _add(scale: float, kernel: Array, a: Array, b: Array) -> Array:
    added: Array = jax.jit(_sum, out_shardings=kernel.sharding)(scale, kernel, a, b)
    return added


def _sum(scale: float, kernel: Array, a: Array, b: Array) -> Array:
    added = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    return (kernel.astype(jnp.float32) + scale * added).astype(kernel.dtype)
