"""Compares the modelled memory of a training step with the memory that the H100 compiler allocates.

No GPU is needed. The first command compiles missing points and then prints the table, the second
compiles what matches once more, and the third only prints the table:

    python scripts/estimate_accuracy.py
    python scripts/estimate_accuracy.py --again 8b 'save_(dots|gathered)'
    python scripts/estimate_accuracy.py --table-only

A point is a Llama, with or without adapters, or a mixture of experts, with an optimizer, a sequence
length, a remat policy and a mesh. Each result is stored in scripts/results/estimate_accuracy.jsonl,
so the script can be stopped and restarted. It needs the extra estimate-gpu. The stored results are
from jax 0.10.2. The model says which arrays are alive at a step's peak, as read from XLA's buffer
assignments; none of its constants is fitted to these points. When the order of gradients changed,
24 steps were compiled again, first those that the model missed most; they need up to 18% less.
Steps with accumulation were compiled again when they came to hold one tree of gradients. The 9
mixtures are as new; the other dense steps are older.
"""

import argparse
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import jaxtp
from jaxtp.analysis.tables import columns
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import DP, FSDP, TP, mesh_shape
from jaxtp.tools.estimate.compiler import TargetError, compile_for
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.memory import memory_per_device

RESULTS = Path(__file__).parent / "results" / "estimate_accuracy.jsonl"
GB = 1e9
SHAPES = {
    "1b": {
        "d_model": 2048,
        "num_layers": 16,
        "num_heads": 32,
        "head_dim": 64,
        "d_ff": 8192,
        "tie_embeddings": True,
    },
    "8b": {"d_model": 4096, "num_layers": 32, "num_heads": 32, "head_dim": 128, "d_ff": 14336},
    "70b": {"d_model": 8192, "num_layers": 80, "num_heads": 64, "head_dim": 128, "d_ff": 28672},
}
"""Shapes of Llama 3.2 1B, Llama 3 8B and 70B."""

MIXTURES = {
    "8x7b": {
        **{
            "vocab_size": 32000,
            "d_model": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "head_dim": 128,
            "d_ff": 14336,
        },
        **{"num_experts": 8, "experts_per_token": 2},
    },
    "30b-a3b": {
        **{
            "vocab_size": 151936,
            "d_model": 2048,
            "num_layers": 48,
            "num_heads": 32,
            "num_kv_heads": 4,
        },
        **{
            "head_dim": 128,
            "d_ff": 768,
            "num_experts": 128,
            "experts_per_token": 8,
            "qk_norm": "head",
        },
    },
}
"""Shapes of Mixtral 8x7B and Qwen3-30B-A3B."""

POLICIES = ("none", "save_dots", "save_gathered", "full", "offload")
SEQUENCES = (2048, 4096, 8192)
_FIRST_FIELDS = 7
"""The number of fields that are in the key of every point."""
MESHES = [
    (1, f, t)
    for f, t in [
        (1, 1),
        (8, 1),
        (1, 8),
        (2, 2),
        (4, 1),
        (1, 2),
        (8, 8),
        (2, 4),
        (4, 8),
        (1, 4),
        (8, 2),
    ]
]


@dataclasses.dataclass(frozen=True)
class Point:
    """Settings of a step to compile."""

    shape: str
    sequence: int
    remat: str
    mesh: tuple[int, int, int]
    micro: int = 1
    accumulation: int = 1
    packing: str = "documents"
    lora: int = 0
    """Rank of adapters on every projection; 0 trains the whole model."""
    optimizer: str = "adamw"
    cp: int = 1

    def config(self) -> TrainConfig:
        model = jaxtp.ModelConfig(
            rope_theta=500000.0,
            remat=self.remat,
            loss_chunk=512 * self.micro,  # in tokens, as the stored points were compiled
            attention="xla" if self.cp == 1 else "auto",  # scores of long sequences do not fit
            precision=jaxtp.Precision(compute="bfloat16"),
            lora=LoraConfig(rank=self.lora),
            **({"vocab_size": 128256, "num_kv_heads": 8} | (SHAPES | MIXTURES)[self.shape]),
        )
        dp, fsdp, _ = self.mesh
        rows = dp * fsdp * self.micro * self.accumulation
        data = DataConfig(
            sequence_length=self.sequence, global_batch_size=rows, packing=self.packing
        )
        loop = LoopConfig(accumulation=self.accumulation, z_loss=1e-4)
        return TrainConfig(
            model=model, data=data, optimizer=OptimizerConfig(name=self.optimizer), train=loop
        )

    def cells(self) -> tuple[str, ...]:
        mesh = " ".join(map(str, self.sizes.values()))
        rows = f"{self.micro} x {self.accumulation}"
        return (
            self.shape,
            self.optimizer,
            str(self.lora or "-"),
            str(self.sequence),
            self.remat,
            mesh,
            rows,
        )

    @property
    def sizes(self) -> dict[str, int]:
        return mesh_shape(**dict(zip((DP, FSDP, TP), self.mesh, strict=True)), cp=self.cp)

    @property
    def key(self) -> str:
        values = dataclasses.astuple(self)
        defaults = [field.default for field in dataclasses.fields(self)]
        given = max(
            i
            for i, (value, default) in enumerate(zip(values, defaults, strict=True))
            if value != default
        )
        # The slice also gives the keys from before later fields were added.
        return json.dumps(values[: max(given + 1, _FIRST_FIELDS)])

    @classmethod
    def from_key(cls, key: str) -> "Point":
        return cls(
            *(tuple(value) if isinstance(value, list) else value for value in json.loads(key))
        )


def points() -> list[Point]:
    """Returns each shape with each remat policy four times, then further points.

    The repetitions cycle through lengths and meshes.
    """
    everywhere = [
        Point(shape, SEQUENCES[(i // 15 + i) % 3], policy, MESHES[7 * i % len(MESHES)])
        for i, (_, policy, shape) in enumerate(
            (r, p, s) for r in range(4) for p in POLICIES for s in SHAPES
        )
    ]
    return [
        *everywhere,
        Point("8b", 8192, "full", (1, 8, 1), accumulation=4),
        Point("8b", 4096, "save_dots", (1, 2, 4), accumulation=2),
        Point("1b", 2048, "full", (8, 1, 1), micro=4),
        Point("8b", 2048, "save_gathered", (2, 2, 2), micro=2),
        Point("70b", 8192, "full", (1, 8, 8), accumulation=2),
        Point("8b", 8192, "full", (1, 4, 2), packing="concatenated"),
        Point("8b", 2048, "full", (1, 8, 1), micro=8),
        Point("8b", 2048, "save_gathered", (1, 2, 4), micro=8),
        Point("8b", 2048, "save_dots", (1, 4, 2), micro=4, accumulation=4),
        Point("1b", 4096, "save_dots", (1, 1, 2), lora=16),
        Point("1b", 2048, "full", (8, 1, 1), micro=4, lora=16),
        Point("1b", 2048, "none", (1, 2, 4), lora=16),
        Point("1b", 4096, "save_gathered", (1, 4, 1), lora=64),
        Point("8b", 8192, "save_dots", (4, 1, 2), lora=16),
        Point("8b", 2048, "save_gathered", (1, 2, 4), micro=8, lora=16),
        Point("8b", 4096, "none", (1, 4, 2), lora=16),
        Point("8b", 8192, "full", (1, 8, 1), accumulation=4, lora=16),
        Point("8b", 2048, "save_dots", (1, 4, 2), micro=4, accumulation=4, lora=16),
        Point("70b", 8192, "save_dots", (1, 1, 8), lora=16),
        Point("70b", 8192, "full", (1, 1, 8), lora=16),
        Point("70b", 4096, "save_gathered", (1, 8, 1), lora=16),
        Point("70b", 2048, "none", (1, 8, 2), lora=16),
        Point("1b", 2048, "full", (1, 2, 2), optimizer="muon"),
        Point("1b", 2048, "save_dots", (2, 2, 2), optimizer="muon"),
        Point("8b", 2048, "full", (1, 8, 1), optimizer="muon"),
        Point("8b", 2048, "save_gathered", (1, 2, 4), optimizer="muon"),
        Point("8b", 131072, "full", (1, 1, 1), cp=8),
        Point("8b", 131072, "full", (1, 2, 1), cp=4),
        Point("8b", 131072, "full", (1, 1, 2), cp=4),
        Point("8b", 131072, "save_dots", (1, 1, 1), cp=16),
        Point("8b", 32768, "save_gathered", (2, 1, 2), cp=2),
        Point("1b", 65536, "none", (1, 1, 2), cp=4),
        Point("8b", 1048576, "full", (1, 1, 2), cp=16),
        Point("70b", 131072, "full", (1, 8, 2), cp=4),
        Point("30b-a3b", 4096, "full", (1, 4, 2), micro=4),
        Point("30b-a3b", 4096, "save_dots", (1, 8, 1), micro=2),
        Point("30b-a3b", 4096, "save_gathered", (2, 1, 4), micro=4, accumulation=2),
        Point("30b-a3b", 4096, "none", (1, 2, 4)),
        Point("8x7b", 4096, "full", (1, 4, 2), micro=8),
        Point("8x7b", 4096, "save_gathered", (1, 8, 1), micro=2),
        Point("8x7b", 4096, "save_dots", (1, 1, 8), micro=4),
        Point("8x7b", 4096, "full", (1, 1, 16), micro=4),
        Point("8x7b", 32768, "full", (1, 2, 2), cp=2),
        Point("70b", 8192, "full", (1, 2, 8), accumulation=2),
        Point("8b", 8192, "full", (2, 4, 1), accumulation=2),
        Point("1b", 2048, "full", (2, 2, 2), accumulation=2),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--again",
        nargs="+",
        metavar="PATTERN",
        help="compile points whose key matches all, once more",
    )
    parser.add_argument(
        "--table-only", action="store_true", help="print the table without compiling"
    )
    arguments = parser.parse_args(argv)
    if not arguments.table_only:
        compile_missing(arguments.again)
    print(
        "GB on each device, modelled and as jax 0.10.2's compiler for an H100 allots them; rows of "
        "a micro-batch\n"
    )
    print(table(read()))


def compile_missing(again: Sequence[str] | None = None) -> None:
    """Compiles each point without a result, and stores the result.

    Points whose key matches all patterns `again` are compiled once more.
    """
    rows = read()
    for point in points():
        if (old := rows.get(point.key)) and not (
            again and all(re.search(each, point.key) for each in again)
        ):
            continue
        devices = math.prod(point.sizes.values())
        hosts = max(1, devices // 8)
        try:
            compiled = compile_for(
                point.config(),
                point.sizes,
                "h100",
                hosts=hosts,
                devices_per_host=devices // hosts,
                timeout_s=600,
            )
        except TargetError as error:
            print(f"{point}: {error}", flush=True)
            continue
        rows[point.key] = {"point": point.key, **dataclasses.asdict(compiled)}
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        before = f", {old['peak_bytes'] / GB:.2f} before" if old else ""
        print(
            f"{point}: {compiled.peak_bytes / GB:.2f} GB{before}, in {compiled.seconds:.0f} s",
            flush=True,
        )


def read() -> dict[str, dict]:
    """Returns the stored results by point."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["point"]: row for row in map(json.loads, lines)}


def table(rows: dict[str, dict]) -> str:
    """Returns the table of modelled and compiled memory.

    It has relative errors of total and temporaries.
    """
    header = (
        "shape",
        "optimizer",
        "rank",
        "sequence",
        "remat",
        "dp fsdp cp tp",
        "rows x acc",
        "state",
        "compiled",
        "modelled",
        "error, %",
    )
    cells = []
    errors = []
    alone = []
    for point in points():
        if row := rows.get(point.key):
            modelled = memory_per_device(point.config(), point.sizes, platform="cuda")
            errors.append(modelled.total / row["peak_bytes"] - 1)
            alone.append((modelled.total - row["argument_bytes"]) / row["temp_bytes"] - 1)
            cells.append(
                (
                    *point.cells(),
                    *(f"{n / GB:.2f}" for n in (modelled.state, row["peak_bytes"], modelled.total)),
                )
            )
            cells[-1] += (f"{100 * errors[-1]:+.1f}",)
    summary = [
        f"{name}: {spread(errors)}"
        for name, errors in (("whole", errors), ("temporaries alone", alone))
    ]
    return "\n".join((columns(header, cells), "", *summary))


def spread(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.15 for size in sizes)
    median, worst, bias = (
        100 * size for size in (statistics.median(sizes), max(sizes), statistics.median(errors))
    )
    return (
        f"{within} of {len(sizes)} within 15%, median {median:.1f}%, worst {worst:.1f}%, signed "
        f"{bias:+.1f}%"
    )


if __name__ == "__main__":
    main()
