"""AdamW with an exponential moving average of the weights, which often predicts better.

    python scripts/examples/ema.py --mesh fsdp=2,tp=4
    jaxtp convert export runs/ema models/averaged --ema

The average takes the memory of one more copy of the parameters, is sharded like them, and is part
of the checkpoints. It is the last transformation of its chain, which sees the whole update.
"""

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxtp


def weight_average(decay: float = 0.999) -> optax.GradientTransformation:
    """Passes updates on, and averages the weights that they lead to."""
    average = optax.ema(decay, debias=False, accumulator_dtype=jnp.float32)

    def init(params: optax.Params) -> optax.EmaState:
        # From the initial weights on, and not from zero, so that nothing has to be debiased.
        weights = jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
        return average.init(params)._replace(ema=weights)

    def update(
        updates: optax.Updates, state: optax.EmaState, params: optax.Params
    ) -> tuple[optax.Updates, optax.EmaState]:
        _, state = average.update(optax.apply_updates(params, updates), state)
        return updates, state

    return optax.GradientTransformation(init, update)


def optimizer(steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10 + 1, steps + 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1),
        weight_average(decay=0.99),
    )


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/ema") -> None:
    with jaxtp.Trainer(optimizer=optimizer, mesh=mesh, steps=steps, folder=folder) as trainer:
        trainer.run_to_end()


if __name__ == "__main__":
    tyro.cli(main)
