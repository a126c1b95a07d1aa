"""Compares reading a prompt once for all its samples with reading it for each; measures proposals.

    python scripts/generate_samples.py | tee scripts/results/generate_samples.txt

Both methods have the same programs and rows and take turns; without sharing each row reads its
prompt. The model is a decoder with random weights. Seconds are medians of `--repeats` calls for one
token of each text, after one that compiles; FLOPs are 2 for each parameter of the layers and each
token read. If the texts differ, the script fails.

Generation with and without proposals (`GenerationSettings.speculate`) takes turns in the same way,
for texts of 256 tokens. Greedy texts of random weights soon repeat, which shows the maximum gain of
proposals; at temperature 1 no text repeats, which shows their maximum cost.
"""

import argparse
import dataclasses
import os
import statistics
import time

import jax
import numpy as np
from flax import nnx

import jaxtp
from jaxtp.generate import engine

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
CASES = {"8 samples": (1, 8, 0), "4 samples of 2": (2, 4, 0), "8 prompts, half shared": (8, 1, 256)}
"""Prompts, samples of each, and tokens with which all prompts begin."""
SPECULATIVE = {"1 text, greedy": (1, 0.0), "8 texts, greedy": (8, 0.0), "1 text, sampled": (1, 1.0)}
"""Prompts, and temperature."""
SHARED = engine.Scheduler._find_shared


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt (default 512)")
    parser.add_argument(
        "--tokens", type=int, default=16, help="tokens of each text that are compared (default 16)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    model = nnx.jit(lambda: jaxtp.Decoder(CONFIG, rngs=nnx.Rngs(0)))()
    layers = (
        sum(array.size for array in jax.tree.leaves(nnx.state(model)))
        - CONFIG.vocab_size * CONFIG.d_model
    )
    generator = jaxtp.Generator(model, jaxtp.ByteTokenizer(), end_ids=frozenset())
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores; prompts of {arguments.length} "
        "tokens, 8 rows"
    )
    compare_sharing(generator, arguments, layers)
    compare_proposals(generator, arguments)


def compare_sharing(generator: jaxtp.Generator, arguments: argparse.Namespace, layers: int) -> None:
    rng = np.random.default_rng(0)
    print(f"{'':<24}{'sharing':>10}{'tokens read':>13}{'GFLOP':>8}{'seconds':>9}")
    for case, (prompts, samples, same) in CASES.items():
        ids = rng.integers(3, 256, (prompts, arguments.length))
        ids[:, :same] = ids[0, :same]
        settings = jaxtp.GenerationSettings(
            max_tokens=arguments.tokens, samples=samples, temperature=1.0
        )
        texts = {}
        read = {}
        seconds: dict[str, list[float]] = {"yes": [], "no": []}
        for turn in range(arguments.repeats + 1):
            for name, times in seconds.items():
                engine.Scheduler._find_shared = (
                    SHARED if name == "yes" else (lambda self, row, request: (row, 0))
                )
                if turn == 0:
                    texts[name] = [each.ids for each in generator.generate(ids.tolist(), settings)]
                started = time.perf_counter()
                generator.generate(ids.tolist(), dataclasses.replace(settings, max_tokens=1))
                times.append(time.perf_counter() - started)
                read[name] = generator.speed.timing.prefill_tokens
        assert texts["yes"] == texts["no"]
        for name, times in seconds.items():
            flops = 2 * layers * read[name] / 1e9
            print(
                f"{case:<24}{name:>10}{read[name]:>13,}{flops:>8.0f}{statistics.median(times[1:]):>9.2f}",
                flush=True,
            )


def compare_proposals(generator: jaxtp.Generator, arguments: argparse.Namespace) -> None:
    prompts = np.random.default_rng(0).integers(3, 256, (8, 16)).tolist()
    print(f"{'':<24}{'proposals':>10}{'accepted':>13}{'tokens/s':>9}")
    for case, (count, temperature) in SPECULATIVE.items():
        rates: dict[int, list[float]] = {0: [], 2: [], 4: [], 8: []}
        texts = {}
        accepted = {}
        for _ in range(arguments.repeats + 1):
            for proposals, found in rates.items():
                settings = jaxtp.GenerationSettings(
                    max_tokens=256, temperature=temperature, speculate=proposals
                )
                texts[proposals] = [
                    each.ids for each in generator.generate(prompts[:count], settings)
                ]
                timing = generator.speed.timing
                found.append(timing.decode_tokens / timing.decode_seconds)
                accepted[proposals] = timing.accepted_tokens / max(1, timing.proposed_tokens)
        assert all(each == texts[0] for each in texts.values())
        for proposals, found in rates.items():
            print(
                f"{case:<24}{proposals:>10}{accepted[proposals]:>13.0%}{statistics.median(found[1:]):>9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
