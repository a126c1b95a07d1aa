"""Compares continuous batching with static batches, on prompts of random lengths.

    python scripts/generate_file.py

In continuous batching a finished row takes the next prompt. Static batches are a loop over
`Generator.generate`; each runs until its longest text ends. The model is a decoder with random
weights over tp 2, on virtual CPU devices, so texts end at random. Both methods use the same rows,
programs and prompts, and take turns. Numbers are medians of `--repeats`. If the texts differ
between the methods, or from texts of single prompts, the script fails. Memory is the process's,
before the first prompt and at the end.
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jaxtp
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.models.decoder import abstract_decoder

ENDS = frozenset(range(3))
"""End tokens, about one in a hundred tokens."""


def build(mesh: jax.sharding.Mesh) -> jaxtp.Decoder:
    """Returns a decoder of 4 million parameters, with four query heads per kv head."""
    config = jaxtp.ModelConfig(
        vocab_size=256,
        d_model=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        d_ff=1024,
        remat="none",
    )
    with jax.set_mesh(mesh):
        graph, _ = abstract_decoder(config)
        return nnx.merge(
            graph, jax.jit(lambda: nnx.state(jaxtp.Decoder(config, rngs=nnx.Rngs(0))))()
        )


def resident() -> float:
    """Returns this process's resident MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument(
        "--longest", type=int, default=200, help="maximum tokens of a prompt (default 200)"
    )
    parser.add_argument(
        "--tokens", type=int, default=192, help="maximum tokens of a text (default 192)"
    )
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args(argv)
    mesh = jaxtp.make_mesh(tp=2)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, arguments.longest + 1, arguments.prompts)
    prompts = [rng.integers(3, 256, length).tolist() for length in lengths]
    model = build(mesh)
    shared = {"tokenizer": ByteTokenizer(), "end_ids": ENDS}
    generator = jaxtp.generate.Generator(model, batch_size=arguments.rows, **shared)
    settings = jaxtp.generate.Settings(max_tokens=arguments.tokens, temperature=1.0)

    def at_once(given: Sequence[list[int] | None]) -> list[tuple[int, ...]]:
        return [result.ids for result in generator.generate(given, settings)]

    def in_batches() -> list[tuple[int, ...]]:
        found = []
        # The list keeps each prompt's number, and so its seed.
        for start in range(0, len(prompts), arguments.rows):
            found += at_once([None] * start + prompts[start : start + arguments.rows])
        return found

    ways = {"as rows end": lambda: at_once(prompts), "in batches": in_batches}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts: list[tuple[int, ...]] = []
    memory = []
    for _ in range(arguments.repeats + 1):  # the first one compiles
        for name, run in ways.items():
            started = time.perf_counter()
            found = run()
            seconds[name].append(time.perf_counter() - started)
            texts = texts or found
            assert found == texts, "the same texts, either way"
        memory.append(resident())
    alone = jaxtp.generate.Generator(model, batch_size=1, **shared)
    by_itself = [
        alone.generate([None] * index + [prompt], settings)[0].ids
        for index, prompt in enumerate(prompts)
    ]
    differ = sum(a != b for a, b in zip(by_itself, texts, strict=True))
    sizes = sorted(map(len, texts))
    tokens = sum(sizes)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, tp 2, {arguments.rows} rows")
    print(f"{len(prompts)} prompts of 1 to {arguments.longest} tokens")
    print(f"texts of {sizes[0]} to {sizes[-1]} tokens, {tokens / len(texts):.0f} on average")
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name, median in medians.items():
        print(
            f"{name:<14}{median:>8.1f} s{tokens / median:>10,.0f} tokens/s   "
            f"{[round(s, 1) for s in seconds[name][1:]]}"
        )
    print(f"ratio         {medians['in batches'] / medians['as rows end']:>8.2f}")
    print(f"texts that differ from those of the prompts one by one: {differ}")
    print(f"memory after each repeat, MiB: {[round(size) for size in memory]}")


if __name__ == "__main__":
    main()
