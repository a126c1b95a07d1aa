"""Tier 3: the real training step, compiled from shapes for GPUs that may be absent.

Nothing is allocated or run. It compiles in a process of its own (`python -m` this file), because a
compiler without its devices may crash, hang or print. XLA reads an absent GPU's
`GpuTargetConfigProto` as text (openxla/xla, xla/stream_executor/device_description.proto). It
divides by missing fields and dies silently, so every field is set.
"""

import dataclasses
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Traced

from jaxtp.analysis.hardware import COMPILED, GB, TABLE, Hardware
from jaxtp.analysis.hlo import HloError, count_flops_in_hlo
from jaxtp.analysis.schedule import Scheduled, read_schedule
from jaxtp.analysis.tables import Record, columns
from jaxtp.config.entry import signal_name
from jaxtp.config.schema import replace_nested, to_plain, validate
from jaxtp.distributed.environment import child_environment
from jaxtp.mesh import Sizes, mesh_of
from jaxtp.tools.estimate.search import Setting
from jaxtp.train.config import TrainConfig
from jaxtp.train.setup import plan_step
from jaxtp.train.step import compiler_options
from jaxtp.train.validation import chosen_kernels

COMPILER = (sys.executable, "-m", "jaxtp.tools.estimate.compiler")
_LAST_LINES = 3
_WARNING = re.compile(r"Involuntary full rematerialization[^\n]*")
_DIFFERENCE = (
    "compiled without cuBLAS and autotuning: kernels, and a few MB of their workspace, differ"
)
_FUSED = "compiled with the fused attention, which holds as little as cuDNN's and tokamax's"
GPU_EXTRA = "estimate-gpu"
GPU_COMPILERS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_COLLECTIVE_HEADER = (
    *("collective", "over", "times"),
    *("GB of messages", "overlapped", "operations that overlap"),
)
ABSENT_GPU = {"xla_gpu_autotune_level": 0}  # no GPU to time kernels on


KIB = 2**10


def target_config(hardware: Hardware, gpu: Mapping[str, Any]) -> str:
    """Returns the `GpuTargetConfigProto` as text; `gpu` is a row of `COMPILED`."""
    shared = KIB * gpu["shared_kib"]
    major, minor = hardware.capability.split(".")
    # Architectures such as sm_90a and sm_100a have their own matrix instructions.
    feature = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"
    # The first CUDA with products in float8, without which XLA multiplies in 16 bits.
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu["threads"]}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  core_count: {gpu["cores"]} fpus_per_core: {gpu["fpus"]} clock_rate_ghz: {gpu["clock_ghz"]}
  shared_memory_per_block: {48 * KIB} shared_memory_per_block_optin: {shared - KIB}
  shared_memory_per_core: {shared}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {hardware.bandwidth:.0f}
  l2_cache_size: {gpu["l2"]} device_memory_size: {hardware.memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  runtime_version: "12.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" device_description_str: "{hardware.kinds[0]}"
dnn_version_info {{ major: 9 minor: 10 }}
"""


TARGET_CONFIGS = {name: target_config(TABLE[name], gpu) for name, gpu in COMPILED.items()}
"""Descriptions of GPUs for XLA, by their names in the hardware table."""


class TargetError(RuntimeError):
    """The compiler is missing, crashed, timed out, or cannot compile."""


class DoesNotFitError(TargetError):
    """The program exceeds the device's memory."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """GPUs to compile for."""

    name: str  # partitions, hosts and GPUs per host, 1x4x8
    target_config: str

    def devices(self) -> Sequence[jax.Device]:
        """Returns abstract devices to compile for."""
        options = {"topology": self.name, "target_config": self.target_config}
        return topologies.get_topology_desc(self.name, "cuda", **options).devices


def topology(hardware: str, hosts: int, devices_per_host: int) -> Topology:
    """Describes devices of the hardware table, perhaps absent.

    Raises `TargetError` without a compiler for them.
    """
    if hardware not in TARGET_CONFIGS:
        raise TargetError(
            f"jaxtp does not compile for {hardware} without the device; choose one of "
            f"{', '.join(TARGET_CONFIGS)}"
        )
    require_compiler()
    return Topology(name=f"1x{hosts}x{devices_per_host}", target_config=TARGET_CONFIGS[hardware])


def require_compiler() -> None:
    """Raises `TargetError`, which names the extra, if no package of `GPU_COMPILERS` is here."""
    for package in GPU_COMPILERS:
        with suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            return
    raise TargetError(f"the compiler for GPUs is not installed: pip install 'jaxtp[{GPU_EXTRA}]'")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Tier 3: the step from the target's compiler, with bytes per device."""

    argument_bytes: int  # state and batch
    temp_bytes: int  # the block that holds everything else
    peak_bytes: int  # bytes to allocate: arguments, temporaries, results that replace no argument
    # Collectives by kind, axes and group, with the compute that overlaps them
    collectives: tuple[Scheduled, ...]
    seconds: float  # to compile
    flops: float | None  # FLOPs of the program's products; None if a kernel does not tell its own
    # Differences from the program on real devices, and the compiler's warnings
    notes: tuple[str, ...]

    def fits(self, setting: Setting) -> bool:
        """Returns whether the step fits into memory."""
        return self.peak_bytes <= setting.target.room

    def lines(self, setting: Setting) -> Iterator[str]:
        """Yields memory, collectives and notes."""
        peak = self.peak_bytes
        room = setting.target.room
        estimated = setting.memory.total
        where = f"{setting.target.devices} x {setting.target.hardware.name}"
        yield f"compiled {setting} for {where}, which need not be there, in {self.seconds:.0f} s"
        yield (
            f"state and batch {self.argument_bytes / GB:,.2f} GB, temporaries "
            f"{self.temp_bytes / GB:,.2f}, peak "
            f"{peak / GB:,.2f} of {room / GB:,.2f} for JAX: "
            f"{'fits' if self.fits(setting) else 'does not fit'}; "
            f"tier 1: {estimated / GB:,.2f}, {estimated / peak - 1:+.0%} of the peak"
        )
        yield self._collective_table()
        for note in self.notes:
            yield f"  ({note})"

    def _collective_table(self) -> str:
        rows = []
        for collective in self.collectives:
            place = f"{'+'.join(collective.axes)} {collective.group}"
            size = f"{collective.bytes / GB:,.3f}"
            overlap = (f"{collective.overlapped:,}", f"{collective.computing:,}")
            rows.append((collective.kind, place, f"{collective.count:,}", size, *overlap))
        return columns(_COLLECTIVE_HEADER, rows)

    def record(self, setting: Setting) -> Record:
        """Returns tier 3 for JSON."""
        return {
            **dataclasses.asdict(self),
            "collectives": [collective.record() for collective in self.collectives],
            "fits": self.fits(setting),
            "tier_1_to_peak": setting.memory.total / self.peak_bytes,
        }


def compile_for(
    config: TrainConfig,
    sizes: Sizes,
    hardware: str,
    *,
    hosts: int,
    devices_per_host: int,
    timeout_s: float,
) -> Compiled:
    """Compiles the step for hardware of the table that may be absent; ignores the run's mesh.

    `sizes` must fit the configuration, and use all devices.

    Raises:
      TargetError: the compiler is missing, crashed, timed out, or reports that the program does not
        fit.
    """
    target = topology(hardware, hosts, devices_per_host)
    chosen = chosen_kernels(config, sizes, TABLE[hardware].architecture)
    if not {"cudnn", "tokamax"} & chosen.keys():
        return ask(config, sizes, target, timeout_s=timeout_s)
    fused = replace_nested(config, {"model.attention": "fused"})
    compiled = ask(fused, sizes, target, timeout_s=timeout_s)
    return replace(compiled, notes=(*compiled.notes, _FUSED))


def ask(
    config: TrainConfig,
    sizes: Sizes,
    target: Topology,
    *,
    timeout_s: float,
) -> Compiled:
    """Runs the compiler process and reads its answer."""
    request = {
        "config": to_plain(config),
        "sizes": dict(sizes),
        "target": dataclasses.asdict(target),
    }
    # Without a platform the plugin refuses to register: it looks for a GPU.
    environment = child_environment(JAX_PLATFORMS="cpu")
    try:
        process = subprocess.run(
            COMPILER,
            input=json.dumps(request),
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a crashing compiler may print anything
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TargetError(
            f"the compiler for the target was ended after its time limit of {timeout_s:g} s; allow "
            f"it more, such as --timeout {3 * timeout_s:g}"
        ) from None
    if process.returncode:
        raise TargetError(f"the compiler for the target {_describe_failure(process)}")
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise TargetError(
            f"the compiler for the target gave no answer: {process.stdout[-200:]!r}"
        ) from None
    if "error" in answer:
        raise DoesNotFitError(answer["error"])
    collectives = []
    for record in answer.pop("collectives"):
        collectives.append(Scheduled(**record | {"axes": tuple(record["axes"])}))
    notes = (_DIFFERENCE, *sorted(set(_WARNING.findall(process.stderr))))
    return Compiled(**answer, collectives=tuple(collectives), notes=notes)


def _describe_failure(process: subprocess.CompletedProcess[str]) -> str:
    code = process.returncode
    verb = f"crashed ({signal_name(-code)})" if code < 0 else "failed"
    lines = [f"\n  {line}" for line in process.stderr.splitlines() if line.strip(" ^~")]
    return f"{verb}:{''.join(lines[-_LAST_LINES:])}" if lines else f"{verb} without a message"


def main() -> None:
    """Reads a request (`ask`) and prints the answer on one line."""
    request = json.load(sys.stdin)
    config = validate(TrainConfig, request["config"], source="request")
    target = Topology(**request["target"])
    sizes = request["sizes"]
    mesh = mesh_of(sizes, target.devices())
    traced = trace(config, mesh)
    with jax.set_mesh(mesh):
        lowered = traced.lower()
    started = time.perf_counter()
    options: dict[str, bool | str | int] = {
        **compiler_options(
            config.model, "cuda", deterministic=config.train.excludes_nondeterministic
        ),
        **ABSENT_GPU,
    }
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = f"the compiler says that it does not fit: {str(error).splitlines()[0][:300]}"
        print(json.dumps({"error": text}))
    else:
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, **_numbers(compiled, sizes)}))


def trace(config: TrainConfig, mesh: Mesh) -> Traced:
    """Traces the step of a configuration on a mesh, also with a user's loss."""
    return plan_step(config).trace_on(mesh)


def _numbers(compiled: jax.stages.Compiled, sizes: Sizes) -> Record:
    text = compiled.as_text() or ""
    flops = None
    stats: Any = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    with suppress(HloError):
        flops = count_flops_in_hlo(text)
    return {
        "argument_bytes": arguments,
        "temp_bytes": temporaries,
        "peak_bytes": arguments + temporaries + results,
        "collectives": [collective.record() for collective in read_schedule(text, sizes)],
        "flops": flops,
    }


if __name__ == "__main__":
    gc.enable()  # paused during the imports of commands
    main()
