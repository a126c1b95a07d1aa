"""Ranks meshes for any Flax model and loss, by a trace of the step on each mesh.

`train/user_step.py` traces the step. Bytes sent and FLOPs are those that `jaxtp explain` counts.
State and gradients are exact for their specs; activations and seconds are modelled (`roofline.py`).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from jax.sharding import Mesh

from jaxtp.analysis.collective import Traffic, bytes_by_axes, with_joined_axes
from jaxtp.analysis.hardware import GB
from jaxtp.analysis.tables import Cells, Record, between, columns
from jaxtp.config.entry import UserError
from jaxtp.config.python_object import user_code
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.mesh import Sizes, abstract_mesh, describe_mesh, fitting_meshes
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
    is_near,
    none_can,
    rank,
    simplest_first,
)
from jaxtp.tools.estimate.summary import candidate_record, memory_by_kind, refusals
from jaxtp.train.setup import Plan
from jaxtp.train.user_step import trace_step
from jaxtp.train.validation import batch_problems

MB = 1e6
PASSES = 2.5
"""Passes over the saved activations by elementwise operations; a backward pass counts 1.5."""


@dataclass(frozen=True, kw_only=True)
class Estimate(Candidate):
    """A step on a mesh; bytes and seconds of a device."""

    flops: float  # with recomputation
    traffic: Traffic
    plan: list[str]  # notes about a proposed plan

    def row(self) -> Cells:
        """Returns a line of the table."""
        return (
            str(self),
            f"{self.memory.total / MB:,.1f}",
            f"{self.spare / MB:,.0f}" if self.fits else "does not fit",
            f"{self.flops / 1e9:,.3f}",
            f"{sum(bytes_by_axes(self.traffic).values()) / MB:,.3f}",
            between(1e3 * self.time.overlapped, 1e3 * self.time.serial),
            f"{self.time.computing_share:.0%}",
        )

    def record(self) -> Record:
        """Returns the estimate for JSON."""
        return {
            **candidate_record(self),
            "flops_per_device": self.flops,
            "bytes_sent": with_joined_axes(bytes_by_axes(self.traffic)),
            "plan": self.plan,
        }


def rank_meshes(where: Target, meshes: Sequence[Sizes], plan: Plan) -> tuple[bool, Record]:
    """Prints the ranking of meshes, by default all, for a planned run.

    Returns whether the best one fits, and numbers for JSON.
    """
    hardware = where.hardware
    count = where.devices
    print(
        f"{count} x {hardware.name}, {where.room / GB:,.1f} GB each for JAX; a step on one "
        "global batch",
        flush=True,
    )
    estimates = []
    refused = {}
    for sizes in meshes or fitting_meshes(count):
        try:
            estimates.append(estimate(plan, sizes, where))
        except UserError as error:
            refused[describe_mesh(sizes)] = str(error)
    if not estimates:
        raise ConfigError(none_can(count, refused))
    estimates = simplest_first(sorted(estimates, key=rank), is_as_fast)
    header = ("mesh", "MB", "to spare", "GFLOP", "MB sent", "ms a step", "computing")
    table = columns(header, [estimate.row() for estimate in estimates])
    print("", table, *refusals(refused), "", sep="\n")
    best = estimates[0]
    print(f"best    {best}", f"memory  {memory_by_kind(best)}", sep="\n")
    print(*(line.partition("\n")[0] for line in best.plan), sep="\n")
    return best.fits, {
        "model": plan.config.origin.build,
        "hardware": dataclasses.asdict(hardware),
        "devices": count,
        "refused": refused,
        "meshes": [estimate.record() for estimate in estimates],
    }


def is_as_fast(estimate: Estimate, first: Estimate) -> bool:
    """Returns whether a mesh is as fast as the fastest."""
    # A tp group whose devices all compute the same numbers sends little. In a small step this could
    # make its mesh the fastest, although overlap may hide the communication of other meshes. So a
    # mesh that computes less counts as equally fast, unless it is slower at any overlap.
    if NEAR * estimate.flops < first.flops and estimate.time.overlapped <= first.time.serial:
        return True
    return is_near(estimate, first)


def estimate(plan: Plan, sizes: Sizes, where: Target) -> Estimate:
    """Returns the memory and time of a step on a mesh.

    Raises:
      ConfigError: the mesh does not divide the batch, or the model or loss fails.
      PlanError: the plan does not fit the model or the mesh.
    """
    config = replace_nested(plan.config, {"mesh": plan.config.mesh.of_sizes(sizes)})
    if problem := next(batch_problems(config, sizes), None):
        raise ConfigError(problem.text)
    with user_code("the model or its loss", UserError):
        # A trace needs no devices.
        blueprint, lines = plan.state_on(cast(Mesh, abstract_mesh(sizes)))
        memory, work = trace_step(plan.step_settings, blueprint, plan.shapes)
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
        config=config,
        memory=memory,
        flops=count * sum(product.flops for product in work.products),
        traffic=traffic,
        time=time,
        target=where,
        plan=lines,
    )
