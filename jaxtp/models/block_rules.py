"""Why the settings of a block contradict each other, or do not fit a mesh.

The messages name the settings of a run. The layers themselves know only their own arguments.
"""

from collections.abc import Iterator, Mapping

from jaxtp.config.hints import Problem, mesh_settings, not_divisible
from jaxtp.layers.attention import AttentionConfig
from jaxtp.layers.kernels.select import unsupported
from jaxtp.layers.mlp import XIELU
from jaxtp.layers.rope import MAX_FREQUENCY, RopeScaling, rotated_dims
from jaxtp.mesh import STORAGE, TP
from jaxtp.models.block import BlockConfig

_MEANINGLESS_WITH_LATENTS = (
    "rotary_fraction",
    "qk_norm",
    "qk_norm_after_rope",
    "value_norm",
    "value_is_key",
    "clip_qkv",
    "attention_gate",
    "gate_per_head",
    "attention_bias",
    "attention_sinks",
)


def block_problems(block: BlockConfig, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Yields why a block cannot run on this mesh."""
    if block.parts == "mixer" and block.num_experts:
        yield Problem(
            f"model.parts=mixer has no experts: use model.num_experts=0, not {block.num_experts}, "
            "in these blocks"
        )
    if block.parts == "all" and not block.delta_value_heads:
        yield Problem(
            "model.parts=all has a layer with states beside attention, but "
            "model.delta_value_heads=0; set it, or use model.parts=both"
        )
    if block.has_states:
        yield from _delta_problems(block, sizes)
    if block.has_attention:
        yield from _attention_problems(block, sizes)
        yield from _latent_problems(block, sizes)
    if block.swiglu_limit is not None and block.mlp != "gated":
        yield Problem(
            f"model.swiglu_limit={block.swiglu_limit} needs model.mlp=gated, or leave it out"
        )
    gate_scale, _ = block.mlp_scales
    if gate_scale != 1 and (block.mlp != "gated" or block.num_experts):
        yield Problem(
            f"model.mlp_scales={block.mlp_scales} needs model.mlp=gated and model.num_experts=0; "
            "or set the first to 1"
        )
    if block.num_experts:
        yield from _group_problems(block)
        yield from _expert_problems(block)
        yield from storage_problems("model.experts_rank", block.experts_rank, sizes)
    if block.dense_mlp and not (
        block.num_experts and block.norm == "rms" and block.norm_placement == "both"
    ):
        yield Problem(
            "model.dense_mlp needs model.num_experts, model.norm=rms and model.norm_placement=both"
        )
    yield from block.problems(sizes)


def _attention_problems(block: BlockConfig, sizes: Mapping[str, int]) -> Iterator[Problem]:
    heads = block.num_heads
    kv_heads = block.num_kv_heads
    if heads % kv_heads:
        advice = ", the default: set both" if kv_heads == type(block).num_kv_heads else ""
        yield Problem(
            f"model.num_heads={heads} is not divisible by model.num_kv_heads={kv_heads}{advice}",
            among={"model.num_kv_heads": heads},
        )
    yield from _idle_devices("model.num_heads", heads, sizes[TP])
    # Latent attention rotates a part of each head; `_latent_problems` refuses an odd one.
    width = block.rope_head_dim // 2 * 2 or block.head_dim
    ropes = rope_problems(width, block.rope_theta, block.rope_scaling, block.rotary_fraction)
    yield from map(Problem, ropes)
    for problem in unsupported(block.attention, block.use()):
        yield Problem(f"model.attention={block.attention}: {problem}")


def _idle_devices(setting: str, heads: int, tp: int) -> Iterator[Problem]:
    if tp > 2 * heads:
        text = f"mesh.tp={tp} is more than twice {setting}={heads}: most devices get no head"
        yield Problem(text, among={f"mesh.{TP}": heads})


def rope_problems(
    head_dim: int, theta: float | None, scaling: RopeScaling, fraction: float = 1.0
) -> Iterator[str]:
    """Yields why positions cannot be rotated."""
    period, count = rotated_dims(head_dim, scaling, fraction)
    rotated = count * head_dim // period
    if rotated % 2 or not rotated:
        yield (
            f"model.rotary_fraction={fraction} rotates {rotated} of {head_dim} dims; an even "
            "number above 0 is needed"
        )
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} is not above "
            f"low_freq_factor={scaling.low_freq_factor}; 4 and 1 are usual"
        )
    if scaling.kind == "yarn" and theta is not None and theta <= 1:
        yield f"model.rope_theta={theta} is not above 1, which yarn needs; 10000 is usual"
    if scaling.kind == "longrope":
        for name in ("short_factor", "long_factor"):
            num_factors = len(getattr(scaling, name))
            if num_factors != count // 2:
                times = "" if fraction == 1 else f" times model.rotary_fraction={fraction}"
                yield (
                    f"model.rope_scaling.{name} has {num_factors:,} numbers; longrope needs "
                    f"{count // 2:,}, half of model.head_dim={head_dim}{times}"
                )
        if scaling.original_length == 1:
            yield (
                "model.rope_scaling.original_length=1 is not above 1, which longrope needs; 4096 "
                "is usual"
            )
    lists = (*scaling.short_factor, *scaling.long_factor)
    divisors = {"none": (), "longrope": lists}.get(scaling.kind, (scaling.factor,))
    largest = max(1.0, 1 / (theta or 1.0)) / min(divisors, default=1.0)
    if largest > MAX_FREQUENCY:
        yield (
            f"model.rope_theta={theta} and model.rope_scaling make frequencies of up to "
            f"{largest:.3g} radians per position, above the limit of {MAX_FREQUENCY:,.0f}; a base "
            "and factors of 1 or more are usual"
        )


def _latent_problems(block: BlockConfig, sizes: Mapping[str, int]) -> Iterator[Problem]:
    if not block.kv_rank:
        for name in ("query_rank", "rope_head_dim", "value_head_dim"):
            if value := getattr(block, name):
                yield Problem(
                    f"model.{name}={value} needs latent attention; set model.kv_rank, or leave it "
                    "out"
                )
        return
    heads = block.num_heads
    head_dim = block.head_dim
    rotated = block.rope_head_dim
    if rotated % 2 or not 0 < rotated < head_dim:
        yield Problem(
            f"model.rope_head_dim={rotated} is not an even number from 2 to below "
            f"model.head_dim={head_dim}, which model.kv_rank needs; {head_dim // 4 * 2} works"
        )
    if not block.value_head_dim:
        yield Problem(
            "model.value_head_dim=0, but latent attention needs a width; "
            f"{head_dim - rotated} is usual"
        )
    if block.num_kv_heads != heads:
        yield Problem(
            f"model.num_kv_heads={block.num_kv_heads} differs from model.num_heads={heads}: with "
            f"model.kv_rank each head has its own keys; set both to {heads}"
        )
    for name in _MEANINGLESS_WITH_LATENTS:
        if (value := getattr(block, name)) != getattr(AttentionConfig, name):
            yield Problem(f"model.{name}={value} has no meaning with model.kv_rank; leave it out")
    for name in ("kv_rank", "query_rank"):
        yield from storage_problems(f"model.{name}", getattr(block, name), sizes)


def storage_problems(name: str, size: int, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Yields a problem if fsdp * cp does not divide a size of the model."""
    yield from not_divisible(name, size, mesh_settings(STORAGE, sizes))


def _delta_problems(block: BlockConfig, sizes: Mapping[str, int]) -> Iterator[Problem]:
    heads = block.delta_value_heads
    key_heads = block.delta_key_heads
    if block.short_conv:
        yield Problem(
            f"model.short_conv={block.short_conv} and model.delta_value_heads={heads} both replace "
            "attention; set one of them to 0"
        )
    needed = {"delta_key_heads": heads, "delta_key_dim": 128, "delta_value_dim": 128}
    for name, example in needed.items():
        if not getattr(block, name):
            yield Problem(
                f"model.{name}=0, but model.delta_value_heads={heads} needs it; {example} works"
            )
    if key_heads and heads % key_heads:
        yield Problem(
            f"model.delta_value_heads={heads} is not divisible by "
            f"model.delta_key_heads={key_heads}",
            among={"model.delta_key_heads": heads},
        )
    rank = block.delta_gate_rank
    if rank and key_heads != heads:
        yield Problem(
            f"model.delta_key_heads={key_heads} differs from model.delta_value_heads={heads}: with "
            f"model.delta_gate_rank each head has its own keys; set both to {heads}"
        )
    if rank and block.delta_kind == "mamba2":
        yield Problem(
            f"model.delta_gate_rank={rank} is for model.delta_kind=gated_delta; Mamba-2 needs 0"
        )
    yield from storage_problems("model.delta_gate_rank", rank, sizes)
    yield from _idle_devices("model.delta_value_heads", heads, sizes[TP])
    longest = block.mamba_max_step
    if longest is not None and block.mamba_min_step > longest:
        yield Problem(
            f"model.mamba_min_step={block.mamba_min_step} is above model.mamba_max_step={longest}; "
            "0 works"
        )


def _group_problems(block: BlockConfig) -> Iterator[Problem]:
    experts = block.num_experts
    groups = block.expert_groups
    k = block.experts_per_token
    if block.groups_per_token > groups:
        yield Problem(
            f"model.groups_per_token={block.groups_per_token} is more than "
            f"model.expert_groups={groups}; at most "
            f"{groups} works"
        )
    yield from not_divisible("model.num_experts", experts, {"model.expert_groups": groups})
    max_choices = min(block.groups_per_token, groups) * (experts // groups)
    if experts % groups == 0 and k > max_choices:
        choices = f"the experts in {block.groups_per_token} of model.expert_groups={groups}"
        if groups == 1:
            choices = f"model.num_experts={experts}"
        yield Problem(
            f"model.experts_per_token={k} is more than {choices}; at most {max_choices} works"
        )


def _expert_problems(block: BlockConfig) -> Iterator[Problem]:
    experts = f"the {block.num_experts} experts of model.num_experts have"
    if block.mlp_bias and not block.shared_experts:
        yield Problem(
            f"model.mlp_bias=true: {experts} their biases by model.experts_bias; use it, and "
            "model.mlp_bias=false"
        )
    if block.activation == XIELU:
        yield Problem(
            f"model.activation={XIELU}: {experts} no learned activations; use, for example, "
            "model.activation=silu"
        )
    if block.experts_rank and block.dense_mlp:
        yield Problem(
            f"model.experts_rank={block.experts_rank} has no meaning with model.dense_mlp; leave "
            "one of them out"
        )
    if block.shared_experts_gate and not block.shared_experts:
        yield Problem(
            "model.shared_experts_gate=true needs model.shared_experts, the width of its MLP"
        )
