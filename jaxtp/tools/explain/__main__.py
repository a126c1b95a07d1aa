"""The command `jaxtp explain`."""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import cast

import jax
from jax.sharding import Mesh

from jaxtp.config import entry
from jaxtp.config.affects import in_short_help
from jaxtp.config.command_line import Command
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.python_object import user_code
from jaxtp.config.schema import ConfigError, OptionalFile
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.mesh import AXES, abstract_mesh, describe_mesh
from jaxtp.tools.explain.explanation import explain
from jaxtp.train.config import IGNORED_BY_STEP, TrainConfig, training_of
from jaxtp.train.defaults import RUN_DIR, Decider, DeviceInfo
from jaxtp.train.setup import plan_step
from jaxtp.train.user_step import micro_batch
from jaxtp.train.validation import batch_problems, refuse

PROGRAM = "jaxtp explain"
DESCRIPTION = """\
Shows how a run is split over a mesh and what it communicates, without the devices.

jaxtp explain --config configs/llama3_8b.yaml --mesh fsdp=4,tp=8
jaxtp explain --model.build mine.py:build --model.plan mine.py:PLAN --train.loss mine.py:loss
              --data.batches mine.py:batches --mesh fsdp=2,tp=4

The first table has a line for each module: its style, how its parameters are split, and the bytes
on each device. The second lists the collectives of a forward and backward pass by module, with
--compile also those that the compiler adds between modules, such as the gather of an output that
is needed whole. In Python, jaxtp.explain takes a model and its inputs.
"""


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(TrainConfig):
    """Command line of an explanation: the settings of a run."""

    compile: bool = False
    """Also compile for virtual CPU devices, and show the collectives that the compiler adds between
    the layers."""

    json: OptionalFile = None
    """JSON file for all numbers."""


_IGNORED = {*IGNORED_BY_STEP} - {"data.batches"}
COMMAND = Command(
    program=PROGRAM,
    schema=ExplainConfig,
    description=DESCRIPTION,
    short_help=(
        *("compile", "json", "model.plan"),
        *(name for name in in_short_help(TrainConfig) if name not in _IGNORED),
    ),
    printed=training_of,
)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return entry.attempt(PROGRAM, lambda: _explain(*COMMAND.load(argv, _as_in_a_run)))


def _as_in_a_run(options: ExplainConfig, explicit: Set[str]) -> tuple[ExplainConfig, list[str]]:
    # A Hugging Face model has the dtypes and the length of its run; the mesh stays.
    count = math.prod(options.mesh.sizes.values())
    if options.origin.from_hf is None or count < 1:
        return options, []
    devices = DeviceInfo(count=count, per_process=count, bfloat16=True, kind="devices")
    decided, notes = Decider(devices)(options, explicit | {f"mesh.{axis}" for axis in AXES})
    return decided, [f"default {note}" for note in notes if not note.startswith(RUN_DIR)]


def _explain(options: ExplainConfig, notes: Sequence[str]) -> None:
    config = training_of(options)
    sizes = options.mesh.sizes
    if -1 in sizes.values():
        raise ConfigError(
            f"{describe_mesh(sizes)} depends on the number of devices; name a mesh, --mesh tp=8"
        )
    require_writable("--json", options.json)
    if options.compile:
        request_virtual_devices(math.prod(sizes.values()))
    plan = plan_step(config)
    config = plan.config
    loss = plan.step_settings.objective
    count = config.train.accumulation
    key = jax.random.key(config.run.seed)
    refuse(problem.text for problem in batch_problems(config, sizes))
    with user_code("the model or its loss", UserError):
        # A trace needs no devices.
        blueprint, lines = plan.state_on(cast(Mesh, abstract_mesh(sizes)))
        explanation = explain(
            blueprint.abstract_model,
            micro_batch(plan.shapes, count),
            mesh=sizes,
            call=lambda model, rows: loss(model, rows, key)[0],
            compiled=options.compile,
        )
    print(*notes, *lines, explanation, sep="\n")
    if count > 1:
        print(f"\nnote: numbers are for one of the {count} micro-batches of a step")
    write_json("--json", options.json, {"model": config.origin.build, **explanation.record()})


if __name__ == "__main__":
    entry.run(PROGRAM, main)
