"""Preflight: checks that all processes of a run agree, before anything is allocated."""

import itertools
import secrets
import socket
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.config.files import fingerprint
from jaxtp.config.hints import divisors
from jaxtp.config.schema import ConfigError, differences, to_plain
from jaxtp.distributed.agreement import (
    all_gather_json,
    first_disagreeing,
    host_names,
    is_multiprocess,
    process_name,
    raise_everywhere,
)
from jaxtp.distributed.environment import gpus_present, names_of_gpus, process_counts
from jaxtp.mesh import TP, mesh_sizes
from jaxtp.train import run_folder
from jaxtp.train.config import TrainConfig
from jaxtp.train.known_versions import versions_here
from jaxtp.train.self_check import check_collectives

MAX_SKEW = 60.0
"""Seconds by which the clocks of hosts may differ. A larger skew breaks certificates, logs and
schedulers."""

_GATHERED = 2**26
_GATHERED_ON_CPU = 2**20  # Bytes per device of the array that measures an axis
_GATHERS = 5


class Record(TypedDict):
    """The report of one process."""

    host: str
    devices: int
    visible: list[str]
    driven: list[int]
    kind: str
    versions: dict[str, str]
    configuration: dict[str, object]
    data: dict[str, object]


def preflight(config: TrainConfig, mesh: Mesh, data: Mapping[str, object]) -> list[str]:
    """Compares the processes; measures the axes if requested; returns lines for the summary.

    Args:
      data: description, as in checkpoints.

    Raises:
      ConfigError: names a process that differs, and both values.
    """
    if not is_multiprocess():
        return measure_axes(mesh) if config.launch.preflight_bandwidth else []
    records: list[Record] = all_gather_json(record(config, data))
    compare(records)
    check_gpus(records)
    if not config.mesh.tp_across_hosts:
        check_hosts_of_tp([record["host"] for record in records], mesh)
    check_clocks(all_gather_json(time.time()), records)  # right after an exchange
    check_folder(config.run.dir)
    check_collectives(mesh)
    first = records[0]
    hosts = [record["host"] for record in records]
    count = first["devices"]
    counts = ", ".join(
        f"{count * times} x {first['kind']} on {host}" for host, times in Counter(hosts).items()
    )
    return [
        f"hosts   {len(records)} processes of {count} device{'s' if count != 1 else ''}: {counts}",
        f"axes    between hosts: {', '.join(axes_between_hosts(mesh, hosts)) or 'none'}",
        f"versions {', '.join(f'{name} {version}' for name, version in first['versions'].items())}",
        f"equal   versions, configuration (sha256 {fingerprint(first['configuration'])[:12]}), "
        "data, clocks and run folder; collectives over every axis are right",
        *(measure_axes(mesh) if config.launch.preflight_bandwidth else []),
    ]


def record(config: TrainConfig, data: Mapping[str, object]) -> Record:
    """Returns the record of this process."""
    first = jax.local_devices()[0]
    on_gpus = first.platform == "gpu"
    return {
        "host": socket.gethostname(),
        "devices": jax.local_device_count(),
        "visible": names_of_gpus(gpus_present()) if on_gpus else [],
        "driven": [device.local_hardware_id for device in jax.local_devices()] if on_gpus else [],
        "kind": first.device_kind,
        "versions": versions_here(),
        "configuration": to_plain(config),
        "data": dict(data),
    }


def compare(records: Sequence[Record]) -> None:
    """Raises ConfigError if a process differs from the first."""
    first = records[0]
    for process, other in enumerate(records):
        pair = f"{process_name(process, other['host'])} and {process_name(0, first['host'])}"
        for what, meaning in (("kind", "kinds of devices"), ("devices", "numbers of devices")):
            if (theirs := other[what]) != (ours := first[what]):  # type: ignore[literal-required]
                raise ConfigError(
                    f"{pair} have different {meaning}, {theirs} and {ours}: all must be equal"
                )
        for what in ("versions", "configuration", "data"):
            if lines := differences(first[what], other[what]):  # type: ignore[literal-required]
                changes = "\n".join(f"  {line}" for line in lines)
                raise ConfigError(
                    f"{pair} differ in their {what} (process 0 -> process {process}):\n{changes}"
                )


def check_gpus(records: Sequence[Record]) -> None:
    """Raises ConfigError if visible GPUs of a host are idle."""
    for host in dict.fromkeys(record["host"] for record in records):
        here = [record for record in records if record["host"] == host]
        # Processes that see the same GPUs share them.
        visible = {tuple(record["visible"]) for record in here}
        driven = sum(len(record["driven"]) for record in here)
        if driven >= (total := sum(map(len, visible))):
            continue
        (*_, names) = visible
        used = {index for record in here for index in record["driven"]}
        idle = (
            [name for index, name in enumerate(names) if index not in used]
            if len(visible) == 1
            else []
        )
        which = f" (not {', '.join(idle)})" if idle else ""
        raise ConfigError(
            f"{host} has {total} visible GPUs, and its {len(here)} processes drive {driven} of "
            f"them{which}: start {process_counts(total)} processes there, or hide the others by "
            "CUDA_VISIBLE_DEVICES"
        )


def check_hosts_of_tp(host_names: Sequence[str], mesh: Mesh) -> None:
    """Raises ConfigError if a tp group spans hosts; `host_names` is by process."""
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(TP), -1).reshape(-1, mesh.shape[TP])
    places = [[host_names[device.process_index] for device in group] for group in groups]
    spread = next((sorted(set(group)) for group in places if len(set(group)) > 1), None)
    if spread is None:
        return
    most = min(Counter(itertools.chain(*places)).values())
    able = ", ".join(map(str, divisors(most)))
    raise ConfigError(
        f"mesh.tp={mesh.shape[TP]} spreads layers over the hosts {' and '.join(spread)}, so that "
        f"each waits for the network between them; with {most} devices on a host tp can be {able}, "
        "and cp, fsdp or dp the rest; --mesh.tp-across-hosts allows it"
    )


def axes_between_hosts(mesh: Mesh, host_names: Sequence[str]) -> list[str]:
    """Returns the axes along which devices lie on several hosts; `host_names` is by process."""
    places = np.vectorize(lambda device: host_names[device.process_index])(mesh.devices)
    firsts = [places.take([0], axis=at) for at in range(places.ndim)]
    return [
        axis for axis, first in zip(mesh.axis_names, firsts, strict=True) if (places != first).any()
    ]


def check_clocks(times: Sequence[float], records: Sequence[Record]) -> None:
    """Raises ConfigError if a clock differs too much from process 0's."""
    for process, seconds in enumerate(times):
        if not abs(seconds - times[0]) <= MAX_SKEW:
            clocks = [
                time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each))
                for each in (times[0], seconds)
            ]
            raise ConfigError(
                f"the clock of {process_name(process, records[process]['host'])} says {clocks[1]}, "
                f"the clock of {process_name(0, records[0]['host'])} {clocks[0]}: they may differ "
                f"by {MAX_SKEW:g} s at most"
            )


def check_folder(folder: Path) -> None:
    """Raises ConfigError unless all processes see the same folder."""
    token = all_gather_json(secrets.token_hex(8))[0]
    name = f".preflight-{token}"
    with raise_everywhere(), run_folder.writing(folder / name):
        if jax.process_index() == 0:
            (folder / name).write_text(token)
    blind = first_disagreeing(lambda: (folder / name).exists())
    if jax.process_index() == 0:
        (folder / name).unlink(missing_ok=True)
    if blind is not None:
        raise ConfigError(
            f"run.dir={folder} is not one folder for all: {blind} does not see what process 0 "
            "writes there; name a folder on a file system that all hosts share"
        )


def measure_axes(mesh: Mesh) -> list[str]:
    """Returns the all-gather bandwidth of each axis, one line each."""
    each = _GATHERED_ON_CPU if mesh.devices.flat[0].platform == "cpu" else _GATHERED
    between = axes_between_hosts(mesh, host_names())
    lines = []
    for axis, size in mesh_sizes(mesh).items():
        if size == 1:
            continue
        split, whole = (NamedSharding(mesh, PartitionSpec(part)) for part in (axis, None))
        parts = jax.make_array_from_callback(
            (size * each,), split, np.zeros(size * each, np.uint8).__getitem__
        )
        gather = jax.jit(lambda array: array, out_shardings=whole)
        jax.block_until_ready(gather(parts))
        times = []
        for _ in range(_GATHERS):
            started = time.perf_counter()
            jax.block_until_ready(gather(parts))
            times.append(time.perf_counter() - started)
        rate = (size - 1) * each / statistics.median(times)
        over = " (over hosts)" if axis in between else ""
        received = f"{rate / 1e9:.3g} GB/s of an all-gather of {each / 2**20:g} MiB from each"
        lines.append(f"axis    {axis} {size}{over}: each device receives {received}")
    return lines
