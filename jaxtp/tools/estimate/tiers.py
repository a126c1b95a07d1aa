"""Tiers 2 and 3: the real training step, compiled from shapes; nothing is allocated or run.

Tier 2 compiles for virtual CPU devices, tier 3 for the hardware in a process of its own (`compiler.py`).
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtp.analysis.audit import audit
from jaxtp.analysis.collective import Axes, Collective, Traffic, sums
from jaxtp.analysis.compiling import captured_stderr
from jaxtp.analysis.hardware import GB, TABLE
from jaxtp.analysis.schedule import Scheduled
from jaxtp.analysis.tables import columns
from jaxtp.config.entry import signal_name
from jaxtp.config.schema import ConfigError, replace_nested, to_plain
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.distributed.environment import child_environment
from jaxtp.mesh import describe_mesh, mesh_of, parts
from jaxtp.tools.estimate.compiler import (
    CUDNN_EXTRA,
    DoesNotFitError,
    TargetError,
    Topology,
    topology,
    with_cudnn,
)
from jaxtp.tools.estimate.search import Setting, is_plain
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import with_attention
from jaxtp.train.state import OPTIMIZER_SCOPE, plan_state
from jaxtp.train.step import trace_step
from jaxtp.train.validation import check, chosen_kernels, kernel_problems

MAX_DEVICES = 1024  # virtual devices of a process: each has threads, and XLA's CPU client refuses 4,096
QUICK = {"xla_backend_optimization_level": 0}  # the program after partitioning is all that is read
COMPILER = (sys.executable, "-m", "jaxtp.tools.estimate.compiler")
_NO_DEVICES = {
    "JAX_PLATFORMS": "cpu",  # else the plugin refuses to register: it looks for a GPU
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a cloud's metadata server, for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock file protects devices, and there are none
}
_LAST_LINES = 3
_WARNING = re.compile(r"Involuntary full rematerialization[^\n]*")
_DIFFERENCES = {
    "cuda": "compiled without cuBLAS and autotuning: kernels, and a few MB of their workspace, differ",
    "tpu": "on TPUs, compute that overlaps with collectives is not read",
}

Bytes = Mapping[tuple[str, Axes], float]
"""Bytes that each device sends, by kind and mesh axes."""


@dataclass(frozen=True)
class Partitioned:
    """Tier 2: the step after SPMD partitioning, compared with tier 1."""

    planned: Bytes
    """By tier 1."""
    realised: Bytes
    """After SPMD partitioning, without sums of scalars."""
    problems: tuple[str, ...]
    """Communication that the compiler added."""
    warnings: tuple[str, ...]
    """Lines that the compiler printed."""
    seconds: float
    """To trace and compile."""
    notes: tuple[str, ...]
    """How the program differs from the one for the hardware."""
    bound: bool
    """Whether tier 1 is an upper bound for this model, and not exact."""

    @property
    def rows(self) -> dict[tuple[str, Axes], tuple[float, float]]:
        """Planned and realised bytes, by kind and mesh axes."""
        keys = dict.fromkeys((*self.planned, *self.realised))
        return {key: (self.planned.get(key, 0.0), self.realised.get(key, 0.0)) for key in keys}

    @property
    def equal(self) -> bool:
        """Whether both tiers agree in kind, axes and bytes, up to rounding."""
        return all(abs(planned - realised) <= 1 for planned, realised in self.rows.values())

    @property
    def within(self) -> bool:
        """Whether tier 1 counts everything that is moved."""
        none_more = all(realised <= planned + 1 for planned, realised in self.rows.values())
        return not self.problems and (none_more if self.bound else self.equal)

    def lines(self, setting: Setting) -> Iterator[str]:
        """Yields the collectives, problems, warnings and notes."""
        yield f"compiled {setting} for {setting.target.devices} virtual CPU devices in {self.seconds:.0f} s"
        rows = [(kind, "+".join(axes), *(f"{n / GB:,.3f}" for n in sent)) for (kind, axes), sent in self.rows.items()]
        yield columns(("collective", "over", "GB sent, tier 1", "GB sent, compiled"), rows)
        amount = "what tier 1 says" if self.equal else "no more than the bounds of tier 1"
        if self.within:
            yield f"the partitioned program moves {amount}, in kind, axes and bytes, and nothing else"
        else:
            yield "the partitioned program does not move what tier 1 says"
        yield from (f"  {text}" for text in (*self.problems, *self.warnings, *self.notes))

    def record(self) -> dict[str, object]:
        """Returns tier 2 for JSON."""
        planned, realised = (
            [{"kind": kind, "axes": list(axes), "bytes_sent": size} for (kind, axes), size in sent.items()]
            for sent in (self.planned, self.realised)
        )
        return {
            "provenance": "compiled",
            "equal_to_tier_1": self.equal,
            "within_tier_1": self.within,
            "planned": planned,
            "realised": realised,
            **{name: getattr(self, name) for name in ("problems", "warnings", "notes", "seconds")},
        }


def request_devices(setting: Setting) -> None:
    """Requests a mesh's virtual devices before other uses of JAX."""
    if setting.target.devices > MAX_DEVICES:
        raise ConfigError(
            f"tier 2 compiles for at most {MAX_DEVICES:,} virtual CPU devices, not {setting.target.devices:,}; a mesh "
            "with less dp shows the same collectives, as in --hardware h100x512"
        )
    request_virtual_devices(setting.target.devices)


def compile_partitioned(setting: Setting) -> Partitioned:
    """Compiles the step for virtual CPU devices.

    Raises:
      MeshError: JAX has started with fewer devices.
    """
    started = time.monotonic()
    config, notes = _for_cpu(setting.config)
    mesh = mesh_of(setting.sizes)
    blueprint = plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)
    with captured_stderr() as printed:
        found = audit(
            trace_step(config, blueprint),
            blueprint.sharded,
            mesh=mesh,
            budget=setting.costs.budget,
            global_view=() if optimizers.is_modelled(config.optimizer) else (OPTIMIZER_SCOPE,),
            compiler_options=QUICK,
        )
    return Partitioned(
        bytes_sent(setting.costs.traffic),
        bytes_sent({one: times for one, times in found.realised.items() if one.shape}),
        tuple(found.problems()),
        tuple(line.rstrip() for line in printed if line.strip()),
        time.monotonic() - started,
        tuple(notes),
        not is_plain(config.model),
    )


def bytes_sent(moved: Traffic) -> Bytes:
    """Sums the bytes per device by kind and mesh axes."""
    return {place: sent for place, (_, sent) in sums(moved, lambda one: (one.kind, one.axes)).items()}


def _for_cpu(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    notes = []
    if any(kernel_problems(config, config.mesh.sizes, "cpu")):
        notes.append(f"compiled with a CPU's attention, which moves the same as {config.model.attention}'s")
        config = with_attention(config, "auto")
    if config.model.remat == "offload":
        config = replace_nested(config, {"model.remat": "full"})
        notes.append("compiled with remat full, which moves the same as offload")
    return config, notes


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Tier 3: the step from the target's compiler, with bytes per device."""

    argument_bytes: int
    """State and batch."""
    temp_bytes: int
    """The block that holds everything else."""
    alive_bytes: int
    """Most bytes alive at once; gaps between them make the block larger."""
    peak_bytes: int
    """Bytes that the allocator must provide: arguments, temporaries and results that replace no argument."""
    collectives: tuple[Scheduled, ...]
    """By kind and axes, with the compute that overlaps them."""
    seconds: float
    """To compile."""
    flops: float | None
    """FLOPs of the program's products, without custom kernels; None where libraries compute them."""
    notes: tuple[str, ...]
    """Differences from the program on real devices, and the compiler's warnings."""

    def fits(self, setting: Setting) -> bool:
        """Returns whether the step fits into memory."""
        return self.peak_bytes <= setting.target.room

    def lines(self, setting: Setting) -> Iterator[str]:
        """Yields memory, collectives and notes."""
        peak, room, estimated = self.peak_bytes, setting.target.room, setting.memory.total
        where = f"{setting.target.devices} x {setting.target.hardware.name}"
        yield f"compiled {setting} for {where}, which need not be there, in {self.seconds:.0f} s"
        yield (
            f"state and batch {self.argument_bytes / GB:,.2f} GB, temporaries {self.temp_bytes / GB:,.2f}, peak "
            f"{peak / GB:,.2f} of {room / GB:,.2f} for JAX: {'fits' if self.fits(setting) else 'does not fit'}; "
            f"tier 1: {estimated / GB:,.2f}, {estimated / peak - 1:+.0%} of the peak"
        )
        if setting.config.model.most_experts and self.flops is not None:
            expected = f"{setting.costs.flops_of_xla / 1e12:,.1f}"
            yield f"products outside of kernels: {self.flops / 1e12:,.1f} TFLOP, tier 1: {expected}"
        rows = []
        for each in self.collectives:
            one, counts = each.collective, (each.overlapped, each.computing)
            cells = (one.kind, "+".join(one.axes), f"{each.count:,}", f"{one.bytes / GB:,.3f}")
            rows.append((*cells, *(f"{count:,}" for count in counts)))
        yield columns(("collective", "over", "times", "GB of messages", "overlapped", "operations that overlap"), rows)
        yield from (f"  ({note})" for note in self.notes)

    def record(self, setting: Setting) -> dict[str, object]:
        """Returns tier 3 for JSON."""
        return {
            "provenance": "compiled",
            **dataclasses.asdict(self),
            "collectives": [one.record() for one in self.collectives],
            "fits": self.fits(setting),
            "tier_1_to_peak": setting.memory.total / self.peak_bytes,
        }


def compile_for(
    config: TrainConfig,
    sizes: Mapping[str, int],
    hardware: str,
    *,
    hosts: int,
    devices_per_host: int,
    timeout_s: float,
) -> Compiled:
    """Compiles the step for hardware of the table that may be absent; ignores the run's mesh.

    Raises:
      TargetError: the compiler is missing, crashed, timed out, or reports that the program does not fit.
      ConfigError: the configuration does not fit the mesh.
    """
    if min(sizes.values()) < 1:
        raise TargetError(f"mesh {describe_mesh(sizes)}: each axis needs at least 1 device")
    check(config, dict(sizes))
    if (needed := math.prod(sizes.values())) != hosts * devices_per_host:
        there = f"{hosts} host{'s' if hosts > 1 else ''} of {devices_per_host}"
        raise TargetError(f"mesh {describe_mesh(sizes)} takes {needed} devices, and {there} have another number")
    target, notes = topology(hardware, hosts, devices_per_host), []
    if "cudnn" in chosen_kernels(config, sizes, TABLE[hardware].architecture):
        if found := with_cudnn(target):
            target, notes = found, ["the workspace of cuDNN's kernels is not counted"]
        else:
            config = with_attention(config, "fused")
            notes = [f"compiled with the fused attention; for cuDNN's: pip install 'jaxtp[{CUDNN_EXTRA}]'"]
    compiled = ask(config, sizes, target, timeout_s=timeout_s)
    return dataclasses.replace(compiled, notes=(*compiled.notes, *notes))


def ask(
    config: TrainConfig,
    sizes: Mapping[str, int],
    target: Topology,
    *,
    timeout_s: float,
    compiler: Sequence[str] | None = None,
) -> Compiled:
    """Runs the compiler process and reads its answer; tests replace `compiler`."""
    request = {"config": to_plain(config), "sizes": dict(sizes), "target": dataclasses.asdict(target)}
    environment = child_environment(**_NO_DEVICES)
    if target.libraries:
        folders = filter(None, (target.libraries, environment.get("LD_LIBRARY_PATH")))
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    try:
        done = subprocess.run(
            compiler or COMPILER,
            input=json.dumps(request),
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a crashing compiler may print anything
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TargetError(
            f"the compiler for the target was ended after its time limit of {timeout_s:g} s; allow it more, "
            f"such as --timeout {3 * timeout_s:g}"
        ) from None
    if done.returncode:
        how = f"crashed ({signal_name(-done.returncode)})" if done.returncode < 0 else "failed"
        last = [f"\n  {line}" for line in done.stderr.splitlines() if line.strip(" ^~")][-_LAST_LINES:]
        raise TargetError(f"the compiler for the target {how}{''.join((':', *last)) if last else ' without a word'}")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise TargetError(f"the compiler for the target gave no answer: {done.stdout[-200:]!r}") from None
    if error := answer.get("error"):
        raise (TargetError if answer.get("fits", True) else DoesNotFitError)(error)
    collectives = tuple(_scheduled(**one, mesh=sizes) for one in answer.pop("collectives"))
    notes = (_DIFFERENCES[target.platform], *sorted(set(_WARNING.findall(done.stderr))))
    return Compiled(**answer, collectives=collectives, notes=notes)


def _scheduled(kind: str, axes: list[str], bytes: float, mesh: Mapping[str, int], **counts: int) -> Scheduled:
    return Scheduled(Collective(kind, tuple(axes), parts(mesh, axes), bytes), **counts)
