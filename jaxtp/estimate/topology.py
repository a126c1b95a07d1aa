"""The devices to compile for: this machine's own, or, as `jax.experimental.topologies` describes them, absent ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from jaxtp.estimate.gpus import TARGET_CONFIGS
from jaxtp.hardware import of_kind
from jaxtp.launch.environment import DRIVER, visible_gpus

GPU_EXTRA, CUDNN_EXTRA, TPU_EXTRA = "estimate-gpu", "estimate-cudnn", "estimate-tpu"
_GPU_COMPILERS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_CUDNN = {"jax-cuda13-plugin": "nvidia-cudnn-cu13", "jax-cuda12-plugin": "nvidia-cudnn-cu12"}
"""The package of cuDNN's library that a compiler takes."""
_TPU_COMPILERS = ("libtpu",)
_TPU_DIMS = {"v5e": 2, "v6e": 2, "v5p": 3}
"""Dimensions of the torus; a host of the flat ones holds 2x4 chips or fewer, one of v5p 2x2x1."""


class TargetError(RuntimeError):
    """The compiler for a target is missing, crashed, took too long, or says that the program cannot run there."""


class DoesNotFitError(TargetError):
    """The compiler for a target says that its memory does not hold the program."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The devices that JAX is asked to compile for."""

    platform: str
    """cuda or tpu."""

    name: str
    """Name of a TPU slice, `v5e:4x4`; for GPUs partitions, hosts and GPUs of each, `1x4x8`."""

    target_config: str = ""
    """Description of a GPU."""

    compiler: str
    """The installed package that compiles for it, with its version; with cuDNN's, if that takes part."""

    libraries: str = ""
    """Folder of cuDNN's library, if it takes part."""

    here: bool = False
    """Whether the devices are this machine's own, and not described."""


def gpus_here(hardware: str, driver: Path = DRIVER) -> int:
    """Returns the number of GPUs of a kind that this machine lets us use, as their driver says; none of them is woken.

    Args:
      hardware: a name of the hardware table.
      driver: its folder of one `information` for each GPU, with a line such as `Model: NVIDIA H100 80GB HBM3`.
    """
    informations = [path.read_text(errors="replace") for path in driver.glob("*/information")]
    kinds = [of_kind(text.partition("Model:")[2].partition("\n")[0]) for text in informations]
    if any(kind is None or kind.name != hardware for kind in kinds):
        return 0  # which of them would be visible is not known
    return visible_gpus(len(kinds))


def this_machine(hardware: str, devices: int) -> Topology | None:
    """Returns so many of this machine's GPUs; None if there are fewer, of another kind, or none compiles for them."""
    if gpus_here(hardware) < devices:
        return None
    try:
        return Topology(platform="cuda", name="here", compiler=installed(_GPU_COMPILERS, GPU_EXTRA), here=True)
    except TargetError:
        return None


def topology(hardware: str, hosts: int, devices_per_host: int) -> Topology:
    """Returns the description of so many devices that need not be there.

    Args:
      hardware: a name of the hardware table.
      hosts: at least 1.
      devices_per_host: at least 1.

    Raises:
      TargetError: no compiler for it is installed, or there is none that works without the device.
    """
    if hardware in TARGET_CONFIGS:
        compiler = installed(_GPU_COMPILERS, GPU_EXTRA)
        name = f"1x{hosts}x{devices_per_host}"
        return Topology(platform="cuda", name=name, target_config=TARGET_CONFIGS[hardware], compiler=compiler)
    if hardware in _TPU_DIMS:
        shape = torus(hosts * devices_per_host, _TPU_DIMS[hardware])
        compiler = installed(_TPU_COMPILERS, TPU_EXTRA)
        return Topology(platform="tpu", name=f"{hardware}:{'x'.join(map(str, shape))}", compiler=compiler)
    known = ", ".join((*TARGET_CONFIGS, *_TPU_DIMS))
    raise TargetError(f"no compiler works for {hardware} without the device; there are some for {known}")


def with_cudnn(target: Topology) -> Topology | None:
    """Returns absent GPUs as a compiler that has cuDNN's library describes them; None if it is not installed."""
    package = _CUDNN[target.compiler.partition(" ")[0]]
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    folder = str(found.locate_file("nvidia/cudnn/lib"))
    return replace(target, compiler=f"{target.compiler}, {package} {found.version}", libraries=folder)


def installed(packages: Sequence[str], extra: str) -> str:
    """Returns the first package that is installed, with its version.

    Raises:
      TargetError: none is; the message names the extra that brings it.
    """
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    raise TargetError(f"the compiler for this target is not installed: pip install 'jaxtp[{extra}]'")


def torus(devices: int, dims: int) -> tuple[int, ...]:
    """Returns the shape nearest to a cube of so many devices.

    Raises:
      TargetError: their number is not a power of two.
    """
    if devices.bit_count() != 1:
        near = 2 ** math.floor(math.log2(devices))
        raise TargetError(f"{devices} TPUs: slices of a power of two are compiled for, such as {near} or {2 * near}")
    exponent = devices.bit_length() - 1
    small, rest = divmod(exponent, dims)
    return tuple(2 ** (small + (i >= dims - rest)) for i in range(dims))
