"""Compiling the real training step for accelerators, which need not be there (tier 3)."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtp.audit.schedule import Scheduled
from jaxtp.communication import Collective
from jaxtp.config import to_plain
from jaxtp.estimate.topology import (
    CUDNN_EXTRA,
    DoesNotFitError,
    TargetError,
    Topology,
    this_machine,
    topology,
    with_cudnn,
)
from jaxtp.files import write_atomically
from jaxtp.hardware import TABLE
from jaxtp.interrupt import signal_name
from jaxtp.launch.environment import cache_folder, child_environment
from jaxtp.mesh import describe_mesh, parts
from jaxtp.train.config import TrainConfig, check, kernels
from jaxtp.train.memory import with_attention

WORKER = (sys.executable, "-m", "jaxtp.estimate.worker")
_ABSENT = {
    "JAX_PLATFORMS": "cpu",  # else the plugin refuses to register: it looks for a GPU
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a cloud's metadata server, for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock file is for devices, of which there are none
}
_OWN = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # another program may be using them
_LAST_LINES = 3
"""Number of lines of a failed process that a message has, without the marks under a traceback's lines."""
_WARNING = re.compile(r"Involuntary full rematerialization[^\n]*")
_HERE = "compiled for the devices of this machine, as it runs on them"
_DIFFERENCES = {
    "cuda": "compiled without cuBLAS and autotuning: kernels, and a few MB of their workspace, differ",
    "tpu": "what a TPU's program computes beside its collectives is not read",
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A training step as the compiler for a target made it. Bytes are those of each device."""

    argument_bytes: int
    """State and batch."""

    temp_bytes: int
    """The block that everything else lives in."""

    alive_bytes: int
    """Most bytes that are alive at once; the gaps between them make the block larger."""

    peak_bytes: int
    """Bytes that the allocator must give: arguments, temporaries and results that take nobody's place."""

    collectives: tuple[Scheduled, ...]
    """Collectives by kind and axes, and what is computed beside them."""

    seconds: float
    """Time that the compiler took, when it was asked."""

    flops: float | None
    """Operations of the program's products, without those of kernels that it calls; None where libraries make them."""

    notes: tuple[str, ...]
    """Notes on how this differs from the program on real devices, and the compiler's warnings."""


def compile_for(
    config: TrainConfig,
    sizes: Mapping[str, int],
    hardware: str,
    *,
    hosts: int,
    devices_per_host: int,
    timeout_s: float,
) -> Compiled:
    """Compiles the training step for hardware that need not be there, in a process of its own.

    GPUs that this machine has are compiled for as they are, with their libraries and autotuning. Asked again for the
    same program, target and versions it gives what it gave.

    Args:
      config: the run; its own mesh is not looked at.
      sizes: devices along each axis.
      hardware: a name of the hardware table, such as `h100`.
      hosts: of the target.
      devices_per_host: of each.
      timeout_s: seconds after which the compiler is ended.

    Raises:
      TargetError: the compiler is not installed, crashed, took too long or says that the program does not fit.
      ConfigError: the configuration does not fit the mesh.
    """
    if min(sizes.values()) < 1:
        raise TargetError(f"mesh {describe_mesh(sizes)}: each axis takes a number of devices, 1 or more")
    check(config, dict(sizes))
    if (needed := math.prod(sizes.values())) != hosts * devices_per_host:
        there = f"{hosts} hosts of {devices_per_host}"
        raise TargetError(f"mesh {describe_mesh(sizes)} takes {needed} devices, and {there} have another number")
    notes: tuple[str, ...] = ()
    if hosts == 1 and (own := this_machine(hardware, needed)):
        try:
            return ask(config, sizes, own, timeout_s=timeout_s)
        except TargetError as error:
            notes += (f"the GPUs of this machine could not be used: {error}",)
    absent = topology(hardware, hosts, devices_per_host)
    if "cudnn" in kernels(config, sizes, TABLE[hardware].platform):
        if found := with_cudnn(absent):
            absent = found
            notes += ("the workspace of cuDNN's kernels is not counted",)
        else:
            config = with_attention(config, "fused")
            notes += (
                f"compiled with the fused attention, not cuDNN's, which takes pip install 'jaxtp[{CUDNN_EXTRA}]'",
            )
    compiled = ask(config, sizes, absent, timeout_s=timeout_s)
    return dataclasses.replace(compiled, notes=(*compiled.notes, *notes))


def ask(
    config: TrainConfig,
    sizes: Mapping[str, int],
    target: Topology,
    *,
    timeout_s: float,
    worker: Sequence[str] | None = None,
    cache: Path | None = None,
) -> Compiled:
    """Asks a worker for what `compile_for` returns.

    Args:
      config: the run.
      sizes: devices along each axis.
      target: what to compile for.
      timeout_s: seconds after which the worker is ended.
      worker: the command, which reads a request and prints an answer; by default `WORKER`.
      cache: folder of earlier answers; by default the user's.
    """
    request = {
        "config": to_plain(config),
        "sizes": dict(sizes),
        "target": dataclasses.asdict(target),
        "cache": str(cache or cache_folder() / "compiled"),
    }
    environment = child_environment(**(_OWN | {"JAX_PLATFORMS": target.platform} if target.here else _ABSENT))
    if target.libraries:
        folders = filter(None, (target.libraries, environment.get("LD_LIBRARY_PATH")))
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    done = _run(worker or WORKER, json.dumps(request), environment, timeout_s)
    return _compiled(_answer(done), target, sizes)


def _run(
    command: Sequence[str], request: str, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command that reads a request, to its end.

    Raises:
      TargetError: it took too long, crashed or failed; with its last words.
    """
    try:
        done = subprocess.run(
            command,
            input=request,
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # of a crashing compiler
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TargetError(
            f"the compiler for the target was ended after its time limit of {timeout_s:g} s; allow it more, "
            f"such as --timeout {3 * timeout_s:g}"
        ) from None
    if done.returncode:
        how = f"crashed ({signal_name(-done.returncode)})" if done.returncode < 0 else "failed"
        raise TargetError(f"the compiler for the target {how}{_last_words(done.stderr)}")
    return done


def _last_words(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip(" ^~")][-_LAST_LINES:]
    return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else " without a word"


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Returns the JSON on the last line that a worker printed, with its compiler's warnings; writes it to the cache.

    Raises:
      TargetError: there is none.
    """
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise TargetError(f"the compiler for the target gave no answer: {done.stdout[-200:]!r}") from None
    if place := answer.pop("keep", None):
        answer["notes"] = sorted(set(_WARNING.findall(done.stderr)))
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(place), json.dumps(answer).encode())
    return answer


def _compiled(answer: Mapping[str, Any], target: Topology, mesh: Mapping[str, int]) -> Compiled:
    """Returns what a worker answered.

    Raises:
      DoesNotFitError: it says so.
      TargetError: it says another error.
    """
    if error := answer.get("error"):
        raise (TargetError if answer.get("fits", True) else DoesNotFitError)(error)
    moved = tuple(_scheduled(**one, mesh=mesh) for one in answer["collectives"])
    notes = (_HERE if target.here else _DIFFERENCES[target.platform], *answer["notes"])
    sizes = {
        name: answer[name] for name in ("argument_bytes", "temp_bytes", "alive_bytes", "peak_bytes", "seconds", "flops")
    }
    return Compiled(**sizes, collectives=moved, notes=notes)


def _scheduled(kind: str, axes: list[str], bytes: float, mesh: Mapping[str, int], **counts: int) -> Scheduled:
    return Scheduled(Collective(kind, tuple(axes), parts(mesh, axes), bytes), **counts)
