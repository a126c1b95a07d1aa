"""Checks that all processes of a run agree, before anything is allocated."""

import secrets
import shutil
import socket
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtp.config.console import size_text
from jaxtp.config.hints import divisors
from jaxtp.config.schema import ConfigError, differences
from jaxtp.distributed.agreement import all_gather_json, first_disagreeing, process_name
from jaxtp.distributed.environment import gpus_present, names_of_gpus, process_counts
from jaxtp.guards.finding import Finding, findings
from jaxtp.guards.known_versions import versions_here
from jaxtp.mesh import AXES


class Record(TypedDict):
    """The report of one process; `settings` have to be equal in all."""

    host: str
    visible: list[str]
    driven: list[int]
    settings: Mapping[str, Mapping[str, object]]


def check_processes(
    mesh: Mesh, settings: Mapping[str, Mapping[str, object]], *, tp_across_hosts: bool
) -> list[Finding]:
    """Compares all processes, which must call it; its findings are equal in all of them."""
    records: list[Record] = all_gather_json(record(settings))
    names = [record["host"] for record in records]
    hosts = hosts_of_devices(mesh, names)
    errors = [*differing(records), *idle_gpus(records)]
    if not tp_across_hosts:
        errors += tp_between_hosts(hosts)
    devices = jax.local_devices()
    count = len(devices)
    counts = ", ".join(
        f"{count * processes} x {devices[0].device_kind} on {host}"
        for host, processes in Counter(names).items()
    )
    between = ", ".join(axes_between_hosts(hosts)) or "none"
    text = (
        f"{len(records)} of {count} device{'s' if count != 1 else ''}: {counts}; axes between "
        f"hosts: {between}"
    )
    return findings("processes", "agreement", errors, text)


def record(settings: Mapping[str, Mapping[str, object]]) -> Record:
    """Returns the record of this process."""
    devices = jax.local_devices()
    driven = [device.local_hardware_id for device in devices if device.platform == "gpu"]
    kinds = {"kind": devices[0].device_kind, "number": len(devices)}
    return {
        "host": socket.gethostname(),
        "visible": names_of_gpus(gpus_present()) if driven else [],
        "driven": driven,
        "settings": {"devices": kinds, "versions": versions_here(), **settings},
    }


def differing(records: Sequence[Record]) -> Iterator[ConfigError]:
    """Yields an error for each kind of settings of a process that differ from the first's."""
    first = records[0]
    for process, other in enumerate(records):
        pair = f"{process_name(process, other['host'])} and {process_name(0, first['host'])}"
        for key, value in first["settings"].items():
            lines = differences(value, other["settings"][key])
            if lines:
                yield ConfigError(
                    f"{pair} differ in their {key} (process 0 -> process {process}):\n  "
                    + "\n  ".join(lines)
                )


def idle_gpus(records: Sequence[Record]) -> Iterator[ConfigError]:
    """Yields an error for each host with visible GPUs that are idle."""
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
        yield ConfigError(
            f"{host} has {total} visible GPUs, and its {len(group)} processes drive {len(driven)} "
            f"of them{hint}: start {process_counts(total)} processes there, or hide the idle GPUs "
            "by CUDA_VISIBLE_DEVICES"
        )


def hosts_of_devices(mesh: Mesh, host_names: Sequence[str]) -> np.ndarray:
    """Returns the host of each device of a mesh; `host_names` is by process."""
    return np.vectorize(lambda device: host_names[device.process_index])(mesh.devices)


def tp_between_hosts(hosts: np.ndarray) -> list[ConfigError]:
    """Returns an error if a tp group, along the last axis of the hosts of devices, spans hosts."""
    tp = hosts.shape[-1]
    devices = min(Counter(hosts.flat).values())
    for group in hosts.reshape(-1, tp):
        names = np.unique(group)
        if len(names) > 1:
            message = (
                f"mesh.tp={tp} spreads layers over the hosts {' and '.join(names)}, so every layer "
                f"waits for the network between them; with {devices} devices on a host tp can be "
                f"{', '.join(map(str, divisors(devices)))}, with the other devices along cp, fsdp "
                "or dp; --mesh.tp-across-hosts allows it"
            )
            return [ConfigError(message)]
    return []


def axes_between_hosts(hosts: np.ndarray) -> list[str]:
    """Returns the axes along which the hosts of devices differ."""
    return [axis for dim, axis in enumerate(AXES) if (hosts != hosts.take([0], axis=dim)).any()]


def check_folder(folder: Path, *, is_shared: bool = True) -> list[Finding]:
    """Writes into a folder, which all processes have to see if `is_shared`; all must call it."""
    path = folder / f".doctor-{all_gather_json(secrets.token_hex(8))[0]}"
    problem = None
    try:
        tempfile.TemporaryFile(dir=folder).close()
        if jax.process_index() == 0:
            path.touch()
    except OSError as error:
        name = process_name(jax.process_index(), socket.gethostname())
        problem = f"{folder} cannot be written by {name}: {error.strerror}; name another folder"
    problems = list(filter(None, all_gather_json(problem)))
    if is_shared and not problems:
        blind = first_disagreeing(path.exists)
        if blind is not None:
            problems.append(
                f"{folder} is not one folder for all: {blind} does not see what process 0 writes "
                "there; name a folder on a file system that all hosts share"
            )
    if jax.process_index() == 0:
        path.unlink(missing_ok=True)
    text = ""
    if not problems:
        text = f"can be written, {size_text(shutil.disk_usage(folder).free, binary=True)} free"
    return findings("folder", str(folder), map(ConfigError, problems), text)
