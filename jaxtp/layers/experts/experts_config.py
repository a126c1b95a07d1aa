"""Settings of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxtp.config.affects import COST
from jaxtp.config.schema import Count, CountOrZero, NonNegative, Positive
from jaxtp.layers.kernels.grouped import Implementation
from jaxtp.layers.mlp import MLPConfig


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(MLPConfig):
    """Settings of experts, each of them an MLP."""

    num_experts: CountOrZero = 0
    """Number of experts; 0 for a dense MLP. d_ff is the width of each expert."""

    experts_per_token: Count = 2
    """Experts that each token uses."""

    normalize_experts: bool = True
    """Divide the weights of a token's experts by their sum."""

    normalize_floor: NonNegative = 0.0
    """Least number that normalize_experts divides by (Ernie 4.5)."""

    experts_scale: Positive = 1.0
    """Factor of the weights of a token's experts, after normalisation."""

    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: a softmax over all of them, or the sigmoid of each (DeepSeek-V3)."""

    router_bias: bool = False
    """Add a learned bias to the router's logits (gpt-oss)."""

    experts_bias: bool = False
    """Biases on the projections of experts (gpt-oss)."""

    expert_groups: Count = 1
    """Number of groups of equally many consecutive experts; each token chooses in groups_per_token
    of them."""

    groups_per_token: Count = 1
    """Groups in which a token chooses its experts: the groups with the highest scores."""

    group_score: Literal["top2", "max"] = "top2"
    """Score of a group: the sum of its two highest scores (DeepSeek-V3), or its highest score
    (DeepSeek-V2)."""

    shared_experts: CountOrZero = 0
    """Hidden width of a dense MLP whose output is added to the output of the experts; 0 for none.
    mlp_bias gives biases to this MLP, not to the experts."""

    shared_experts_gate: bool = False
    """Multiply the output of shared_experts by the sigmoid of a projection of the input
    (Qwen2-MoE)."""

    experts_rank: CountOrZero = 0
    """Width of the latents that experts transform: a projection to them before the experts, and one
    from their sum (Nemotron 3 Super). 0: experts transform the tokens. The router and
    shared_experts always read the tokens."""

    dense_mlp: CountOrZero = 0
    """Hidden width of a dense MLP whose output is added to the output of the experts, both
    normalised; 0 for none. Each of both reads the residual stream through its own norm. Learned
    scales multiply the input of the router and the weight of each expert (Gemma 4)."""

    selection_bias: bool = False
    """Add a bias to each expert's score, for the choice only. Each update moves it against the
    expert's load; see train.selection_bias_rate."""

    grouped: Annotated[Implementation, COST] = "auto"
    """Kernel that multiplies rows with their experts. pallas runs on NVIDIA GPUs. xla runs
    everywhere, but on GPUs it multiplies every row with every expert. auto takes pallas where it
    runs."""

    def over_tp(self, tp: int) -> bool:
        """Returns whether each device has whole experts."""
        return self.num_experts % tp == 0

    def stored_by_expert(self, tp: int, shards: int) -> bool:
        """Returns whether `shards` of the storage split a device's experts.

        Otherwise they split the features of each expert.
        """
        return self.num_experts % (shards * (tp if self.over_tp(tp) else 1)) == 0

    def projections(self) -> dict[str, str]:
        """Returns the kernels of experts and their dims, in the order of computation.

        The dims are E experts, D features of the model or of latents, and F hidden features of an
        expert.
        """
        columns = ("gate", "up") if self.mlp == "gated" else ("up",)
        return {**dict.fromkeys(columns, "EDF"), "down": "EFD"}
