"""Where the model of a run comes from: the decoder of the settings, or a user's Flax model.

`ModelSource` answers all questions whose answers differ between them. `model_source` chooses by the
settings, before any code of a user is imported; `load` imports it, and then knows whether it makes
a Decoder.
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.logical import Variable
from jaxtp.config.python_object import describe_value, load_object
from jaxtp.config.schema import ConfigError, place, replace_nested
from jaxtp.data.corpus import Corpus
from jaxtp.distributed.devices import build_mesh, most_devices, request_virtual_devices
from jaxtp.layers.kernels.select import architecture_of
from jaxtp.mesh import TP, check_sizes, mesh_sizes
from jaxtp.models.config import ModelConfig, OriginConfig
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss import Example, NextToken, Objective
from jaxtp.train.run_report import (
    arguments_text,
    describe_context,
    describe_decoder,
    describe_experts,
    describe_kernels,
    describe_matmul,
    describe_overlap,
    describe_padding,
)
from jaxtp.train.state import (
    Blueprint,
    MakeModel,
    decoder_maker,
    parameter_count,
    parameters,
    trained_parameters,
)
from jaxtp.train.task import Shapes, changed, refuse_unused
from jaxtp.train.validation import (
    AttentionCase,
    attention_cases,
    check,
    check_decoder,
    check_kernels,
    chosen_kernels,
    general_problems,
    refuse,
    share_of,
    violations_on,
)

Plan = Mapping[str, Any]
"""Styles by pattern of module paths (`plans/plan.py`)."""

if TYPE_CHECKING:
    from jaxtp.train.defaults import Defaults


@dataclass(frozen=True)
class ModelSource:
    """The decoder that the settings describe; subclasses are a user's models."""

    def load(
        self, config: TrainConfig, model: object, plan: object
    ) -> tuple[TrainConfig, "ModelSource"]:
        """Imports the model, unless it is there, and checks its settings and its plan.

        Returns the configuration with the settings of a user's Decoder, and the source.

        Raises:
          ConfigError: a name cannot be imported, the plan does not suit the kind of model, or a
            setting has no effect.
        """
        if plan is not None:
            raise ConfigError(
                "a plan splits a model of your own (--model.build); the decoder has its own "
                "PartitionSpecs"
            )
        return config, self

    def default_loss(self) -> Objective:
        """Returns the objective of a run without a loss; raises ConfigError if there is none."""
        return NextToken()

    def check_data(self, config: TrainConfig) -> None:
        """Raises ConfigError if a run without batches of its own has no data."""

    def check_vocabulary(self, corpus: Corpus, size: int) -> None:
        """Raises ConfigError if `size` is less than the number of a corpus's ids."""
        needed = corpus.tokenizer.vocab_size
        if size < needed:
            raise ConfigError(
                f"the ids of {corpus.description} go up to {needed - 1}, and "
                f"model.vocab_size={size} has fewer; a new model, or one of --model.from-hf, which "
                f"gets further rows, needs at least --model.vocab-size {needed}; a run's size is "
                "in --config RUN/config.yaml"
            )

    def default_folder(self, config: TrainConfig) -> tuple[Path, str] | None:
        """Returns a folder for the run, and the reason; None if the setting's default suits it."""
        source = config.run.init_from or config.origin.from_hf
        if source is None:
            return None
        # The function realpath tolerates a link to itself.
        path = Path(os.path.realpath(source))
        if path.parent.name in ("snapshots", "checkpoints"):
            path = path.parents[1]
        return Path("runs") / f"{path.name}-tuned", f"for runs that begin with {source}"

    def choose(self, defaults: "Defaults") -> None:
        """Chooses the settings that depend on the model and the devices."""
        defaults.choose_for_decoder()

    def open_mesh(self, config: TrainConfig) -> Mesh:
        """Returns a run's checked mesh; unless a size is -1, checks before JAX's backend starts.

        Raises:
          ConfigError: all violations with the nearest values that work, or an unsupported kernel.
          MeshError: impossible mesh.
        """
        sizes = config.mesh.sizes
        check_sizes(sizes)
        if -1 in sizes.values():
            mesh = build_mesh(sizes)
            check_decoder(config, mesh)
            return mesh
        check(config, sizes)
        needed = math.prod(sizes.values())
        request_virtual_devices(needed)
        available = most_devices()
        if available is not None and available < needed:
            refuse(violations_on(config, sizes, available))
        mesh = build_mesh(sizes)
        check_kernels(config, sizes, architecture_of(mesh.devices.flat[0]))
        return mesh

    def example(self, objective: Objective, config: TrainConfig) -> dict[str, Example] | None:
        """Returns an example of a row, if the batches of a run without data are known."""
        return objective.example(1, config)

    def maker(self, model: ModelConfig) -> MakeModel:
        """Returns a function that makes the model, not split over a mesh."""
        return decoder_maker(model)

    def split(
        self, model: ModelConfig, mesh: Mesh, objective: Objective, seed: int, batch: Shapes
    ) -> tuple[MakeModel, list[str]]:
        """Returns a function that makes the model on a mesh, and lines on its plan.

        Raises:
          ConfigError: the function that builds it does not take its arguments, or fails.
          PlanError: the plan does not fit.
        """
        return self.maker(model), []

    def weights(self, blueprint: Blueprint) -> dict[str, Variable]:
        """Returns the variables that a layer multiplies with or adds, by dotted path."""
        return parameters(blueprint)

    def attention_cases(self, config: TrainConfig, mesh: Mesh) -> list[AttentionCase]:
        """Returns the run's attention kernels, their uses, and query and kv heads of a device."""
        return attention_cases(config, mesh)

    def describe(self, blueprint: Blueprint, config: TrainConfig) -> dict[str, object]:
        """Returns lines of the summary by name; a line that is None is left out."""
        model = config.model
        mesh = blueprint.mesh
        sizes = mesh_sizes(mesh)
        share = share_of(config, sizes)
        architecture = architecture_of(mesh.devices.flat[0])
        kernels = chosen_kernels(config, sizes, architecture)
        return {
            "model": describe_decoder(blueprint, config.origin.build),
            "context": describe_context(model, share),
            "experts": describe_experts(model, sizes[TP]),
            "kernels": describe_kernels(model, kernels, architecture),
            "matmul": describe_matmul(model),
            "overlap": describe_overlap(model, share),
            "padding": describe_padding(model, sizes),
        }

    def next_steps(self, config: TrainConfig, *, pairs: bool) -> list[str]:
        """Returns commands that use the model of a run.

        Args:
          pairs: whether the data are pairs of answers, which `jaxtp evaluate` does not take.
        """
        from jaxtp.data.copies import local
        from jaxtp.data.tokenizer_files import TEMPLATE
        from jaxtp.models.own_decoder import call_of_load

        if config.origin.build and config.origin.build.startswith("<"):  # no file names it
            call = call_of_load(config.place, config.origin.build)
            return ["next, in Python:", f"  model = {call}"]
        run = shlex.quote(str(config.place))
        model = f"--model {run}"
        if config.origin.build:
            model += f" --build {shlex.quote(config.origin.build)}"
        trained_on = config.data.path or next(
            map(place, map(Path, config.data.mixture)), Path(shlex.__file__)
        )
        data = config.data.validation or trained_on
        lines = ["next:"]
        if not pairs:
            kind = "--data" if local(data).is_dir() else "--text"
            lines.append(f"  jaxtp evaluate {model} {kind} {shlex.quote(str(data))}")
        prompt = "--chat" if (local(trained_on) / TEMPLATE).is_file() else "--prompt 'def '"
        generate = f"  jaxtp generate {model} {prompt}"
        if not config.origin.build:
            export = f"{config.run.dir}-{'peft' if config.model.lora.rank else 'hf'}"
            generate += f"; jaxtp convert export {run} {shlex.quote(export)}"
        return [*lines, generate]


@dataclass(frozen=True)
class NamedModel(ModelSource):
    """A user's model that is not imported yet; it may be a Decoder.

    The section `model` does not describe it, and nothing is known of the meshes that it fits.
    """

    def load(
        self, config: TrainConfig, model: Any, plan: object
    ) -> tuple[TrainConfig, ModelSource]:
        """See `ModelSource`."""
        from jaxtp.models.own_decoder import decoder_settings

        if model is None:
            model = load_object(str(config.origin.build), "--model.build")
        settings = decoder_settings(model, config.origin)
        if settings is not None:
            refuse_unused(_unused(config, {"build", "arguments"}))
            return ModelSource().load(replace_nested(config, {"model": settings}), model, plan)
        if not isinstance(plan, Mapping | None):
            raise ConfigError(
                f"a plan is a dict from patterns to styles, not {describe_value(plan)}"
            )
        matmul = config.model.precision.matmul
        if matmul != "compute":
            raise ConfigError(
                f"model.precision.matmul={matmul} applies to projections of jaxtp's decoder, and "
                "the model is your own"
            )
        refuse_unused(_unused(config, {"build", "arguments", "plan", "precision"}))
        return config, OwnModel(model, config.origin, plan)

    def check_vocabulary(self, corpus: Corpus, size: int) -> None:
        """The model has no known vocabulary."""

    def default_folder(self, config: TrainConfig) -> tuple[Path, str] | None:
        """See `ModelSource`."""
        _, _, name = str(config.origin.build).rpartition(":")
        name = re.sub(r"\W+", "-", name).strip("-").lower() or "model"
        return Path("runs") / name, "for the model of your own"

    def choose(self, defaults: "Defaults") -> None:
        """See `ModelSource`."""
        defaults.choose_for_own_model()

    def open_mesh(self, config: TrainConfig) -> Mesh:
        """See `ModelSource`."""
        sizes = config.mesh.sizes
        check_sizes(sizes)
        mesh = build_mesh(sizes)
        check(config, mesh_sizes(mesh), find=general_problems)
        return mesh


@dataclass(frozen=True)
class OwnModel(NamedModel):
    """A user's model that is not a Decoder."""

    build: Callable[..., nnx.Module]
    origin: OriginConfig
    plan: Plan | None = None

    def default_loss(self) -> Objective:
        """See `ModelSource`."""
        raise ConfigError(
            "a model of your own needs a loss (--train.loss FILE.py:loss): a function (model, "
            "batch, key) that returns a sum over the batch's rows and its weight"
        )

    def check_data(self, config: TrainConfig) -> None:
        """See `ModelSource`."""
        if config.data.path is None and not config.data.mixture:
            raise ConfigError(
                "a model of your own needs batches (--data.batches FILE.py:batches), or a dataset "
                "of tokens (--data.path)"
            )

    def example(self, objective: Objective, config: TrainConfig) -> dict[str, Example] | None:
        """See `ModelSource`."""
        return None

    def maker(self, model: ModelConfig) -> MakeModel:
        """See `ModelSource`."""
        from jaxtp.models.own_decoder import builder

        return builder(self.build, self.origin)

    def split(
        self, model: ModelConfig, mesh: Mesh, objective: Objective, seed: int, batch: Shapes
    ) -> tuple[MakeModel, list[str]]:
        """See `ModelSource`."""
        from jaxtp.train.own_model import propose, split_by

        build = self.maker(model)
        plan = self.plan
        lines: list[str] = []
        if plan is None:
            plan, lines = propose(build, mesh, objective, seed, batch)
        return split_by(plan, build, model.precision, mesh), lines

    def weights(self, blueprint: Blueprint) -> dict[str, Variable]:
        """See `ModelSource`."""
        return trained_parameters(blueprint)

    def attention_cases(self, config: TrainConfig, mesh: Mesh) -> list[AttentionCase]:
        """The model has its own kernels."""
        return []

    def describe(self, blueprint: Blueprint, config: TrainConfig) -> dict[str, object]:
        """See `ModelSource`."""
        call = f"{self.origin.build}({arguments_text(self.origin.arguments)})"
        return {"model": f"{parameter_count(blueprint):,} parameters: {call}"}

    def next_steps(self, config: TrainConfig, *, pairs: bool) -> list[str]:
        """See `ModelSource`."""
        from jaxtp.models.own_decoder import call_of_load

        return ["next, in Python:", f"  model = {call_of_load(config.place, self.origin.build)}"]


def _unused(config: TrainConfig, used: Set[str]) -> Iterator[str]:
    for setting in changed(config, "model", used):
        yield f"{setting}: the model is your own; its function takes model.arguments"


def model_source(config: TrainConfig) -> ModelSource:
    """Returns the source of a run's model, before a user's code is imported."""
    # The settings of a user's Decoder have the function that makes it.
    if config.origin.build is not None and config.model.decoder is None:
        return NamedModel()
    return ModelSource()
