"""Versions of packages that compute wrongly or hang on some devices, with reports.

A row stays as long as it can affect a supported JAX. Versions that JAX rejects are left out.
"""

import contextlib
import importlib.metadata
import itertools
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxtp.guards.finding import Finding
from jaxtp.layers.kernels.select import architecture_of

Version = tuple[int, ...]

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
NATIVE = ("jaxlib", *_CUDA, *_NCCL, *_CUDNN)
"""Packages with native code; `versions` has the other packages."""
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class KnownProblem:
    """A range of bad versions of a package."""

    packages: tuple[str, ...]
    first: Version
    # The first version after the range
    fixed: Version
    devices: str
    """Part of the kind and `architecture_of` of affected devices, such as `NVIDIA RTX A6000, cuda
    8.6`."""
    effect: str
    """The effect, and the version to install instead."""
    thread: str


TABLE = (
    KnownProblem(
        packages=("jax",),
        first=(0, 11, 0),
        fixed=(0, 11, 2),
        devices="A6000",
        effect="operations outside of jit give wrong numbers on this GPU; 0.10.2 is right",
        thread="https://github.com/jax-ml/jax/issues/40633",
    ),
    KnownProblem(
        packages=_NCCL,
        first=(2, 30, 7),
        fixed=(2, 30, 8),
        devices=", cuda",
        effect="transfers between processes can hang; 2.31.2 passes where it hangs",
        thread="https://github.com/NVIDIA/jaxpp/issues/11",
    ),
    KnownProblem(
        packages=_CUDNN[:1],
        first=(0,),
        # 9.13 was the newest version at the report; the first version that works is unknown.
        fixed=(9, 14),
        devices=", cuda",
        effect="cuDNN's attention fails with CUDA 13; install a newer one, or use "
        "--model.attention fused",
        thread="https://github.com/jax-ml/jax/issues/32430",
    ),
    KnownProblem(
        packages=_CUDNN,
        first=(0,),
        fixed=(9, 11),
        devices=", cuda 10.3",
        effect="it has no attention for this GPU; install 9.11 or newer, or use "
        "--model.attention fused",
        thread="https://github.com/jax-ml/jax/pull/30242",
    ),
    KnownProblem(
        packages=_CUDNN,
        first=(0,),
        fixed=(9, 25),
        devices=", cuda 10.7",
        effect="it has no attention for this GPU; install 9.25 or newer, or use "
        "--model.attention fused",
        thread="https://github.com/pytorch/pytorch/pull/192843",
    ),
)


def versions() -> dict[str, str]:
    """Returns versions of Python and packages that affect a run's numbers and files."""
    packages = ("jaxtp", "jax", "flax", "optax", "orbax-checkpoint")
    installed = {name: importlib.metadata.version(name) for name in packages}
    return installed | {"python": platform.python_version()}


def versions_here() -> dict[str, str]:
    """Returns the versions that affect computation and communication."""
    installed = versions()
    for package in NATIVE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    if DRIVER.exists():
        installed["NVIDIA's driver"] = DRIVER.read_text(errors="replace").partition("\n")[0]
    return installed


def check_versions(device: jax.Device) -> list[Finding]:
    """Returns a warning for each installed version that is known to be bad on a device."""
    installed = versions_here()
    problems = known_problems(installed, device.device_kind, architecture_of(device))
    warnings = [Finding("versions", "known problems", text, "WARNING") for text in problems]
    return warnings or [Finding("versions", "known problems", "none")]


def known_problems(
    installed_versions: Mapping[str, str], kind: str, architecture: str
) -> Iterator[str]:
    """Yields a warning for each bad version on a device; see `KnownProblem.devices`."""
    for problem in TABLE:
        for package in problem.packages:
            installed = installed_versions.get(package)
            affected = problem.devices in f"{kind}, {architecture}"
            if affected and installed and problem.first <= _numbers(installed) < problem.fixed:
                yield f"WARNING {package} {installed}, {kind}: {problem.effect} ({problem.thread})"


def _numbers(version: str) -> Version:
    # `0.11.1.dev20260725` is 0.11.1.
    return tuple(map(int, itertools.takewhile(str.isdecimal, version.split("."))))
