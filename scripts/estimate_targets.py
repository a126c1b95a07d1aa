"""What the compiler for GPUs makes of the shipped Llama configurations, and of a 70B model as tp grows; no GPU needed.

    python scripts/estimate_targets.py

1. Each shipped configuration on its hardware: seconds, peak memory, and what the schedule computes beside collectives.
2. Peak memory of a device of a 70B model at tp 1, 2, 4, 8 (fsdp 1, one sequence of 8192), against 1/tp of one device.

Needs the extra estimate-gpu. The attention is XLA's; of runs with cuDNN's the modelled scores are subtracted.
"""

import argparse
import math
import time
from pathlib import Path

from estimate_accuracy import GB, Point

from jaxtp.audit.tables import columns
from jaxtp.config import from_yaml
from jaxtp.estimate.target import Compiled, compile_for
from jaxtp.mesh import describe_mesh
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import memory_per_device

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = [("llama3_8b.yaml", 1), ("llama3_70b.yaml", 8), ("llama3_405b.yaml", 64)]
"""And hosts, of eight H100s each."""


def compile_on_h100(config: TrainConfig, sizes: dict[str, int]) -> tuple[Compiled, float]:
    """And the seconds that it took in all, a process of its own included."""
    devices = sizes["dp"] * sizes["fsdp"] * sizes["tp"]
    hosts = max(1, devices // 8)
    started = time.perf_counter()
    compiled = compile_for(config, sizes, "h100", hosts=hosts, devices_per_host=devices // hosts, timeout_s=900)
    return compiled, time.perf_counter() - started


def whole_mesh(config: TrainConfig, devices: int) -> dict[str, int]:
    """The configured mesh; -1 is what the other axes leave."""
    sizes = config.mesh.sizes
    given = math.prod(size for size in sizes.values() if size != -1)
    return {axis: devices // given if size == -1 else size for axis, size in sizes.items()}


def shipped() -> str:
    """The first table."""
    rows, moved = [], []
    for name, hosts in SHIPPED:
        config = from_yaml(TrainConfig, CONFIGS / name)
        sizes = whole_mesh(config, 8 * hosts)
        compiled, seconds = compile_on_h100(config, sizes)
        memory = memory_per_device(config, sizes)
        peak = compiled.peak_bytes
        cells = (f"{n / GB:.2f}" for n in (memory.state, compiled.peak_bytes, peak, memory.total))
        rows.append(
            (name, f"h100x{8 * hosts}", describe_mesh(sizes), f"{seconds:.0f}", f"{compiled.seconds:.0f}", *cells)
        )
        for m in compiled.collectives:
            numbers = (f"{n:,}" for n in (m.count, m.overlapped, m.computing))
            one = m.collective
            moved.append((name, one.kind, "+".join(one.axes), *numbers, f"{one.bytes / GB:,.3f}"))
    header = ("config", "hardware", "mesh", "seconds", "compiler", "state", "compiled", "without scores", "modelled")
    beside = ("config", "collective", "over", "count", "overlapped", "computing beside", "GB")
    return columns(header, rows) + "\n\n" + columns(beside, moved)


def over_tp() -> str:
    """The second table."""
    rows, one = [], None
    for tp in (1, 2, 4, 8):
        point = Point("70b", 8192, "full", (1, 1, tp))
        compiled, _ = compile_on_h100(point.config(), point.sizes)
        one = one or compiled
        shares = (compiled.argument_bytes * tp / one.argument_bytes, compiled.peak_bytes * tp / one.peak_bytes)
        modelled = memory_per_device(point.config(), point.sizes).total
        sizes = (compiled.argument_bytes, compiled.peak_bytes, modelled)
        rows.append((str(tp), *(f"{n / GB:,.2f}" for n in sizes), *(f"{share:.4f}" for share in shares)))
    header = ("tp", "state and batch, GB", "compiled peak, GB", "modelled, GB", "state x tp / one", "peak x tp / one")
    return columns(header, rows)


def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print("GB on each device; seconds with those of starting Python and tracing, and the compiler's own\n")
    print(shipped(), flush=True)
    print("\nLlama 3 70B, one sequence of 8192, remat full, H100\n")
    print(over_tp())


if __name__ == "__main__":
    main()
