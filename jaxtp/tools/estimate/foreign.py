"""`jaxtp estimate FILE.py:build`: ranks meshes for any Flax model, from a trace of its plan on each mesh.

Bytes sent and FLOPs are those that `jaxtp explain` counts. Parameters, gradients and optimizer are exact for their
specs. Saved activations and seconds are modelled (`roofline.py`).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import optax
import tyro
from pydantic import Field

from jaxtp.analysis.hardware import GB, TABLE, Hardware, parse
from jaxtp.analysis.tables import columns
from jaxtp.config import entry
from jaxtp.config.command_line import Command
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.schema import ConfigError, allowed
from jaxtp.mesh import CP, FSDP, TP, describe_mesh, fitting_meshes
from jaxtp.tools.estimate.roofline import StepTime, communication_seconds, leaves_domain, product_seconds
from jaxtp.tools.estimate.search import MEMORY_ERROR, parse_meshes, target
from jaxtp.tools.explain.explanation import Explanation, explain
from jaxtp.tools.explain.propose import propose_plan
from jaxtp.tools.explain.python_model import PythonModel, load

PROGRAM = "jaxtp estimate"
DESCRIPTION = """Ranks the meshes on which a plan trains a Flax model. The hardware need not be here.

jaxtp estimate model.py:build --plan plan.py:PLAN --input 64x16x16x1 --hardware h100x8

A step on one global batch is traced as by jaxtp explain. Activations and times are modelled. Exit code 1: nothing fits.
"""
HARDWARE = f"Kind and count: {', '.join(TABLE)}, or a YAML file, as in mine.yamlx8. 2xh100x8: two hosts of 8."
MB = 1e6
PASSES = 2.5
"""Passes over the saved activations by elementwise operations; a backward pass counts 1.5."""


@dataclass(frozen=True, kw_only=True)
class OnHardware:
    """Flags of the hardware and its meshes."""

    hardware: Annotated[str, tyro.conf.arg(metavar="h100x8", help=HARDWARE)] = "h100x8"
    """See `HARDWARE`."""

    meshes: Annotated[tuple[str, ...], tyro.conf.arg(name="mesh", metavar="tp=8 fsdp=2,tp=4 ...")] = ()
    """Meshes to try; an axis that is left out is 1. By default all that can run."""

    memory_fraction: Annotated[float, Field(gt=0, le=1), allowed("above 0, up to 1")] | None = None
    """Share of a GPU's memory that JAX takes: by default 0.75 as in JAX, and 0.9 on several hosts as in
    scripts/cluster/gpu.env. XLA_PYTHON_CLIENT_MEM_FRACTION is ignored."""


@dataclass(frozen=True, kw_only=True)
class EstimateModel(OnHardware, PythonModel):
    """Flags of an estimate for a Flax model."""

    optimizer: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """An optax.GradientTransformation. By default optax.adamw."""


COMMAND = Command(program=PROGRAM, schema=EstimateModel, description=DESCRIPTION)


def names_model(argv: Sequence[str]) -> bool:
    """Returns whether a word of a command line is a Flax model, as in FILE.py:build."""
    return any(re.fullmatch(r"[^-\s][^\s:]*:[A-Za-z_]\w*", word) for word in argv)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 1 if nothing fits, 2 for a user's mistake."""
    return entry.attempt(PROGRAM, lambda: _run(COMMAND.load(argv)[0]))


@dataclass(frozen=True)
class Estimate:
    """A model's step on a mesh; bytes and seconds of a device."""

    explanation: Explanation
    memory: Mapping[str, float]  # bytes by kind
    time: StepTime
    spare: float  # bytes left; negative if the step does not fit

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: with margin, tight, too large; then time or missing memory."""
        margin = MEMORY_ERROR * (self.memory["activations"] + self.memory["gathered_weights"])
        return (0 if self.spare >= margin else 1, self.time.expected) if self.spare >= 0 else (2, -self.spare)

    def row(self) -> tuple[str, ...]:
        """Returns a line of the table."""
        found = self.explanation
        return (
            " x ".join(f"{axis} {size}" for axis, size in found.sizes.items() if size > 1) or "one device",
            f"{sum(self.memory.values()) / MB:,.1f}",
            f"{self.spare / MB:,.0f}" if self.spare >= 0 else "does not fit",
            f"{found.flops / 1e9:,.3f}",
            f"{sum(found.sent_by_axes().values()) / MB:,.3f}",
            f"{1e3 * self.time.overlapped:,.3g} to {1e3 * self.time.serial:,.3g}",
            f"{self.time.computing_share:.0%}",
        )

    def record(self) -> dict[str, object]:
        """Returns the estimate for JSON."""
        found = self.explanation
        return {
            **found.sizes,
            "fits": self.spare >= 0,
            "bytes_per_device": {**self.memory, "total": sum(self.memory.values())},
            "flops_per_device": found.flops,
            "bytes_sent": {"+".join(axes): sent for axes, sent in found.sent_by_axes().items()},
            "seconds": {"serial": self.time.serial, "overlapped": self.time.overlapped},
            "notes": list(found.notes),
        }


def _run(command: EstimateModel) -> int:
    require_writable("--json", command.json)
    if not command.input:
        raise ConfigError("an estimate runs the model: give the shapes of its inputs, --input 64x128:int32")
    jax.config.update("jax_platforms", "cpu")  # nothing is allocated, on a GPU least of all
    hardware, count = parse(command.hardware)
    room = target(hardware, count, command.memory_fraction).room
    build, inputs, plan = command.builder(), command.shapes(), command.load_plan()
    optimizer = optax.adamw(1e-3) if command.optimizer is None else load(command.optimizer, "--optimizer")
    print(f"{count} x {hardware.name}, {room / GB:,.1f} GB each for JAX; a step on one global batch", flush=True)
    estimates, refused = [], {}
    for sizes in _meshes(command, count):
        try:
            if command.propose:
                plan = propose_plan(build, *inputs, mesh=sizes, report=None) if sizes[TP] > 1 else None
            found = explain(build, *inputs, plan=plan, mesh=sizes)
            estimates.append(estimate(found, optimizer, hardware, room))
        except (TypeError, ValueError) as error:
            refused[describe_mesh(sizes)] = re.split("[;\n]", str(command.failure(error)))[0]
    if not estimates:
        raise ConfigError(f"no mesh of {count} devices can run it: {next(iter(refused.values()))}")
    estimates.sort(key=lambda each: each.rank)
    header = ("mesh", "MB", "to spare", "GFLOP", "MB sent", "ms a step", "computing")
    print("", columns(header, [each.row() for each in estimates]), sep="\n")
    if refused:
        mesh, reason = next(iter(refused.items()))
        print(f"{len(refused)} meshes cannot run it, such as {mesh}: {reason}")
    best = estimates[0]
    kinds = ", ".join(f"{kind.replace('_', ' ')} {size / MB:,.1f}" for kind, size in best.memory.items())
    print(f"best    {best.row()[0]}: {kinds} MB", *(f"note: {note}" for note in best.explanation.notes), sep="\n")
    record = {"model": command.model, "hardware": dataclasses.asdict(hardware), "devices": count, "refused": refused}
    write_json("--json", command.json, {**record, "meshes": [each.record() for each in estimates]})
    return 0 if best.spare >= 0 else 1


def _meshes(command: EstimateModel, count: int) -> Iterable[dict[str, int]]:
    splits = command.plan is not None or command.propose  # else tp and cp would only repeat work
    every = (sizes for sizes in fitting_meshes(count) if splits or sizes[TP] * sizes[CP] == 1)
    return parse_meshes(command.meshes, command.hardware, count) or every


def estimate(found: Explanation, optimizer: optax.GradientTransformation, hardware: Hardware, room: float) -> Estimate:
    """Returns the memory and time of an explained step; `room` is the bytes that JAX has."""
    whole = {**found.sizes, FSDP: 1, CP: 1}
    memory = {
        "parameters": float(found.bytes_per_device),
        "gradients": float(found.bytes_per_device),
        "optimizer": float(_optimizer_bytes(found, optimizer)),
        "activations": found.saved,
        "gathered_weights": 2.0 * max(sum(p.bytes(whole) for p in row.parameters) for row in found.rows),
    }
    return Estimate(found, memory, _step_time(hardware, found, memory), room - sum(memory.values()))


def _optimizer_bytes(found: Explanation, optimizer: optax.GradientTransformation) -> int:
    """An array of the optimizer with a parameter's path and shape is split like it."""
    parameters = {f"{row.path}.{p.name}": p for row in found.rows for p in row.parameters}
    state = jax.eval_shape(optimizer.init, {k: jax.ShapeDtypeStruct(p.shape, p.dtype) for k, p in parameters.items()})
    total = 0
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        like = next((parameters[k] for k in (getattr(key, "key", None) for key in path) if k in parameters), None)
        if like is not None and like.shape == array.shape:
            total += dataclasses.replace(like, dtype=str(array.dtype)).bytes(found.sizes)
        else:
            total += array.size * array.dtype.itemsize
    return total


def _step_time(hardware: Hardware, found: Explanation, memory: Mapping[str, float]) -> StepTime:
    speed, communication = hardware.memory_speed, communication_seconds(hardware, found.sizes, found.traffic)
    return StepTime(
        products=sum(product_seconds(hardware, one.flops, one.bytes, one.itemsize) for one in found.products),
        attention=0.0,
        elementwise=PASSES * memory["activations"] / speed,
        update=2 * (memory["parameters"] + memory["optimizer"] + memory["gradients"]) / speed,
        communication=communication,
        crossing=frozenset(axes for axes in communication if leaves_domain(hardware, found.sizes, axes)),
    )
