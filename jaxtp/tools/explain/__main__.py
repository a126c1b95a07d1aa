"""The command `jaxtp explain`."""

import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from jaxtp.config import entry
from jaxtp.config.command_line import Command, parse_mesh
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.schema import ConfigError, Switch, UserPath, from_yaml, nearest_file
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.mesh import AXES, CP
from jaxtp.models.decoder import Decoder
from jaxtp.tools.explain.explanation import explain
from jaxtp.tools.explain.propose import propose_plan
from jaxtp.tools.explain.traced_model import Callee
from jaxtp.train.config import TrainConfig
from jaxtp.train.validation import check

PROGRAM = "jaxtp explain"
DESCRIPTION = """Shows how a plan splits a model over a mesh and what it communicates, without the devices.

jaxtp explain model.py:build --plan plan.py:PLAN --input 64x16x16x1 --mesh fsdp=2,tp=4

The first table has a line for each module: its style, how its parameters are split, and the bytes on each device. The
second lists the collectives of a forward and backward pass by module. Notes point out avoidable communication. The
model may also be a configuration of jaxtp train:

jaxtp explain configs/llama3_8b.yaml --mesh fsdp=4,tp=8
"""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Flags of `jaxtp explain`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:FUNCTION")]
    """A function without arguments that returns an nnx.Module, in a file or a module (package.model:build); or a YAML
    configuration of jaxtp train."""

    mesh: Annotated[str | None, tyro.conf.arg(metavar="fsdp=2,tp=4")] = None
    """Devices along each axis, 1 by default. The devices need not exist. A YAML configuration has a mesh already."""

    plan: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """A dict from patterns of module paths to styles. Without a plan, parameters are split over fsdp only. With cp > 1
    the plan must name the module whose sequences cp divides: {"": ContextParallel()}."""

    propose: Switch = False
    """Use the plan that jaxtp.propose_plan returns, and print its reasons first."""

    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="64x16x16x1")] = ()
    """Shape of an input of a global batch, with a dtype unless it is float32: 16x128:int32. Repeat the flag for several
    inputs. Without it no collectives are shown."""

    compile: Switch = False
    """Also compile for virtual CPU devices, and show the collectives that the compiler adds between the layers."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all numbers to this file."""

    @property
    def is_config(self) -> bool:
        """Whether the model is a YAML configuration of jaxtp train."""
        return self.model.endswith((".yaml", ".yml"))


COMMAND = Command(program=PROGRAM, schema=Explain, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return entry.attempt(PROGRAM, lambda: run(COMMAND.load(argv)[0]))


def run(command: Explain) -> None:
    """Prints the explanation.

    Raises:
      ConfigError: a flag is invalid.
      PlanError, MeshError: as `explain`.
    """
    sizes = _axis_sizes(command)
    require_writable("--json", command.json)
    if command.propose and command.plan is not None:
        raise ConfigError("--propose makes a plan, and --plan names one; leave one of them out")
    if not command.input and (command.propose or command.compile) and not command.is_config:
        raise ConfigError("--propose and --compile run the model: give the shapes of its inputs, --input 64x128:int32")
    if command.compile:
        request_virtual_devices(math.prod(sizes.values()))
    build, inputs, call = _model(command, sizes)
    plan = None if command.plan is None else _load("--plan", command.plan)
    try:
        if command.propose:
            plan = propose_plan(build, *inputs, mesh=sizes, call=call)
            print()
        explanation = explain(build, *inputs, plan=plan, mesh=sizes, call=call, compiled=command.compile)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        shapes = ", ".join(command.input) or "none"
        hint = "; integer inputs need a dtype: --input 16x128:int32" if "integer" in str(error) else ""
        raise ConfigError(f"{command.model} fails on these inputs ({shapes}): {error}{hint}") from None
    print(explanation)
    if command.is_config and not command.input:
        print("\nnote: the whole batch at once, without remat; jaxtp estimate shows the traffic of a training step")
    write_json("--json", command.json, {"model": command.model, **explanation.record()})


def _axis_sizes(command: Explain) -> dict[str, int]:
    if command.mesh is not None:
        return parse_mesh(command.mesh, AXES)
    if not command.is_config:
        raise ConfigError("name the mesh, as in --mesh fsdp=2,tp=4")
    sizes = from_yaml(TrainConfig, command.model).mesh.sizes
    if -1 in sizes.values():
        raise ConfigError(f"the mesh of {command.model} depends on the number of devices; name one: --mesh tp=8")
    return sizes


def _model(
    command: Explain, sizes: dict[str, int]
) -> tuple[Callable[[], nnx.Module], list[jax.ShapeDtypeStruct], Callee | None]:
    inputs = [_parse_input(text) for text in command.input]
    if not command.is_config:
        return _builder(command.model), inputs, None
    config = from_yaml(TrainConfig, command.model)
    if sizes[CP] > 1 and not inputs:
        check(config, sizes, lambda: None)
    shape = (config.data.global_batch_size, config.data.sequence_length)
    build = lambda: Decoder(config.model, rngs=nnx.Rngs(0))  # noqa: E731
    call = lambda model, *inputs: model(*inputs, context=config.mesh.context)  # noqa: E731
    return build, inputs or [jax.ShapeDtypeStruct(shape, jnp.int32)], call


def _builder(name: str) -> Callable[[], nnx.Module]:
    function = _load("MODEL", name)
    if not callable(function):
        raise ConfigError(f"{name} is {function!r}, and should be a function that returns a model")

    def build() -> nnx.Module:
        try:
            model = function()
        except TypeError as error:
            raise ConfigError(f"{name} does not build a model: {error}") from None
        if not isinstance(model, nnx.Module):
            raise ConfigError(f"{name} returns a {type(model).__name__}, and should return an nnx.Module")
        return model

    return build


def _parse_input(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    try:
        dtype = jnp.dtype(match[2] or "float32") if match else None
    except TypeError:
        dtype = None
    if match is None or dtype is None:
        raise ConfigError(f"--input {text}: should be a shape such as 64x16x16x1, or with a dtype 16x128:int32")
    return jax.ShapeDtypeStruct(tuple(map(int, match[1].split("x"))), dtype)


def _load(flag: str, text: str) -> Any:
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{flag} {text}: should be FILE.py:NAME or package.module:NAME")
    module = _load_file(flag, Path(place)) if place.endswith(".py") else _import(flag, place)
    if not hasattr(module, name):
        values = (key for key, value in vars(module).items() if isinstance(value, dict) or callable(value))
        names = ", ".join(key for key in values if not key.startswith("_"))
        raise ConfigError(f"{flag} {text}: {place} has no {name}; it has {names}")
    return getattr(module, name)


def _load_file(flag: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{flag} {path}: no such file{nearest_file(path)}")
    sys.path.insert(0, str(path.parent))  # as when Python runs the file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(flag: str, name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{flag} {name}: {error}; to name a file, write FILE.py:NAME") from None


if __name__ == "__main__":
    entry.run(PROGRAM, main)
