"""Flags of `jaxtp explain` and `jaxtp estimate` that name a Flax model, a plan and inputs."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from jaxtp.config.entry import UserError
from jaxtp.config.schema import ConfigError, Switch, UserPath, nearest_file
from jaxtp.parallelize.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PythonModel:
    """Flags that name a model, its plan and its inputs."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:FUNCTION")]
    """A function that returns an nnx.Module, or its class, in a file or a module (package.model:build). It may have a
    parameter rngs."""

    plan: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """A dict from patterns of module paths to styles. Without a plan, parameters are split over fsdp only. With cp > 1
    the plan must name the module whose sequences cp splits: {"": ContextParallel()}."""

    propose: Switch = False
    """Use the plan that jaxtp.propose_plan returns; jaxtp explain prints its reasons."""

    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="64x16x16x1")] = ()
    """Shape of an input of a global batch, with a dtype unless it is float32: 16x128:int32. Repeat the flag for several
    inputs. Without inputs there are no collectives."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all numbers to this file."""

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the inputs."""
        return [_parse_input(text) for text in self.input]

    def load_plan(self) -> Plan | None:
        """Returns the plan, if any."""
        if self.propose and self.plan is not None:
            raise ConfigError("--propose and --plan both give a plan; leave one of them out")
        plan: Plan | None = None if self.plan is None else load(self.plan, "--plan")
        return plan

    def builder(self) -> Callable[[], nnx.Module]:
        """Returns the function that builds the model; mistakes in it are ConfigErrors."""
        function = load(self.model, "MODEL")
        if not callable(function):
            raise ConfigError(f"{self.model} is {function!r}, and should be a function that returns a model")

        is_class = isinstance(function, type)  # `inspect` would read the `__call__` of NNX's metaclass
        parameters = inspect.signature(function.__init__ if is_class else function).parameters

        def build() -> nnx.Module:
            try:
                model = function(**({"rngs": nnx.Rngs(0)} if "rngs" in parameters else {}))
            except TypeError as error:
                raise ConfigError(f"{self.model} does not build a model: {error}") from None
            if not isinstance(model, nnx.Module):
                raise ConfigError(f"{self.model} returns a {type(model).__name__}, and should return an nnx.Module")
            return model

        return build

    def failure(self, error: Exception) -> UserError:
        """Returns the error to raise if the model's code fails on the inputs."""
        if isinstance(error, UserError):
            return error
        shapes = ", ".join(self.input) or "none"
        hint = "; integer inputs need a dtype: --input 16x128:int32" if "integer" in str(error) else ""
        return ConfigError(f"{self.model} fails on these inputs ({shapes}): {error}{hint}")


def load(text: str, flag: str) -> Any:
    """Returns the value at `FILE.py:NAME` or `package.module:NAME`, or raises a ConfigError."""
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
    sys.path.insert(0, str(path.parent))  # like `python FILE.py`
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(flag: str, name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{flag} {name}: {error}; to name a file, write FILE.py:NAME") from None


def _parse_input(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    try:
        dtype = jnp.dtype(match[2] or "float32") if match else None
    except TypeError:
        dtype = None
    if match is None or dtype is None:
        raise ConfigError(f"--input {text}: should be a shape such as 64x16x16x1, or with a dtype 16x128:int32")
    return jax.ShapeDtypeStruct(tuple(map(int, match[1].split("x"))), dtype)
