"""Package versions that compute wrongly or hang on some devices, with reports.

A row stays while it can affect a supported JAX; versions that JAX rejects are omitted.
"""

import contextlib
import importlib.metadata
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxtp.layers.kernels.select import architecture_of
from jaxtp.train.run_folder import versions

Version = tuple[int, ...]

_NCCL, _CUDNN = (
    tuple(f"nvidia-{name}-cu{cuda}" for cuda in (13, 12)) for name in ("nccl", "cudnn")
)
NATIVE = ("jaxlib", *_NCCL, *_CUDNN)
"""Packages with native code; `run_folder.versions` lists the others."""
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Known:
    """A range of bad versions of a package."""

    packages: tuple[str, ...]
    first: Version
    fixed: Version  # the first after the range
    devices: str
    """Part of the kind and `architecture_of` of affected devices, such as `NVIDIA RTX A6000, cuda
    8.6`."""
    what: str
    """The effect, and the version to install instead."""
    thread: str


TABLE = (
    Known(
        packages=("jax",),
        first=(0, 11, 0),
        fixed=(0, 11, 2),
        devices="A6000",
        what="operations outside of jit give wrong numbers on this GPU; 0.10.2 is right",
        thread="https://github.com/jax-ml/jax/issues/40633",
    ),
    Known(
        packages=_NCCL,
        first=(2, 30, 7),
        fixed=(2, 30, 8),
        devices=", cuda",
        what="transfers between processes can hang; 2.31.2 passes where it hangs",
        thread="https://github.com/NVIDIA/jaxpp/issues/11",
    ),
    Known(
        packages=_CUDNN[:1],
        first=(0,),
        fixed=(9, 14),  # 9.13 was the newest at the report; the first that works is unknown
        devices=", cuda",
        what="cuDNN's attention fails with CUDA 13; install a newer one, or use "
        "--model.attention fused",
        thread="https://github.com/jax-ml/jax/issues/32430",
    ),
    Known(
        packages=_CUDNN,
        first=(0,),
        fixed=(9, 11),
        devices=", cuda 10.3",
        what="it has no attention for this GPU; install 9.11 or newer, or use "
        "--model.attention fused",
        thread="https://github.com/jax-ml/jax/pull/30242",
    ),
    Known(
        packages=_CUDNN,
        first=(0,),
        fixed=(9, 25),
        devices=", cuda 10.7",
        what="it has no attention for this GPU; install 9.25 or newer, or use "
        "--model.attention fused",
        thread="https://github.com/pytorch/pytorch/pull/192843",
    ),
)


def native_versions() -> dict[str, str]:
    """Returns the installed versions of `NATIVE`."""
    found = {}
    for package in NATIVE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def versions_here() -> dict[str, str]:
    """Returns the versions that affect computation and communication."""
    driver = (
        {"NVIDIA's driver": DRIVER.read_text(errors="replace").partition("\n")[0]}
        if DRIVER.exists()
        else {}
    )
    return versions() | native_versions() | driver


def version_warnings() -> list[str]:
    """Returns warnings for this process's first device."""
    first = jax.local_devices()[0]
    return list(known_problems(versions_here(), first.device_kind, architecture_of(first)))


def known_problems(
    installed_versions: Mapping[str, str], kind: str, architecture: str
) -> Iterator[str]:
    """Yields a warning for each bad version on a device; see `Known.devices`."""
    for known in TABLE:
        for package in known.packages:
            installed = installed_versions.get(package)
            affected = known.devices in f"{kind}, {architecture}"
            if affected and installed and known.first <= _numbers(installed) < known.fixed:
                yield f"WARNING {package} {installed}, {kind}: {known.what} ({known.thread})"


def _numbers(version: str) -> Version:
    # `0.11.1.dev20260725` is 0.11.1.
    return tuple(map(int, itertools.takewhile(str.isdecimal, version.split("."))))
