"""Compiles the shipped Llama configurations, and a 70B model as tp grows, for absent GPUs.

    python scripts/estimate_targets.py

1. Each shipped configuration on its hardware, and 8B with packed sequences of 32,768: seconds to
   compile, peak memory, and overlap of computation and collectives in the schedule.
2. A 70B model's peak memory per device at tp 1, 2, 4, 8 (fsdp 1, one sequence of 8192), relative to
   1/tp of tp 1.

Needs the extra estimate-gpu.
"""

import argparse
import math
import time
from pathlib import Path

from estimate_accuracy import GB, Point

from jaxtp.analysis.tables import columns
from jaxtp.config.schema import from_yaml, replace_nested
from jaxtp.mesh import describe_mesh, fixed_devices
from jaxtp.tools.estimate.compiler import Compiled, compile_for
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import memory_per_device

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = [
    ("llama3_8b.yaml", "h100", 1, None),
    ("llama3_8b.yaml", "h100", 1, 32768),
    ("llama3_8b.yaml", "h200", 1, 32768),
    ("llama3_70b.yaml", "h100", 8, None),
    ("llama3_405b.yaml", "h100", 64, None),
]
"""Each configuration with its GPUs, number of eight-GPU hosts, and sequence length if it differs
from the file's."""


def compile_on(hardware: str, config: TrainConfig, sizes: dict[str, int]) -> tuple[Compiled, float]:
    """Returns the compiled step, and the seconds from the start of its process to the end."""
    devices = math.prod(sizes.values())
    hosts = max(1, devices // 8)
    started = time.perf_counter()
    compiled = compile_for(
        config, sizes, hardware, hosts=hosts, devices_per_host=devices // hosts, timeout_s=900
    )
    return compiled, time.perf_counter() - started


def whole_mesh(config: TrainConfig, devices: int) -> dict[str, int]:
    """Returns the configured mesh; -1 becomes the number of remaining devices."""
    sizes = config.mesh.sizes
    given = fixed_devices(sizes)
    return {axis: devices // given if size == -1 else size for axis, size in sizes.items()}


def shipped() -> str:
    """Returns table 1."""
    rows = []
    moved = []
    for name, hardware, hosts, length in SHIPPED:
        config = from_yaml(TrainConfig, CONFIGS / name)
        config = replace_nested(
            config, {"data.sequence_length": length or config.data.sequence_length}
        )
        tokens = f"{config.data.sequence_length:,}"
        sizes = whole_mesh(config, 8 * hosts)
        compiled, seconds = compile_on(hardware, config, sizes)
        memory = memory_per_device(config, sizes, platform="cuda")
        gpus = f"{hardware}x{8 * hosts}"
        took = (f"{seconds:.0f}", f"{compiled.seconds:.0f}")
        cells = (f"{n / GB:.2f}" for n in (memory.state, compiled.peak_bytes, memory.total))
        rows.append((name, tokens, gpus, describe_mesh(sizes), *took, *cells))
        for m in compiled.collectives:
            numbers = (f"{n:,}" for n in (m.count, m.overlapped, m.computing))
            moved.append(
                (name, tokens, gpus, m.kind, "+".join(m.axes), *numbers, f"{m.bytes / GB:,.3f}")
            )
    header = (
        "config",
        "tokens",
        "hardware",
        "mesh",
        "seconds",
        "compiler",
        "state",
        "compiled",
        "modelled",
    )
    beside = (
        "config",
        "tokens",
        "hardware",
        "collective",
        "over",
        "count",
        "overlapped",
        "computing beside",
        "GB",
    )
    return columns(header, rows) + "\n\n" + columns(beside, moved)


def over_tp() -> str:
    """Returns table 2."""
    rows = []
    one = None
    for tp in (1, 2, 4, 8):
        point = Point("70b", 8192, "full", (1, 1, tp))
        compiled, _ = compile_on("h100", point.config(), point.sizes)
        one = one or compiled
        shares = (
            compiled.argument_bytes * tp / one.argument_bytes,
            compiled.peak_bytes * tp / one.peak_bytes,
        )
        modelled = memory_per_device(point.config(), point.sizes, platform="cuda").total
        sizes = (compiled.argument_bytes, compiled.peak_bytes, modelled)
        rows.append(
            (str(tp), *(f"{n / GB:,.2f}" for n in sizes), *(f"{share:.4f}" for share in shares))
        )
    header = (
        "tp",
        "state and batch, GB",
        "compiled peak, GB",
        "modelled, GB",
        "state x tp / one",
        "peak x tp / one",
    )
    return columns(header, rows)


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    print(
        "GB on each device; seconds with those of starting Python and tracing, and the "
        "compiler's own\n"
    )
    print(shipped(), flush=True)
    print("\nLlama 3 70B, one sequence of 8192, remat full, H100\n")
    print(over_tp())


if __name__ == "__main__":
    main()
