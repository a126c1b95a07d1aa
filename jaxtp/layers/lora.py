"""Low-rank adapters (LoRA: Hu et al., arXiv 2106.09685).

A projection `x @ W` becomes `x @ W + scale * (x @ A) @ B`, with `A [in, rank]` random and
`B [rank, out]` zero, split like the dims of W that they share. Adapters are `nnx.LoRAParam`, a
subclass of `nnx.Param`; the other params become `FrozenParam`, so code that handles every
`nnx.Param` sees only adapters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxtp.collectives import PROJECTED
from jaxtp.config.affects import SHORT_HELP, STEP
from jaxtp.config.hints import dotted
from jaxtp.config.schema import CountOrZero, OptionalFolder, Positive, Rank, Settings
from jaxtp.layers.forms import BLOCK, Form, form_of
from jaxtp.layers.parameter import (
    DType,
    ExactDim,
    FrozenParam,
    PaddedDim,
    Variable,
    logical_shape,
    padding_of,
    parameter,
    spec_of,
)

_Llama = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_Latent = Literal["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
# Of Kimi Delta Attention's latents
_Kimi = Literal["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
# Of the latents of experts
_Experts = Literal["fc1_latent_proj", "fc2_latent_proj"]
# b_proj and a_proj are Gated DeltaNet's
Target = Literal[_Llama, _Latent, "b_proj", "a_proj", _Kimi, _Experts]
LLAMA_TARGETS: tuple[Target, ...] = get_args(_Llama)
TARGETS: tuple[Target, ...] = get_args(Target)
OLD_TARGETS = TARGETS[: TARGETS.index("f_a_proj")]
TOKEN_ROWS = "token_rows"
"""Attribute of a table's module: the rows of `LoraConfig.tokens`, or None."""
_Module = TypeVar("_Module", bound=nnx.Module)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """Low-rank adapters of frozen kernels."""

    from_peft: Annotated[OptionalFolder, STEP] = None
    """Folder of adapters in PEFT's format to start from, which also sets rank, alpha, rslora and
    targets."""

    rank: Annotated[Rank, SHORT_HELP] = 0
    """Rank of the adapters, usually 8 to 64; 0 trains every parameter, without adapters."""

    alpha: Positive = 16.0
    """Scale of the adapters: their outputs are multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that outputs do not shrink at high ranks
    (rsLoRA)."""

    targets: tuple[Target, ...] = TARGETS
    """Projections that get an adapter, named as in Hugging Face's Llama, DeepSeek and Nemotron, and
    as in FLA for Gated DeltaNet; a short convolution's are b_proj, gate_proj, v_proj and o_proj.
    Others than the model's are skipped."""

    tokens: tuple[CountOrZero, ...] = ()
    """Ids of tokens whose rows of the embedding and of the head are trained too, in place of the
    frozen ones; by default those of model.add_tokens. PEFT calls them trainable_token_indices. A
    step then has a copy of both tables, and their gradients."""

    tables: bool = False
    """Train all rows of the embedding and of the head too, split like the frozen ones, which stay.
    PEFT calls them modules_to_save."""

    dtype: Annotated[DType, STEP] = "float32"
    """Dtype of the adapters and their optimizer state. All other weights are frozen, and stored in
    model.precision.param: by default the dtype of their files."""

    base: Annotated[Literal["full", "float8", "mxfp4"], STEP] = "full"
    """Storage of the frozen kernels of projections. float8: 8 bits (E4M3, and a float32 scale for
    each output feature), half of bfloat16's memory and traffic over fsdp; values move by up to
    1/16. mxfp4: 4 bits (E2M1, and a power of two for each 32 input features), a quarter; values
    move by up to 1/4 of the largest of their 32, and gpt-oss's experts, whose files have MXFP4, do
    not move. In a block with experts, mxfp4 is for their kernels only. Adapters learn on the moved
    model, which the run's own evaluations see too. Exports, `jaxtp generate` and `jaxtp evaluate`
    use the original weights. Embedding, head, norms, biases and routers stay in
    model.precision.param."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The file of a run lists all targets of its version, which means all.
        if self.targets == OLD_TARGETS:
            object.__setattr__(self, "targets", TARGETS)

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapted(self, *projections: Target) -> list[int]:
        """Returns the indices of the projections that have an adapter."""
        return [i for i, name in enumerate(projections) if self.rank and name in self.targets]


def freeze_state(state: nnx.State) -> nnx.State:
    """Freezes every param of a real or abstract state except adapters."""
    frozen = []
    for path, variable in nnx.to_flat_state(state):
        if _is_base_param(variable):
            variable = _freeze_param(variable)
        frozen.append((path, variable))
    return nnx.from_flat_state(frozen)


def freeze(model: _Module) -> _Module:
    """Freezes every param of a model except adapters, so that training does not change them.

    Changes the model in place, and returns it. It may be a part of a model, such as a teacher:
    `self.teacher = jaxtp.freeze(teacher)` in `__init__`.
    """
    for _, module in nnx.iter_modules(model):
        for name, value in [*vars(module).items()]:
            if _is_base_param(value):
                setattr(module, name, _freeze_param(value))
    return model


def without_adapters(model: _Module) -> _Module:
    """Returns a copy of a model without its adapters, such as the reference of DPO.

    The copy shares the model's arrays.
    """
    copy: _Module = nnx.merge(*nnx.split(model), copy=True)
    for _, module in [*nnx.iter_modules(copy)]:
        for name, value in [*vars(module).items()]:
            if name == "loras":
                setattr(module, name, nnx.List([]))
            elif name == "adapted":
                setattr(module, name, ())
            elif name == TOKEN_ROWS:
                setattr(module, name, None)
            elif isinstance(value, Lora) and name.endswith("_lora"):
                delattr(module, name)
    return copy


def _is_base_param(value: object) -> bool:
    return isinstance(value, nnx.Param) and not isinstance(value, nnx.LoRAParam)


def _freeze_param(param: nnx.Param[Any]) -> Variable:
    return FrozenParam.from_metadata(param.get_raw_value(), param.get_metadata())


class StoredKernel(nnx.Module):
    """A frozen kernel in a `Form`, which `params_and_specs` gives its layer."""

    def __init__(self, kernel: Variable, form: type[Form]):
        bits, scale = form.of(kernel[...])
        self.bits = _part_of(kernel, bits)
        self.scale = _part_of(kernel, scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        form: Form = form_of(self.scale)(self.bits, self.scale)  # type: ignore[arg-type]
        return form.shape

    @property
    def itemsize(self) -> float:
        """Bytes of an element, without the scales."""
        return math.prod(self.bits.shape) / math.prod(self.shape)


def _part_of(kernel: Variable, array: Array) -> Variable:
    """Returns an array of a kernel's form, split and padded like the kernel."""
    *stack, inputs, outputs = spec_of(kernel)
    rows = array.shape[-2]
    # Nothing splits or pads the only row.
    spec = PartitionSpec(*stack, inputs if rows > 1 else None, outputs)
    padding = []
    for dim, split in padding_of(kernel):
        if dim == -2 and rows > 1:
            padding.append((dim, split.in_blocks(kernel.shape[-2] // rows)))
        elif dim != -2:
            padding.append((dim, split))
    metadata = {**kernel.get_metadata(), "out_sharding": spec, "padding": tuple(padding)}
    return FrozenParam.from_metadata(array, metadata)


def has_whole_blocks(kernel: Variable, parts: int) -> bool:
    """Returns whether each of `parts` devices has whole blocks of a kernel's input features."""
    inputs = logical_shape(kernel)[-2]
    stored = kernel.shape[-2]
    width = dict(padding_of(kernel)).get(-2, ExactDim((inputs,))).factors[-1]
    # Padded heads have whole blocks too.
    return stored % (BLOCK * parts) == 0 and (stored == inputs or width % BLOCK == 0)


def store_kernels(module: nnx.Module, kernels: Iterable[str], form: type[Form]) -> None:
    """Replaces kernels, given by dotted paths, by `StoredKernel`s, in place."""
    for path in kernels:
        *parents, name = path.split(".")
        owner = module
        for parent in parents:
            owner = vars(owner)[parent]
        setattr(owner, name, StoredKernel(vars(owner)[name], form))


def stored_kernels(state: nnx.State) -> dict[str, type[Form]]:
    """Returns the forms of the kernels that a state has in fewer bits, by dotted path."""
    variables = dict(nnx.to_flat_state(state))
    kernels = [parents for *parents, name in variables if name == "bits"]
    return {dotted(path): form_of(variables[*path, "scale"]) for path in kernels}


def freeze_as(weights: nnx.State, abstract: nnx.State) -> nnx.State:
    """Freezes weights; kernels that `abstract` has in a form are quantised on their devices."""
    stored = dict(nnx.to_flat_state(abstract))
    frozen = []
    for path, variable in nnx.to_flat_state(freeze_state(weights)):
        if (*path, "bits") not in stored:
            frozen.append((path, variable))
            continue
        arrays = quantise(variable[...], form_of(stored[*path, "scale"]))
        for field, array in arrays._asdict().items():
            frozen.append(((*path, field), stored[*path, field].replace(array)))
    return nnx.from_flat_state(frozen)


@partial(jax.jit, static_argnums=1)
def quantise(kernel: Array, form: type[Form]) -> Form:
    """Returns a kernel in a form, on the kernel's devices."""
    return form.of(kernel)


class Lora(nnx.Module):
    """One adapter, of a kernel or of each of a `stack` of kernels.

    Its layer loads A and B, which have the given `features` and `specs`, and multiplies the input
    by A. The adapter does the rest.
    """

    def __init__(
        self,
        features: tuple[PaddedDim, PaddedDim],
        config: LoraConfig,
        specs: tuple[PartitionSpec, PartitionSpec],
        *,
        stack: tuple[int, ...] = (),
        rngs: nnx.Rngs,
    ):
        inner, outer = features
        self.rank = config.rank
        self.scale = config.scale
        # PEFT's initial values are the default of PyTorch's linear layers.
        bound = inner.size**-0.5
        shape = (*stack, inner.size, config.rank)
        a = jax.random.uniform(rngs.params(), shape, config.dtype, -bound, bound)
        b = jnp.zeros((*stack, config.rank, outer.size), config.dtype)
        adapter = partial(parameter, kind=nnx.LoRAParam)
        a_spec, b_spec = specs
        self.a = adapter("lora_a", a, a_spec, padding=((-2, inner),))
        self.b = adapter("lora_b", b, b_spec, padding=((-1, outer),))

    def add(
        self,
        y: Array,
        inner: Array,
        b: Array,
        multiply: Callable[[Array, Array], Array] = operator.matmul,
    ) -> Array:
        """Returns `y + scale * inner @ b`, where `inner` is `x @ A`."""
        return y + self.scale * multiply(checkpoint_name(inner, PROJECTED), b)

    def scaled(self, inner: Array) -> Array:
        """Returns `scale * x @ A`, for a layer that sums products before it adds them to `y`."""
        return checkpoint_name(self.scale * inner, PROJECTED)
