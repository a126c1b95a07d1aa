"""Ranks meshes for any Flax model and loss, by a trace of the step on each mesh.

`train/user_step.py` traces the step.

`jaxtp estimate --model.build ...` takes a run's model, plan, loss, batches and optimizer. In
`jaxtp estimate FILE.py:build` the loss is the sum of the model's outputs. Bytes sent and FLOPs are
those that `jaxtp explain` counts. State and gradients are exact for their specs; activations and
seconds are modelled (`roofline.py`).
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from pydantic import Field

from jaxtp.analysis.collective import Traffic, bytes_by_axes, with_joined_axes
from jaxtp.analysis.hardware import GB, RANGES, TABLE, parse
from jaxtp.analysis.tables import Cells, Record, between, columns
from jaxtp.config import entry
from jaxtp.config.affects import Argument
from jaxtp.config.command_line import Command
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.python_object import load_object, user_code
from jaxtp.config.schema import ConfigError, Fraction, OptionalFile, replace_nested
from jaxtp.mesh import (
    CP,
    TP,
    Sizes,
    abstract_mesh,
    describe_mesh,
    describe_split,
    fitting_meshes,
    mesh_sizes,
)
from jaxtp.tools.estimate.roofline import (
    StepTime,
    communication_seconds,
    crossing_axes,
    product_seconds,
)
from jaxtp.tools.estimate.search import (
    NEAR,
    Candidate,
    Target,
    move_to_front,
    parse_meshes,
    target,
)
from jaxtp.tools.estimate.search import rank as ranking_key
from jaxtp.tools.explain.explanation import sum_of_outputs
from jaxtp.tools.explain.python_model import PythonModel, explain_step, has_settings
from jaxtp.train.config import TrainConfig
from jaxtp.train.setup import plan
from jaxtp.train.state import Blueprint
from jaxtp.train.task import Shapes, Task
from jaxtp.train.user_step import trace_step
from jaxtp.train.validation import batch_problems

PROGRAM = "jaxtp estimate"
DESCRIPTION = """\
Ranks the meshes on which a plan trains a Flax model. The hardware need not be here.

jaxtp estimate model.py:build --plan plan.py:PLAN --input 64x16x16x1 --hardware h100x8

A step on one global batch is traced as by jaxtp explain. Activations and times are modelled.
Exit code 1: nothing fits.

With a loss and batches, as for jaxtp train:

jaxtp estimate --model.build model.py:build --train.loss ...
"""
_KEYS = ", ".join(f"{key} ({unit})" for key, (_, _, unit) in RANGES.items())
HARDWARE = (
    "Kind and number of devices, as in h100x8, 2xh100x8 (two hosts) or mine.yamlx8 (a YAML file): "
    f"{', '.join(TABLE)}. A YAML file has like (a name; without it the first six keys are "
    f"required), platform (cuda, rocm, tpu), direct (true: links join each pair) and {_KEYS}."
)
MB = 1e6
PASSES = 2.5
"""Passes over the saved activations by elementwise operations; a backward pass counts 1.5."""


@dataclass(frozen=True, kw_only=True)
class OnHardware:
    """Flags of the hardware and its meshes."""

    hardware: Annotated[str, Field(description=HARDWARE), Argument("h100x8")] = "h100x8"
    """See `HARDWARE`."""

    meshes: Annotated[tuple[str, ...], Argument("tp=8 fsdp=2,tp=4", name="mesh")] = ()
    """Meshes to try, by default all that can run; an axis that is left out is 1."""

    memory_fraction: Fraction | None = None
    """Share of a GPU's memory that JAX takes: by default 0.75 as in JAX, and 0.9 on several hosts
    as in scripts/cluster/gpu.env. XLA_PYTHON_CLIENT_MEM_FRACTION is ignored."""

    json: OptionalFile = None
    """JSON file for all numbers."""


@dataclass(frozen=True, kw_only=True)
class EstimateModel(OnHardware, PythonModel):
    """Flags of an estimate for a Flax model."""

    optimizer: Annotated[str | None, Argument("FILE.py:NAME")] = None
    """Optimizer, an optax.GradientTransformation; by default optax.adamw."""


COMMAND = Command(program=PROGRAM, schema=EstimateModel, description=DESCRIPTION)


def names_model(argv: Sequence[str]) -> bool:
    """Returns whether a command line has a Flax model without a flag, as in `FILE.py:build`."""
    return not has_settings(argv) and any(
        re.fullmatch(r"[^-\s][^\s:]*:[A-Za-z_]\w*", word) for word in argv
    )


def main(argv: Sequence[str]) -> int:
    """Runs `jaxtp estimate FILE.py:build`; returns 0, 1 if nothing fits, 2 for a user's mistake."""
    return entry.attempt(PROGRAM, lambda: _of_model(COMMAND.load(argv)[0]))


def _of_model(command: EstimateModel) -> int:
    require_writable("--json", command.json)
    if not command.input:
        raise ConfigError(
            "an estimate runs the model: give the shapes of its inputs, --input 64x128:int32"
        )
    jax.config.update("jax_platforms", "cpu")  # nothing is allocated, on a GPU least of all
    optimizer = optax.adamw(1e-3)
    if command.optimizer is not None:
        optimizer = load_object(command.optimizer, "--optimizer")
    task = Task(
        model=command.builder(),
        plan=command.load_plan() or (None if command.propose else {}),
        loss=lambda model, batch, key: (sum_of_outputs(model(*batch.values())), jnp.ones(())),
        optimizer=optimizer,
    )
    # JAX sorts the names.
    inputs = {f"{index:03}": shape for index, shape in enumerate(command.shapes())}
    settings = {"model.build": command.model, "data.global_batch_size": inputs["000"].shape[0]}
    return rank(command, replace_nested(TrainConfig(), settings), task, inputs)


@dataclass(frozen=True, kw_only=True)
class Estimate(Candidate):
    """A step on a mesh; bytes and seconds of a device."""

    blueprint: Blueprint
    flops: float  # with recomputation
    traffic: Traffic
    plan: list[str]  # notes about a proposed plan

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return mesh_sizes(self.blueprint.mesh)

    def row(self) -> Cells:
        """Returns a line of the table."""
        return (
            describe_split(self.sizes),
            f"{self.memory.total / MB:,.1f}",
            f"{self.spare / MB:,.0f}" if self.fits else "does not fit",
            f"{self.flops / 1e9:,.3f}",
            f"{sum(bytes_by_axes(self.traffic).values()) / MB:,.3f}",
            between(1e3 * self.time.overlapped, 1e3 * self.time.serial),
            f"{self.time.computing_share:.0%}",
        )

    def summary(self) -> str:
        """Returns the memory by kind, and the first line of each note about a proposed plan."""
        kinds = dataclasses.asdict(self.memory).items()
        memory = ", ".join(
            f"{kind.replace('_', ' ')} {size / MB:,.1f}" for kind, size in kinds if size
        )
        plan = [line.partition("\n")[0] for line in self.plan]
        return "\n".join([f"best    {describe_split(self.sizes)}: {memory} MB", *plan])

    def record(self) -> Record:
        """Returns the estimate for JSON."""
        return {
            **self.sizes,
            "fits": self.fits,
            "bytes_per_device": dataclasses.asdict(self.memory) | {"total": self.memory.total},
            "flops_per_device": self.flops,
            "bytes_sent": with_joined_axes(bytes_by_axes(self.traffic)),
            "seconds": {"serial": self.time.serial, "overlapped": self.time.overlapped},
            "plan": self.plan,
        }


def rank(flags: OnHardware, config: TrainConfig, task: Task, batch: Shapes) -> int:
    """Prints the ranking of the meshes for a task with a loss; returns 0, or 1 if nothing fits."""
    hardware, count = parse(flags.hardware)
    where = target(hardware, count, flags.memory_fraction, config.launch.allocator)
    print(
        f"{count} x {hardware.name}, {where.room / GB:,.1f} GB each for JAX; a step on one "
        "global batch",
        flush=True,
    )
    meshes = parse_meshes(flags.meshes, flags.hardware, count) or fitting_meshes(count)
    if not (flags.meshes or task.plan or task.plan is None):
        # Without a plan tp and cp would only repeat work.
        meshes = [sizes for sizes in meshes if sizes[TP] * sizes[CP] == 1]
    estimates = []
    refused = {}
    for sizes in meshes:
        try:
            estimates.append(estimate(config, task, batch, sizes, where))
        except UserError as error:
            refused[describe_mesh(sizes)] = re.split("[;\n]", str(error))[0]
    if not estimates:
        raise ConfigError(f"no mesh of {count} devices can run it: {next(iter(refused.values()))}")
    estimates = simplest_first(sorted(estimates, key=ranking_key))
    header = ("mesh", "MB", "to spare", "GFLOP", "MB sent", "ms a step", "computing")
    print("", columns(header, [estimate.row() for estimate in estimates]), sep="\n")
    if refused:
        mesh, reason = next(iter(refused.items()))
        print(f"{len(refused)} meshes cannot run it, such as {mesh}: {reason}")
    best = estimates[0]
    assert task.loss is not None
    notes = explain_step(config, best.blueprint, task.loss, batch).notes
    print(best.summary())
    for note in notes:
        print(f"note: {note}")
    numbers = {
        "model": config.origin.build,
        "hardware": dataclasses.asdict(hardware),
        "devices": count,
        "refused": refused,
        "notes": list(notes),
        "meshes": [estimate.record() for estimate in estimates],
    }
    write_json("--json", flags.json, numbers)
    return int(not best.fits)


def simplest_first(ranked: list[Estimate]) -> list[Estimate]:
    """Moves the mesh with the smallest tp, then cp, among the fastest meshes to the front."""
    first = ranked[0]
    if not first.fits:
        return ranked
    as_fast = []
    for estimate in ranked:
        fits_alike = ranking_key(estimate)[0] == ranking_key(first)[0]
        if fits_alike and _is_as_fast(estimate, first):
            as_fast.append(estimate)
    simplest = min(as_fast, key=lambda estimate: (estimate.sizes[TP], estimate.sizes[CP]))
    return move_to_front(simplest, ranked)


def _is_as_fast(estimate: Estimate, first: Estimate) -> bool:
    # A tp group whose devices all compute the same numbers sends little. In a small step this could
    # make its mesh the fastest, although overlap may hide the communication of other meshes. So a
    # mesh that computes less counts as equally fast, unless it is slower at any overlap.
    if NEAR * estimate.flops < first.flops and estimate.time.overlapped <= first.time.serial:
        return True
    return estimate.time.expected <= NEAR * first.time.expected


def estimate(
    config: TrainConfig, task: Task, batch: Shapes, sizes: Sizes, where: Target
) -> Estimate:
    """Returns the memory and time of a step on a mesh.

    Raises:
      ConfigError: the mesh does not divide the batch, or the model or loss fails.
      PlanError: the plan does not fit the model or the mesh.
    """
    assert task.loss is not None
    if problem := next(batch_problems(config, sizes), None):
        raise ConfigError(problem.text)
    with user_code("the model or its loss", UserError):
        # A trace needs no devices.
        blueprint, lines = plan(config, cast(Mesh, abstract_mesh(sizes)), task, batch)
        memory, work = trace_step(config, blueprint, task.loss, batch)
    hardware = where.hardware
    count = config.train.accumulation
    traffic = {collective: count * times for collective, times in work.traffic.items()}
    products = (
        product_seconds(hardware, product.flops, product.bytes, product.itemsize)
        for product in work.products
    )
    communication = communication_seconds(hardware, sizes, traffic)
    time = StepTime(
        products=count * sum(products),
        attention=0.0,
        elementwise=count * PASSES * memory.activations / hardware.memory_speed,
        update=2 * (memory.state + memory.gradients) / hardware.memory_speed,
        communication=communication,
        crossing=crossing_axes(hardware, sizes, communication),
    )
    return Estimate(
        blueprint=blueprint,
        memory=memory,
        flops=count * sum(product.flops for product in work.products),
        traffic=traffic,
        time=time,
        target=where,
        plan=lines,
    )
