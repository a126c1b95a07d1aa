"""The hosts of a run, and which of its devices are on which."""

import socket
from collections import Counter
from collections.abc import Sequence
from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtp.launch.agreement import share


@cache
def hosts() -> list[str]:
    """Returns the host of each process; the first time all of them have to call it."""
    return share(socket.gethostname())


def by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[jax.Device]:
    """Returns devices with those of a host next to each other, whichever of its processes drives them.

    A scheduler may deal out processes over the hosts one by one. In this order the last axes of a mesh stay on a host
    as far as they fit, and the first reach over hosts: tp inside, then cp, then fsdp inside a group of hosts, dp
    across. It is the order of JAX's `create_hybrid_device_mesh`, which knows processes and TPU slices, and not hosts.

    Args:
      devices: the devices.
      hosts: host of each process.
    """
    first = {host: process for process, host in reversed(list(enumerate(hosts)))}
    return sorted(devices, key=lambda each: (first[hosts[each.process_index]], each.process_index, each.id))


def draw_hosts(mesh: Mesh, hosts: Sequence[str], most: int = 8) -> list[str]:
    """Returns a line for each host, with the coordinates of its devices; the devices along the last axis in a row.

    A device is written as its process and its number there, such as 1.3.

    Args:
      mesh: the mesh.
      hosts: host of each process.
      most: number of hosts that are drawn; a line says how many are not.
    """
    lines: dict[str, list[str]] = {}
    number: Counter[int] = Counter()
    names = {}
    for device in sorted(mesh.devices.flat, key=lambda each: each.id):
        names[device] = f"{device.process_index}.{number[device.process_index]}"
        number[device.process_index] += 1
    *outer, _ = mesh.devices.shape
    for index in np.ndindex(*outer):
        at = " ".join(f"{axis} {place}" for axis, place in zip(mesh.axis_names, index, strict=False))
        places: dict[str, list[str]] = {}
        for device in mesh.devices[index]:
            places.setdefault(hosts[device.process_index], []).append(names[device])
        for host, ids in places.items():
            lines.setdefault(host, []).append(f"{at}: {' '.join(ids)}")
    drawn = [f"{host}   {' | '.join(rows)}" for host, rows in lines.items()]
    return drawn if len(drawn) <= most else [*drawn[:most], f"... {len(drawn) - most} more hosts"]
