"""A kind of decoder block: its settings, its projections that can have adapters, and its padding.

A user's branches add theirs through the methods of `BranchConfig`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtp.config.schema import Positive
from jaxtp.layers.branch import BranchConfig, Padded
from jaxtp.layers.context import LocalShape
from jaxtp.layers.convolution import CONVOLUTION_TARGETS, ShortConvolutionConfig
from jaxtp.layers.experts import EXPERT_TARGETS, ExpertsConfig
from jaxtp.layers.gated_delta import GatedDeltaConfig
from jaxtp.layers.latent_attention import LatentAttentionConfig
from jaxtp.layers.lora import Target
from jaxtp.layers.norm import NormConfig
from jaxtp.layers.parameter import PaddedDim

STATES = "states"
"""Name of the branch beside attention that reads its norm, of blocks with `parts: all`."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(
    NormConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    ShortConvolutionConfig,
    LatentAttentionConfig,
    BranchConfig,
):
    """Settings of a block: attention or another mixer, then an MLP or experts, with norms.

    It has the settings of all these layers. `heads` and `use` describe attention, which is latent
    if `kv_rank` is not 0.
    """

    parts: Literal["both", "mixer", "mlp", "all"] = "both"
    """Branches of a block: attention, or a layer with states, and then an MLP or experts; one of
    them (Nemotron-H); or all, where attention and a layer with states read one norm and their
    results are added, before the MLP (Falcon-H1)."""

    residual_scale: Positive = 1.0
    """Factor of the outputs of attention and MLP (Granite)."""

    layer_scale: bool = False
    """Multiply the residual stream at the end of each block by a number that is not trained (Gemma
    4)."""

    @property
    def has_states(self) -> bool:
        """Whether the block has a layer with states."""
        return self.parts != "mlp" and self.delta_value_heads > 0

    @property
    def has_attention(self) -> bool:
        """Whether the block has attention, of either kind."""
        replaced = self.short_conv or (self.delta_value_heads and self.parts != "all")
        return self.parts != "mlp" and not replaced

    @property
    def states(self) -> str:
        """Name of the branch that has states."""
        return STATES if self.parts == "all" else "attention"

    def scales(self, branch: str) -> tuple[float, float]:
        """Returns the factors of a branch's input and output."""
        factors: dict[str, tuple[float, ...]] = {"mlp": (1.0, self.mlp_scales[1])}
        if self.has_attention:
            factors["attention"] = self.attention_scales
        if self.has_states and self.delta_kind == "mamba2":
            factors[self.states] = self.mamba_scales
        entering, *_, leaving = factors.get(branch, (1.0, 1.0))
        return entering, leaving * self.residual_scale

    def zigzag(self, shape: LocalShape) -> bool:
        """See `AttentionConfig`; other layers work equally on all devices in any order."""
        return self.has_attention and super().zigzag(shape)


def adapter_kernels(block: BlockConfig) -> Iterator[tuple[Target, str]]:
    """Yields each projection that can have adapters, with its kernel's path in the block."""
    if block.parts != "mlp":
        yield from _mixer_kernels(block)
    if block.num_experts:
        yield from _expert_kernels(block)
    elif block.parts != "mixer":
        yield from _mlp_kernels(block, "mlp")
    yield from block.adapter_kernels()


def _mixer_kernels(block: BlockConfig) -> Iterator[tuple[Target, str]]:
    if block.has_states:
        states = block.states
        yield from _kernels(f"{states}.in_proj", block.delta_targets)
        if block.delta_gate_rank:
            yield "f_a_proj", f"{states}.decay_down.kernel"
            yield "f_b_proj", f"{states}.decay_up.kernels.0"
            yield "g_a_proj", f"{states}.gate_down.kernel"
            yield "g_b_proj", f"{states}.gate_up.kernels.0"
        yield "o_proj", f"{states}.out.kernel"
        if not block.has_attention:
            return
    if block.short_conv:
        yield from _kernels("attention.in_proj", CONVOLUTION_TARGETS)
    elif block.kv_rank:
        if block.query_rank:
            yield "q_a_proj", "attention.query_down.kernel"
        yield "q_b_proj" if block.query_rank else "q_proj", "attention.query_up.kernels.0"
        yield "kv_a_proj_with_mqa", "attention.latent_down.kernel"
        yield "kv_b_proj", "attention.latent_up.kernels.0"
    else:
        yield from _kernels("attention.qkv", block.qkv_outputs())
    yield "o_proj", "attention.out.kernel"


def base_kernels(block: BlockConfig, form: str) -> Iterator[str]:
    """Yields the paths of the kernels that `lora.base` stores in a form.

    In a block with experts mxfp4 leaves the others, which are few, as they are: so does gpt-oss.
    """
    for _, path in adapter_kernels(block):
        is_expert = path.rpartition(".")[2] in block.projections()
        if form == "float8" or is_expert or not block.num_experts:
            yield path


def _expert_kernels(block: BlockConfig) -> Iterator[tuple[Target, str]]:
    module = "mlp"
    if block.dense_mlp:
        yield from _mlp_kernels(block, "mlp.mlp")
        module = "mlp.experts"
    for name in block.projections():
        yield EXPERT_TARGETS[name], f"{module}.{name}"
    if block.experts_rank:
        yield "fc1_latent_proj", f"{module}.latent_down.kernel"
        yield "fc2_latent_proj", f"{module}.latent_up.kernel"
    if block.shared_experts:
        yield from _mlp_kernels(block, f"{module}.shared")


def _mlp_kernels(block: BlockConfig, module: str) -> Iterator[tuple[Target, str]]:
    if block.mlp == "gated":
        yield from _kernels(f"{module}.gate_up", ("gate_proj", "up_proj"))
    else:
        yield "up_proj", f"{module}.up.kernels.0"
    yield "down_proj", f"{module}.down.kernel"


def _kernels(module: str, targets: Iterable[Target]) -> Iterator[tuple[Target, str]]:
    """The outputs of a column layer."""
    for i, target in enumerate(targets):
        yield target, f"{module}.kernels.{i}"


def padded_dims(block: BlockConfig, tp: int) -> Iterator[Padded]:
    """Yields the name, the size and the padded size of each dim that tp may pad."""
    key_heads = block.delta_key_heads
    if block.has_states and key_heads and block.delta_value_heads % key_heads == 0:
        key_heads, group, _ = block.delta_heads.stored(tp)
        yield "delta value heads", block.delta_value_heads, key_heads * group
        yield "delta key heads", block.delta_key_heads, key_heads
    if block.has_attention and block.num_heads % block.num_kv_heads == 0:
        kv_heads, group, _ = block.heads.stored(tp)
        yield "query heads", block.num_heads, kv_heads * group
        yield "kv heads", block.num_kv_heads, kv_heads
    widths = {}
    # Devices that have whole experts do not split their width.
    if block.parts != "mixer" and not (block.num_experts and block.over_tp(tp)):
        widths["d_ff"] = block.d_ff
    if block.num_experts:
        widths |= {"dense_mlp": block.dense_mlp, "shared_experts": block.shared_experts}
    for name, width in widths.items():
        if width:
            yield name, width, PaddedDim((width,)).padded(tp)
    yield from block.padding(tp)
