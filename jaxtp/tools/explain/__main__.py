"""The command `jaxtp explain`."""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start("jaxtp explain")

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.analysis.propose import propose_plan
from jaxtp.analysis.traced_model import Forward
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, Argument
from jaxtp.config.command_line import Command, parse_mesh
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.python_object import named_code, user_code
from jaxtp.config.schema import ConfigError, OptionalFile, from_yaml
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.mesh import AXES, CP, abstract_mesh, describe_mesh
from jaxtp.models.decoder import Decoder
from jaxtp.plans.parallelize import Build
from jaxtp.tools.explain.explanation import explain
from jaxtp.tools.explain.python_model import PythonModel, explain_step, has_own_step, has_settings
from jaxtp.train import setup
from jaxtp.train.config import TrainConfig, training_of
from jaxtp.train.validation import batch_problems, check, refuse

PROGRAM = "jaxtp explain"
DESCRIPTION = """\
Shows how a plan splits a model over a mesh and what it communicates, without the devices.

jaxtp explain model.py:build --plan plan.py:PLAN --input 64x16x16x1 --mesh fsdp=2,tp=4

The first table has a line for each module: its style, how its parameters are split, and the bytes
on each device. The second lists the collectives of a forward and backward pass by module. Notes
point out avoidable communication. The model may also be a configuration of jaxtp train, and
settings of a run work too:

jaxtp explain configs/llama3_8b.yaml --mesh fsdp=4,tp=8
jaxtp explain --model.build mine.py:build --train.loss mine.py:loss --data.batches mine.py:batches
"""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Flags of the output."""

    compile: bool = False
    """Also compile for virtual CPU devices, and show the collectives that the compiler adds between
    the layers."""

    json: OptionalFile = None
    """JSON file for all numbers."""


@dataclass(frozen=True, kw_only=True)
class Explain(Output, PythonModel):
    """Flags of `jaxtp explain`."""

    model: Annotated[str, POSITIONAL, Argument("FILE.py:FUNCTION")]
    """A function that returns an nnx.Module, in a file or a module (package.model:build); or a YAML
    configuration of jaxtp train."""

    mesh: Annotated[str | None, Argument("fsdp=2,tp=4")] = None
    """Devices along each axis, 1 by default. The devices need not exist. A YAML configuration has
    its own mesh, which this flag replaces."""


@dataclass(frozen=True, kw_only=True)
class ExplainRun(Output, TrainConfig):
    """Settings of a run to explain."""


COMMAND = Command(program=PROGRAM, schema=Explain, description=DESCRIPTION)
RUN_COMMAND = Command(
    program=PROGRAM, schema=ExplainRun, description=DESCRIPTION, printed=training_of
)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if has_settings(argv):
        return entry.attempt(PROGRAM, lambda: _explain_run(RUN_COMMAND.load(argv)[0]))
    return entry.attempt(PROGRAM, lambda: _explain_model(COMMAND.load(argv)[0]))


def _explain_run(options: ExplainRun) -> None:
    config = training_of(options)
    sizes = _with_fixed_sizes(options.mesh.sizes)
    require_writable("--json", options.json)
    if options.compile:
        request_virtual_devices(math.prod(sizes.values()))
    config, task, batch = setup.open_task(config)
    assert task.loss is not None
    refuse(problem.text for problem in batch_problems(config, sizes))
    with user_code("the model or its loss", UserError):
        # A trace needs no devices.
        blueprint, lines = setup.plan(config, cast(Mesh, abstract_mesh(sizes)), task, batch)
        explanation = explain_step(config, blueprint, task.loss, batch, compiled=options.compile)
    print(*lines, explanation, sep="\n")
    count = config.train.accumulation
    if count > 1:
        print(f"\nnote: numbers are for one of the {count} micro-batches of a step")
    write_json("--json", options.json, {"model": config.model.build, **explanation.record()})


def _explain_model(command: Explain) -> None:
    config = _configuration(command.model)
    sizes = _mesh_of(command, config)
    require_writable("--json", command.json)
    if command.compile:  # before the model's file, which may start JAX's backend
        request_virtual_devices(math.prod(sizes.values()))
    plan = command.load_plan()
    inputs = command.shapes()
    call = None
    if config is not None:
        if sizes[CP] > 1 and not inputs:
            check(config, sizes, lambda: None)
        build, call = _decoder(config)
        shape = (config.data.global_batch_size, config.data.sequence_length)
        inputs = inputs or [jax.ShapeDtypeStruct(shape, jnp.int32)]
    else:
        build = command.builder()
        if not inputs and (command.propose or command.compile):
            raise ConfigError(
                "--propose and --compile trace the model: give the shapes of its inputs, --input "
                "64x128:int32"
            )
    shapes = ", ".join(command.input) or "none"
    with user_code(f"{command.model}, on inputs {shapes} (float32 by default),", UserError):
        if command.propose:
            plan = propose_plan(build, *inputs, mesh=sizes, call=call)
            print()
        explanation = explain(
            build, *inputs, plan=plan, mesh=sizes, call=call, compiled=command.compile
        )
    print(explanation)
    if config is not None and not command.input:
        print(
            "\nnote: numbers are for the whole batch at once, without remat; jaxtp estimate shows "
            "a training step"
        )
    write_json("--json", command.json, {"model": command.model, **explanation.record()})


def _configuration(model: str) -> TrainConfig | None:
    """Reads a YAML configuration; returns None for a Python model."""
    if not model.endswith((".yaml", ".yml")):
        return None
    config = from_yaml(TrainConfig, model)
    if has_own_step(config) or named_code(config):
        raise ConfigError(f"{model} names parts of your own; write jaxtp explain --config {model}")
    return config


def _mesh_of(command: Explain, config: TrainConfig | None) -> dict[str, int]:
    if command.mesh is not None:
        return parse_mesh(command.mesh, AXES)
    if config is None:
        raise ConfigError("name the mesh, as in --mesh fsdp=2,tp=4")
    return _with_fixed_sizes(config.mesh.sizes)


def _with_fixed_sizes(sizes: dict[str, int]) -> dict[str, int]:
    if -1 in sizes.values():
        raise ConfigError(
            f"{describe_mesh(sizes)} depends on the number of devices; name a mesh, --mesh tp=8"
        )
    return sizes


def _decoder(config: TrainConfig) -> tuple[Build, Forward]:
    return (
        lambda: Decoder(config.model, rngs=nnx.Rngs(0)),
        lambda model, *inputs: model(*inputs, context=config.mesh.context),
    )


if __name__ == "__main__":
    entry.run(PROGRAM, main)
