"""Measures the memory traffic of decoding, in the program that XLA compiles for H100s that need not be present.

    python scripts/decode_on_h100.py | tee scripts/results/decode_on_h100.txt

The model is Llama 3 8B in bfloat16, sharded for decoding, with eight rows. Read: bytes that one iteration of the decode
loop reads from arrays of at least 1 MiB, next to the bytes of a device's weights and KV cache. Rearranged: instructions
that copy, convert, transpose, gather or concatenate such an array. Temporaries: memory besides weights and KV cache.
Needs the extra estimate-gpu, and tests/accounts.py, which parses the compiled program.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

import jax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding

import jaxtp
from jaxtp.config.schema import from_yaml
from jaxtp.generate.decode_model import to_decode_model
from jaxtp.generate.decode_model import weight_bytes as bytes_of_weights
from jaxtp.generate.programs import Programs, Shape
from jaxtp.layers.cache import LAYER_SPEC
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import make_mesh, mesh_sizes
from jaxtp.tools.estimate.compiler import TARGET_CONFIGS
from jaxtp.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from accounts import bytes_of_a_turn  # noqa: E402

ROWS, LEAST = 8, 2**20
CASES = [(1, 1024), (8, 8192)]
"""Sizes of tp, and slots of the KV cache."""


def sharded(tree, mesh: jax.sharding.Mesh, spec):
    """Returns abstract arrays with their sharding."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def measure(config: jaxtp.ModelConfig, mesh: jax.sharding.Mesh, slots: int) -> list[str]:
    make = lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))  # noqa: E731
    with jax.set_mesh(mesh):
        model, reader = nnx.eval_shape(make), nnx.eval_shape(lambda: to_decode_model(make(), mesh))
        memories = nnx.eval_shape(lambda: reader.empty(ROWS, slots))
    graph, weights = nnx.split(reader)
    flat = [
        (path, v.replace(sharded(jax.ShapeDtypeStruct(v.shape, v.dtype), mesh, spec_of(v))))
        for path, v in nnx.to_flat_state(weights)
    ]
    reader, memories = nnx.merge(graph, nnx.from_flat_state(flat)), sharded(memories, mesh, LAYER_SPEC)
    settings = jaxtp.GenerationSettings()
    programs = Programs(reader, mesh, Shape(ROWS, slots), settings, config.vocab_size, frozenset({2}))
    started = time.perf_counter()
    compiled = programs.compiled_decode(memories)
    seconds = time.perf_counter() - started
    read, rearranged = bytes_of_a_turn(compiled.as_text(), LEAST)
    weight_bytes = bytes_of_weights(model, mesh_sizes(mesh))
    shards = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(memories))
    cache_bytes = sum(shards)
    held = weight_bytes + cache_bytes
    return [
        f"{weight_bytes / 1e9:.2f}",
        f"{cache_bytes / 1e9:.2f}",
        f"{read / held:.3f}",
        str(len(rearranged)),
        f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:.0f}",
        f"{seconds:.0f}",
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="number of layers; fewer compile faster")
    arguments = parser.parse_args(argv)
    target = topologies.get_topology_desc("1x1x8", "cuda", topology="1x1x8", target_config=TARGET_CONFIGS["h100"])
    config = from_yaml(TrainConfig, ROOT / "configs/llama3_8b.yaml").model
    precision = jaxtp.Precision(param="bfloat16", compute="bfloat16")
    changes = {"remat": "none", "sequence_parallel": None, "attention": "auto", "precision": precision}
    layers = arguments.layers or config.num_layers
    config = dataclasses.replace(config, num_layers=layers, **changes)
    print(f"jax {jax.__version__}, Llama 3 8B, {layers} layers, {ROWS} rows; GB of each device")
    print(
        f"{'tp':>3}{'slots':>7}{'weights':>9}{'cache':>7}{'read / both':>13}{'rearranged':>12}{'temporaries, MiB':>18}",
        end="",
    )
    print(f"{'compiled in, s':>16}")
    for tp, slots in CASES:
        weights, cache, read, rearranged, temporaries, seconds = measure(
            config, make_mesh(tp=tp, devices=target.devices[:tp]), slots
        )
        print(
            f"{tp:>3}{slots:>7,}{weights:>9}{cache:>7}{read:>13}{rearranged:>12}{temporaries:>18}{seconds:>16}",
            flush=True,
        )


if __name__ == "__main__":
    main()
