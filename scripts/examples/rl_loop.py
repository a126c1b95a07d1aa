"""A policy gradient: an engine samples texts, a function rewards them, and a step learns from them.

    python scripts/examples/rl_loop.py --mesh fsdp=2,tp=2

The reward of a text is its share of digits. A sample's advantage is its reward minus the mean of
its prompt's samples, as in GRPO (arXiv 2402.03300). An engine beside the trainer, such as vLLM,
reads `jaxtp.hf.stream_weights(model)`.
"""

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jax import Array

import jaxtp

CONFIG = jaxtp.ModelConfig(
    vocab_size=256, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128
)
PROMPTS = ("one ", "two ", "six ", "ten ")
SAMPLES = 16
TOKENS = 12
DIGITS = frozenset(b"0123456789")


def reward(ids: tuple[int, ...]) -> float:
    return sum(each in DIGITS for each in ids) / TOKENS


def loss(model: jaxtp.Decoder, inputs: Array, labels: Array, advantages: Array) -> Array:
    log_probs = jaxtp.losses.token_log_probs(model, inputs, labels)
    return -(advantages[:, None] * log_probs).sum() / len(labels)


@nnx.jit
def update(
    model: jaxtp.Decoder, optimizer: nnx.Optimizer, inputs: Array, labels: Array, advantages: Array
) -> None:
    optimizer.update(model, nnx.grad(loss)(model, inputs, labels, advantages))


def main(mesh: str = "fsdp=2,tp=2", steps: int = 20) -> list[float]:
    """Returns the mean reward of each step."""
    means = []
    count = len(PROMPTS) * SAMPLES
    sizes = {axis: int(size) for axis, size in (each.split("=") for each in mesh.split(","))}
    with jax.set_mesh(jaxtp.make_mesh(**sizes)):
        model = nnx.jit(lambda: jaxtp.Decoder(CONFIG, rngs=nnx.Rngs(0)))()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        generator = jaxtp.generate.Generator(
            model, jaxtp.generate.ByteTokenizer(), batch_size=count
        )
        for step in range(steps):
            settings = jaxtp.generate.Settings(
                max_tokens=TOKENS, samples=SAMPLES, temperature=1.0, seed=step * count
            )
            found = generator.generate(PROMPTS, settings)
            texts = [each.ids for each in found]
            rewards = np.array([reward(ids) for ids in texts], np.float32).reshape(
                len(PROMPTS), SAMPLES
            )
            rows = np.array(
                [[*PROMPTS[each.index].encode(), *each.ids] for each in found], np.int32
            )
            labels = np.where(np.arange(1, rows.shape[1]) < len(PROMPTS[0]), -100, rows[:, 1:])
            update(
                model,
                optimizer,
                rows[:, :-1],
                labels,
                (rewards - rewards.mean(1, keepdims=True)).ravel(),
            )
            generator.update(model)
            means.append(float(rewards.mean()))
            if step % 5 == 0 or step == steps - 1:
                print(f"step {step}  mean reward {means[-1]:.3f}  {bytes(texts[0])!r}")
    return means


if __name__ == "__main__":
    tyro.cli(main)
