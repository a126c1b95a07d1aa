"""Flags of `jaxtp explain` and `jaxtp estimate` that name a Flax model, and a user's step."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.config.affects import POSITIONAL, REPEATED, Argument
from jaxtp.config.python_object import describe_value, load_object
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import mesh_sizes
from jaxtp.models.config import OriginConfig
from jaxtp.models.own_decoder import builder
from jaxtp.plans.parallelize import Build
from jaxtp.plans.plan import Plan
from jaxtp.tools.explain.explanation import Explanation, explain
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import Blueprint
from jaxtp.train.task import Loss, Shapes
from jaxtp.train.user_step import micro_batch


@dataclass(frozen=True, kw_only=True)
class PythonModel:
    """Flags that name a model, its plan and its inputs."""

    model: Annotated[str, POSITIONAL, Argument("FILE.py:FUNCTION")]
    """A function that returns an nnx.Module, or its class, in a file or a module
    (package.model:build). A parameter rngs gets nnx.Rngs(0)."""

    plan: Annotated[str | None, Argument("FILE.py:NAME")] = None
    """A dict from patterns of module paths to styles. Without a plan, parameters are split over
    fsdp only. With cp > 1 the plan must name the module whose sequences cp splits: {"":
    ContextParallel()}."""

    propose: bool = False
    """Use the plan that jaxtp.propose_plan returns; jaxtp explain prints its reasons."""

    input: Annotated[tuple[str, ...], REPEATED, Argument("64x16x16x1")] = ()
    """Shape of an input of a global batch, with a dtype unless it is float32: 16x128:int32. Repeat
    the flag for several inputs. Without inputs there are no collectives."""

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the inputs."""
        return list(map(_parse_input, self.input))

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


def has_settings(argv: Sequence[str]) -> bool:
    """Returns whether a command line has `--config` or a dotted flag such as `--model.build`."""
    return any(re.match(r"--(config(=|$)|[^=]*\.)", word) for word in argv)


def explain_step(
    config: TrainConfig, blueprint: Blueprint, loss: Loss, batch: Shapes, *, compiled: bool = False
) -> Explanation:
    """Explains a user's loss on one micro-batch, on a mesh that may be abstract.

    `compiled` is as in `explain`.
    """
    key = jax.random.key(config.run.seed)
    return explain(
        blueprint.abstract_model,
        micro_batch(config, batch),
        mesh=mesh_sizes(blueprint.mesh),
        call=lambda model, rows: loss(model, rows, key)[0],
        compiled=compiled,
    )


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
