"""A loss that trains a model to predict the most probable tokens of a teacher.

`jaxtp score --top-k` stores the teacher's tokens and their probabilities.

At each position the teacher's k tokens keep their probabilities, and for both models all other
tokens together are one more token (the ghost token of Megatron-LM, the tail bucket of TRL). So the
divergence is 0 only if the student gives the k tokens the teacher's probabilities. It is at most
the divergence over the whole vocabulary, and equal to it if the k tokens are the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxtp.config.schema import Count, Positive, Settings, Share
from jaxtp.data.rows import IGNORE, SEGMENTS
from jaxtp.data.scores import TOP_IDS, TOP_LOG_PROBS
from jaxtp.models.decoder import Decoder
from jaxtp.models.log_probs import hidden_log_probs
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss import Example, NextToken

MIN_PROBABILITY = 1e-6
"""If all other tokens together have a lower probability, float32 cannot distinguish it from
rounding errors, so the logarithm is continued linearly."""


@dataclass(frozen=True, kw_only=True)
class Distillation(Settings):
    """A loss that makes a model predict a teacher's probabilities, read from `data.scores`.

    Metrics are means over positions with a label: `kl`; `teacher_mass`, the teacher's probability
    of the k tokens; and `cross_entropy`. The latter is left out if its weight is 0 and the
    temperature is not 1, because it would take another product with the head.
    """

    direction: Literal["forward", "reverse"] = "forward"
    """Direction of the divergence: forward is KL(teacher || student), reverse is KL(student ||
    teacher)."""

    temperature: Positive = 1.0
    """Divides the student's logits, as `jaxtp score --temperature` divided the teacher's; its
    square multiplies the divergence (arXiv 1503.02531)."""

    cross_entropy: Share = 0.0
    """Weight w of the cross-entropy of the labels, at temperature 1; the divergence has the weight
    1 - w."""

    top_k: Count = 64
    """Number of tokens at a position, used only if no data is read, as in `jaxtp estimate`."""

    columns: ClassVar[tuple[str, ...]] = ("inputs", "labels", TOP_IDS, TOP_LOG_PROBS)

    @property
    def scores_temperature(self) -> float:
        """The temperature that scores must have; `open_data` checks it."""
        return self.temperature

    def __call__(
        self, model: Decoder, batch: Mapping[str, Array], key: Array
    ) -> tuple[Array, Array, Mapping[str, Array]]:
        """Returns sums over the positions with a label, and their number."""
        sequences = model.sequences(batch["inputs"], segments=batch.get(SEGMENTS))
        hidden_BTD = model.hidden(batch["inputs"], sequences=sequences)
        labels_BT, ids_BTK, teacher_BTK = (
            sequences.local_tokens(batch[name]) for name in self.columns[1:]
        )
        is_label_BT = labels_BT != IGNORE
        ids_BTK = jnp.where(is_label_BT[..., None], ids_BTK, IGNORE)

        def total(x_BT: Array) -> Array:
            return jnp.sum(x_BT, where=is_label_BT, dtype=jnp.float32)

        def log_probs(labels: Array, temperature: float = 1.0) -> Array:
            return jnp.asarray(hidden_log_probs(model, hidden_BTD, labels, temperature=temperature))

        student_BTK, label_BT = self._student(log_probs, ids_BTK, labels_BT)
        p = with_other_tokens(teacher_BTK)
        q = with_other_tokens(student_BTK)
        if self.direction == "reverse":
            p, q = q, p
        metrics = {
            "kl": total(jnp.sum(jnp.exp(p) * (p - q), axis=-1)),
            "teacher_mass": total(jnp.sum(jnp.exp(teacher_BTK), axis=-1)),
        }
        loss = (1 - self.cross_entropy) * self.temperature**2 * metrics["kl"]
        if label_BT is not None:
            metrics["cross_entropy"] = -total(label_BT)
            loss += self.cross_entropy * metrics["cross_entropy"]
        return loss, total(is_label_BT), metrics

    def _student(
        self, log_probs: Callable[..., Array], ids_BTK: Array, labels_BT: Array
    ) -> tuple[Array, Array | None]:
        """Returns log-probabilities of the ids, and of the labels at temperature 1.

        The log-probabilities of the labels are None if they are not needed and would take time.
        """
        if self.temperature == 1:
            all_BTL = log_probs(jnp.concatenate([ids_BTK, labels_BT[..., None]], axis=-1))
            return all_BTL[..., :-1], all_BTL[..., -1]
        student_BTK = log_probs(ids_BTK, self.temperature)
        return student_BTK, log_probs(labels_BT) if self.cross_entropy else None

    def example_batch(self, rows: int, length: int, config: TrainConfig) -> dict[str, Example]:
        """Returns the shapes of a batch's tokens, and scores that halve from token to token."""
        k = min(self.top_k, config.model.vocab_size)
        places = np.arange(rows * length, dtype=np.int32)
        offsets = np.arange(k, dtype=np.int32)
        ids = ((places[:, None] + offsets) % config.model.vocab_size).reshape(rows, length, k)
        log_probs = np.broadcast_to(np.float32(math.log(0.5)) * np.float32(offsets + 1), ids.shape)
        tokens = NextToken.example_batch(rows, length, config)
        return tokens | {TOP_IDS: ids, TOP_LOG_PROBS: log_probs}


def with_other_tokens(log_probs_BTK: Array) -> Array:
    """Appends the log-probability of all other tokens together."""
    probability = 1 - jnp.sum(jnp.exp(log_probs_BTK), axis=-1, keepdims=True)
    # The linear continuation has a gradient, so a student does not stay there.
    below = math.log(MIN_PROBABILITY) + probability / MIN_PROBABILITY - 1
    log = jnp.log(jnp.maximum(probability, MIN_PROBABILITY))
    log_probability = jnp.where(probability > MIN_PROBABILITY, log, below)
    return jnp.concatenate([log_probs_BTK, log_probability], axis=-1)
