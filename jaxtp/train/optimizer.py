"""The optimizer of a run, from Optax."""

from typing import Any

import jax
import optax

from jaxtp.train.config import OptimizerConfig

_VECTORS = {"scale", "bias", "biases"}


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from zero, then cosine decay until the last of `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    adamw = optax.adamw(
        learning_rate(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decayed(params: Any) -> Any:
    """Which parameters decay: matrices, not norm scales and biases.

    Told by name, because the stacking of layers gives every vector a second dim.
    """

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return not any(getattr(key, "key", None) in _VECTORS for key in path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)
