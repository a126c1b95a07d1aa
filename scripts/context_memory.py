"""Measures a device's memory as cp grows, by compiling for H100s that need not be present.

    python scripts/context_memory.py --out scripts/results/context_memory.txt

The step trains Llama 3.1 8B (`configs/llama31_8b_128k.yaml`) on packed sequences of 131,072 tokens,
one for each cp group, on 16 H100s. cp grows from 1 to 16, and fsdp shrinks, so every mesh stores
the same share of the weights. Columns for each mesh and attention method: tokens per device;
temporaries; the part of the temporaries that grows with the tokens, namely activations (temporaries
minus those at 1/32 of the length, times 32/31); and the number of arrays with two dims of positions
(T, T/cp or T/(2cp)), like scores `[T, T]` or a part of them.

Nothing is executed. Needs the extra estimate-gpu.
"""

import argparse
import os
import re
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # else the plugin looks for a GPU

import jax

from jaxtp.analysis.tables import columns
from jaxtp.config.schema import from_yaml, replace_nested
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.tools.estimate.compiler import ABSENT_GPU, topology
from jaxtp.train.config import TrainConfig
from jaxtp.train.setup import plan_step

CONFIG = Path(__file__).parents[1] / "configs" / "llama31_8b_128k.yaml"
DEVICES = 16
HOSTS = 2
SHORTER = 32
_ARRAY = re.compile(r"\b(?:f64|f32|bf16|f16|s32|u32|s8|u8|pred)\[([\d,]+)\]")


def compiled(sizes: dict[str, int], context: str, length: int) -> tuple[int, int]:
    """Returns a step's bytes of temporaries, and its number of arrays with two position dims."""
    config = from_yaml(TrainConfig, CONFIG)
    values = {
        "mesh": config.mesh.of_sizes(sizes),
        "mesh.context": context,
        "data.sequence_length": length,
    }
    rows = sizes["fsdp"] * sizes["dp"]
    run = replace_nested(
        config,
        {**values, "data.global_batch_size": rows, "train.accumulation": 1, "model.remat": "full"},
    )
    mesh = mesh_of(sizes, topology("h100", HOSTS, DEVICES // HOSTS).devices())
    with jax.set_mesh(mesh):
        program = plan_step(run).trace_on(mesh).lower().compile(compiler_options=ABSENT_GPU)
    positions = {length, length // sizes["cp"], length // (2 * sizes["cp"])} - {run.model.d_model}
    shapes = {tuple(map(int, dims.split(","))) for dims in _ARRAY.findall(program.as_text())}
    pairs = sum(sum(dim in positions for dim in shape) > 1 for shape in shapes)
    return program.memory_analysis().temp_size_in_bytes, pairs


def row(cp: int, context: str, length: int) -> tuple[str, ...]:
    sizes = mesh_shape(fsdp=DEVICES // cp, cp=cp)
    temporaries, pairs = compiled(sizes, context, length)
    shorter, _ = compiled(sizes, context, length // SHORTER)
    growing = (temporaries - shorter) * SHORTER / (SHORTER - 1)
    cells = f"{length // cp:,}", f"{temporaries / 1e9:.2f}", f"{growing / 1e9:.2f}", str(pairs)
    return str(cp), context if cp > 1 else "", *cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    asked = parser.parse_args()
    header = (
        "cp",
        "attention",
        "tokens on a device",
        "temporaries, GB",
        "activations, GB",
        "arrays of pairs",
    )
    cases = [
        (cp, context)
        for cp in asked.cp
        for context in (("gather", "ulysses") if cp > 1 else ("auto",))
    ]
    rows = [row(cp, context, asked.length) for cp, context in cases]
    text = f"jax {jax.__version__}, T = {asked.length:,}\n\n" + columns(header, rows)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
