"""Checks that all processes of a run agree, before anything is allocated."""

import secrets
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtp.config.files import fingerprint
from jaxtp.config.hints import divisors
from jaxtp.config.schema import ConfigError, differences, to_plain
from jaxtp.distributed.agreement import (
    all_gather_json,
    first_disagreeing,
    process_name,
    raise_everywhere,
)
from jaxtp.distributed.environment import gpus_present, names_of_gpus, process_counts
from jaxtp.mesh import TP
from jaxtp.train import run_folder
from jaxtp.train.config import TrainConfig
from jaxtp.train.known_versions import versions_here
from jaxtp.train.self_check import check_collectives


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
    """Compares a run's several processes; returns lines for the summary.

    Args:
      data: the description of the data, as in checkpoints.

    Raises:
      ConfigError: a process differs; the message names it, and both values.
    """
    records: list[Record] = all_gather_json(record(config, data))
    compare(records)
    check_gpus(records)
    hosts = [record["host"] for record in records]
    if not config.mesh.tp_across_hosts:
        check_hosts_of_tp(hosts, mesh)
    check_folder(config.run.dir)
    check_collectives(mesh)
    first = records[0]
    count = first["devices"]
    counts = ", ".join(
        f"{count * processes} x {first['kind']} on {host}"
        for host, processes in Counter(hosts).items()
    )
    versions = ", ".join(map(" ".join, first["versions"].items()))
    return [
        f"hosts   {len(records)} processes of {count} device{'s' if count != 1 else ''}: {counts}",
        f"axes    between hosts: {', '.join(axes_between_hosts(mesh, hosts)) or 'none'}",
        f"versions {versions}",
        f"equal   versions, configuration (sha256 {fingerprint(first['configuration'])[:12]}), "
        "data and run folder; collectives over every axis are right",
    ]


def record(config: TrainConfig, data: Mapping[str, object]) -> Record:
    """Returns the record of this process."""
    devices = jax.local_devices()
    visible: list[str] = []
    driven: list[int] = []
    if devices[0].platform == "gpu":
        visible = names_of_gpus(gpus_present())
        driven = [device.local_hardware_id for device in devices]
    return {
        "host": socket.gethostname(),
        "devices": len(devices),
        "visible": visible,
        "driven": driven,
        "kind": devices[0].device_kind,
        "versions": versions_here(),
        "configuration": to_plain(config),
        "data": dict(data),
    }


def compare(records: Sequence[Record]) -> None:
    """Raises ConfigError if a process differs from the first."""
    first = records[0]
    for process, other in enumerate(records):
        pair = f"{process_name(process, other['host'])} and {process_name(0, first['host'])}"
        for key, meaning in (("kind", "kinds of devices"), ("devices", "numbers of devices")):
            if other[key] != first[key]:  # type: ignore[literal-required]
                raise ConfigError(
                    f"{pair} have different {meaning}, {other[key]} and {first[key]}: all must be "  # type: ignore[literal-required]
                    "equal"
                )
        for key in ("versions", "configuration", "data"):
            lines = differences(first[key], other[key])  # type: ignore[literal-required]
            if lines:
                raise ConfigError(
                    f"{pair} differ in their {key} (process 0 -> process {process}):\n  "
                    + "\n  ".join(lines)
                )


def check_gpus(records: Sequence[Record]) -> None:
    """Raises ConfigError if visible GPUs of a host are idle."""
    by_host = defaultdict[str, list[Record]](list)
    for record in records:
        by_host[record["host"]].append(record)
    for host, group in by_host.items():
        # Processes that see the same GPUs share these GPUs.
        visible = {tuple(record["visible"]) for record in group}
        driven = list(chain(*(record["driven"] for record in group)))
        total = sum(map(len, visible))
        if len(driven) >= total:
            continue
        hint = ""
        if len(visible) == 1:
            (names,) = visible
            idle = [name for index, name in enumerate(names) if index not in driven]
            hint = f" (not {', '.join(idle)})"
        raise ConfigError(
            f"{host} has {total} visible GPUs, and its {len(group)} processes drive {len(driven)} "
            f"of them{hint}: start {process_counts(total)} processes there, or hide the idle GPUs "
            "by CUDA_VISIBLE_DEVICES"
        )


def _hosts_of_devices(mesh: Mesh, host_names: Sequence[str]) -> np.ndarray:
    return np.vectorize(lambda device: host_names[device.process_index])(mesh.devices)


def check_hosts_of_tp(host_names: Sequence[str], mesh: Mesh) -> None:
    """Raises ConfigError if a tp group spans hosts; `host_names` is by process."""
    tp = mesh.shape[TP]
    hosts = _hosts_of_devices(mesh, host_names)
    for group in np.moveaxis(hosts, mesh.axis_names.index(TP), -1).reshape(-1, tp):
        names = np.unique(group)
        if len(names) == 1:
            continue
        devices = min(Counter(hosts.flat).values())
        raise ConfigError(
            f"mesh.tp={tp} spreads layers over the hosts {' and '.join(names)}, so every layer "
            f"waits for the network between them; with {devices} devices on a host tp can be "
            f"{', '.join(map(str, divisors(devices)))}, with the other devices along cp, fsdp or "
            "dp; --mesh.tp-across-hosts allows it"
        )


def axes_between_hosts(mesh: Mesh, host_names: Sequence[str]) -> list[str]:
    """Returns the axes along which devices are on several hosts; `host_names` is by process."""
    hosts = _hosts_of_devices(mesh, host_names)
    return [
        axis
        for dim, axis in enumerate(mesh.axis_names)
        if (hosts != hosts.take([0], axis=dim)).any()
    ]


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
