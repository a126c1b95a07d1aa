"""The command line of `jaxtp explain`, and what it names."""

import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from jaxtp.config import ConfigError, Switch, UserPath, from_yaml, nearest_file
from jaxtp.entry import UserError
from jaxtp.explain.explanation import explain
from jaxtp.explain.plot import draw
from jaxtp.files import require_picture, require_writable, write_json, write_picture
from jaxtp.mesh import CP, parse_mesh, request_virtual_devices
from jaxtp.models.decoder import Decoder
from jaxtp.propose.propose import propose_plan
from jaxtp.train.config import TrainConfig, check


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Command line of an explanation: a model, its plan, and the mesh."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:FUNCTION")]
    """A function without arguments that makes an nnx.Module, in a file or a module (package.model:build); or a YAML
    configuration of jaxtp.train."""

    mesh: Annotated[str | None, tyro.conf.arg(metavar="fsdp=2,tp=4")] = None
    """Devices along each axis; an axis that is left out is 1. None of them has to be there. By default the mesh of a
    YAML configuration."""

    plan: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """A dict from patterns of module paths to styles. Without one everything is split over fsdp alone. With several
    devices along cp it names the module whose sequences are divided: {"": ContextParallel()}."""

    propose: Switch = False
    """Uses the plan that jaxtp.propose_plan gives, and prints its reasons first."""

    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="64x16x16x1")] = ()
    """Shape of an input of a global batch, and its dtype if it is not float32: 16x128:int32. Once for each input.
    Without one the collectives are left out."""

    compile: Switch = False
    """Compiles for virtual CPU devices, too, and shows what the compiler adds between the layers."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write every number to, for machines."""

    plot: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE.png")] = None
    """File to draw how each matrix is cut in (pip install 'jaxtp[plot]')."""


def run(command: Explain) -> None:
    """Prints the explanation.

    Raises:
      ConfigError: what the command names is not there, or is something else.
      PlanError, MeshError: as `explain`.
    """
    sizes = _sizes(command)
    require_writable("--json", command.json)
    require_picture("--plot", command.plot)
    if command.propose and command.plan is not None:
        raise ConfigError("--propose makes a plan, and --plan names one; leave one of them out")
    if not command.input and (command.propose or command.compile) and not command.model.endswith((".yaml", ".yml")):
        raise ConfigError("--propose and --compile run the model: give the shapes of its inputs, --input 64x128:int32")
    if command.compile:
        request_virtual_devices(math.prod(sizes.values()))
    model, inputs, call = _model(command, sizes)
    plan = None if command.plan is None else _named("--plan", command.plan)
    try:
        if command.propose:
            plan = propose_plan(model, *inputs, mesh=sizes, call=call)
            print()
        found = explain(model, *inputs, plan=plan, mesh=sizes, call=call, compiled=command.compile)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        shapes = ", ".join(command.input) or "none"
        hint = "; ids have a dtype, as in --input 16x128:int32" if "integer" in str(error) else ""
        raise ConfigError(f"{command.model} does not run on these inputs ({shapes}): {error}{hint}") from None
    print(found)
    if command.model.endswith((".yaml", ".yml")) and not command.input:
        print("\nnote: the whole batch at once, without remat; jaxtp estimate has what a step of the run moves")
    write_json("--json", command.json, {"model": command.model, **found.record()})
    write_picture("--plot", command.plot, partial(draw, found))
    if command.plot is not None:
        print(f"\ndrawn in {command.plot}")


def _sizes(command: Explain) -> dict[str, int]:
    """Returns the mesh that is asked for, or that of the configuration.

    Raises:
      MeshError, ConfigError: there is none, it is not of that form, or the file cannot be read.
    """
    if command.mesh is not None:
        return parse_mesh(command.mesh)
    if not command.model.endswith((".yaml", ".yml")):
        raise ConfigError("name the mesh, as in --mesh fsdp=2,tp=4")
    mesh = from_yaml(TrainConfig, command.model).mesh.sizes
    if -1 in mesh.values():
        raise ConfigError(f"{command.model} takes all devices that are left for its mesh; name one, as in --mesh tp=8")
    return mesh


Call = Callable[..., Any] | None
"""A function that is run of a model and its inputs, as `explain` takes it."""


def _model(
    command: Explain, sizes: dict[str, int]
) -> tuple[Callable[[], nnx.Module], list[jax.ShapeDtypeStruct], Call]:
    """Returns a function that makes the model, abstract inputs, and what is run of them."""
    inputs = [_input(text) for text in command.input]
    if not command.model.endswith((".yaml", ".yml")):
        return _function(command.model), inputs, None
    config = from_yaml(TrainConfig, command.model)
    if sizes[CP] > 1 and not inputs:
        check(config, sizes, lambda: None)
    shape = (config.data.global_batch_size, config.data.sequence_length)
    build = lambda: Decoder(config.model, rngs=nnx.Rngs(0))  # noqa: E731
    call = lambda model, *inputs: model(*inputs, context=config.mesh.context)  # noqa: E731
    return build, inputs or [jax.ShapeDtypeStruct(shape, jnp.int32)], call


def _function(name: str) -> Callable[[], nnx.Module]:
    build = _named("MODEL", name)
    if not callable(build):
        raise ConfigError(f"{name} is {build!r}, and should be a function that makes a model")

    def made() -> nnx.Module:
        try:
            model = build()
        except TypeError as error:
            raise ConfigError(f"{name} does not make a model: {error}") from None
        if not isinstance(model, nnx.Module):
            raise ConfigError(f"{name} gives a {type(model).__name__}, and should give an nnx.Module")
        return model

    return made


def _input(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    try:
        dtype = jnp.dtype(match[2] or "float32") if match else None
    except TypeError:
        dtype = None
    if match is None or dtype is None:
        raise ConfigError(f"--input {text}: should be a shape such as 64x16x16x1, or with a dtype 16x128:int32")
    return jax.ShapeDtypeStruct(tuple(map(int, match[1].split("x"))), dtype)


def _named(flag: str, text: str) -> Any:
    """Returns what `file.py:name` or `package.module:name` stands for."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{flag} {text}: should be FILE.py:NAME or package.module:NAME")
    module = _load_file(flag, Path(place)) if place.endswith(".py") else _import(flag, place)
    if not hasattr(module, name):
        own = (key for key, value in vars(module).items() if isinstance(value, dict) or callable(value))
        there = ", ".join(key for key in own if not key.startswith("_"))
        raise ConfigError(f"{flag} {text}: {place} has no {name}; it has {there}")
    return getattr(module, name)


def _load_file(flag: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{flag} {path}: no such file{nearest_file(path)}")
    sys.path.insert(0, str(path.parent))  # it may import what is beside it, as when it is run
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(flag: str, name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{flag} {name}: {error}; a file is named by FILE.py:NAME") from None
