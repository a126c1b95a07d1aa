"""Tokens per second with a cache, beside reading everything again for each token; both in one run.

    python scripts/generate_speed.py

A decoder with random weights on virtual CPU devices, prompts of one length, greedy. Without the cache the whole text,
padded to its final length so that one program does for all, is read for every token, by the model as it is trained.
Medians of `--repeats`, each of both ways in turn.
"""

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtp
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.mesh import describe_mesh, mesh_sizes
from jaxtp.models.decoder import abstract_decoder

MESHES = [{}, {"tp": 2}, {"fsdp": 2, "tp": 2}]


def build(mesh: jax.sharding.Mesh) -> jaxtp.Decoder:
    """A decoder of 13 million parameters, four query heads to each kv head."""
    config = jaxtp.ModelConfig(
        vocab_size=256, d_model=384, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=48, d_ff=1024, remat="none"
    )
    with jax.set_mesh(mesh):
        graph, _ = abstract_decoder(config)
        return nnx.merge(graph, jax.jit(lambda: nnx.state(jaxtp.Decoder(config, rngs=nnx.Rngs(0))))())


class Uncached:
    """Greedy decoding that reads everything again for each token."""

    def __init__(self, model: jaxtp.Decoder):
        graph, self._state = nnx.split(model)

        def step(state: nnx.State, ids: jax.Array, length: jax.Array) -> jax.Array:
            model = nnx.merge(graph, state)
            last = jax.lax.dynamic_slice_in_dim(model.hidden(ids), length - 1, 1, axis=1)
            chosen = jnp.argmax(model.logits_of_hidden(last)[:, 0], axis=-1).astype(ids.dtype)
            return jax.lax.dynamic_update_slice_in_dim(ids, chosen[:, None], length, axis=1)

        self._step = jax.jit(step)

    def __call__(self, prompts: np.ndarray, tokens: int) -> np.ndarray:
        """The likeliest tokens `[B, tokens]` after prompts `[B, T]`."""
        ids = np.pad(prompts, ((0, 0), (0, tokens)))
        for length in range(prompts.shape[1], ids.shape[1]):
            # Many programs under way at a time make virtual CPU devices hang (jax 0.10.2).
            ids = self._step(self._state, ids, length).block_until_ready()
        return np.asarray(ids)[:, -tokens:]


def measure(mesh: jax.sharding.Mesh, rows: int, prompt: int, tokens: int, repeats: int) -> dict[str, float]:
    """Median tokens per second of each way."""
    model = build(mesh)
    generator, plainly = jaxtp.Generator(model, ByteTokenizer(), batch_size=rows), Uncached(model)
    prompts = np.random.default_rng(0).integers(0, 256, (rows, prompt), np.int32)
    settings = jaxtp.GenerationSettings(max_tokens=tokens)
    found: dict[str, list[float]] = {"prefill": [], "cached": [], "uncached": []}
    with jax.set_mesh(mesh):
        for _ in range(repeats + 1):
            results = generator.generate(prompts.tolist(), settings)
            speed = generator.speed
            started = time.perf_counter()
            again = plainly(prompts, tokens)
            found["uncached"].append(rows * tokens / (time.perf_counter() - started))
            found["cached"].append(speed.decode_tokens / speed.decode_seconds)
            found["prefill"].append(speed.prefill_tokens / speed.prefill_seconds)
            assert [list(result.ids) for result in results] == again.tolist(), "the same tokens, either way"
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}  # the first one compiles


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="prompts in the batch")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 192], help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="made for each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    meshes = [jaxtp.make_mesh(**sizes) for sizes in reversed(MESHES)][::-1]  # the largest first, for its devices
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores, {arguments.rows} prompts, {arguments.tokens} tokens for each"
    )
    print(f"{'mesh':<22}{'prompt':>8}{'prefill':>10}{'cached':>10}{'uncached':>10}{'ratio':>8}  (tokens/s)")
    for mesh in meshes:
        for prompt in arguments.prompts:
            found = measure(mesh, arguments.rows, prompt, arguments.tokens, arguments.repeats)
            rates = "".join(f"{rate:>10,.0f}" for rate in found.values())
            ratio = found["cached"] / found["uncached"]
            print(f"{describe_mesh(mesh_sizes(mesh)):<22}{prompt:>8}{rates}{ratio:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
