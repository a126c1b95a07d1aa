"""The command `jaxtp explain`."""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start("jaxtp explain")

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.analysis.propose import propose_plan
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, REPEATED, Argument
from jaxtp.config.command_line import Command, parse_mesh
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.python_object import describe_value, load_object, user_code
from jaxtp.config.schema import ConfigError, OptionalFile
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.mesh import AXES, abstract_mesh, describe_mesh
from jaxtp.models.config import OriginConfig
from jaxtp.models.own_decoder import builder
from jaxtp.plans.parallelize import Build
from jaxtp.plans.plan import Plan
from jaxtp.tools.explain.explanation import explain
from jaxtp.train.config import TrainConfig, training_of
from jaxtp.train.setup import plan_step
from jaxtp.train.user_step import micro_batch
from jaxtp.train.validation import batch_problems, refuse

PROGRAM = "jaxtp explain"
DESCRIPTION = """\
Shows how a plan splits a model over a mesh and what it communicates, without the devices.

jaxtp explain model.py:build --plan plan.py:PLAN --input 64x16x16x1 --mesh fsdp=2,tp=4

The first table has a line for each module: its style, how its parameters are split, and the bytes
on each device. The second lists the collectives of a forward and backward pass by module. Notes
point out avoidable communication. Settings of a run work too, such as a configuration of jaxtp
train, by its own mesh or another:

jaxtp explain --config configs/llama3_8b.yaml --mesh fsdp=4,tp=8
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
class Explain(Output):
    """Flags of `jaxtp explain`."""

    model: Annotated[str, POSITIONAL, Argument("FILE.py:FUNCTION")]
    """A function that returns an nnx.Module, or its class, in a file or a module
    (package.model:build). A parameter rngs gets nnx.Rngs(0)."""

    plan: Annotated[str | None, Argument("FILE.py:NAME")] = None
    """A dict from patterns of module paths to styles. Without a plan, parameters are split over
    fsdp only. With cp > 1 the plan must name the module whose sequences cp splits: {"":
    ContextParallel()}."""

    propose: bool = False
    """Use the plan that jaxtp.propose_plan returns, and print its reasons."""

    input: Annotated[tuple[str, ...], REPEATED, Argument("64x16x16x1")] = ()
    """Shape of an input of a global batch, with a dtype unless it is float32: 16x128:int32. Repeat
    the flag for several inputs. Without inputs there are no collectives."""

    mesh: Annotated[str | None, Argument("fsdp=2,tp=4")] = None
    """Devices along each axis, 1 by default. The devices need not exist."""

    def load_plan(self) -> Plan | None:
        """Returns the plan, if any."""
        if self.propose and self.plan is not None:
            raise ConfigError("--propose and --plan both give a plan; leave one of them out")
        plan: Plan | None = None if self.plan is None else load_object(self.plan, "--plan")
        if plan is not None and not isinstance(plan, Mapping):
            raise ConfigError(
                f"--plan {self.plan} is {describe_value(plan)}, and should be a dict from module "
                "paths to styles"
            )
        return plan

    def builder(self) -> Build:
        """Returns the function that builds the model; mistakes in it are ConfigErrors."""
        function = load_object(self.model, "MODEL")
        build = builder(function, OriginConfig(build=self.model))
        return lambda: build(nnx.Rngs(0))


@dataclass(frozen=True, kw_only=True)
class ExplainRun(Output, TrainConfig):
    """Settings of a run to explain."""


COMMAND = Command(program=PROGRAM, schema=Explain, description=DESCRIPTION)
RUN_COMMAND = Command(
    program=PROGRAM, schema=ExplainRun, description=DESCRIPTION, printed=training_of
)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if any(re.match(r"--(config(=|$)|[^=]*\.)", word) for word in argv):  # settings of a run
        return entry.attempt(PROGRAM, lambda: _explain_run(RUN_COMMAND.load(argv)[0]))
    return entry.attempt(PROGRAM, lambda: _explain_model(COMMAND.load(argv)[0]))


def _explain_run(options: ExplainRun) -> None:
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
    loss = plan.parts.loss
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
    print(*lines, explanation, sep="\n")
    if count > 1:
        print(f"\nnote: numbers are for one of the {count} micro-batches of a step")
    write_json("--json", options.json, {"model": config.origin.build, **explanation.record()})


def _explain_model(command: Explain) -> None:
    if command.model.endswith((".yaml", ".yml")):
        raise ConfigError(f"to explain a configuration, use --config {command.model}")
    if command.mesh is None:
        raise ConfigError("name the mesh, as in --mesh fsdp=2,tp=4")
    sizes = parse_mesh(command.mesh, AXES)
    require_writable("--json", command.json)
    if command.compile:  # before the model's file, which may start JAX's backend
        request_virtual_devices(math.prod(sizes.values()))
    plan = command.load_plan()
    inputs = list(map(_parse_input, command.input))
    build = command.builder()
    if not inputs and (command.propose or command.compile):
        raise ConfigError(
            "--propose and --compile trace the model: give the shapes of its inputs, --input "
            "64x128:int32"
        )
    shapes = ", ".join(command.input) or "none"
    with user_code(f"{command.model}, on inputs {shapes} (float32 by default),", UserError):
        if command.propose:
            plan = propose_plan(build, *inputs, mesh=sizes)
            print()
        explanation = explain(build, *inputs, plan=plan, mesh=sizes, compiled=command.compile)
    print(explanation)
    write_json("--json", command.json, {"model": command.model, **explanation.record()})


def _parse_input(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    try:
        dtype = jnp.dtype(match[2] or "float32") if match else None
    except TypeError:
        dtype = None
    if match is None or dtype is None:
        raise ConfigError(
            f"--input {text}: should be a shape such as 64x16x16x1, or with a dtype 16x128:int32"
        )
    return jax.ShapeDtypeStruct(tuple(map(int, match[1].split("x"))), dtype)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
