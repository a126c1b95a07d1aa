"""Measures communication, memory and overlap of training steps, compiled for absent H100s.

    python scripts/step_on_h100.py | tee scripts/results/step_on_h100.txt
    python scripts/step_on_h100.py --of ../before | tee scripts/results/step_on_h100_before.txt

Sequences have 4,096 tokens of packed documents, one per device outside tp (or 32,768 tokens, one in
total). Compute and reductions are in bfloat16. The 8B rows include MaxText 0.2.5 on the same meshes
(cuDNN's attention, which ignores packing; remat full), measured once with the same compiler. Sent:
bytes that each device sends in a step, with ring collectives. Exposed: the part of them that the
schedule does not overlap with a matrix product. T x T: whether the program has an array of this
size. Copies: milliseconds of kernels that only copy, transpose or convert, at the memory's peak.
TFLOP: matrix products of each device outside attention kernels. Needs the extra estimate-gpu.

`--of` compiles the step of another checkout of this repository, with its own layers and default
attention.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from parts import read_parts

from jaxtp.analysis.hardware import find
from jaxtp.analysis.schedule import read_schedule
from jaxtp.analysis.tables import columns
from jaxtp.mesh import describe_mesh, mesh_shape
from jaxtp.tools.estimate.compiler import TARGET_CONFIGS

ROOT = Path(__file__).parent.parent
GIB = 2**30
GB = 1e9
MAXTEXT = {(1, 1, 8): (101.5, 17.76), (1, 2, 4): (50.7, 21.43), (1, 8, 1): (38.5, 20.77)}
"""GB sent, and peak GiB, by mesh."""
LONG = 32768
STEPS = [
    *(
        ("llama3_8b", mesh, 4096, 8, remat)
        for mesh in MAXTEXT
        for remat in ("full", "save_reduced")
    ),
    *(("llama3_8b", (1, 1, 8), length, 1, "full") for length in (LONG // 2, LONG)),
    *(("llama3_70b", (1, 8, 8), 4096, 64, remat) for remat in ("full", "save_reduced")),
    *(("qwen3_30b_a3b", mesh, 4096, 8, "full") for mesh in ((1, 8, 1), (1, 2, 4))),
    ("lora_llama31_70b", (1, 8, 1), 4096, 8, "full"),
]
RINGS = [("llama3_8b", (1, 1, 8), 4096, 8, remat, "ring") for remat in ("full", "save_reduced")]

COMPILE = """
import json, re, sys
import jax
from jax.experimental import topologies
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.hlo import count_flops_in_hlo
from jaxtp.config.schema import from_yaml, replace_nested
from jaxtp.mesh import make_mesh
from jaxtp.train import optimizer, setup, step
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import plan_state

asked = json.load(sys.stdin)
name = f"1x{asked['hosts']}x8"
described = topologies.get_topology_desc(name, "cuda", topology=name, target_config=asked["gpu"])
sizes = dict(zip(("dp", "fsdp", "tp"), asked["mesh"]))
mesh = make_mesh(**sizes, devices=described.devices)
config = replace_nested(from_yaml(TrainConfig, asked["config"]), asked["changes"])
plan = plan_state(config.model, optimizer.build(config.optimizer, config.train.steps), mesh)
with jax.set_mesh(mesh):
    if hasattr(setup, "plan_step"):
        lowered = setup.plan_step(config).trace_on(mesh).lower()
        options = step.compiler_options(config.model, "cuda")
    else:  # before 0.3
        lowered = step.trace_step(config, plan).lower()
        options = getattr(step, "compiler_options", lambda *_: {})(config, "cuda")
# Without a GPU some products then have no kernel.
options.pop("xla_gpu_exclude_nondeterministic_ops", None)
compiled, text = compile_with_spmd_text(lowered, {"xla_gpu_autotune_level": 0, **options})
memory = compiled.memory_analysis()
held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
with open(asked["out"], "w") as file:
    json.dump({
        "peak": held + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "flops": count_flops_in_hlo(re.sub(r".* custom-call\\(.*", "", text)),
        "text": compiled.as_text(),
    }, file)
"""
"""Compiles a step with the first jaxtp on Python's path; it uses only names that every checkout
has."""


def sizes_of(mesh: tuple[int, int, int]) -> dict[str, int]:
    """Returns the sizes of all axes from sizes of dp, fsdp and tp."""
    return mesh_shape(**dict(zip(("dp", "fsdp", "tp"), mesh, strict=True)))


def compiled(
    checkout: Path,
    name: str,
    mesh: tuple[int, int, int],
    length: int,
    sequences: int,
    remat: str,
    *overlap: str,
) -> dict[str, Any]:
    """Returns a step's peak memory, FLOPs and compiled HLO."""
    changes = {
        "data.sequence_length": length,
        "model.precision.reduce": "bfloat16",
        "train.accumulation": 1,
    }
    changes |= {"model.remat": remat, "data.global_batch_size": sequences}
    if overlap:
        (changes["model.overlap"],) = overlap
    hosts = max(1, mesh[0] * mesh[1] * mesh[2] // 8)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compiled.json"
        asked = {
            "config": str(checkout / "configs" / f"{name}.yaml"),
            "mesh": mesh,
            "changes": changes,
        }
        asked |= {"hosts": hosts, "gpu": TARGET_CONFIGS["h100"], "out": str(out)}
        environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", COMPILE]
        done = subprocess.run(
            command, input=json.dumps(asked), env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{name}, {describe_mesh(sizes_of(mesh))}, {remat}:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def row(
    checkout: Path, name: str, mesh: tuple[int, int, int], length: int, sequences: int, *how: str
) -> tuple[str, ...]:
    sizes = sizes_of(mesh)
    opening = (name, describe_mesh(sizes), f"{length:,}", ", ".join(how))
    found = compiled(checkout, name, mesh, length, sequences, *how)
    moved = [(m.bytes_sent, m.hidden_bytes / m.bytes) for m in read_schedule(found["text"], sizes)]
    sent = sum(size for size, _ in moved)
    exposed = sum(size * (1 - hidden) for size, hidden in moved)
    # The number 4096 is d_model.
    square = "" if length == 4096 else "yes" if f"{length},{length}]" in found["text"] else "no"
    theirs = MAXTEXT.get(mesh) if name == "llama3_8b" and length == 4096 else None
    peak = found["peak"]
    beside = (
        ("", "")
        if theirs is None
        else (f"{sent / GB / theirs[0]:.2f}", f"{peak / GIB / theirs[1]:.2f}")
    )
    copied = sum(part.get("copied_bytes", 0.0) for part in read_parts(found["text"]).values())
    copies = f"{1e3 * copied / find('h100').bandwidth:.1f}"
    numbers = (f"{sent / GB:.1f}", f"{exposed / GB:.1f}", f"{peak / GIB:.2f}", copies, square)
    return (*opening, *numbers, f"{found['flops'] / 1e12:.1f}", *beside)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--of", type=Path, default=ROOT, help="checkout whose step is compiled")
    checkout = parser.parse_args().of.resolve()
    print(__doc__.split("\n\n")[2], end="\n\n")
    header = (
        "model",
        "mesh",
        "tokens",
        "remat",
        "GB sent",
        "exposed",
        "peak GiB",
        "copies",
        "T x T",
        "TFLOP",
    )
    header += ("sent / MaxText", "peak / MaxText")
    steps = [*STEPS, *(RINGS if checkout == ROOT.resolve() else ())]
    print(columns(header, [row(checkout, *step) for step in steps]), flush=True)


if __name__ == "__main__":
    main()
