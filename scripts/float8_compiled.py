"""Compares the steps of Llama 3 in bfloat16 and with products in float8, compiled for absent H100s.

    pip install -e '.[estimate-gpu]'
    python scripts/float8_compiled.py --dumps runs/float8_compiled | tee
    scripts/results/float8_compiled.txt

Nothing is run. A compilation takes half a minute of one core; programs that are in --dumps already
are read instead.

peak: GB that a device allocates. in float8: the number of compiled products with two operands in
float8, and the number that the setting asks for; XLA merges products of the same input if their
kernels are gathered. others: the other products, by the dtypes of their operands. saved: GB that
the scan over layers saves for the backward pass. copied: GB of all layers' kernels that the scan
reads in another layout or dtype than the stored one, in the forward and in the backward pass.

gathered: GB of all-gathers in a step, after SPMD partitioning. In the backward pass, sequence
parallelism gathers the gradient of a row layer's output in bfloat16, because the gradient of its
kernel is computed in bfloat16.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import yaml

from jaxtp.analysis.collective import ALL_GATHER
from jaxtp.analysis.hardware import GB
from jaxtp.analysis.hlo import (
    count_collectives_in_hlo,
    is_product,
    named,
    operand_types,
    parse_module,
    walk,
)
from jaxtp.analysis.tables import columns
from jaxtp.config.schema import replace_nested, validate
from jaxtp.layers.float8 import FLOAT8 as SCOPE
from jaxtp.mesh import AXES
from jaxtp.tools.estimate.compiler import compile_for
from jaxtp.train.config import TrainConfig

CONFIGS = Path(__file__).parents[1] / "configs"
ROWS = [
    ("llama3_8b", {"tp": 8}),
    ("llama3_8b", {"fsdp": 2, "tp": 4}),
    ("llama3_8b", {"fsdp": 8}),
    ("llama3_70b", {"fsdp": 8, "tp": 8}),
]
MORE = 1.05  # times bfloat16's peak that float8 may take
TEXTS = ("gpu_after_optimizations", "after_spmd_partitioner")
BYTES = {"u8": 1, "f8e4m3fn": 1, "bf16": 2, "f32": 4}
BFLOAT16 = "compute"
FLOAT8 = "float8"
HOST = 8  # GPUs


class Step(NamedTuple):
    """What is read from a compiled step."""

    peak: int
    in_float8: int
    asked: int
    others: Counter[str]
    gathered: Counter[tuple[str, bool]]  # bytes by mesh axes, and whether in the backward pass
    saved: int
    copied: tuple[int, int]  # bytes in the forward and in the backward pass


def configure(name: str, sizes: dict[str, int], matmul: str) -> TrainConfig:
    """Returns a configuration, with fewer micro-batches if the mesh has more rows at a time."""
    config = validate(
        TrainConfig, yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), source=name
    )
    accumulation = math.gcd(
        config.train.accumulation, config.data.global_batch_size // sizes["fsdp"]
    )
    return replace_nested(
        config, {"model.precision.matmul": matmul, "train.accumulation": accumulation}
    )


def compiled(config: TrainConfig, sizes: dict[str, int], folder: Path) -> Step:
    """Compiles a step, unless its folder is there, and reads it."""
    answer = folder / "answer.json"
    if not answer.exists():
        os.environ["XLA_FLAGS"] = (
            f"--xla_dump_to={folder.absolute()} --xla_dump_hlo_module_re=.*step.*"
        )
        hosts = max(1, math.prod(sizes.values()) // HOST)
        found = compile_for(
            config, sizes, "h100", hosts=hosts, devices_per_host=HOST, timeout_s=3600
        )
        for path in folder.iterdir():
            if not path.stem.endswith(TEXTS):
                path.unlink()  # code of kernels
        answer.write_text(json.dumps({"peak": found.peak_bytes}))
    final, partitioned = (next(folder.glob(f"*{name}.txt")).read_text() for name in TEXTS)
    saved, copied = stacks(final, config.model.num_layers)
    asked = asked_for(final)
    return Step(
        peak=json.loads(answer.read_text())["peak"],
        in_float8=asked[True],
        asked=asked.total(),
        others=others(final),
        gathered=gathered(partitioned, sizes),
        saved=saved,
        copied=copied,
    )


def others(text: str) -> Counter[str]:
    """Counts products outside attention that are not in float8, by the dtypes of their operands."""
    module, entry = parse_module(text)
    found: Counter[str] = Counter()
    for computation, instruction, scope, times, _ in walk(module, entry):
        if is_product(instruction) and "/attend/" not in scope:
            made = (named(module[computation], name) for name, _ in instruction.operands[:2])
            dtypes = [one.type.partition("[")[0] for one in made]
            if not all(dtype.startswith("f8") for dtype in dtypes):
                found[" x ".join(dtypes)] += times
    return found


def asked_for(text: str) -> Counter[bool]:
    """Counts products that layers ask for in float8, by whether they are compiled in it."""
    module, entry = parse_module(text)
    found: Counter[bool] = Counter()
    for computation, instruction, scope, times, _ in walk(module, entry):
        if is_product(instruction) and re.search(rf"\b{SCOPE}\b", scope):
            operands = operand_types(module[computation], instruction)[:2]
            found[bool(operands) and all(type_.startswith("f8") for type_ in operands)] += times
    return found


def gathered(text: str, sizes: dict[str, int]) -> Counter[tuple[str, bool]]:
    """Returns the bytes of all-gathers, by mesh axes and pass.

    A recomputed forward pass is not backward.
    """
    found: Counter[tuple[str, bool]] = Counter()
    for one, times in count_collectives_in_hlo(text, sizes).items():
        if one.kind == ALL_GATHER:
            backward = one.backward and "rematted_computation" not in one.scope
            found["+".join(one.axes), backward] += int(times * one.bytes)
    return found


def stacks(text: str, layers: int) -> tuple[int, tuple[int, int]]:
    """Returns the bytes that the loop over layers stacks, and the bytes of copied kernels."""
    module, entry = parse_module(text)
    saved = 0
    copied = [0, 0]
    for _, instruction, scope, _, _ in walk(module, entry):
        if (
            instruction.opcode == "while"
            and f'"known_trip_count":{{"n":"{layers}"}}' in instruction.text
        ):
            backward = "transpose(" in scope
            for dtype, dims, order in re.findall(
                rf"(\w+)\[({layers},[\d,]+)\]\{{([\d,]+)", instruction.type
            ):
                sizes = [int(size) for size in dims.split(",")]
                size = BYTES[dtype] * math.prod(sizes)
                if len(sizes) > 3:  # a layer, rows, tokens, features
                    saved += 0 if backward else size
                elif len(sizes) == 3 and (dtype, order) != ("f32", "2,1,0"):
                    copied[backward] += size
    return saved, (copied[0], copied[1])


def cells(step: Step) -> list[str]:
    """Returns the cells of a row."""
    sent = [step.gathered[axis, backward] for axis in ("tp", "fsdp") for backward in (False, True)]
    sizes = (f"{size / GB:,.2f}" for size in (*sent, step.saved, *step.copied))
    products = ", ".join(f"{times:,} {dtypes}" for dtypes, times in step.others.most_common())
    return [f"{step.in_float8:,} of {step.asked:,}", *sizes, products]


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a check fails, else 0.

    One fails if a product asked for is not in float8, a peak exceeds the limit, or the backward
    pass reads copied kernels.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dumps", type=Path, default=Path("runs/float8_compiled"), help="folder of the programs"
    )
    folder = parser.parse_args(argv).dumps
    table = []
    good = True
    for name, mesh in ROWS:
        sizes = dict.fromkeys(AXES, 1) | mesh
        label = f"{name} {' x '.join(f'{axis} {size}' for axis, size in mesh.items())}"
        pair = {}
        for matmul in (BFLOAT16, FLOAT8):
            config = configure(name, sizes, matmul)
            step = pair[matmul] = compiled(
                config, sizes, folder / f"{label.replace(' ', '-')}-{matmul}"
            )
            more = step.peak / pair[BFLOAT16].peak
            good &= more <= MORE and step.in_float8 == step.asked and not step.copied[1]
            good &= matmul == BFLOAT16 or step.in_float8 > 0
            peak = f"{step.peak / GB:,.2f}" + f" ({more - 1:+.1%})" * (matmul == FLOAT8)
            dtype = "bfloat16" if matmul == BFLOAT16 else matmul
            table.append((label, config.model.remat, dtype, peak, *cells(step)))
            print(*table[-1], sep="  ", file=sys.stderr, flush=True)
    gathers = (f"{axis}, {way}" for axis in ("tp", "fsdp") for way in ("forward", "backward"))
    header = (
        "",
        "remat",
        "",
        "peak",
        "in float8",
        *gathers,
        "saved",
        "copied",
        "backward",
        "others",
    )
    print(f"jax {jax.__version__}; gathered over tp and fsdp in the forward and backward pass\n")
    print(columns(header, table))
    print(
        "every product asked for is in float8, no peak is above 1.05 of bfloat16's"
        if good
        else "FAIL"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
