"""Accelerators by name: memory, peak, bandwidth and links, from `hardware.toml`.

Links are one-way per device. Fast links join a domain (a host of GPUs, a slice of TPUs); between
domains each device has its share of the network. Peaks and bandwidths come from data sheets; their
reachable shares (`matmul_efficiency` etc.) are assumptions. A user's own hardware is a YAML file,
with units and ranges as in `RANGES`:

    like: h100                # supplies missing keys; without it, all of `NEEDED` are required
    matmul_efficiency: 0.73
    network: 25.0e+9          # bytes/s
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxtp.config.reading import truncate
from jaxtp.config.schema import ConfigError, Count, NonNegative, Positive, read_yaml, validate
from jaxtp.layers.kernels.select import CAPABILITIES, FLOAT8_CAPABILITY
from jaxtp.mesh import AXES, Sizes, parts

GB = 1e9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device, and its interconnect."""

    name: str = "custom"
    # In a file: the row of the table that has its missing keys, and that programs are compiled for
    like: str = ""
    # Values of `jax.Device.device_kind`, exactly: a near name is another device's
    kinds: tuple[str, ...] = ()
    platform: Literal["cuda", "rocm", "tpu"] = "cuda"
    # Compute capability of an NVIDIA GPU, such as 9.0; it determines the available kernels
    capability: str = ""
    memory: Positive = 80 * GIB  # bytes that a program can see
    flops: Positive = 1e15  # dense bfloat16 FLOP/s at their peak
    float8: NonNegative = 0.0  # the same for E4M3 with float32 sums; 0 without such products
    bandwidth: Positive = 3e12  # bytes/s to and from its memory
    # Bytes/s to the other devices of its domain, one way; to all of them together if `direct`
    link: Positive = 450e9
    domain: Count = 8  # devices that fast links join
    # Whether links join each pair; else a switch or a torus gives a ring all of `link`
    direct: bool = False
    network: Positive = 50e9  # bytes/s that it sends out of its domain, in one direction
    # Assumed bytes outside JAX's allocator: context, kernels, communication buffers
    reserved: NonNegative = 2.0 * GIB
    # Share of the peak that a large matrix product reaches; assumed, like the next two
    matmul_efficiency: Positive = 0.7
    bandwidth_efficiency: Positive = 0.85
    link_efficiency: Positive = 0.8  # 360 of 450 GB/s on an H100
    # Seconds until a collective starts, as in NCCL (src/graph/tuning.cc: Simple rings)
    latency: NonNegative = 8.4e-6
    # Seconds of each step of a collective in a domain; 0 if a measured `latency` includes them
    hop: NonNegative = 3.4e-6
    network_hop: NonNegative = 14e-6  # the same between devices of different domains
    source: str = ""  # source of the numbers

    @property
    def compiled_as(self) -> str:
        """Name in the table that programs are compiled for."""
        return self.like or self.name

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s of `Precision.matmul`; 0 if the hardware has no such products."""
        return self.flops if dtype in ("", "compute") else self.float8

    @property
    def memory_speed(self) -> float:
        """Bytes/s that programs reach to and from memory."""
        return self.bandwidth * self.bandwidth_efficiency

    @property
    def architecture(self) -> str:
        """Platform and compute capability, as from `architecture_of`."""
        return f"{self.platform} {self.capability}".strip()


RANGES = {
    "memory": (1e9, 1e13, "bytes"),
    "flops": (1e11, 1e18, "FLOP/s, dense bfloat16"),
    "float8": (0, 1e18, "FLOP/s, dense; 0: none"),
    "bandwidth": (1e9, 1e15, "bytes/s"),
    "link": (1e6, 1e14, "bytes/s, one way"),
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
"""Minimum, maximum and unit of the numbers in a file. They reject a wrong unit, such as a memory
of 80 (GB, not bytes)."""

MAX_DEVICES = 2**20

NEEDED = ("memory", "flops", "bandwidth", "link", "domain", "network")
"""Keys that a file without `like` must have: their defaults describe no device."""


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _table() -> dict[str, Hardware]:
    table = {}
    for name, device in _FILE["devices"].items():
        fields = _FILE["groups"].get(device.pop("group", ""), {}) | device
        memory = GIB * fields.pop("gib")
        kinds = tuple(fields.pop("kinds"))
        capability = CAPABILITIES.get(kinds[0], "")
        # Twice bfloat16 on each card of Ada, Hopper and Blackwell, by the sources of the devices:
        # 1,979 TFLOP/s of an H100, 4,500 of a B200 and 330.3 of an RTX 4090. CDNA 3 has another
        # format (E4M3FNUZ); these TPUs have none.
        if float(capability or 0) >= FLOAT8_CAPABILITY:
            fields["float8"] = 2 * fields["flops"]
        table[name] = Hardware(
            name=name, kinds=kinds, capability=capability, memory=memory, **fields
        )
    return table


TABLE = _table()
"""Hardware by name. `memory` is the nominal size without the driver's share."""
COMPILED: dict[str, dict[str, Any]] = _FILE["compiled"]
"""Descriptions of GPUs for XLA's compiler by name, beside their rows of `TABLE`."""


def of_kind(device_kind: str) -> Hardware | None:
    """Returns the hardware of a `jax.Device.device_kind`, or None.

    Partitions of a GPU (MIG) and related models are not in the table: their peaks differ.
    """
    for hardware in TABLE.values():
        if device_kind.strip() in hardware.kinds:
            return hardware
    return None


def require_matmul(hardware: Hardware, matmul: str) -> None:
    """Raises ConfigError if the hardware does not multiply in the dtype of `Precision.matmul`."""
    if not hardware.peak(matmul):
        able = ", ".join(name for name in TABLE if TABLE[name].peak(matmul))
        in_file = "" if hardware.name in TABLE else ", or the key float8 in the file"
        raise ConfigError(
            f"model.precision.matmul={matmul}: {hardware.name} has no such products; "
            f"--model.precision.matmul compute works, or one of {able}{in_file}"
        )


def devices_per_host(hardware: Hardware, devices: int) -> int:
    """Returns how many of `devices` fast links join: as many on each host, or all on one host."""
    if devices <= hardware.domain:
        return devices
    return math.gcd(devices, hardware.domain)


def inside_domain(hardware: Hardware, sizes: Sizes, axes: Iterable[str]) -> int:
    """Returns how many devices of a ring over `axes` share a domain.

    The last axes join neighbors.
    """
    left = devices_per_host(hardware, math.prod(sizes.values()))
    inside = {}
    for axis in reversed(AXES):
        inside[axis] = math.gcd(sizes[axis], left)
        # Once an axis leaves the domain, so do all others.
        left = left // sizes[axis] if inside[axis] == sizes[axis] else 1
    return parts(inside, axes)


def link_of(hardware: Hardware, devices: int) -> float:
    """Returns the bytes/s of `link` that each of `devices` in a domain has to the others.

    If links are `direct`, each has the links to n - 1 others, and the rest of its `link` lies idle.
    """
    if not hardware.direct or devices == 1:
        return hardware.link
    return hardware.link * (devices - 1) / (hardware.domain - 1)


def find(name: str) -> Hardware:
    """Returns the hardware of a name (in any case) or YAML file.

    Raises `ConfigError` with the nearest name.
    """
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    return _of_table(name, "; or give a YAML file")


def _of_table(name: str, besides: str = "") -> Hardware:
    key = _key(name)
    if key in TABLE:
        return TABLE[key]
    close = difflib.get_close_matches(key, TABLE, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise ConfigError(
        f"hardware {name!r} is not known{hint} The table has {', '.join(TABLE)}{besides}"
    )


def parse(text: str) -> tuple[Hardware, int]:
    """Returns hardware and device count of `h100x8`, `mine.yamlx8` or `2xh100x8` (two hosts).

    The `x` may be upper case.

    Raises:
      ConfigError: malformed, or unknown hardware.
    """
    match = re.fullmatch(r"(?P<name>(?:(?P<hosts>\d+)[xX])?(?P<kind>.+?))[xX](?P<count>\d+)", text)
    if match is None or _key(text) in TABLE:  # rtx4090 is no 4090 devices
        raise ConfigError(
            f"--hardware {truncate(text, 25)}: should be a kind and a number of devices, as in "
            "h100x8"
        )
    devices = _number(text, match["count"])
    if not match["hosts"] or Path(match["name"]).is_file():
        return find(match["name"]), devices
    hardware = find(match["kind"])
    count = _number(text, _number(text, match["hosts"]) * devices)
    if devices > hardware.domain:
        raise ConfigError(
            f"--hardware {text}: fast links join at most {hardware.domain} of {hardware.name}; "
            f"{match['kind']}x{count} has as many devices on more hosts"
        )
    return replace(hardware, domain=devices), count


def _number(text: str, digits: str | int) -> int:
    number = float(digits)  # which may have any number of digits
    if not 1 <= number <= MAX_DEVICES:
        raise ConfigError(f"--hardware {truncate(text, 25)}: from 1 to {MAX_DEVICES:,} devices")
    return int(number)


def _key(name: str) -> str:
    return name.lower().replace("_", "-")


def read(path: Path) -> Hardware:
    """Reads a `Hardware` from YAML; the table row `like` supplies missing fields.

    Raises:
      ConfigError: unreadable, invalid or missing keys.
    """
    values = read_yaml(path)
    if not isinstance(values, dict) or not values:
        content = truncate(repr(values)) if values else "nothing"
        raise ConfigError(
            f"{path}: expected keys such as 'like: h100' and {', '.join(RANGES)}; found {content}"
        )
    problems = []
    for key, (low, high, unit) in RANGES.items():
        if key in values and not _is_between(values[key], low, high):
            value = truncate(repr(values[key]))
            problems.append(f"\n  {key} = {value}: {unit}, from {low:g} to {high:g}")
    if problems:
        raise ConfigError(f"{path}:{''.join(problems)}")
    base: dict[str, Any] = {}
    if values.get("like") is not None:
        try:
            base = asdict(_of_table(truncate(values["like"])))
        except ConfigError as error:
            raise ConfigError(f"{path}: like: {error}") from None
    settings = {**base, "name": path.stem, "source": str(path), **values}
    if base:
        settings["like"] = base["name"]
    hardware = validate(Hardware, settings, source=str(path))
    missing = [key for key in NEEDED if key not in settings]
    if missing:
        raise ConfigError(
            f"{path}: {', '.join(missing)} missing; give {'it' if len(missing) == 1 else 'them'}, "
            "or the name of a device that has the missing values, as in 'like: h100'"
        )
    if hardware.reserved >= hardware.memory:
        raise ConfigError(
            f"{path}: reserved = {hardware.reserved:g} is not less than memory = "
            f"{hardware.memory:g} bytes: nothing is left for JAX"
        )
    return hardware


def _is_between(value: Any, low: float, high: float) -> bool:
    try:
        return low <= float(value) <= high
    except (OverflowError, TypeError, ValueError):
        return False
