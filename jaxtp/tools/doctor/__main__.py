"""The command `jaxtp doctor`."""

import os
import platform
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtp.analysis.hardware import of_kind
from jaxtp.analysis.tables import columns
from jaxtp.config import entry
from jaxtp.config.command_line import Command
from jaxtp.config.console import size_text
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.schema import ConfigError, OptionalFile, UserPath, to_plain
from jaxtp.distributed.agreement import (
    all_gather_json,
    is_multiprocess,
    raise_everywhere,
    reporting_failure,
    run_and_report,
    watch,
)
from jaxtp.distributed.devices import build_mesh, host_memory, memory_per_device
from jaxtp.distributed.environment import enable_compilation_cache, gpus_present
from jaxtp.distributed.joining import join_processes
from jaxtp.guards.doctor import examine
from jaxtp.guards.finding import Finding
from jaxtp.guards.known_versions import versions_here
from jaxtp.guards.self_check import MAX_TOKENS, TOLERANCE, Case
from jaxtp.layers.kernels.select import KERNELS, Use, architecture_of
from jaxtp.mesh import describe_mesh, mesh_sizes

PROGRAM = "jaxtp doctor"
DESCRIPTION = """Examines this machine without a run, for a first look or a bug report.

Shows versions, devices, memory and disk. Compares operations of each device, each collective over
each axis of the mesh, and each attention kernel with the host. Warns of versions with known
problems. Exit code 3: numbers are wrong; 2: a folder, a version or a process does not fit.

Started like a run of several processes, it also compares them, for example:

jaxtp launch --processes 2 --devices 2 -- jaxtp doctor --folder /shared/runs
"""
CPU_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class DoctorMesh:
    """Devices along each axis; one axis may be -1, for all remaining."""

    dp: int = 1
    """Devices along dp."""

    fsdp: int = -1
    """Devices along fsdp."""

    cp: int = 1
    """Devices along cp."""

    tp: int = 1
    """Devices along tp."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Flags of `jaxtp doctor`."""

    mesh: DoctorMesh = field(default_factory=DoctorMesh)

    folder: UserPath = Path()
    """Folder in which runs write, here by default. All processes have to see it."""

    json: OptionalFile = None
    """JSON file for all that was found."""


COMMAND = Command(program=PROGRAM, schema=Doctor, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 2 for a mistake, 3 for wrong numbers, 75 for a lost process."""
    return run_and_report(lambda: entry.attempt(PROGRAM, lambda: _doctor(argv)))


def _doctor(argv: Sequence[str]) -> int:
    join_processes()
    with raise_everywhere(watch):
        options, _ = COMMAND.load(argv)
        require_writable("--json", options.json)
    with reporting_failure():
        machine = dict(_host())
        _show(machine)
        try:
            mesh = build_mesh(asdict(options.mesh))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"JAX cannot start the devices: {reason}") from None
        devices = dict(_devices(mesh))
        _show(devices)
        rows = merged(_findings(mesh, options))
        if jax.process_index() == 0:
            _report(rows)
            record = {"machine": machine | devices, "findings": rows}
            write_json("--json", options.json, record)
    return max(row["error"] for row in rows)


def _show(lines: Mapping[str, str]) -> None:
    # `jax.process_index()` starts the devices, before the mesh requests virtual ones.
    if not is_multiprocess() or jax.process_index() == 0:
        print(*(f"{name:<9}{text}" for name, text in lines.items()), sep="\n", flush=True)


def _host() -> Iterator[tuple[str, str]]:
    memory = size_text(host_memory(), binary=True)
    yield "host", f"{socket.gethostname()}: {os.cpu_count()} cores, {memory} of memory"
    yield "system", platform.platform()
    yield "versions", ", ".join(map(" ".join, versions_here().items()))


def _devices(mesh: Mesh) -> Iterator[tuple[str, str]]:
    first = mesh.local_devices[0]
    enable_compilation_cache(first.platform)
    memory = size_text(memory_per_device(mesh.local_devices) or 0, binary=True)
    kind = f"{first.device_kind} ({architecture_of(first)})"
    yield "devices", f"{mesh.size} x {kind}, {memory} for JAX on each"
    hardware = of_kind(first.device_kind)
    links = "unknown"
    if hardware is not None:
        links = (
            f"{hardware.link / 1e9:,.0f} GB/s one way between {hardware.domain}, "
            f"{hardware.network / 1e9:,.0f} GB/s to others, as jaxtp estimate assumes"
        )
    yield "links", links
    yield "mesh", describe_mesh(mesh_sizes(mesh))
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    yield "cache", cache or "off, as always on CPUs; a run of several processes has its own"


def _findings(mesh: Mesh, options: Doctor) -> Iterator[Finding]:
    first = mesh.local_devices[0]
    if first.platform == "cpu" and gpus_present():
        text = "JAX does not use the NVIDIA GPUs of this machine: install jaxtp[cuda13] or [cuda12]"
        yield Finding("devices", "GPUs", text, "WARNING")
    stages = examine(
        mesh,
        {"configuration": to_plain(options)},
        lambda: options.folder,
        dtypes=tuple(TOLERANCE),
        attention=_attention(first),
        tp_across_hosts=True,
    )
    for findings in stages:
        yield from findings


def _attention(device: jax.Device) -> Iterator[Case]:
    length = CPU_TOKENS if device.platform == "cpu" else MAX_TOKENS
    whole = Use(
        head_dim=64,
        dtype="bfloat16",
        length=length,
        packed=False,
        platform=architecture_of(device),
    )
    for kernel in KERNELS.values():
        yield kernel, whole, (4, 2)
        yield kernel, replace(whole, packed=True, window=length // 8), (4, 2)


def merged(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Returns the findings of all processes, which must call it; what several found is one row.

    The error of a row is its exit code.
    """
    report = [vars(finding) | {"error": finding.exit_code} for finding in findings]
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for process, records in enumerate(all_gather_json(report)):
        for record in records:
            # The numbers of what is right may differ.
            text = "" if record["verdict"] == "ok" else record["text"]
            key = (record["area"], record["subject"], record["verdict"], text)
            rows.setdefault(key, record | {"processes": []})["processes"].append(process)
    return list(rows.values())


def _report(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for row in rows:
        where = ""
        if len(row["processes"]) < jax.process_count():
            where = f"process {', '.join(map(str, row['processes']))}: "
        text = where + row["text"].replace("\n", " ")
        cells.append((row["verdict"], row["area"], row["subject"], text))
    print(f"\n{columns(('', 'examined', '', 'measured'), cells)}")
    verdicts = Counter(row["verdict"] for row in rows)
    print(f"\n{verdicts['WRONG']} wrong, {verdicts['WARNING']} warnings, {verdicts['ok']} right")


if __name__ == "__main__":
    entry.run(PROGRAM, main)
