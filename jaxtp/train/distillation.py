"""A loss that draws a model towards the most probable tokens of a teacher.

`jaxtp score --top-k` has stored these.

At each position the teacher's k tokens keep their probabilities, and all others are one more token,
for both models (the ghost token of Megatron-LM, the tail bucket of TRL). So the divergence is 0
only if the student gives the k tokens the teacher's probabilities. It is at most the divergence
over the whole vocabulary, and equals it if k is all of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from jaxtp.config.schema import Count, Positive, allowed, check_fields
from jaxtp.data.rows import IGNORE, SEGMENTS
from jaxtp.data.scores import TOP_IDS, TOP_LOG_PROBS
from jaxtp.models.decoder import Decoder
from jaxtp.models.log_probs import hidden_log_probs
from jaxtp.train.config import TrainConfig
from jaxtp.train.user_loss import Example

LEAST = 1e-6
"""Probability below which float32 cannot tell all other tokens from rounding: their logarithm is
linear there."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """A loss that makes a model predict a teacher's probabilities.

    They are read from scores (`data.scores`).

    Metrics are means over positions with a label: `kl`; `teacher_mass`, the teacher's probability
    of the k tokens; and `cross_entropy`, unless its weight is 0 and the temperature is not 1, where
    it would cost another product with the head.
    """

    direction: Literal["forward", "reverse"] = "forward"
    """forward is KL(teacher || student), reverse KL(student || teacher)."""

    temperature: Positive = 1.0
    """Divides the student's logits, as `jaxtp score --temperature` divided the teacher's; its
    square multiplies the divergence (arXiv 1503.02531)."""

    cross_entropy: Annotated[float, Field(ge=0, le=1), allowed("from 0 to 1")] = 0.0
    """Weight of the cross-entropy of the labels, at temperature 1; the divergence has the rest."""

    top_k: Count = 64
    """Tokens of a position where no data are read, as in `jaxtp estimate`; scores know their
    own."""

    columns: ClassVar[tuple[str, ...]] = ("inputs", "labels", TOP_IDS, TOP_LOG_PROBS)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def scores_temperature(self) -> float:
        """Temperature that scores need to have; `open_data` checks it."""
        return self.temperature

    def __call__(
        self, model: Decoder, batch: Mapping[str, Array], key: Array
    ) -> tuple[Array, Array, Mapping[str, Array]]:
        """Returns sums over the positions with a label, and their number."""
        sequences = model.sequences(batch["inputs"], batch.get(SEGMENTS))
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
        p = with_rest(teacher_BTK)
        q = with_rest(student_BTK)
        p, q = (p, q) if self.direction == "forward" else (q, p)
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

        The latter are None unless they are needed or free.
        """
        if self.temperature == 1:
            both_BTL = log_probs(jnp.concatenate([ids_BTK, labels_BT[..., None]], axis=-1))
            return both_BTL[..., :-1], both_BTL[..., -1]
        return log_probs(ids_BTK, self.temperature), log_probs(
            labels_BT
        ) if self.cross_entropy else None

    def example_batch(self, rows: int, length: int, config: TrainConfig) -> dict[str, Example]:
        """Returns the shapes of a batch's tokens, and scores that halve from token to token."""
        k = min(self.top_k, config.model.vocab_size)
        places = np.arange(rows * length, dtype=np.int32)
        offsets = np.arange(k, dtype=np.int32)
        ids = ((places[:, None] + offsets) % config.model.vocab_size).reshape(rows, length, k)
        log_probs = np.broadcast_to(np.float32(math.log(0.5)) * np.float32(offsets + 1), ids.shape)
        names = ("inputs", "labels", *((SEGMENTS,) if config.data.packed else ()))
        tokens: dict[str, Example] = {
            name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in names
        }
        return tokens | {TOP_IDS: ids, TOP_LOG_PROBS: log_probs}


def with_rest(log_probs_BTK: Array) -> Array:
    """Returns log-probabilities with one more, of all other tokens together."""
    rest = 1 - jnp.sum(jnp.exp(log_probs_BTK), axis=-1, keepdims=True)
    # The continuation has a gradient, so that a student does not stay there.
    below = math.log(LEAST) + rest / LEAST - 1
    log_rest = jnp.where(rest > LEAST, jnp.log(jnp.maximum(rest, LEAST)), below)
    return jnp.concatenate([log_probs_BTK, log_rest], axis=-1)
