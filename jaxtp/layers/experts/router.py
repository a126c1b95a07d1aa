"""The router: scores of experts, each token's choice, its gates, and the statistics of balance.

Scores are float32, a softmax over all E experts or a sigmoid of each; ties go to the lower index.
Gates are the weights of the sum over a token's experts.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtp.collectives import KEPT
from jaxtp.layers.balance import Routing
from jaxtp.layers.experts.experts_config import ExpertsConfig
from jaxtp.layers.experts.placement import on_first_device
from jaxtp.layers.parameter import Precision, Weights


class Scores(NamedTuple):
    """Scores of each token's experts, `[b, t, E]` float32."""

    logits: Array
    log_scores: Array  # up to a term that is equal for all experts of a token
    probabilities: Array  # scores over their sum
    scores: Array


@dataclass(frozen=True)
class Router:
    """The router of a layer, on a device's tokens, inside `device_view`."""

    config: ExpertsConfig
    precision: Precision
    weights: Weights
    is_split: bool  # whether each device of a tp group has other tokens

    def route(
        self,
        x: Array,
        not_padding: Array,
        replayed: Array | None,
        *,
        record: bool,
    ) -> tuple[Array, Array, Routing]:
        """Returns the experts of tokens `[b, t, D]`, their gates, and router statistics.

        Experts and gates are `[b, t, k]`. Padding gets expert E, which does not exist. `replayed`
        experts replace the router's choice, which is recorded.
        """
        config = self.config
        if config.dense_mlp:
            scale = self._load("router_scale", 0)
            x = x.astype(jnp.float32) * scale * x.shape[-1] ** -0.5
        scores = self._scores(x)
        choice, best, group_margin = self._choose(scores.scores, record=record)
        experts = choice if replayed is None else replayed
        gates = self._gates(scores, experts)
        if config.dense_mlp:
            gates *= jnp.take(self._load("expert_scale", None), experts)
        routing = self._statistics(scores, experts, not_padding)
        if record:
            k = choice.shape[-1]
            margin = best[..., k - 1]
            if k < config.num_experts:
                margin -= best[..., k]
            if group_margin is not None:
                margin = jnp.minimum(margin, group_margin)
            routing = replace(routing, experts=choice, margin=margin)
        experts = jnp.where(not_padding[..., None], experts, config.num_experts)
        return experts, gates, routing

    def project(self, x: Array, name: str) -> Array:
        """Multiplies tokens with the kernel `[D, n]` of this name, in float32."""
        kernel = self._load(name, 0)
        x32 = x.astype(jnp.float32)
        return jnp.einsum("btd,de->bte", x32, kernel, precision=jax.lax.Precision.HIGHEST)

    def _load(self, name: str, storage_dim: int | None) -> Array:
        in_float32 = replace(self.precision, compute="float32")
        return in_float32.load(self.weights[name], storage_dim, used_by_all_tp=self.is_split)

    def _scores(self, x: Array) -> Scores:
        logits = self.project(x, "router")
        if self.config.router_bias:
            logits += self._load("router_bias", None)
        if self.config.router_scores == "softmax":
            probabilities = jax.nn.softmax(logits)
            return Scores(logits, logits, probabilities, probabilities)
        log_scores = jax.nn.log_sigmoid(logits)
        probabilities = jax.nn.softmax(log_scores)
        return Scores(logits, log_scores, probabilities, jax.nn.sigmoid(logits))

    def _choose(self, scores: Array, *, record: bool) -> tuple[Array, Array, Array | None]:
        """Returns the chosen experts `[b, t, k]`, the best scores, and the margin of groups.

        A recorded choice also has the score of the next expert, if any, `[b, t, k + 1]`.
        """
        k = self.config.experts_per_token
        candidates = jax.lax.stop_gradient(scores)
        if self.config.selection_bias:
            candidates = candidates + self.weights["selection_bias"]
        candidates, group_margin = self._in_best_groups(candidates)
        num_best = min(k + record, self.config.num_experts)
        best, choice = jax.lax.top_k(candidates, num_best)
        # Saved under every remat policy: recomputed scores could round differently and choose other
        # experts.
        return checkpoint_name(choice[..., :k], KEPT), best, group_margin

    def _in_best_groups(self, scores: Array) -> tuple[Array, Array | None]:
        """Returns scores `[b, t, E]`, -inf outside of each token's groups, and a margin `[b, t]`.

        The margin is the lead of the lowest chosen group over the next one; it is None if every
        group is chosen.
        """
        groups = self.config.expert_groups
        count = self.config.groups_per_token
        if count >= groups:
            return scores, None
        by_group = scores.reshape(*scores.shape[:2], groups, -1)  # [b, t, groups, E / groups]
        summands = 2 if self.config.group_score == "top2" else 1
        best_scores, _ = jax.lax.top_k(by_group, min(summands, by_group.shape[-1]))
        group_scores = jnp.sum(best_scores, axis=-1)
        best, order = jax.lax.top_k(group_scores, count + 1)  # [b, t, count + 1]
        chosen = jax.nn.one_hot(order[..., :count], groups, dtype=bool)
        is_chosen = jnp.any(chosen, axis=-2)
        limited = jnp.where(is_chosen[..., None], by_group, -jnp.inf)
        limited = limited.reshape(scores.shape)
        margin = best[..., count - 1] - best[..., count]
        return limited, margin

    def _gates(self, scores: Scores, experts: Array) -> Array:
        config = self.config
        take = partial(jnp.take_along_axis, indices=experts, axis=-1)
        if config.normalize_experts:
            # Scores over their sum are a softmax of their logarithms, so the gradient of the other
            # logits is exactly zero. Rounding noise there would become full steps in Adafactor,
            # different on each mesh.
            gates = jax.nn.softmax(take(scores.log_scores))
            if config.normalize_floor:
                total = jnp.sum(take(scores.scores), axis=-1, keepdims=True)
                gates *= jnp.minimum(total / config.normalize_floor, 1)
        else:
            gates = take(scores.scores)
        if config.experts_scale != 1:
            gates *= config.experts_scale
        return gates

    def _statistics(self, scores: Scores, experts: Array, not_padding: Array) -> Routing:
        """Returns sums over the tokens of each sequence, without the number of computed rows."""
        normaliser = jax.nn.logsumexp(scores.logits, axis=-1)
        log_total = normaliser
        if self.config.router_scores == "sigmoid":
            log_total = jax.nn.logsumexp(scores.log_scores, axis=-1)
        log_probabilities = scores.log_scores - log_total[..., None]
        valid = not_padding.astype(jnp.float32)
        choices = jax.nn.one_hot(experts, self.config.num_experts).sum(2)  # [b, t, E]
        times_chosen = jnp.sum(choices * valid[..., None], axis=1)
        probabilities = jnp.sum(scores.probabilities * valid[..., None], axis=1)
        squared_normaliser = jnp.sum(jnp.square(normaliser) * valid, axis=1)
        entropies = -jnp.sum(scores.probabilities * log_probabilities, axis=-1)  # [b, t]
        entropy = jax.lax.stop_gradient(jnp.sum(entropies * valid, axis=1))
        sums = [times_chosen, probabilities, squared_normaliser, entropy]
        if not self.is_split:  # every device of a tp group has the same tokens
            sums = [on_first_device(x) for x in sums]
        # `computed` is set after the experts' products.
        return Routing(*(x[:, None] for x in sums), computed=valid)  # type: ignore[misc]
