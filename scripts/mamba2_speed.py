"""Times Mamba-2's forward and backward pass on the CPU beside a plain scan over tokens.

    python scripts/mamba2_speed.py

The layer has the width, heads and states of mamba2-130m, and eight groups as Nemotron 3; one row,
float32. `states` are the part that differs: from convolved tokens to results. `s` are seconds of
the processor over all threads, which other work on the machine hardly changes; both programs run in
turns. `MiB` are the temporaries of the compiled programs, `differ` is the largest relative
difference of the result and the gradients. Below are the collectives of both passes over tp 2,
beside attention's of the same width.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench import medians
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis.hlo import count_collectives_in_hlo
from jaxtp.analysis.tables import columns
from jaxtp.layers.branch import Branch
from jaxtp.layers.gated_delta import GatedDeltaConfig
from jaxtp.layers.kernels.delta_rule import State, Tokens
from jaxtp.layers.mamba2 import Mamba2
from jaxtp.mesh import TP, mesh_sizes

HEAD_DIM = 64
GROUPS = 8
STATES = 128


class PlainMamba2(Mamba2):
    """Mamba-2 whose states are a scan over tokens, differentiated by JAX."""

    def rule(self, tokens: Tokens, state: State = None) -> tuple[Array, Array]:
        *numbers, _ = tokens
        rows, _, heads, width = tokens.v.shape
        initial = jnp.zeros((rows, heads, tokens.k.shape[3], width))

        def visit(state: Array, token: list[Array]) -> tuple[Array, Array]:
            y, state = self.step(*token, state)
            return state, y

        by_token = [jnp.moveaxis(x, 1, 0) for x in numbers]
        final, y = lax.scan(visit, initial, by_token)
        return jnp.moveaxis(y, 0, 1), final


def program(run: Callable[..., Array], grad: Array, *arrays: Any) -> partial[tuple[Array, Any]]:
    """Returns a compiled program of a result and its gradients, for the gradient of the result."""

    def both(grad: Array, *arrays: Any) -> tuple[Array, Any]:
        y, backward = jax.vjp(run, *arrays)
        return y, backward(grad)

    return partial(jax.jit(both).lower(grad, *arrays).compile(), grad, *arrays)


def layer_program(build: Callable[[], Branch], x: Array) -> partial[tuple[Array, Any]]:
    """Returns the program of a layer; `x` is also the gradient of its output."""
    graph, params = nnx.split(jax.jit(build)())
    return program(lambda params, x: nnx.merge(graph, params)(x), x, params, x)


def states_program(layer: Mamba2, length: int) -> partial[tuple[Array, Any]]:
    """Returns the program of a layer's states, from convolved tokens to results."""
    config = layer.config
    draw = partial(jax.random.normal, jax.random.key(1))
    keys = 0.1 * draw((1, length, config.delta_key_heads, config.delta_key_dim))
    values = draw((1, length, config.delta_value_heads, config.delta_value_dim))
    steps = jax.nn.softplus(draw(values.shape[:3]) - 3)
    decay = -steps * jnp.linspace(1, 16, values.shape[2])
    return program(
        lambda *tokens: layer.rule(Tokens(*tokens))[0], values, keys, keys, values, decay, steps
    )


def difference(ours: object, right: object) -> float:
    """Returns the largest relative difference of arrays, in the L2 norm."""
    differences = jax.tree.map(
        lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), ours, right
    )
    return float(np.max(jax.tree.leaves(differences)))


def mamba2(kind: type[Mamba2], width: int) -> Mamba2:
    config = GatedDeltaConfig(
        delta_kind="mamba2",
        delta_value_heads=2 * width // HEAD_DIM,
        delta_key_heads=GROUPS,
        delta_key_dim=STATES,
        delta_value_dim=HEAD_DIM,
    )
    return kind(width, config, rngs=nnx.Rngs(0))


def attention(width: int) -> Branch:
    heads = width // HEAD_DIM
    config = jaxtp.AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=HEAD_DIM)
    return jaxtp.CausalSelfAttention(width, config, rngs=nnx.Rngs(0))


def time_of(width: int, length: int, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yields rows of the table."""
    x = jax.random.normal(jax.random.key(1), (1, length, width))
    builds = {kind.__name__: partial(mamba2, kind, width) for kind in (Mamba2, PlainMamba2)}
    parts = {
        "states": {name: states_program(build(), length) for name, build in builds.items()},
        "layer": {name: layer_program(build, x) for name, build in builds.items()},
    }
    for part, programs in parts.items():
        results = [run() for run in programs.values()]
        ours, plain = medians(programs, rounds, clock=time.process_time).values()
        memory = [run.func.memory_analysis().temp_size_in_bytes for run in programs.values()]
        yield (
            *(part, f"{length:,}", f"{ours:.2f}", f"{plain:.2f}", f"{plain / ours:.1f}"),
            *(f"{each / 2**20:,.1f}" for each in memory),
            f"{difference(*results):.1e}",
        )


def collectives(build: Callable[[], Branch], width: int, length: int) -> str:
    """Returns the collectives of a layer over tp 2."""
    mesh = jaxtp.make_mesh(tp=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((1, length, width)), NamedSharding(mesh, P(None, TP)))
        text = layer_program(build, x).func.as_text()
    counts: Counter[str] = Counter()
    for collective, times in count_collectives_in_hlo(text, mesh_sizes(mesh)).items():
        if collective.axes == (TP,):
            counts[f"{collective.kind} of {collective.bytes:,} bytes"] += times
    return ", ".join(f"{times:.0f} {name}" for name, times in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768, help="d_model (default 768)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (default 3)")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    width = options.width
    print(f"jax {jax.__version__}, d_model {width}; medians of {options.rounds} runs\n")
    rows = chain.from_iterable(time_of(width, length, options.rounds) for length in options.lengths)
    head = ("part", "tokens", "s", "s, plain", "plain / s", "MiB", "MiB, plain", "differ")
    print(columns(head, list(rows)))
    length = options.lengths[0]
    for name, build in (("mamba2", partial(mamba2, Mamba2)), ("attention", attention)):
        print(f"tp 2, {length} tokens, {name}: {collectives(partial(build, width), width, length)}")


if __name__ == "__main__":
    main()
