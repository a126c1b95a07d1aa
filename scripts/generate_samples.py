"""Compares reading a prompt once for all its samples with reading as many different prompts.

    python scripts/generate_samples.py | tee scripts/results/generate_samples.txt

Both have the same programs and rows and take turns. The model is a decoder with random weights.
Seconds are medians of `--repeats` calls for one token of each text, after one that compiles; FLOPs
are 2 for each parameter of the layers and each token read.
"""

import argparse
import os
import statistics
import time

import jax
import numpy as np
from flax import nnx

import jaxtp

CONFIG = jaxtp.ModelConfig(
    vocab_size=256,
    d_model=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    d_ff=2048,
    remat="none",
)
CASES = {"8 samples": (1, 8), "4 samples of 2": (2, 4)}
"""Prompts, and samples of each."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt (default 512)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    model = nnx.jit(lambda: jaxtp.Decoder(CONFIG, rngs=nnx.Rngs(0)))()
    layers = (
        sum(array.size for array in jax.tree.leaves(nnx.state(model)))
        - CONFIG.vocab_size * CONFIG.d_model
    )
    generator = jaxtp.generate.Generator(model, jaxtp.generate.ByteTokenizer(), end_ids=frozenset())
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores; prompts of {arguments.length} "
        "tokens, 8 rows"
    )
    compare(generator, arguments.repeats, arguments.length, layers)


def compare(generator: jaxtp.generate.Generator, repeats: int, length: int, layers: int) -> None:
    random = np.random.default_rng(0)
    print(f"{'':<24}{'sharing':>10}{'tokens read':>13}{'GFLOP':>8}{'seconds':>9}")
    for case, (prompts, samples) in CASES.items():
        ids = random.integers(3, 256, (prompts * samples, length)).tolist()
        ways = {"yes": (ids[:prompts], samples), "no": (ids, 1)}
        seconds: dict[str, list[float]] = {"yes": [], "no": []}
        read = {}
        for _ in range(repeats + 1):
            for name, (given, count) in ways.items():
                settings = jaxtp.generate.Settings(max_tokens=1, samples=count, temperature=1.0)
                started = time.perf_counter()
                generator.generate(given, settings)
                seconds[name].append(time.perf_counter() - started)
                read[name] = generator.speed.timing.prefill_tokens
        for name, times in seconds.items():
            flops = 2 * layers * read[name] / 1e9
            print(
                f"{case:<24}{name:>10}{read[name]:>13,}{flops:>8.0f}{statistics.median(times[1:]):>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
