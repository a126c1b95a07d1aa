"""The command `jaxtp explain`."""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start("jaxtp explain")

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from jax.sharding import Mesh

from jaxtp.analysis.propose import propose_plan
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, Argument, leaf_settings
from jaxtp.config.command_line import Command, parse_mesh
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.python_object import user_code
from jaxtp.config.schema import ConfigError, OptionalFile
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.mesh import AXES, abstract_mesh, describe_mesh
from jaxtp.tools.explain.explanation import explain
from jaxtp.tools.explain.python_model import PythonModel, explain_step, has_settings
from jaxtp.train import setup
from jaxtp.train.config import TrainConfig, training_of
from jaxtp.train.validation import batch_problems, refuse

PROGRAM = "jaxtp explain"
DESCRIPTION = """\
Shows how a plan splits a model over a mesh and what it communicates, without the devices.

jaxtp explain model.py:build --plan plan.py:PLAN --input 64x16x16x1 --mesh fsdp=2,tp=4

The first table has a line for each module: its style, how its parameters are split, and the bytes
on each device. The second lists the collectives of a forward and backward pass by module. Notes
point out avoidable communication. Settings of a run work too; a configuration of jaxtp train is
explained with its whole batch at once, by its own mesh or another:

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
    """A function that returns an nnx.Module, in a file or a module (package.model:build)."""

    mesh: Annotated[str | None, Argument("fsdp=2,tp=4")] = None
    """Devices along each axis, 1 by default. The devices need not exist."""


@dataclass(frozen=True, kw_only=True)
class ExplainRun(Output, TrainConfig):
    """Settings of a run to explain."""


COMMAND = Command(program=PROGRAM, schema=Explain, description=DESCRIPTION)
RUN_COMMAND = Command(
    program=PROGRAM, schema=ExplainRun, description=DESCRIPTION, printed=training_of
)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if not has_settings(argv):
        flags = _with_config_flags(argv)
        if flags != list(argv):
            argv = ["--train.accumulation=1", *flags]
    if has_settings(argv):
        return entry.attempt(PROGRAM, lambda: _explain_run(RUN_COMMAND.load(argv)[0]))
    return entry.attempt(PROGRAM, lambda: _explain_model(COMMAND.load(argv)[0]))


def _with_config_flags(argv: Sequence[str]) -> list[str]:
    """Returns the words with `--config=` before each YAML file that is no value of a flag."""
    switches = [setting.flag for setting in leaf_settings(Explain) if setting.kind is bool]
    words = []
    previous = ""
    for word in argv:
        is_value = previous.startswith("--") and "=" not in previous and previous not in switches
        is_file = re.fullmatch(r"[^-].*\.ya?ml", word) is not None
        words.append(f"--config={word}" if is_file and not is_value else word)
        previous = word
    return words


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
    write_json("--json", options.json, {"model": config.origin.build, **explanation.record()})


def _explain_model(command: Explain) -> None:
    if command.mesh is None:
        raise ConfigError("name the mesh, as in --mesh fsdp=2,tp=4")
    sizes = parse_mesh(command.mesh, AXES)
    require_writable("--json", command.json)
    if command.compile:  # before the model's file, which may start JAX's backend
        request_virtual_devices(math.prod(sizes.values()))
    plan = command.load_plan()
    inputs = command.shapes()
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


def _with_fixed_sizes(sizes: dict[str, int]) -> dict[str, int]:
    if -1 in sizes.values():
        raise ConfigError(
            f"{describe_mesh(sizes)} depends on the number of devices; name a mesh, --mesh tp=8"
        )
    return sizes


if __name__ == "__main__":
    entry.run(PROGRAM, main)
