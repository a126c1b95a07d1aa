"""Compares the time of the gated delta rule in chunks with the rule token by token.

    taskset -c 0 python scripts/delta_rule_speed.py --lengths 2048 --rounds 3 | tee
    scripts/results/delta_rule_speed.txt

Programs are forward, and forward with backward, in float32, with one row, two key heads and four
value heads of 128. Token by token is a plain `lax.scan`, which saves each token's state for its
backward pass. The programs take turns, and the table has medians. Memory is the size of XLA's
temporaries. The script runs on one core, because threads on a busy machine wait for each other.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bench import medians
from jax import Array, lax

from jaxtp.layers.kernels.delta_rule import Tokens, delta_rule, delta_step

KEY_HEADS = 2
VALUE_HEADS = 4
WIDTH = 128


def token_by_token(
    q: Array, k: Array, v: Array, log_decay: Array, write: Array
) -> tuple[Array, Array]:
    """Returns what `delta_rule` returns."""

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        y, state = delta_step(*token, state)
        return state, y

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, log_decay, write))
    final, y = lax.scan(step, jnp.zeros((len(v), VALUE_HEADS, WIDTH, WIDTH)), tokens)
    return jnp.moveaxis(y, 0, 1), final


RULES = {"tokens": token_by_token, "chunks": lambda *arrays: delta_rule(Tokens(*arrays))}


def draw(length: int) -> list[Array]:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, length, KEY_HEADS, WIDTH))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((1, length, VALUE_HEADS, WIDTH))
    log_decay = -rng.exponential(0.1, v.shape[:3])
    write = rng.uniform(0, 1, v.shape[:3])
    return [jnp.asarray(x, "float32") for x in (q * WIDTH**-0.5, k, v, log_decay, write)]


def programs(
    rule: Callable[..., tuple[Array, Array]], arrays: list[Array]
) -> dict[str, jax.stages.Compiled]:
    """Returns both compiled programs of a rule."""

    def total(*arrays: Array) -> Array:
        return jnp.sum(jnp.square(rule(*arrays)[0]))

    both = jax.grad(total, argnums=(0, 1, 2, 3, 4))
    passes = {"forward": rule, "forward and backward": both}
    return {name: jax.jit(function).lower(*arrays).compile() for name, function in passes.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens")
    parser.add_argument("--rounds", type=int, default=5, help="times of each program (default 5)")
    arguments = parser.parse_args(argv)
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {arguments.rounds} rounds, "
        "programs in turn"
    )
    print(f"{'':6}  {'':<20}{'milliseconds':>20}{'':17}{'MB':>20}")
    print(
        f"{'length':>6}  {'pass':<20}{'tokens':>10}{'chunks':>10}{'tokens / chunks':>17}"
        f"{'tokens':>10}{'chunks':>10}"
    )
    for length in arguments.lengths:
        arrays = draw(length)
        by_rule = {name: programs(rule, arrays) for name, rule in RULES.items()}
        for part in by_rule["chunks"]:
            compiled = {name: by_rule[name][part] for name in RULES}
            seconds = medians(
                {name: partial(run, *arrays) for name, run in compiled.items()}, arguments.rounds
            )
            tokens, chunks = (1e3 * seconds[name] for name in RULES)
            memory = "".join(
                f"{run.memory_analysis().temp_size_in_bytes / 1e6:>10,.0f}"
                for run in compiled.values()
            )
            print(
                f"{length:>6}  "
                f"{part:<20}{tokens:>10,.0f}{chunks:>10,.0f}{tokens / chunks:>17.1f}{memory}",
                flush=True,
            )


if __name__ == "__main__":
    main()
