"""Compares the modelled memory of a training step with the memory that the H100 compiler allocates.

No GPU is needed. The first command prints the table of the stored steps, the second compiles those
that match once more, and the third compiles another one:

    python scripts/estimate_accuracy.py
    python scripts/estimate_accuracy.py --again 8b 'save_(dots|gathered)'
    python scripts/estimate_accuracy.py --add '["8b", 8192, "full", [1, 8, 1], 1, 4, "documents"]'

A step is a Llama, with or without adapters, or a mixture of experts, with an optimizer, a sequence
length, a remat policy and a mesh (`Point`). Each result is stored in
scripts/results/estimate_accuracy.jsonl, so the script can be stopped and restarted. It needs the
extra estimate-gpu. The stored results are from jax 0.10.2. The model says which arrays are alive at
a step's peak, as read from XLA's buffer assignments; none of its constants is fitted to these
steps. When the order of gradients changed, 24 steps were compiled again, first those that the model
missed most; they need up to 18% less. Steps with accumulation were compiled again when they came to
hold one tree of gradients. The 9 mixtures are as new; the other dense steps are older.
"""

import argparse
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from jaxtp.analysis.tables import columns
from jaxtp.config.schema import from_yaml
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import DP, FSDP, TP, mesh_shape
from jaxtp.tools.estimate.compiler import TargetError, compile_for
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.memory import memory_per_device

RESULTS = Path(__file__).parent / "results" / "estimate_accuracy.jsonl"
GB = 1e9
MODELS = Path(__file__).parents[1] / "configs" / "models"
SHAPES = {
    "1b": "llama32_1b",
    "8b": "llama3_8b",
    "70b": "llama3_70b",
    "8x7b": "mixtral_8x7b",
    "30b-a3b": "qwen3_30b_a3b",
}
_FIRST_FIELDS = 7
"""The number of fields that are in the key of every point."""


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
    base: str = "full"
    """Form of the frozen kernels of adapters; the rest of the model is then in bfloat16."""

    def config(self) -> TrainConfig:
        model = dataclasses.replace(
            from_yaml(TrainConfig, MODELS / f"{SHAPES[self.shape]}.yaml").model,
            remat=self.remat,
            loss_chunk=512 * self.micro,  # in tokens, as the stored points were compiled
            attention="xla" if self.cp == 1 else "auto",  # scores of long sequences do not fit
            lora=LoraConfig(rank=self.lora, base=self.base),
        )
        if self.base != "full":
            precision = dataclasses.replace(model.precision, param="bfloat16")
            model = dataclasses.replace(model, precision=precision)
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
            f"{self.lora or '-'}{'' if self.base == 'full' else f' {self.base}'}",
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--again", nargs="+", metavar="PATTERN", help="compile steps whose key matches all again"
    )
    parser.add_argument("--add", metavar="KEY", help="compile another step")
    arguments = parser.parse_args(argv)
    patterns = arguments.again
    keys = []
    if patterns:
        keys = [key for key in read() if all(re.search(one, key) for one in patterns)]
    if arguments.add:
        keys.append(Point.from_key(arguments.add).key)
    compile_steps(keys)
    print(
        "GB on each device, modelled and as jax 0.10.2's compiler for an H100 allots them; rows of "
        "a micro-batch\n"
    )
    print(table(read()))


def compile_steps(keys: Sequence[str]) -> None:
    """Compiles steps, and stores each result."""
    rows = read()
    for key in keys:
        point = Point.from_key(key)
        old = rows.get(key)
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
        rows[key] = {"point": key, **dataclasses.asdict(compiled)}
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
    for key, row in rows.items():
        point = Point.from_key(key)
        modelled = memory_per_device(point.config(), point.sizes, platform="cuda")
        errors.append(modelled.total / row["peak_bytes"] - 1)
        alone.append((modelled.total - row["argument_bytes"]) / row["temp_bytes"] - 1)
        sizes = (modelled.state, row["peak_bytes"], modelled.total)
        numbers = [f"{size / GB:.2f}" for size in sizes]
        cells.append((*point.cells(), *numbers, f"{100 * errors[-1]:+.1f}"))
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
