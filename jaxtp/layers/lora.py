"""Low-rank adapters: what fine-tuning trains instead of a kernel (LoRA: Hu et al., arXiv 2106.09685).

A projection `x @ W` becomes `x @ W + scale * (x @ A) @ B`, with `A [in, rank]` random and `B [rank, out]` zero: it
begins as the projection was. W stays as it is; A and B are divided over the mesh like the dims of W that they share.
Where a column of A and its row of B are both zero, so are their gradients: what has no adapter keeps having none.

Adapters are variables of a kind of their own (`LoraParam`): where there are any, the step differentiates, the optimizer
updates and checkpoints hold that kind alone. A layer applies them inside its own `device_view`. Outside of training
they are added to their kernels (`hf/adapters.py`), so nothing else has to know of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import PartitionSpec
from pydantic import Field

from jaxtp.config import UserPath, allowed
from jaxtp.layers.costs import PROJECTIONS_AGAIN, Cost, Kept, Product, Share, Weight, itemsize
from jaxtp.layers.parameter import Precision, Split, parameter

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters beside frozen kernels."""

    from_peft: Annotated[UserPath | None, Field(alias="from"), tyro.conf.arg(name="from", metavar="DIR")] = None
    """Folder of adapters in PEFT's format, to begin with; rank, alpha, rslora and targets are then theirs."""

    rank: Annotated[int, Field(ge=0, lt=2**16), allowed("0 or more")] = 0
    """Inner width of the adapters, 8 to 64 is usual; 0 trains every parameter and has no adapters."""

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False), allowed("above 0")] = 16.0
    """Scale: what an adapter adds is multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that what adapters of a high rank add does not shrink (rsLoRA)."""

    targets: tuple[Target, ...] = TARGETS
    """The projections that get one, by their names in Hugging Face's Llama."""

    @property
    def scale(self) -> float:
        """Multiplies what an adapter adds."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapted(self, *projections: Target) -> list[int]:
        """The indices of those projections that have an adapter."""
        return [i for i, name in enumerate(projections) if self.rank and name in self.targets]

    def only(self, projection: Target) -> "LoraConfig":
        """This, if the projection has an adapter; else none."""
        return self if self.adapted(projection) else LoraConfig()


class LoraParam(nnx.Param[Any]):
    """A parameter of an adapter."""


def trained(config: LoraConfig) -> type[nnx.Param[Any]]:
    """The kind of variables that training changes: adapters, if there are any."""
    return LoraParam if config.rank else nnx.Param


class Lora(nnx.Module):
    """One adapter; the layer that it belongs to knows how to apply it.

    Args:
      features: of the input and the output; a `Split` where tp divides them.
      config: rank and scale.
      specs: of A and B.
      precision: the dtypes.
      rngs: source of the `params` key.
    """

    def __init__(
        self,
        features: tuple[int | Split, int | Split],
        config: LoraConfig,
        specs: tuple[PartitionSpec, PartitionSpec],
        *,
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        self.rank = config.rank
        self.scale = config.scale
        inner, outer = (f.size if isinstance(f, Split) else f for f in features)
        rows, columns = (((dim, f),) if isinstance(f, Split) else () for dim, f in zip((-2, -1), features, strict=True))
        bound = inner**-0.5  # as PEFT begins: the default of a linear layer of PyTorch
        a = jax.random.uniform(rngs.params(), (inner, config.rank), precision.param, -bound, bound)
        b = jnp.zeros((config.rank, outer), precision.param)
        self.a = parameter("lora_a", a, specs[0], kind=LoraParam, padding=rows)
        self.b = parameter("lora_b", b, specs[1], kind=LoraParam, padding=columns)

    def costs(self, share: Share, features: tuple[int, int], a: Weight, b: Weight, *, again: bool) -> Iterator[Cost]:
        """Yields what it costs to apply.

        Args:
          share: of the device.
          features: of input and output, on the device.
          a: how A is loaded.
          b: how B is loaded.
          again: whether its projection is computed again in the backward pass.
        """
        compute = itemsize(a.precision.compute)
        inner = share.passes(share.remat in PROJECTIONS_AGAIN, 2)
        yield replace(a, adapter=True)
        yield replace(b, adapter=True)
        yield Product.of("adapter's A", (share.tokens, features[0], self.rank), compute, inner)
        yield Product.of("adapter's B", (share.tokens, self.rank, features[1]), compute, share.passes(again, 2))
        if share.remat in ("none", "save_dots"):
            yield Kept(share.tokens * self.rank * compute)
