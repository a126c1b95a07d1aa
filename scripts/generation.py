"""Measures what decoding and reading prompts cost besides their products.

    python scripts/generation.py --beside ../before | tee scripts/results/generation.txt

1. A layer of Llama 3 8B's width in the programs compiled for an H100 that need not be present: its
   kernels and the bytes that they move, as the difference between four layers and two, and the
   kernels of a token, or of a call that reads prompts, with 32 layers. The time is that of an H200
   whose products reach its peaks, with 2 microseconds for each other kernel and 1.3 between kernels
   (scripts/results/gpu_h200.txt in 20fc358a: the ten small kernels of a layer took 20 of 168
   microseconds). XLA chooses products here without timing them, so a GPU may run others.
2. CPU seconds of the process to generate one token, and for each of 32 more, with 32 tiny layers:
   this is mostly the host's work. Checkouts take turns.

`--beside` compares with the folder of another checkout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from gpu_acceptance import EIGHT_B
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parts import _NO_KERNELS, AMOUNTS, _kernel

import jaxtp
from jaxtp.analysis import hlo
from jaxtp.analysis.hardware import find
from jaxtp.analysis.tables import columns
from jaxtp.generate import decode_model
from jaxtp.generate.programs import PackedTokens, Programs, RowArrays, Shape
from jaxtp.layers.cache import LAYER_SPEC
from jaxtp.layers.parameter import spec_of
from jaxtp.tools.estimate.compiler import topology

TINY = {
    "vocab_size": 256,
    "d_model": 8,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 8,
    "d_ff": 8,
}
LAYERS = 32
SLOTS = 1024
CASES = [("decode", 2, 1), ("decode", 8, 1), ("read", 2, 512), ("read", 8, 2048)]
"""The program, rows, and tokens of a call. One text is decoded in two rows."""
GAP = 1.3e-6
"""Seconds between two kernels of a CUDA graph."""
SMALLEST = 2e-6
"""Seconds of a small kernel."""
TOKENS = 33
_HEADER = ("checkout", "program", "rows", "tokens", "kernels", "of which products", "of all layers")
_HEADER += ("MB", "MB without products", "microseconds")


def compiled_text(program: str, num_layers: int, rows: int, tokens: int) -> str:
    """Returns a program of the generator, compiled for an H100."""
    precision = jaxtp.Precision(param="bfloat16", compute="bfloat16")
    config = jaxtp.ModelConfig(**EIGHT_B, num_layers=num_layers, precision=precision)
    mesh = jaxtp.make_mesh(devices=topology("h100", 1, 8).devices()[:1])

    # Other checkouts do not join the kernels of a layer.
    join_columns = getattr(decode_model, "join_columns", lambda model: model)

    def build() -> decode_model.DecodeModel:
        decoder = jaxtp.Decoder(config, rngs=nnx.Rngs(0))
        return join_columns(decode_model.DecodeModel(decoder, decoder.in_order()))

    def placed(array: object, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        graph, state = nnx.split(nnx.eval_shape(build))
    flat = []
    for path, variable in nnx.to_flat_state(state):
        spec = spec_of(variable)
        array = placed(variable.get_raw_value(), spec)
        flat.append((path, variable.replace(array, out_sharding=spec)))
    model = nnx.merge(graph, nnx.from_flat_state(flat))
    with jax.set_mesh(mesh):
        caches = jax.eval_shape(lambda: model.empty(rows, SLOTS))
    caches = jax.tree.map(lambda array: placed(array, LAYER_SPEC), caches)
    settings = jaxtp.generate.Settings()
    programs = Programs(model, mesh, Shape(rows, SLOTS), settings, config.vocab_size, frozenset())
    if program == "decode":
        return programs.compiled_decode(caches).as_text()
    packed = np.zeros((1, tokens), np.int32)
    zeros = np.zeros(rows, np.int32)
    arguments = (
        caches,
        PackedTokens(packed, packed, packed, zeros[None], continued=False),
        RowArrays(zeros, zeros, zeros, zeros.astype(np.uint32)),
    )
    return programs._program("read", programs._read, *arguments).as_text()


def kernels_of(text: str) -> dict[str, float]:
    """Returns the amounts (`parts.AMOUNTS`) of a program, or of a turn of its loop."""
    module, entry = hlo.parse_module(text)
    loops = [each for each in module[entry] if each.opcode == "while"]
    name = loops[0].attribute("body") if loops else entry
    hardware = find("h200")
    total = dict.fromkeys(("products", "seconds", *AMOUNTS), 0.0)
    for kernel in module[name]:
        if kernel.opcode in _NO_KERNELS:
            continue
        _, amounts = _kernel(kernel, name, "", module)
        flops = amounts.get("flops", 0.0)
        total["products"] += flops > 0
        size = amounts.get("product_bytes", 0.0) + amounts.get("other_bytes", 0.0)
        seconds = max(size / hardware.bandwidth, flops / hardware.flops)
        total["seconds"] += GAP + (seconds if flops else max(seconds, SMALLEST))
        for key, amount in amounts.items():
            total[key] += amount
    return total


def compiled_rows(name: str) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the first table for this process's checkout."""
    for program, rows, tokens in CASES:
        two, four = (kernels_of(compiled_text(program, count, rows, tokens)) for count in (2, 4))
        layer = {key: (four[key] - two[key]) / 2 for key in two}
        size = layer["product_bytes"] + layer["other_bytes"]
        kernels = two["kernels"] + (LAYERS - 2) * layer["kernels"]
        counts = (layer["kernels"], layer["products"], kernels)
        sizes = (size, layer["other_bytes"])
        yield (
            *(name, program, str(rows), f"{tokens:,}", *(f"{count:,.0f}" for count in counts)),
            *(f"{size / 1e6:,.1f}" for size in sizes),
            f"{1e6 * layer['seconds']:,.1f}",
        )


def serve_times() -> None:
    """Prints the CPU seconds of texts of one token, and of `TOKENS`, for each line of the input."""
    config = jaxtp.ModelConfig(**TINY, num_layers=LAYERS, remat="none")
    with jax.set_mesh(jaxtp.make_mesh(devices=jax.devices()[:1])):
        model = nnx.jit(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)))()
    tokenizer = jaxtp.generate.ByteTokenizer()
    generator = jaxtp.generate.Generator(model, tokenizer, end_ids=frozenset())
    seconds = []
    for line in sys.stdin:
        for tokens in (1, TOKENS):
            prompts = [[int(line) + row] * 8 for row in range(8)]
            started = time.process_time()
            generator.generate(prompts, jaxtp.generate.Settings(max_tokens=tokens))
            seconds.append(time.process_time() - started)
        print(json.dumps(seconds[-2:]), flush=True)


def worker(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Starts this script in the code of a checkout."""
    flags_of_xla = "--xla_gpu_autotune_level=0"  # no GPU to time kernels on
    paths = f"{folder.resolve()}:{Path(__file__).parent}"
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": flags_of_xla}
    command = [sys.executable, __file__, *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--only", choices=["compiled", "host"])
    parser.add_argument("--worker", choices=["compiled", "host"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if given.worker == "compiled":
        print(json.dumps(list(compiled_rows(sys.stdin.read()))))
        return
    if given.worker == "host":
        serve_times()
        return
    folders = {str(folder): folder for folder in given.beside}
    folders["this"] = Path(__file__).parent.parent
    print(f"jax {jax.__version__}\n")
    if given.only != "host":
        table: list[tuple[str, ...]] = []
        for name, folder in folders.items():
            output, _ = worker(folder, "--worker", "compiled").communicate(name)
            table += map(tuple, json.loads(output))
        print(columns(_HEADER, sorted(table, key=lambda row: row[1:4])), flush=True)
    if given.only == "compiled":
        return
    workers = {name: worker(folder, "--worker", "host") for name, folder in folders.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in folders}
    for turn in range(given.turns + 1):
        for name, process in workers.items():
            print(turn, file=process.stdin, flush=True)
            times[name].append(json.loads(process.stdout.readline()))
    for process in workers.values():
        process.communicate()
    rows = []
    for name, each in times.items():
        one, many = zip(*each[1:], strict=True)  # the first turn compiles
        more = [(many[i] - one[i]) / (TOKENS - 1) for i in range(given.turns)]
        rows.append(
            (name, f"{1e3 * statistics.median(one):.2f}", f"{1e3 * statistics.median(more):.2f}")
        )
    print(f"\n{columns(('checkout', 'one token of 8 rows, CPU ms', 'each more'), rows)}")


if __name__ == "__main__":
    main()
