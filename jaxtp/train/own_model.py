"""User models that are not Decoders: sharding, dtypes, and loading from a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.checkpoint.logical import abstract_logical
from jaxtp.checkpoint.manager import load_weights
from jaxtp.checkpoint.storage import StoredCheckpoint, open_checkpoint
from jaxtp.config.python_object import describe_value, load_object
from jaxtp.config.reading import first_lines
from jaxtp.config.schema import ConfigError
from jaxtp.data.copies import local
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import CP, TP, MeshLike, as_current, as_mesh, current_mesh, make_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder
from jaxtp.models.own_decoder import Builder, builder
from jaxtp.plans.module_wrappers import find_modules
from jaxtp.plans.parallelize import mark_arrays_as_data, parallelize
from jaxtp.plans.plan import Plan, format_style
from jaxtp.plans.run_styles import role_of
from jaxtp.train.loss import Objective, call
from jaxtp.train.state import plan_state
from jaxtp.train.task import Shapes

if TYPE_CHECKING:
    from jaxtp.hf.runs import RecordedFlaxModel

_MAX_SHOWN = 4  # Maximum number of variables in a message


@overload
def load_run(path: str | Path, *, base: str | Path | None = None) -> Decoder: ...


@overload
def load_run(
    path: str | Path,
    *,
    base: str | Path | None = None,
    build: object,
    plan: Plan | str | None = None,
) -> Any: ...


def load_run(
    path: str | Path,
    *,
    base: str | Path | None = None,
    build: object = None,
    plan: Plan | str | None = None,
    mesh: MeshLike = None,
) -> object:
    """Returns the trained model in a run's newest checkpoint, or in a checkpoint.

    Neither the data nor the mesh of the run is needed. A model of your own is in the mode in which
    `build` returns it: call `model.eval()` before you use a model with dropout.

    Args:
      base: the base model of a run's adapters, if it has moved.
      build: for a model of your own, the function, class or settings that make it, or the name of
        this object, `"FILE.py:NAME"`. A function gets the run's `model.arguments`. Code that the
        run's folder names is never imported.
      plan: for a model of your own, the styles by which `parallelize` splits it over tp, or the
        name of such a plan. Without a plan, a model without specs is replicated over tp.
      mesh: by default the mesh in context, or one device if there is none; also sizes,
        `{"fsdp": 2, "tp": 4}` or `"fsdp=2,tp=4"`.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, or another model's; or the base model
        does not match.
      ConfigError: `build` does not take the recorded arguments, or fails.
      PlanError: the plan does not fit the model or the mesh.
      HFError: the base model is unreadable.
    """
    # A run of such a model imports this file, and needs nothing of Hugging Face.
    from jaxtp.hf.runs import RecordedFlaxModel, load_adapted, load_merged, own_or_decoder

    # Makes the mesh before anything else starts JAX's backend.
    if mesh is not None:
        with as_current(as_mesh(mesh, "load_run")):
            return load_run(path, base=base, build=build, plan=plan)
    has_mesh = current_mesh() is not None
    run_mesh = jax.sharding.get_mesh() if has_mesh else make_mesh()
    checkpoint = open_checkpoint(local(path))
    source = load_object(build, "build") if isinstance(build, str) else build
    styles: Plan | None = load_object(plan, "plan") if isinstance(plan, str) else plan
    if not (source is None or callable(source) or isinstance(source, ModelConfig)):
        raise ConfigError(
            "build must be a function, a class, settings, or FILE.py:NAME, not "
            f"{describe_value(source)}"
        )
    if not (styles is None or isinstance(styles, Mapping)):
        raise ConfigError(
            f"plan must be a dict of styles, or FILE.py:NAME, not {describe_value(styles)}"
        )
    recorded = own_or_decoder(checkpoint.folder, checkpoint.info, source)
    if isinstance(recorded, RecordedFlaxModel):
        if base is not None:
            raise ConfigError(
                "base is for the base model of a decoder's adapters, but the run's model is not a "
                "Decoder"
            )
        assert callable(source), "settings are a decoder's"
        make = builder(source, recorded.origin)
        # Without a mesh and a plan the model stays plain Flax.
        is_split = has_mesh or styles is not None
        return _load_flax(recorded, checkpoint, make, styles, run_mesh, is_split=is_split)
    if styles is not None:
        raise ConfigError(
            "a plan splits a model of your own; the decoder has its own PartitionSpecs"
        )
    if recorded.config.lora.rank:
        return load_adapted(checkpoint.folder, checkpoint.info, run_mesh, local(base))
    return load_merged(checkpoint.folder, checkpoint.info, recorded.config, run_mesh)


def _load_flax(
    recorded: RecordedFlaxModel,
    checkpoint: StoredCheckpoint,
    make: Builder,
    plan: Plan | None,
    mesh: Mesh,
    *,
    is_split: bool,
) -> nnx.Module:
    if plan is None:
        _require_whole_sequences(mesh)

    def plain(rngs: nnx.Rngs) -> nnx.Module:
        model = make(rngs)
        set_precision(model, recorded.config.precision)
        return model

    create = split_by(plan, plain, Precision(), mesh) if is_split else plain
    # Plans the model like the state of a run, so that it has the run's random keys.
    blueprint = plan_state(recorded.config, optax.identity(), mesh, create)
    abstract = blueprint.abstract["model"]
    # The load checks the variables that the model has.
    built = {f"model.{name}" for name in abstract_logical(abstract, mesh)}
    missing = sorted(name for name in checkpoint.arrays.keys() - built if name.startswith("model."))
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder} was trained with {recorded.origin.build}, and build makes "
            f"another model, without {'; '.join(first_lines(missing, _MAX_SHOWN))}"
        )
    weights, _ = load_weights(checkpoint.folder, abstract, mesh)
    return blueprint.model_of(weights)


def split_by(plan: Plan | None, build: Builder, precision: Precision, mesh: Mesh) -> Builder:
    """Returns a function that builds a model, and splits it over the mesh by a plan.

    Without a plan, a model with specs stays as `build` returns it, and any other is replicated over
    tp.
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = build(rngs)
        set_precision(model, precision)
        if plan is None and any(role_of(info.module) for info in find_modules(model)):
            return model
        model = parallelize(model, plan or {}, mesh=mesh)
        mark_arrays_as_data(model)
        return model

    return make


def propose(
    build: Builder, mesh: Mesh, objective: Objective, seed: int, batch: Shapes
) -> tuple[Plan, list[str]]:
    """Returns a plan for a model without one, and lines on it."""
    sizes = mesh_sizes(mesh)
    _require_whole_sequences(mesh)
    if sizes[TP] == 1:
        return {}, []
    from jaxtp.analysis.propose import propose_plan

    key = jax.random.key(seed)
    proposal = propose_plan(
        lambda: build(nnx.Rngs(seed)),
        batch,
        mesh=sizes,
        call=lambda model, batch: call(objective, model, batch, key).loss,
        report=None,
    )
    styles = ", ".join(f"{pattern}: {format_style(style)}" for pattern, style in proposal.items())
    return proposal, [
        f"plan    proposed: {styles or 'no split over tp'} (jaxtp.propose_plan says why)",
        *map("note    {}".format, proposal.notes),
    ]


def _require_whole_sequences(mesh: Mesh) -> None:
    cp = mesh_sizes(mesh)[CP]
    if cp > 1:
        raise ConfigError(
            f"mesh.cp={cp} splits sequences, and no plan names the module that takes them; bring a "
            'plan (--model.plan), such as {"": ContextParallel()}'
        )


def set_precision(model: nnx.Module, precision: Precision) -> None:
    """Sets `dtype` on Flax layers that have none, and casts parameters."""
    default = Precision()
    if precision.compute != default.compute:
        for _, module in nnx.iter_modules(model):
            if getattr(module, "dtype", ...) is None:
                module.dtype = jnp.dtype(precision.compute)  # type: ignore[attr-defined]
    if precision.param != default.param:
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Param) and jnp.issubdtype(variable.dtype, jnp.floating):
                variable.set_value(variable[...].astype(precision.param))
