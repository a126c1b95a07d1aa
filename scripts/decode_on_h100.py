"""Measures the memory traffic of decoding, compiled for H100s that need not be present.

    python scripts/decode_on_h100.py | tee scripts/results/decode_on_h100.txt

The models are configurations of configs/ in bfloat16, sharded for decoding, with eight rows. Read:
bytes that one iteration of the decode loop reads from arrays of at least 1 MiB, next to the bytes
of a device's weights and KV cache. Rearranged: instructions that copy, convert, transpose, gather
or concatenate such an array. Temporaries: memory besides weights and KV cache. Seconds: of the
compilation. Needs the extra estimate-gpu, and tests/accounts.py, which parses the compiled program.
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

ROWS = 8
LEAST = 2**20
CASES = [
    ("llama3_8b", 1, 1024),
    ("llama3_8b", 8, 8192),
    ("qwen35_27b", 1, 1024),
    ("qwen35_27b", 8, 8192),
]
"""Configurations, sizes of tp, and slots of the KV cache."""


def sharded(tree, mesh: jax.sharding.Mesh, spec):
    """Returns abstract arrays with their sharding."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def measure(config: jaxtp.ModelConfig, mesh: jax.sharding.Mesh, slots: int) -> list[str]:
    make = lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))  # noqa: E731
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(make)
        reader = nnx.eval_shape(lambda: to_decode_model(make(), mesh))
        memories = nnx.eval_shape(lambda: reader.empty(ROWS, slots))
    graph, weights = nnx.split(reader)
    flat = [
        (path, v.replace(sharded(jax.ShapeDtypeStruct(v.shape, v.dtype), mesh, spec_of(v))))
        for path, v in nnx.to_flat_state(weights)
    ]
    reader = nnx.merge(graph, nnx.from_flat_state(flat))
    memories = sharded(memories, mesh, LAYER_SPEC)
    settings = jaxtp.generate.Settings()
    programs = Programs(
        reader, mesh, Shape(ROWS, slots), settings, config.vocab_size, frozenset({2})
    )
    started = time.perf_counter()
    compiled = programs.compiled_decode(memories)
    seconds = time.perf_counter() - started
    read, rearranged = bytes_of_a_turn(compiled.as_text(), LEAST)
    weight_bytes = bytes_of_weights(model, mesh_sizes(mesh))
    shards = (
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(memories)
    )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="number of layers; fewer compile faster")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the plugin for GPUs would look for one
    target = topologies.get_topology_desc(
        "1x1x8", "cuda", topology="1x1x8", target_config=TARGET_CONFIGS["h100"]
    )
    precision = jaxtp.Precision(param="bfloat16", compute="bfloat16")
    changes = {
        "remat": "none",
        "sequence_parallel": None,
        "attention": "auto",
        "precision": precision,
    }
    print(f"jax {jax.__version__}, {ROWS} rows; GB of each device")
    names = (
        "layers",
        "tp",
        "slots",
        "weights",
        "cache",
        "read / both",
        "rearranged",
        "temporaries, MiB",
        "seconds",
    )
    print(f"{'':<10}" + "".join(f"{name:>{len(name) + 2}}" for name in names))
    for name, tp, slots in CASES:
        config = from_yaml(TrainConfig, ROOT / f"configs/{name}.yaml").model
        config = dataclasses.replace(
            config, num_layers=arguments.layers or config.num_layers, **changes
        )
        found = measure(config, make_mesh(tp=tp, devices=target.devices[:tp]), slots)
        row = zip(names, (str(config.num_layers), str(tp), f"{slots:,}", *found), strict=True)
        print(
            f"{name:<10}" + "".join(f"{value:>{len(name) + 2}}" for name, value in row), flush=True
        )


if __name__ == "__main__":
    main()
