"""Preflight of a run of several processes: what must be alike in all of them is, before anything is allocated."""

import contextlib
import importlib.metadata
import itertools
import secrets
import socket
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.config import ConfigError, differences, to_plain
from jaxtp.files import fingerprint
from jaxtp.launch.agreement import first_other, several, share, together, who
from jaxtp.launch.environment import gpus_present, names_of_gpus, sharing
from jaxtp.launch.hosts import draw_hosts, hosts
from jaxtp.mesh import TP, divisors, mesh_sizes
from jaxtp.train import folder
from jaxtp.train.config import TrainConfig

NATIVE = ("jaxlib", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Packages that talk to other processes, beside those that a checkpoint names."""
DRIVER = Path("/proc/driver/nvidia/version")
MOST_SKEW = 60.0
"""Seconds by which the clocks of hosts may differ: certificates, logs and schedulers go wrong beyond."""

_GATHERED = {"cpu": 2**20}
_GATHERED_BY_GPUS = 2**26
"""Bytes of a device's part of an array that is gathered to measure an axis."""
_GATHERS = 5

Record = dict[str, Any]


def preflight(config: TrainConfig, mesh: Mesh, data: Mapping[str, Any]) -> list[str]:
    """Compares the processes of a run; returns lines for its summary, none of a single process.

    Args:
      config: the run.
      mesh: its devices.
      data: a description of its data, as checkpoints have it.

    Raises:
      ConfigError: something differs that must be alike; it names the process and both values.
    """
    if not several():
        return measure_axes(mesh) if config.launch.preflight_bandwidth else []
    records = share(record(config, data))
    compare(records)
    check_gpus(records)
    if not config.mesh.tp_across_hosts:
        check_hosts_of_tp([record["host"] for record in records], mesh)
    check_clocks(share(time.time()), records)  # everybody has just waited for everybody
    check_folder(config.run.dir)
    check_sums(mesh)
    devices: Counter[str] = Counter()
    for each in records:
        devices[each["host"]] += each["devices"]
    versions, kept = records[0]["versions"], records[0]["configuration"]
    told = ", ".join(f"{count} x {records[0]['kind']} on {host}" for host, count in devices.items())
    drawn = draw_hosts(mesh, [record["host"] for record in records])
    return [
        f"hosts   {len(records)} processes of {records[0]['devices']} devices: {told}",
        "devices " + ("\n" + 8 * " ").join(drawn),
        f"versions {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"alike   versions, configuration (sha256 {fingerprint(kept)[:12]}), data, clocks and run folder; sums over "
        "every axis are right",
        *(measure_axes(mesh) if config.launch.preflight_bandwidth else []),
    ]


def record(config: TrainConfig, data: Mapping[str, Any]) -> Record:
    """Returns what a process says of itself."""
    first = jax.local_devices()[0]
    versions = folder.versions()
    for package in NATIVE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if DRIVER.exists():
        versions["NVIDIA's driver"] = DRIVER.read_text(errors="replace").partition("\n")[0]
    on_gpus = first.platform == "gpu"
    return {
        "host": socket.gethostname(),
        "devices": jax.local_device_count(),
        "visible": names_of_gpus(gpus_present()) if on_gpus else [],
        "driven": [device.local_hardware_id for device in jax.local_devices()] if on_gpus else [],
        "kind": first.device_kind,
        "versions": versions,
        "configuration": to_plain(config),
        "data": dict(data),
    }


def compare(records: Sequence[Record]) -> None:
    """Compares what the processes say of themselves with what the first says.

    Raises:
      ConfigError: something differs.
    """
    first = records[0]
    for process, other in enumerate(records):
        pair = f"{who(process, other['host'])} and {who(0, first['host'])}"
        for what, meaning in (("kind", "kinds of devices"), ("devices", "numbers of devices")):
            if other[what] != first[what]:
                raise ConfigError(f"{pair} have other {meaning}, {other[what]} and {first[what]}: all must be alike")
        for what in ("versions", "configuration", "data"):
            if lines := differences(first[what], other[what]):
                changes = "\n".join(f"  {line}" for line in lines)
                raise ConfigError(f"{pair} differ in their {what} (process 0 -> process {process}):\n{changes}")


def check_gpus(records: Sequence[Record]) -> None:
    """Checks that the processes of each host drive all GPUs that they see there.

    Raises:
      ConfigError: some are idle.
    """
    for host in dict.fromkeys(record["host"] for record in records):
        here = [record for record in records if record["host"] == host]
        visible = {tuple(record["visible"]) for record in here}  # what several see alike they share
        driven = sum(len(record["driven"]) for record in here)
        if driven >= (total := sum(map(len, visible))):
            continue
        (*_, names) = visible
        used = {index for record in here for index in record["driven"]}
        idle = [name for index, name in enumerate(names) if index not in used] if len(visible) == 1 else []
        which = f" (not {', '.join(idle)})" if idle else ""
        raise ConfigError(
            f"{host} has {total} visible GPUs, and its {len(here)} processes drive {driven} of them{which}: start "
            f"{sharing(total)} processes there, or hide those that are not for this run (CUDA_VISIBLE_DEVICES)"
        )


def check_hosts_of_tp(hosts: Sequence[str], mesh: Mesh) -> None:
    """Checks that the devices which share each layer are on one host.

    Args:
      hosts: by process.
      mesh: the devices.

    Raises:
      ConfigError: some are not.
    """
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(TP), -1).reshape(-1, mesh.shape[TP])
    places = [[hosts[device.process_index] for device in group] for group in groups]
    spread = next((sorted(set(group)) for group in places if len(set(group)) > 1), None)
    if spread is None:
        return
    most = min(Counter(itertools.chain(*places)).values())
    able = ", ".join(map(str, divisors(most)))
    raise ConfigError(
        f"mesh.tp={mesh.shape[TP]} spreads layers over the hosts {' and '.join(spread)}, so that each waits for the "
        f"network between them; with {most} devices on a host tp can be {able}, and cp, fsdp or dp the rest; "
        "--mesh.tp-across-hosts allows it"
    )


def check_clocks(times: Sequence[float], records: Sequence[Record]) -> None:
    """Compares the clocks of the hosts.

    Raises:
      ConfigError: one is far off the first's.
    """
    for process, seconds in enumerate(times):
        if not abs(seconds - times[0]) <= MOST_SKEW:
            clocks = [time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each)) for each in (times[0], seconds)]
            raise ConfigError(
                f"the clock of {who(process, records[process]['host'])} says {clocks[1]}, and that of "
                f"{who(0, records[0]['host'])} {clocks[0]}: set them, they may be {MOST_SKEW:g} s apart"
            )


def check_folder(place: Path) -> None:
    """Checks that every process sees and can write the folder of the run.

    Raises:
      ConfigError: one does not: the folder is not shared.
    """
    token = share(secrets.token_hex(8))[0]
    name = f".preflight-{token}"
    with together(), folder.writing(place / name):
        if jax.process_index() == 0:
            (place / name).write_text(token)
    blind = first_other(lambda: (place / name).exists())
    if jax.process_index() == 0:
        (place / name).unlink(missing_ok=True)
    if blind is not None:
        raise ConfigError(
            f"run.dir={place} is not one folder for all: {blind} does not see what process 0 writes there; name a "
            "folder on a file system that all hosts share"
        )


def check_sums(mesh: Mesh) -> None:
    """Sums over every axis of a mesh.

    Raises:
      ConfigError: a sum is wrong.
    """
    for axis, size in mesh_sizes(mesh).items():
        numbers = np.arange(size, dtype=np.float32)
        spread = jax.make_array_from_callback((size,), NamedSharding(mesh, PartitionSpec(axis)), numbers.__getitem__)
        total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(spread))
        if total != numbers.sum():
            right = f"{numbers.sum():g}"
            raise ConfigError(f"a sum over mesh.{axis} is {total:g}, not {right}: its links or devices are broken")


def measure_axes(mesh: Mesh) -> list[str]:
    """Returns a line for each axis of several devices: how fast a device receives what it gathers from the others."""
    platform = mesh.devices.flat[0].platform
    each = _GATHERED.get(platform, _GATHERED_BY_GPUS)
    lines = []
    for axis, size in mesh_sizes(mesh).items():
        if size == 1:
            continue
        split, whole = (NamedSharding(mesh, PartitionSpec(part)) for part in (axis, None))
        parts = jax.make_array_from_callback((size * each,), split, np.zeros(size * each, np.uint8).__getitem__)
        gather = jax.jit(lambda array: array, out_shardings=whole)
        jax.block_until_ready(gather(parts))
        times = []
        for _ in range(_GATHERS):
            started = time.perf_counter()
            jax.block_until_ready(gather(parts))
            times.append(time.perf_counter() - started)
        rate = (size - 1) * each / statistics.median(times)
        places = np.vectorize(lambda device: hosts()[device.process_index] if several() else "")(mesh.devices)
        along = np.moveaxis(places, mesh.axis_names.index(axis), 0)
        over = " (over hosts)" if (along != along[0]).any() else ""
        received = f"{rate / 1e9:.3g} GB/s of an all-gather of {each / 2**20:g} MiB from each"
        lines.append(f"axis    {axis} {size}{over}: each device receives {received}")
    return lines
