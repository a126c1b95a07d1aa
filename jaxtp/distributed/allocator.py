"""Chooses the allocator of an NVIDIA GPU's memory, and the memory limit of a step under it.

- `default`: JAX's BFC allocator. Fragmentation can make an allocation fail despite enough free
  memory (marin-community/marin#7115), or make collectives wait for each other without an error
  (#7298).
- `cuda_async`: CUDA's pool, which joins fragments. Its share of the memory is a release threshold:
  a step with a higher peak maps memory again each time, which may fail hours later (#8490, #8507).

JAX's backend reads the choice from `jax_pjrt_client_create_options` at its start.
XLA_PYTHON_CLIENT_ALLOCATOR had no effect for some users of jax 0.10.1 (#7115).
"""

import os
import re
from collections.abc import Mapping
from typing import Literal

from jaxtp.config.console import size_text
from jaxtp.distributed.environment import has_nvidia_gpu

Allocator = Literal["default", "cuda_async"]

MEMORY_FRACTION: dict[Allocator, float] = {"default": 0.75, "cuda_async": 0.85}
"""Default share of a GPU's memory for each allocator; JAX's defaults, except for cuda_async."""

OUTSIDE = 0.1
"""Minimum share of a GPU's memory outside of the pool: NCCL, cuBLAS and CUDA's context need 10% to
15% (28.6 of 184 GiB in marin#8490)."""

FRAGMENTED = 0.1
"""Assumed share of its memory that the default allocator may lose to fragmentation."""

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SMALLER_STEP = "XLA_FLAGS=--xla_gpu_memory_limit_slop_factor=85"
"""Makes XLA plan a smaller step; the default is 95 (marin#8507)."""

_OPTIONS = "jax_pjrt_client_create_options"


def choose_allocator(allocator: Allocator) -> None:
    """Sets JAX's allocator before its backend starts, if there is an NVIDIA GPU.

    The backend of a TPU would crash at an unknown option.
    """
    import jax  # not at the top: the supervisor does not need it

    if allocator == "default" or not has_nvidia_gpu():
        return
    configured = getattr(jax.config, _OPTIONS) or {}
    if isinstance(configured, str):
        configured = dict(re.findall(r"([^;:]*):([^;]*)", configured))
    fraction = memory_fraction(allocator)
    jax.config.update(_OPTIONS, {"memory_fraction": fraction, **configured, "allocator": allocator})


def memory_fraction(allocator: Allocator, environment: Mapping[str, str] = os.environ) -> float:
    """Returns the share of a GPU's memory that the allocator takes."""
    fraction = environment.get("XLA_CLIENT_MEM_FRACTION") or environment.get(FRACTION)
    try:
        return float(fraction or MEMORY_FRACTION[allocator])
    except ValueError:  # JAX reports it
        return MEMORY_FRACTION[allocator]


def most_bytes(allocator: Allocator, limit: float, fraction: float) -> float:
    """Returns the maximum bytes that a step can use.

    `limit` is `fraction` of the memory; only cuda_async can exceed it.
    """
    if allocator != "cuda_async":
        return limit
    return max(limit, limit / fraction * (1 - OUTSIDE))


def advice(allocator: Allocator, peak: float, limit: float, fraction: float) -> str | None:
    """Returns advice on a step's `peak` bytes, or None.

    `limit` is the number of bytes that JAX may allocate (with cuda_async, the release threshold),
    and `fraction` is its share of the memory.
    """
    if allocator == "default" and limit * (1 - FRAGMENTED) < peak <= limit:
        return (
            f"{size_text(limit - peak)} to spare; {size_text(limit * FRAGMENTED)} are advisable, "
            "because fragments of free memory can be too small, above all after a resume; "
            "--launch.allocator cuda_async joins fragments"
        )
    if allocator == "cuda_async" and peak > limit:
        return (
            f"WARNING: above the {size_text(limit)} that the pool of cuda_async retains: each step "
            "maps memory again, and hours later one of many processes may fail to get it. Raise "
            f"{FRACTION} from {fraction:g} to at most {1 - OUTSIDE:g}, or let XLA plan a smaller "
            f"step: {SMALLER_STEP} (its default is 95)"
        )
    if allocator == "cuda_async" and fraction > 1 - OUTSIDE:
        return (
            f"WARNING: {FRACTION}={fraction:g} leaves less than {OUTSIDE:.0%} of the memory "
            "outside of the pool: NCCL, cuBLAS and CUDA's context need 10% to 15%"
        )
    return None


def describe_out_of_memory(error: BaseException, allocator: Allocator) -> str | None:
    """Returns advice on an out-of-memory error; None for other errors."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    if allocator == "cuda_async":
        instead = f"raise {FRACTION} (up to {1 - OUTSIDE:g}), or set {SMALLER_STEP}"
    else:
        instead = (
            "if the error names more free memory than it requested, or the run did fit before it "
            "was resumed, the free memory is fragmented: --launch.allocator cuda_async joins "
            "fragments"
        )
    return (
        "A device ran out of memory. To use less: more devices along fsdp or tp, --model.remat "
        f"full, a larger --train.accumulation. Otherwise: {instead}. jaxtp estimate shows which "
        "settings fit."
    )
