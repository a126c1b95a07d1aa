"""Shrinks a model for virtual CPU devices, split and padded as the large one is on its meshes.

Every size keeps its remainder modulo the numbers that divide it on the meshes of the check. A
user's own branch defines how its settings shrink (`BranchConfig.shrink`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxtp.layers.kernels.select import KERNELS, KernelChoice
from jaxtp.layers.rope import RopeScaling, rotated_dims
from jaxtp.models.block import BlockConfig
from jaxtp.models.block_rules import rope_problems
from jaxtp.models.config import ModelConfig

_MIN_D_MODEL = 64
_MIN_VOCAB = 96
_MAX_TURNS = 2
_MIN_FEATURES = 48
_SMALL_HEAD_DIMS = (8, 16, 32, 64)
# Every dim rotates; in a dim that hardly rotates, a key bias's gradient is rounding noise.
_SMALL_THETA = 2.0
_SMALL_LATENT_WIDTH = 8
_SMALL_RANK = 16
_SMALL_DELTA_KEY = 8
_SMALL_DELTA_VALUE = 10
_SMALL_EXPERTS = 4
_SMALL_CHOICES = 2

_SMALL_EPS = 1.0
"""Minimum norm_eps of a small model with Gated DeltaNet. A query can read small values from a
state, and the norm divides by them. With 1e-2, gradients of a small Qwen3.5 in float32 differ by
9e-6 between meshes; with 1, by 6e-7."""


@dataclass(frozen=True)
class ShrinkSpec:
    """Sizes of a check on virtual CPU devices."""

    # Every tp of the check
    tps: frozenset[int]
    # A multiple of every fsdp of the check
    shards: int
    # Tokens in a sequence of the check
    length: int
    # Tokens in a sequence of the run
    before: int
    # A divisor of the input features of a kernel on each device
    features: int = 1

    def positions(self, count: int) -> int:
        """Scales a number of positions like the sequence length."""
        return max(1, count * self.length // self.before)

    def width(self, value: int) -> int:
        """Returns the smallest number of input features of a row layer; see `size`."""
        modulus = self.features * math.lcm(*self.tps)
        return smallest_congruent(value, modulus, _MIN_FEATURES)

    def size(self, value: int, minimum: int) -> int:
        """Returns the smallest size >= `minimum` that every tp divides, or pads, like `value`."""
        return smallest_congruent(value, math.lcm(*self.tps), minimum)


def smallest_congruent(value: int, modulus: int, minimum: int) -> int:
    """Returns the smallest number >= `minimum` that is congruent to `value` modulo `modulus`."""
    return minimum + (value - minimum) % modulus


def shrink_model(config: ModelConfig, small: ShrinkSpec) -> ModelConfig:
    """Returns a small model for virtual CPU devices, with every kind of block."""
    config = with_each_kind(config)
    num_first = len(config.first_blocks)
    precision = config.precision
    if precision.matmul != "compute":
        precision = replace(precision, matmul_least=1)
    norm_eps = config.norm_eps
    if any(block.delta_value_heads for block in config.block_kinds()):
        norm_eps = max(norm_eps, _SMALL_EPS)
    usual = {**vars(config), **shrink_block(config, small)}
    listed = []
    all_changes = (*config.first_blocks, *config.pattern)
    for changes, block in zip(all_changes, config.listed_blocks().values(), strict=True):
        shrunk = {**changes, **shrink_block(block, small)}
        # The same settings of the small block, and others in which small blocks differ
        names = [name for name in shrunk if name in changes or shrunk[name] != usual[name]]
        listed.append({name: shrunk[name] for name in names})
    vocab_size = small.size(config.vocab_size, _MIN_VOCAB)
    tokens = tuple(range(min(len(config.lora.tokens), vocab_size)))
    return replace(
        config,
        vocab_size=vocab_size,
        lora=replace(config.lora, tokens=tokens),
        d_model=smallest_congruent(0, small.features * small.shards, _MIN_D_MODEL),
        loss_chunk=small.positions(config.loss_chunk),
        first_blocks=tuple(listed[:num_first]),
        pattern=tuple(listed[num_first:]),
        norm_eps=norm_eps,
        learned_positions=config.learned_positions and small.positions(config.learned_positions),
        precision=precision,
        **shrink_block(config, small),
    )


def with_each_kind(config: ModelConfig) -> ModelConfig:
    """Returns a model with each kind of block listed once, as each listed block is compiled."""
    period = len(config.pattern) or 1
    turns, remainder = divmod(config.num_layers - len(config.first_blocks), period)
    pattern = config.pattern if turns else config.pattern[:remainder]
    pattern = tuple(dict.fromkeys(pattern))
    listed = dict.fromkeys(config.first_blocks)
    first_blocks = tuple(block for block in listed if block not in pattern)
    num_layers = len(first_blocks) + (len(pattern) or 1) * min(turns, _MAX_TURNS)
    num_layers += min(remainder, 1 if turns else len(pattern))
    return replace(config, first_blocks=first_blocks, pattern=pattern, num_layers=num_layers)


def small_attention(choice: KernelChoice) -> KernelChoice:
    """Returns a choice of kernels, `auto` for a kernel of GPUs."""
    if choice == "auto" or KERNELS[choice].platforms is None:
        return choice
    return "auto"


def shrink_block(block: BlockConfig, small: ShrinkSpec) -> dict[str, Any]:
    """Returns the settings of a small block, split and padded like this one on a mesh."""
    heads = _shrink_latents(block, small) if block.kv_rank else _shrink_heads(block, small)
    delta_key_dim = block.delta_key_dim
    return {
        **heads,
        "rope_theta": block.rope_theta and _SMALL_THETA,
        "sliding_window": block.sliding_window and small.positions(block.sliding_window),
        "attention": small_attention(block.attention),
        "delta_key_dim": small.size(delta_key_dim, min(delta_key_dim, _SMALL_DELTA_KEY)),
        "delta_gate_rank": block.delta_gate_rank
        and smallest_congruent(0, small.shards, _SMALL_RANK),
        # Unlike the width of keys, so that the check notices if both are mixed up
        "delta_value_dim": min(block.delta_value_dim, _SMALL_DELTA_VALUE),
        "d_ff": small.width(block.d_ff),
        **_shrink_experts(block, small),
        **block.shrink(small),
    }


def _shrink_heads(block: BlockConfig, small: ShrinkSpec) -> dict[str, Any]:
    heads = block.heads
    fraction = block.rotary_fraction

    def scaling(width: int) -> RopeScaling:
        _, num_rotated = rotated_dims(width, block.rope_scaling, fraction)
        return _shrink_scaling(block.rope_scaling, num_rotated, small)

    def suits(width: int) -> bool:
        if width >= block.head_dim:
            return False
        if any(rope_problems(width, _SMALL_THETA, scaling(width), fraction)):
            return False
        narrow = replace(block, head_dim=width).heads
        if any(narrow.on_device(tp)[0] * width % small.features for tp in small.tps):
            return False
        return all(heads.stored(tp)[:-1] == narrow.stored(tp)[:-1] for tp in small.tps)

    head_dim = next(filter(suits, _SMALL_HEAD_DIMS), block.head_dim)
    return {"head_dim": head_dim, "rope_scaling": scaling(head_dim)}


def _shrink_latents(block: BlockConfig, small: ShrinkSpec) -> dict[str, Any]:
    rope = min(block.rope_head_dim, _SMALL_LATENT_WIDTH)
    nope = min(block.head_dim - block.rope_head_dim, _SMALL_LATENT_WIDTH)
    rank = smallest_congruent(0, small.shards, _SMALL_RANK)
    return {
        "kv_rank": rank,
        "query_rank": block.query_rank and rank,
        "rope_head_dim": rope,
        "head_dim": rope + nope,
        # Unlike the other widths
        "value_head_dim": min(block.value_head_dim, _SMALL_LATENT_WIDTH + 2),
        "rope_scaling": _shrink_scaling(block.rope_scaling, rope, small),
    }


def _shrink_scaling(scaling: RopeScaling, head_dim: int, small: ShrinkSpec) -> RopeScaling:
    """Returns the scaling of a small head, with a sample of the factors."""
    if scaling.kind not in ("llama3", "yarn", "longrope"):
        # It has no length and no factors.
        return scaling
    count = head_dim // 2

    def sample(factors: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factors[i * len(factors) // count] for i in range(count) if factors)

    return replace(
        scaling,
        original_length=max(2, small.positions(scaling.original_length)),
        short_factor=sample(scaling.short_factor),
        long_factor=sample(scaling.long_factor),
    )


def _shrink_experts(block: BlockConfig, small: ShrinkSpec) -> dict[str, int]:
    settings: dict[str, int] = {}
    for name in ("shared_experts", "dense_mlp"):
        if width := getattr(block, name):
            settings[name] = small.width(width)
    if block.experts_rank:
        settings["experts_rank"] = smallest_congruent(0, small.shards, _SMALL_RANK)
    groups = block.expert_groups
    min_experts = max(_SMALL_EXPERTS, _SMALL_CHOICES * groups)
    experts = smallest_congruent(block.num_experts, math.lcm(*small.tps, groups), min_experts)
    if experts < block.num_experts:
        uses_all = block.experts_per_token == block.num_experts
        choices = experts if uses_all else min(block.experts_per_token, _SMALL_CHOICES)
        settings |= {"num_experts": experts, "experts_per_token": choices}
    return settings
