"""Descriptions of GPUs that are not there, for XLA's compiler.

It reads a `GpuTargetConfigProto` in text form (openxla/xla, xla/stream_executor/device_description.proto). A field that
is missing is zero there, and divided by: the compiler then ends its process without a word, so every one is given.
"""

from functools import partial

KIB, MIB = 2**10, 2**20


def _target_config(
    description: str,
    *,
    capability: tuple[int, int],
    cores: int,
    fpus: int,
    threads: int = 2048,
    shared: int,
    l2: int,
    clock_ghz: float,
    bandwidth: float,
    memory: int,
) -> str:
    """Returns the text that describes a GPU.

    Args:
      description: name that the driver gives it.
      capability: CUDA compute capability.
      cores: number of streaming multiprocessors.
      fpus: single-precision units of each.
      threads: resident threads of each.
      shared: bytes of shared memory of each.
      l2: bytes of cache.
      clock_ghz: boost clock.
      bandwidth: bytes/s to and from its memory.
      memory: bytes that the driver reports.
    """
    major, minor = capability
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"  # sm_90a, sm_100a: their matrix instructions
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock_ghz}
  shared_memory_per_block: {48 * KIB} shared_memory_per_block_optin: {shared - KIB}
  shared_memory_per_core: {shared} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {l2} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
}}
platform_name: "CUDA" device_description_str: "{description}"
"""


# CUDA C++ Programming Guide, table of technical specifications per compute capability; NVIDIA's architecture papers
# for the counts, caches and clocks.
_ampere = partial(_target_config, capability=(8, 0), cores=108, fpus=64, shared=164 * KIB, l2=40 * MIB, clock_ghz=1.41)
_ada = partial(_target_config, capability=(8, 9), fpus=128, threads=1536, shared=100 * KIB, clock_ghz=2.52)
_hopper = partial(_target_config, capability=(9, 0), cores=132, fpus=128, shared=228 * KIB, l2=50 * MIB, clock_ghz=1.98)
_blackwell = partial(
    _target_config, capability=(10, 0), cores=148, fpus=128, shared=228 * KIB, l2=132_644_864, clock_ghz=1.965
)

TARGET_CONFIGS = {
    "a100-40": _ampere("NVIDIA A100-SXM4-40GB", bandwidth=1555e9, memory=42_297_786_368),
    "a100": _ampere("NVIDIA A100-SXM4-80GB", bandwidth=2039e9, memory=85_100_068_864),
    "h100": _hopper("NVIDIA H100 80GB HBM3", bandwidth=3352e9, memory=84_942_979_072),
    "h200": _hopper("NVIDIA H200", bandwidth=4800e9, memory=151_397_597_184),
    "b200": _blackwell("NVIDIA B200", bandwidth=7672e9, memory=191_514_411_008),
    "l40s": _ada("NVIDIA L40S", cores=142, l2=96 * MIB, bandwidth=864e9, memory=47_674_097_664),
    "rtx4090": _ada("NVIDIA GeForce RTX 4090", cores=128, l2=72 * MIB, bandwidth=1008e9, memory=25_232_932_864),
}
"""Descriptions of GPUs, by their names in the hardware table."""
