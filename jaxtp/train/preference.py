"""DPO and SimPO on pairs of a chosen and a rejected answer, as in TRL 1.16.

The column `pairs` assigns tokens to answers, so an answer may be anywhere in its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray
from pydantic import Field

from jaxtp.config.entry import UserError
from jaxtp.config.schema import ConfigError, NonNegative, Positive, Settings
from jaxtp.data.rows import IGNORE, PAIRS, SEGMENTS
from jaxtp.data.scores import LOG_PROBS
from jaxtp.layers.lora import without_adapters
from jaxtp.models.decoder import Decoder
from jaxtp.models.log_probs import token_log_probs
from jaxtp.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DPO(Settings):
    """A loss that makes chosen answers more likely, and rejected ones less (arXiv 2305.18290).

    Likelihoods are relative to a reference: the model without its adapters, or the scores of
    `jaxtp score` (`data.scores`). The step divides by the number of pairs; a pair counts only if
    both answers have labels.
    """

    beta: Positive = 0.1
    """Strength of the reference: a reward is beta times the log-ratio of model and reference."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of the margin between rewards; ipo (arXiv 2310.12036) moves the margin of log-ratios per
    token towards 1 / (2 beta)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that the answers of a pair are swapped (conservative DPO); only for sigmoid."""

    length_normalized: bool = False
    """Take log-ratios per token (`sigmoid_norm` of TRL); ipo always does."""

    sft_weight: NonNegative = 0.0
    """Weight of the cross-entropy of chosen answers (RPO, arXiv 2404.19733), a mean over the tokens
    of a micro-batch."""

    columns: ClassVar[tuple[str, ...]] = ("inputs", "labels", PAIRS)
    scores_temperature: ClassVar[float] = 1.0
    # Whether it needs log-probabilities of the initial model, or adapters
    reads_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"DPO: label_smoothing={self.label_smoothing} is for loss='sigmoid', not "
                f"{self.loss!r}"
            )

    def __call__(
        self, model: Decoder, batch: Mapping[str, Array], key: Array
    ) -> tuple[Array, Array, dict[str, tuple[Array, Array]]]:
        """Returns the sum over pairs, their number, and TRL's metrics."""
        log_probs = partial(_log_probs, batch=batch)
        if LOG_PROBS in batch:
            reference_BT = batch[LOG_PROBS]
        elif jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
            reference_BT = jax.lax.stop_gradient(log_probs(without_adapters(model)))
        else:
            raise ConfigError(
                f"DPO needs a reference: a column {LOG_PROBS}, as `jaxtp score` makes it for "
                "data.scores, or adapters (--model.lora.rank 16); the model without them is then "
                "the reference"
            )
        (policy, reference, tokens), valid = _sums(batch, log_probs(model), reference_BT)
        total = partial(jnp.sum, where=valid)
        log_ratios = policy - reference
        loss = total(self._losses(log_ratios, tokens))
        count = jnp.sum(valid)
        if self.sft_weight:
            loss -= self.sft_weight * count * total(policy[0]) / jnp.maximum(total(tokens[0]), 1)
        metrics = {
            **_reward_metrics(self.beta * jax.lax.stop_gradient(log_ratios)),
            "logps/chosen": policy[0],
            "logps/rejected": policy[1],
        }
        return loss, count, {name: (total(values), count) for name, values in metrics.items()}

    def _losses(self, log_ratios: Array, tokens: Array) -> Array:
        if self.length_normalized or self.loss == "ipo":
            log_ratios = log_ratios / jnp.maximum(tokens, 1)
        difference = log_ratios[0] - log_ratios[1]
        if self.loss == "ipo":
            return jnp.square(difference - 1 / (2 * self.beta))
        margin = self.beta * difference
        if self.loss == "hinge":
            return jax.nn.relu(1 - margin)
        chosen = jax.nn.log_sigmoid(margin)
        rejected = jax.nn.log_sigmoid(-margin)
        return -(1 - self.label_smoothing) * chosen - self.label_smoothing * rejected

    def example_batch(
        self, rows: int, length: int, config: TrainConfig
    ) -> dict[str, NDArray[np.generic]]:
        """Returns random rows of two pairs."""
        batch = _example_pairs(rows, length, config)
        if config.model.lora.rank and config.data.scores is None:
            return batch
        random = np.random.default_rng(1)
        return batch | {LOG_PROBS: -random.exponential(size=(rows, length)).astype(np.float32)}


@dataclass(frozen=True, kw_only=True)
class SimPO(Settings):
    """A loss of pairs without a reference (arXiv 2405.14734).

    A reward is beta times the mean log-probability of an answer's tokens. The step divides by the
    number of pairs; a pair counts only if both answers have labels.
    """

    beta: Positive = 2.0
    """Factor of the mean log-probabilities."""

    gamma: NonNegative = 1.0
    """The difference of rewards at which the loss is log 2: the target margin of the paper."""

    columns: ClassVar[tuple[str, ...]] = DPO.columns

    def __call__(
        self, model: Decoder, batch: Mapping[str, Array], key: Array
    ) -> tuple[Array, Array, dict[str, tuple[Array, Array]]]:
        """Returns the sum over pairs, their number, and TRL's metrics."""
        (policy, tokens), valid = _sums(batch, _log_probs(model, batch))
        total = partial(jnp.sum, where=valid)
        rewards = self.beta * policy / jnp.maximum(tokens, 1)
        loss = total(-jax.nn.log_sigmoid(rewards[0] - rewards[1] - self.gamma))
        count = jnp.sum(valid)
        metrics = _reward_metrics(rewards)
        return loss, count, {name: (total(values), count) for name, values in metrics.items()}

    def example_batch(
        self, rows: int, length: int, config: TrainConfig
    ) -> dict[str, NDArray[np.generic]]:
        """Returns random rows of two pairs."""
        return _example_pairs(rows, length, config)


def _log_probs(model: Decoder, batch: Mapping[str, Array]) -> Array:
    """Returns the log-probability of each label, `[B, T]`."""
    pairs_BT = batch[PAIRS]
    labels_BT = batch["labels"]
    if pairs_BT.shape != labels_BT.shape:
        raise ConfigError(
            f"{PAIRS} is {list(pairs_BT.shape)}, and labels is {list(labels_BT.shape)}"
        )
    segments_BT = batch.get(SEGMENTS, 2 * jnp.abs(pairs_BT) - (pairs_BT > 0))
    log_probs = token_log_probs(model, batch["inputs"], labels_BT, segments=segments_BT)
    return jnp.asarray(log_probs)


def _sums(batch: Mapping[str, Array], *terms_BT: Array) -> tuple[Array, Array]:
    """Returns sums over the tokens of answers, and which pairs have labels in both answers.

    The sums are of each term, and the number of labels, `[terms + 1, 2 answers, B, pairs of a
    row]`.
    """
    is_label_BT = batch["labels"] != IGNORE
    terms = jnp.stack([*terms_BT, is_label_BT], axis=-1)
    sums = [_by_answer(terms, jnp.where(is_label_BT, sign * batch[PAIRS], 0)) for sign in (1, -1)]
    by_term = jnp.moveaxis(jnp.stack(sums), -1, 0)
    tokens = by_term[-1]
    valid = jnp.all(tokens > 0, axis=0)
    _check(jnp.sum(tokens * valid, axis=(0, 2)), jnp.sum(is_label_BT, axis=1))
    return by_term, valid


def _reward_metrics(rewards: Array) -> dict[str, Array]:
    """Returns TRL's metrics of rewards `[2 answers, B, pairs of a row]`, for each pair."""
    chosen, rejected = rewards
    return {
        "rewards/accuracies": chosen > rejected,
        "rewards/margins": chosen - rejected,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
    }


def _example_pairs(rows: int, length: int, config: TrainConfig) -> dict[str, NDArray[np.generic]]:
    random = np.random.default_rng(0)
    inputs, labels = random.integers(0, config.model.vocab_size, (2, rows, length), np.int32)
    answer = np.minimum(np.arange(length) // max(length // 4, 1), 4)
    pairs = np.tile(np.array([1, -1, 2, -2, 0], np.int32)[answer], (rows, 1))
    return {"inputs": inputs, "labels": np.where(pairs, labels, IGNORE), PAIRS: pairs}


def _by_answer(terms: Array, numbers_BT: Array) -> Array:
    """Returns sums `[B, pairs, ...]` over the tokens of answers 1, 2, ... of each row."""
    max_pairs = terms.shape[1] // 2
    # The function segment_sum drops indices beyond the last.
    indices_BT = jnp.where(numbers_BT > 0, numbers_BT - 1, max_pairs)
    return jax.vmap(partial(jax.ops.segment_sum, num_segments=max_pairs))(terms, indices_BT)


def _check(paired_B: Array, labels_B: Array) -> None:
    """Raises `UserError` if rows outside of a jit have labels outside of whole pairs."""
    if isinstance(paired_B, jax.core.Tracer):
        return
    for row in np.flatnonzero(paired_B != labels_B):
        raise UserError(
            f"row {row}: {labels_B[row] - paired_B[row]:g} of {labels_B[row]} labels are in no "
            f"pair; `{PAIRS}` must be 1 for the tokens of the first chosen answer, -1 for the "
            "first rejected answer, 2 and -2 for the next pair, and so on"
        )
