"""A training step of Llama 3 8B and 70B, as the compiler for GPUs makes it for absent H100s: bytes, memory, overlap.

    python scripts/step_on_h100.py | tee scripts/results/step_on_h100.txt

Sequences of 4,096 tokens of packed documents, one for each device of a mesh but for tp; bfloat16 compute and
reductions. Beside 8B stands what MaxText 0.2.5 compiles to on the same meshes (cuDNN's attention, which ignores
packing; remat full), measured once by the same compiler. Sent: bytes of each device in a step, around rings; bare: the
share of messages that have nothing computed beside them in the schedule. Needs the extra estimate-gpu.
"""

import math
from collections.abc import Mapping

from jaxtp.audit.tables import columns
from jaxtp.config import changed, from_yaml
from jaxtp.estimate.target import compile_for
from jaxtp.mesh import describe_mesh, sized
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import costs_of_step

GIB, GB = 2**30, 1e9
SHAPE = {"data.sequence_length": 4096, "model.precision.reduce": "bfloat16", "train.accumulation": 1}
MAXTEXT = {(1, 1, 8): (101.5, 17.76), (1, 2, 4): (50.7, 21.43), (1, 8, 1): (38.5, 20.77)}
"""GB sent and GiB at the peak, by mesh."""
STEPS = [
    *(("llama3_8b", mesh, 8, remat) for mesh in MAXTEXT for remat in ("full", "save_reduced")),
    ("llama3_70b", (1, 8, 8), 64, "full"),
    ("llama3_70b", (1, 8, 8), 64, "save_reduced"),
]


def row(name: str, mesh: tuple[int, int, int], sequences: int, remat: str) -> tuple[str, ...]:
    """Returns a line of the table."""
    config = from_yaml(TrainConfig, f"configs/{name}.yaml")
    config = changed(config, {**SHAPE, "model.remat": remat, "data.global_batch_size": sequences})
    sizes: Mapping[str, int] = sized(*mesh)
    hosts = max(1, math.prod(mesh) // 8)
    compiled = compile_for(config, sizes, "h100", hosts=hosts, devices_per_host=8, timeout_s=900)
    costs = costs_of_step(config, sizes, "cuda")
    sent, peak = sum(costs.budget.values()) / GB, compiled.peak_bytes / GIB
    messages = sum(m.count for m in compiled.collectives)
    bare = sum(m.count - m.overlapped for m in compiled.collectives) / messages
    theirs = MAXTEXT.get(mesh) if name == "llama3_8b" else None
    beside = ("", "") if theirs is None else (f"{sent / theirs[0]:.2f}", f"{peak / theirs[1]:.2f}")
    flops = f"{costs.flops / 1e12:.1f}"
    return name, describe_mesh(sizes), remat, f"{sent:.1f}", f"{peak:.2f}", f"{bare:.0%}", flops, *beside


def main() -> None:
    print(__doc__.split("\n\n")[2], end="\n\n")
    header = ("model", "mesh", "remat", "GB sent", "peak GiB", "bare", "TFLOP", "sent / MaxText", "peak / MaxText")
    print(columns(header, [row(*step) for step in STEPS]))


if __name__ == "__main__":
    main()
