"""Times Mamba-2's forward and backward pass on the CPU beside a plain scan over tokens.

    python scripts/mamba2_speed.py

The layer has the width, heads and states of mamba2-130m, and eight groups as Nemotron 3; one row,
float32. Both programs run in turns. `MiB` are the temporaries of the compiled programs, `differ` is
the largest relative difference of the output and the gradients. Below are the collectives of both
passes over tp 2, beside attention's of the same width.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial

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


def program(build: Callable[[], Branch], x: Array) -> partial[tuple[Array, nnx.State]]:
    """Returns a compiled program of the layer's output and its gradients, for an output's of x."""
    graph, params = nnx.split(jax.jit(build)())

    def run(params: nnx.State, x: Array, grad: Array) -> tuple[Array, tuple[nnx.State, Array]]:
        y, backward = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return y, backward(grad)

    compiled = jax.jit(run).lower(params, x, x).compile()
    return partial(compiled, params, x, x)


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


def time_of(width: int, length: int, rounds: int) -> tuple[str, ...]:
    """Returns a row of the table."""
    x = jax.random.normal(jax.random.key(1), (1, length, width))
    programs = {
        kind.__name__: program(partial(mamba2, kind, width), x) for kind in (Mamba2, PlainMamba2)
    }
    by_chunks, by_token = programs.values()
    differ = difference(by_chunks(), by_token())
    seconds = medians(programs, rounds).values()
    ours, plain = seconds
    memory = [each.func.memory_analysis().temp_size_in_bytes / 2**20 for each in programs.values()]
    return (
        f"{length:,}",
        *(f"{each:.3f}" for each in seconds),
        f"{plain / ours:.1f}",
        *(f"{each:,.1f}" for each in memory),
        f"{differ:.1e}",
    )


def collectives(build: Callable[[], Branch], width: int, length: int) -> str:
    """Returns the collectives of a layer over tp 2."""
    mesh = jaxtp.make_mesh(tp=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((1, length, width)), NamedSharding(mesh, P(None, TP)))
        text = program(build, x).func.as_text()
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
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program (default 5)")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    width = options.width
    print(f"jax {jax.__version__}, d_model {width}; medians of {options.rounds} runs\n")
    rows = [time_of(width, length, options.rounds) for length in options.lengths]
    head = ("tokens", "s", "s, plain", "plain / s", "MiB", "MiB, plain", "differ")
    print(columns(head, rows))
    length = options.lengths[0]
    for name, build in (("mamba2", partial(mamba2, Mamba2)), ("attention", attention)):
        print(f"tp 2, {length} tokens, {name}: {collectives(partial(build, width), width, length)}")


if __name__ == "__main__":
    main()
