"""Compiles a training step for GPUs or TPUs that may be absent.

`tiers.ask` starts this process, because a compiler without its devices may crash, hang or print. XLA reads an absent
GPU's `GpuTargetConfigProto` as text (openxla/xla, xla/stream_executor/device_description.proto). It divides by
missing fields and dies silently, so every field is set.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxtp.analysis.hlo import HloError, count_flops_in_hlo
from jaxtp.analysis.schedule import read_schedule
from jaxtp.config.schema import validate
from jaxtp.mesh import mesh_of
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import trace_step

GPU_EXTRA, CUDNN_EXTRA, TPU_EXTRA = "estimate-gpu", "estimate-cudnn", "estimate-tpu"
GPU_COMPILERS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_CUDNN = {"jax-cuda13-plugin": "nvidia-cudnn-cu13", "jax-cuda12-plugin": "nvidia-cudnn-cu12"}
_TORUS_DIMS = {"v5e": 2, "v6e": 2, "v5p": 3}
ABSENT_GPU = {"xla_gpu_autotune_level": 0}  # no GPU to time kernels on

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class GpuSpec:
    """A GPU's description for XLA's compiler."""

    name: str
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    fpus: int
    """Float32 units of each core."""
    shared_kib: int
    """Shared memory of each core."""
    l2: int
    clock_ghz: float
    bandwidth: float
    """Bytes/s."""
    memory: int
    """Bytes, as the driver reports them."""
    threads: int = 2048

    def target_config(self) -> str:
        """Returns the `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"  # sm_90a, sm_100a: their matrix instructions
        shared = self.shared_kib * KIB
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock_ghz}
  shared_memory_per_block: {48 * KIB} shared_memory_per_block_optin: {shared - KIB}
  shared_memory_per_core: {shared} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.l2} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
}}
platform_name: "CUDA" device_description_str: "{self.name}"
"""


# CUDA C++ Programming Guide, table of technical specifications per compute capability; NVIDIA's architecture papers
# for the counts, caches and clocks.
_A100 = GpuSpec("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164, 40 * MIB, 1.41, 2039e9, 85_100_068_864)
_H100 = GpuSpec("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228, 50 * MIB, 1.98, 3352e9, 84_942_979_072)
_L40S = GpuSpec("NVIDIA L40S", (8, 9), 142, 128, 100, 96 * MIB, 2.52, 864e9, 47_674_097_664, threads=1536)
_GPUS = {
    "a100-40": replace(_A100, name="NVIDIA A100-SXM4-40GB", bandwidth=1555e9, memory=42_297_786_368),
    "a100": _A100,
    "h100": _H100,
    "h200": replace(_H100, name="NVIDIA H200", bandwidth=4800e9, memory=151_397_597_184),
    "b200": GpuSpec("NVIDIA B200", (10, 0), 148, 128, 228, 132_644_864, 1.965, 7672e9, 191_514_411_008),
    "l40s": _L40S,
    "rtx4090": replace(
        _L40S, name="NVIDIA GeForce RTX 4090", cores=128, l2=72 * MIB, bandwidth=1008e9, memory=25_232_932_864
    ),
}
TARGET_CONFIGS = {name: gpu.target_config() for name, gpu in _GPUS.items()}
"""Descriptions of GPUs for XLA, by their names in the hardware table."""


class TargetError(RuntimeError):
    """The compiler is missing, crashed, timed out, or cannot compile."""


class DoesNotFitError(TargetError):
    """The program exceeds the device's memory."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to compile for."""

    platform: str
    """cuda or tpu."""
    name: str
    """A TPU slice, `v5e:4x4`; for GPUs partitions, hosts and GPUs per host, `1x4x8`."""
    target_config: str = ""
    compiler: str
    """The package that compiles, and cuDNN's if used, with their versions."""
    libraries: str = ""
    """Folder of cuDNN's library, if used."""

    def devices(self) -> Sequence[jax.Device]:
        """Returns abstract devices to compile for."""
        gpu = {"topology": self.name, "target_config": self.target_config} if self.platform == "cuda" else {}
        described = topologies.get_topology_desc(self.name, self.platform, **gpu)
        return list(described.devices)


def topology(hardware: str, hosts: int, devices_per_host: int) -> Topology:
    """Describes devices of the hardware table, which may be absent.

    Raises:
      TargetError: no compiler for the hardware is installed, or none works without it.
    """
    if hardware in TARGET_CONFIGS:
        compiler = installed(GPU_COMPILERS, GPU_EXTRA)
        name = f"1x{hosts}x{devices_per_host}"
        return Topology(platform="cuda", name=name, target_config=TARGET_CONFIGS[hardware], compiler=compiler)
    if hardware in _TORUS_DIMS:
        shape = torus(hosts * devices_per_host, _TORUS_DIMS[hardware])
        compiler = installed(("libtpu",), TPU_EXTRA)
        return Topology(platform="tpu", name=f"{hardware}:{'x'.join(map(str, shape))}", compiler=compiler)
    known = ", ".join((*TARGET_CONFIGS, *_TORUS_DIMS))
    raise TargetError(f"no compiler works for {hardware} without the device; choose one of {known}")


def with_cudnn(target: Topology) -> Topology | None:
    """Adds cuDNN's library to absent GPUs; None if missing."""
    package = _CUDNN[target.compiler.partition(" ")[0]]
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    folder = str(found.locate_file("nvidia/cudnn/lib"))
    return replace(target, compiler=f"{target.compiler}, {package} {found.version}", libraries=folder)


def installed(packages: Sequence[str], extra: str) -> str:
    """Returns the first installed package with its version; the error names the extra."""
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    raise TargetError(f"the compiler for this target is not installed: pip install 'jaxtp[{extra}]'")


def torus(devices: int, dims: int) -> tuple[int, ...]:
    """Returns a TPU slice's shape: near a cube, of powers of two."""
    if devices.bit_count() != 1:
        near = 2 ** math.floor(math.log2(devices))
        raise TargetError(f"{devices} TPUs: a slice has a power of two, such as {near} or {2 * near}")
    small, rest = divmod(devices.bit_length() - 1, dims)
    return tuple(2 ** (small + (i >= dims - rest)) for i in range(dims))


def main() -> None:
    """Reads a request (`tiers.ask`) and prints the answer on one line."""
    request = json.load(sys.stdin)
    config = validate(TrainConfig, request["config"], source="request")
    target, sizes = Topology(**request["target"]), request["sizes"]
    print(json.dumps(_compile(_lower(config, mesh_of(sizes, target.devices())), target.platform, sizes)))


def _lower(config: TrainConfig, mesh: Mesh) -> jax.stages.Lowered:
    blueprint = plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)
    with jax.set_mesh(mesh):
        return trace_step(config, blueprint).lower()


def _compile(lowered: Any, platform: str, sizes: Mapping[str, int]) -> dict[str, object]:
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=ABSENT_GPU if platform == "cuda" else {})
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"error": f"the compiler says that it does not fit: {str(error).splitlines()[0][:300]}", "fits": False}
    seconds, text = time.perf_counter() - started, compiled.as_text()
    stats = compiled.memory_analysis()
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    block = arguments + temporaries + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        "seconds": seconds,
        "argument_bytes": arguments,
        "temp_bytes": temporaries,
        "alive_bytes": stats.peak_memory_in_bytes,
        "peak_bytes": stats.peak_memory_in_bytes if platform == "tpu" else block,  # GPUs: temporaries are one block
        "collectives": [one.record() for one in read_schedule(text, sizes)],
        "flops": _flops(text) if platform == "cuda" else None,
    }


def _flops(text: str) -> int | None:
    try:
        return count_flops_in_hlo(text)
    except HloError:
        return None


if __name__ == "__main__":
    main()
