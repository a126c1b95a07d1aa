"""Accelerators by name: memory, peak, bandwidth and links, each with its source; a user's own in YAML.

Links are counted one way for each device. A domain is what the fast links join: a host of GPUs, a slice of TPUs;
between domains each device has its share of the network. Peaks and bandwidths are those of data sheets; the shares of
them that programs reach (`matmul_efficiency` and the like) are assumptions, to be replaced by measured ones in a file:

    like: h100                # what is left out is as of this name
    matmul_efficiency: 0.73
    network: 25.0e+9          # bytes/s

`RANGES` has the unit of each number and what it may be. Without `like` a file says all of `NEEDED`.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxtp.config import ConfigError, Count, NonNegative, Positive, UniqueKeys, nearest_file, validate
from jaxtp.mesh import AXES

GIB = 2**30
PLATFORMS = ("cuda", "rocm", "tpu")
MAX_DEVICES = 2**20


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device, and how devices of it are joined."""

    name: str = "custom"
    """As it is asked for."""

    like: str = ""
    """In a file: the one of the table that what is left out is taken from, and that it is compiled as."""

    kind: str = ""
    """What `jax.Device.device_kind` contains on it."""

    platform: str = "cuda"
    """cuda, rocm or tpu."""

    memory: Positive = 80 * GIB
    """Bytes that a program can see."""

    flops: Positive = 1e15
    """Dense bfloat16 FLOP/s at their peak."""

    bandwidth: Positive = 3e12
    """Bytes/s to and from its memory."""

    link: Positive = 450e9
    """Bytes/s that it sends to the others of its domain, in one direction. To all of them together where `direct`."""

    domain: Count = 8
    """Devices that fast links join."""

    direct: bool = False
    """Whether the links of a domain join each pair directly: of n devices each then has the links to n - 1 others, and
    the rest of its `link` lies idle. False: a switch, or a torus, gives a ring all of it."""

    network: Positive = 50e9
    """Bytes/s that it sends out of its domain, in one direction."""

    reserved: NonNegative = 2.0 * GIB
    """Bytes outside JAX's allocator: context, kernels, communication buffers. An assumption."""

    matmul_efficiency: Positive = 0.7
    """Share of the peak that a large matrix product reaches. An assumption."""

    bandwidth_efficiency: Positive = 0.85
    """Share of the memory's bandwidth that a large kernel reaches. An assumption."""

    link_efficiency: Positive = 0.8
    """Share of a link that a large collective reaches. An assumption: 360 of 450 GB/s on an H100."""

    latency: NonNegative = 8.4e-6
    """Seconds that a collective takes to begin. As NCCL has it (src/graph/tuning.cc: rings, its Simple protocol)."""

    hop: NonNegative = 3.4e-6
    """Seconds of each step of a collective between devices of a domain, however little is sent. From there too. 0: a
    measured `latency` has it already."""

    network_hop: NonNegative = 14e-6
    """The same between devices of different domains."""

    source: str = ""
    """Where the numbers are from."""

    @property
    def compiled_as(self) -> str:
        """The name in the table whose compiler makes its programs."""
        return self.like or self.name


RANGES = {
    "memory": (1e9, 1e13, "bytes"),
    "flops": (1e11, 1e18, "FLOP/s, dense bfloat16"),
    "bandwidth": (1e9, 1e15, "bytes/s"),
    "link": (1e8, 1e14, "bytes/s, one way"),
    "domain": (1, 1e6, "devices"),
    "network": (1e6, 1e14, "bytes/s, one way"),
    "reserved": (0, 1e13, "bytes"),
    "matmul_efficiency": (1e-6, 1, "a share"),
    "bandwidth_efficiency": (1e-6, 1, "a share"),
    "link_efficiency": (1e-6, 1, "a share"),
    "latency": (0, 0.1, "seconds"),
    "hop": (0, 0.1, "seconds"),
    "network_hop": (0, 0.1, "seconds"),
}
"""Of the numbers in a file: the least, the most, and the unit. 80 for memory is no device's: it was meant in GB."""

NEEDED = ("memory", "flops", "bandwidth", "link", "domain", "network")
"""What a file without `like` says: no default of these is any device's."""


def _gpu(name: str, kind: str, gib: float, tflops: float, bandwidth: float, link: float, **others: Any) -> Hardware:
    """GB/s for the three bandwidths."""
    network = others.pop("network", 50.0)
    return Hardware(
        name=name,
        kind=kind,
        memory=gib * GIB,
        flops=tflops * 1e12,
        bandwidth=bandwidth * 1e9,
        link=link * 1e9,
        network=network * 1e9,
        **others,
    )


def _tpu(name: str, kind: str, gib: float, tflops: float, bandwidth: float, link: float, **others: Any) -> Hardware:
    """A mesh axis lies along one axis of the torus: two of its links, one each way round, and so half the steps.

    That both ways are there is assumed: where the ends of a slice's axis do not meet (on v5e and v6e one shorter than
    16) a ring has about half of the bandwidth. So is that a mesh axis is given no second axis of the torus, with which
    it would have twice as much. 1 us for a step is that of jax-ml.github.io/scaling-book; a collective's start and the
    network's step are assumed.
    """
    waits = {"latency": 3e-6, "hop": 0.5e-6, "network_hop": 10e-6}
    tpu: dict[str, Any] = {"platform": "tpu", "network": 3.1, "reserved": 0.0, **waits, **others}
    return _gpu(name, kind, gib, tflops, bandwidth, link, **tpu)


_DGX = "NVIDIA data sheet of the {} (SXM: dense bfloat16, half of NVLink's two-way bandwidth) and of its DGX (network)"
_CLOUD = "cloud.google.com/tpu/docs/{} (HBM as XLA reports it); a link's bandwidth: jax-ml.github.io/scaling-book/tpus"

_PCIE_HOP = 5.7e-6
"""As NCCL has it for PCIe."""

_RCCL = {"latency": 17e-6, "hop": 4.5e-6, "network_hop": 24.1e-6}
"""As RCCL has them: src/graph/tuning.cc of github.com/ROCm/rccl, rings, large messages."""

TABLE = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100-40", "A100-SXM4-40GB", 39.4, 312, 1555, 300, network=25.0, source=_DGX.format("A100 40GB")),
        _gpu("a100", "A100", 79.1, 312, 2039, 300, network=25.0, source=_DGX.format("A100 80GB")),
        _gpu("h100", "H100", 79.1, 989.4, 3352, 450, source=_DGX.format("H100")),
        _gpu("h200", "H200", 139.8, 989.4, 4800, 450, source=_DGX.format("H200")),
        _gpu("b200", "B200", 178.0, 2250, 8000, 900, source=_DGX.format("B200")),
        _gpu(
            "l40s",
            "L40S",
            44.4,
            362,
            864,
            32,
            network=12.5,
            hop=_PCIE_HOP,
            source="NVIDIA data sheet of the L40S (PCIe 4.0 x16, no NVLink); the network, 100 Gb/s each, is assumed",
        ),
        _gpu(
            "rtx4090",
            "RTX 4090",
            23.5,
            165.2,
            1008,
            16,
            network=1.6,
            hop=_PCIE_HOP,
            source="NVIDIA Ada architecture paper (bfloat16 with float32 sums); half of PCIe 4.0 x16, because it goes "
            "through the host; the network, 100 Gb/s for eight, is assumed",
        ),
        _gpu(
            "mi300x",
            "MI300X",
            191.5,
            1307.4,
            5300,
            448,
            platform="rocm",
            direct=True,
            **_RCCL,
            source="AMD data sheet of the MI300X: seven Infinity Fabric links, one to each other GPU, 64 GB/s one way",
        ),
        _tpu("v5e", "TPU v5 lite", 15.75, 197, 819, 90, domain=256, source=_CLOUD.format("v5e")),
        _tpu("v5p", "TPU v5", 95.74, 459, 2765, 180, domain=8960, source=_CLOUD.format("v5p")),
        _tpu("v6e", "TPU v6 lite", 31.25, 918, 1638, 180, domain=256, source=_CLOUD.format("v6e")),
    )
}
"""By name. Memory is what the driver leaves of the size on the label."""

_ALIASES = {"a100-80": "a100", "tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e", "4090": "rtx4090"}


def find(name: str) -> Hardware:
    """The hardware of a name in the table, in any case; or that of a YAML file.

    Raises:
      ConfigError: neither is there; the nearest names are given.
    """
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    return _of_table(name, ", or a YAML file of yours")


def _of_table(name: str, besides: str = "") -> Hardware:
    """The row of a name; a message about one that is not there ends with what it may be besides."""
    key = _key(name)
    if key not in TABLE:
        close = difflib.get_close_matches(key, TABLE, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ConfigError(f"hardware {name!r} is not known{hint} There are {', '.join(TABLE)}{besides}")
    return TABLE[key]


def parse(text: str) -> tuple[Hardware, int]:
    """`h100x8` or `mine.yamlx8` as the hardware and the number of devices; X is as good as x.

    Raises:
      ConfigError: it is not of that form, or the hardware is not known.
    """
    found = re.fullmatch(r"(?P<name>.+?)[xX](?P<count>\d+)", text)
    if found is None or _is_known(text):
        raise _uncounted(text)
    digits = found["count"].lstrip("0")
    if not digits or len(digits) > len(str(MAX_DEVICES)) or int(digits) > MAX_DEVICES:
        given = f"{digits[:20] or 0}{'...' if len(digits) > 20 else ''}"
        raise ConfigError(f"--hardware {found['name']}x{given}: from 1 to {MAX_DEVICES:,} devices")
    return find(found["name"]), int(digits)


def _uncounted(text: str) -> ConfigError:
    """What is wrong with `h100`, `h100x`, `h100x-3` or `h1000`."""
    at = text.lower().rfind("x")
    name, count = text[: max(at, 0)], text[at + 1 :]
    if _is_known(text):
        return ConfigError(f"--hardware {text}: how many devices? Such as {text}x8")
    if not _is_known(name):
        find(text)
    wrong = f"{count!r} is no number of devices; such as" if count else "how many devices? Such as"
    return ConfigError(f"--hardware {text}: {wrong} {name}x8")


def _is_known(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or _key(name) in TABLE


def _key(name: str) -> str:
    key = name.lower().replace("_", "-")
    return _ALIASES.get(key, key)


def read(path: Path) -> Hardware:
    """A YAML file of a `Hardware`'s fields; `like` names the one in the table that the others are taken from.

    Raises:
      ConfigError: it cannot be read, says what is not understood, or leaves out what nothing else gives.
    """
    values = _values(path)
    _require_ranges(path, values)
    base = _base(path, values)
    given = {**values, "like": base["name"]} if base else values
    own = {"name": path.stem, "source": _source(path, values, base)}
    hardware = validate(Hardware, {**base, **own, **given}, source=str(path))
    if hardware.platform not in PLATFORMS:
        raise ConfigError(f"{path}: platform = {hardware.platform!r}: should be {', '.join(PLATFORMS)}")
    if not base and (missing := [key for key in NEEDED if key not in values]):
        raise ConfigError(
            f"{path}: {', '.join(missing)} missing; give {'it' if len(missing) == 1 else 'them'}, or the name of a "
            "device that all that is left out is taken from, as in 'like: h100'"
        )
    if hardware.reserved >= hardware.memory:
        raise ConfigError(
            f"{path}: reserved = {hardware.reserved:g} is not less than memory = {hardware.memory:g} bytes: nothing is "
            "left for JAX"
        )
    return hardware


def _values(path: Path) -> Mapping[str, Any]:
    """The keys of a file, as strictly as those of a configuration."""
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, Loader=UniqueKeys)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {error}") from None
    if not isinstance(values, dict) or not values:
        found = repr(values) if values else "nothing"
        raise ConfigError(f"{path}: expected keys such as 'like: h100' and {', '.join(RANGES)}; found {found}")
    return values


def _base(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the device that a file is like; none if it names none."""
    if values.get("like") is None:
        return {}
    try:
        return dataclasses.asdict(_of_table(str(values["like"])))
    except ConfigError as error:
        raise ConfigError(f"{path}: like: {error}") from None


def _source(path: Path, values: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """`mine.yaml: memory, link; others as of h100`."""
    own = [str(key) for key in values if key not in ("like", "name", "kind")]
    others = f"as of {base['name']}" if base else "assumed"
    return f"{path}: {', '.join(own)}; others {others}" if own else f"{path}: all as of {base['name']}"


def _require_ranges(path: Path, values: Mapping[str, Any]) -> None:
    """Every number that cannot be meant, each with its unit."""
    problems = [
        f"  {key} = {values[key]!r}: {unit}, from {least:g} to {most:g}"
        for key, (least, most, unit) in RANGES.items()
        if key in values and not _is_between(values[key], least, most)
    ]
    if problems:
        raise ConfigError("\n".join([f"{path}:", *problems]))


def _is_between(value: Any, least: float, most: float) -> bool:
    try:
        return least <= float(value) <= most
    except (TypeError, ValueError):
        return False


def of_kind(device_kind: str) -> Hardware | None:
    """The hardware that a `jax.Device.device_kind` names; None if the table has none."""
    matches = [hardware for hardware in TABLE.values() if hardware.kind in device_kind]
    return max(matches, key=lambda hardware: len(hardware.kind), default=None)


def inside_domain(hardware: Hardware, sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """Devices of a ring that lie in one domain: neighbours lie along tp, then fsdp, then dp."""
    left, inside = hardware.domain, {}
    for axis in reversed(AXES):
        inside[axis] = math.gcd(sizes[axis], left)
        left = left // sizes[axis] if inside[axis] == sizes[axis] else 1
    return math.prod(inside[axis] for axis in axes)


def link_of(hardware: Hardware, devices: int) -> float:
    """Bytes/s, of its `link`, that each of so many devices of a domain has to the others of them."""
    if not hardware.direct or devices == 1:
        return hardware.link
    return hardware.link * (devices - 1) / (hardware.domain - 1)
