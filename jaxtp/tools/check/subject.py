"""The subject of a check: the task of a configuration, and its first batches.

A user's model is used as it is; a decoder is shrunk. A user's batches are read once, so every mesh
gets the same batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtp.config.console import size_text
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.data.batches import Batches, Position
from jaxtp.data.columns import Columns
from jaxtp.data.loader import Batch, on_mesh
from jaxtp.data.rows import SEGMENTS
from jaxtp.data.sources import open_batches
from jaxtp.distributed.devices import host_memory
from jaxtp.layers.loss import IGNORE
from jaxtp.mesh import make_mesh
from jaxtp.plans.styles import ContextParallel
from jaxtp.tools.check.shrink import (
    ONE_DEVICE,
    UPDATES,
    Case,
    describe,
    in_three_updates,
    own_model_cases,
    plan,
)
from jaxtp.train.config import TrainConfig
from jaxtp.train.init_source import InitSource
from jaxtp.train.loss import Example, Objective
from jaxtp.train.model_source import ModelSource, OwnModel
from jaxtp.train.parts import Parts, load_parts
from jaxtp.train.run_data import open_data
from jaxtp.train.setup import Plan, check_loss_on, with_batches
from jaxtp.train.state import Blueprint, total_bytes

DOCUMENTS = 4  # mean number of documents in a row of a packed batch
COPIES = 6
"""Copies of a state in the host's memory: on the devices, before and after the updates, and
gradients."""


@dataclass(frozen=True)
class Subject:
    """The parts of a run and its first batches."""

    parts: Parts = Parts()
    batches: Batches | None = None  # by default random tokens

    @property
    def is_own(self) -> bool:
        """Whether the user's code computes any of the numbers."""
        return not self.is_audited or self.parts.optimizer is not None

    @property
    def is_audited(self) -> bool:
        """Whether the modules declare all collectives of a step.

        They do for a decoder with its own loss and data.
        """
        return self.parts.loss.has_formulas and self.parts.batches is None

    def blueprint(self, config: TrainConfig, mesh: Mesh) -> Blueprint:
        """Plans the state on a mesh."""
        shapes = {} if self.batches is None else self.batches.shapes
        blueprint, _ = Plan(config=config, parts=self.parts, shapes=shapes).state_on(mesh)
        return blueprint

    def on_mesh(self, config: TrainConfig, mesh: Mesh) -> Iterator[Batch]:
        """Yields a batch for each update; raises BatchError if it cannot be split over the mesh."""
        source = self.batches or _in_memory(random_tokens(config))
        micro_batches = 1 if self.parts.loss.is_by_row else config.train.accumulation
        for batch, _ in on_mesh(source, mesh, Position(), UPDATES, micro_batches=micro_batches):
            yield batch


@dataclass(frozen=True)
class Small:
    """A configuration that virtual CPU devices can check, and its cases."""

    config: TrainConfig
    cases: list[Case]
    # Lines on what was shrunk
    lines: list[str]
    # Settings whose defaults are explained
    noted: tuple[str, ...] = ("model", "mesh")


def shrunk(model: ModelSource, config: TrainConfig, meshes: Sequence[str]) -> Small:
    """Shrinks a decoder; a user's model is used as it is."""
    if isinstance(model, OwnModel):
        return _unchanged(model, config, meshes)
    small, cases = plan(config, meshes)
    changes = ", ".join(describe(config, small)) or "nothing: the model is small"
    rope = "(rope_theta so that RoPE rotates every dim; noise is added to the weights)"
    return Small(small, cases, [f"shrunk  {changes}", f"        {rope}"])


def _unchanged(model: OwnModel, config: TrainConfig, meshes: Sequence[str]) -> Small:
    styles = (model.plan or {}).values()
    over_cp = any(isinstance(style, ContextParallel) for style in styles)
    lines = [
        "shrunk  nothing: the model is your own; model.arguments can make it small",
        "        (noise is added to the parameters)",
    ]
    if model.plan is None:
        lines.append("plan    the one that jaxtp proposes, where a mesh has tp")
    cases = own_model_cases(config, meshes, over_cp=over_cp)
    return Small(in_three_updates(config), cases, lines, noted=("model",))


def open_subject(config: TrainConfig, meshes: Sequence[str]) -> tuple[Small, Subject]:
    """Loads the parts that a configuration names.

    Raises:
      ValueError: a user's mistake, as in a run, or a model that is too large.
    """
    unused_parts = {"train.callbacks": (), "data.validation_batches": None}
    config, parts = load_parts(replace_nested(config, unused_parts))
    data = None
    if parts.batches is not None or parts.model.example(parts.loss, config) is None:
        data = open_data(config, InitSource(), parts)
        config = _with_length(with_batches(config, data, make_mesh()), data.train)
    small = shrunk(parts.model, config, meshes)
    batches = data.train if data else _in_memory(random_batches(small.config, parts.loss))
    subject = Subject(parts, batches)
    if not subject.is_own:
        return small, subject
    traits = check_loss_on(small.config, parts, batches)
    batches.with_weights = traits.reads_weights
    blueprint = subject.blueprint(small.config, make_mesh())
    needed = COPIES * total_bytes(blueprint)
    memory = host_memory()
    if needed > memory:
        raise ConfigError(
            f"a check of this model needs {size_text(needed, binary=True)} for {COPIES} copies of "
            f"its state, and this host has {size_text(memory, binary=True)}; make it small by "
            "arguments of the function that builds it (model.arguments)"
        )
    accumulation = 2 if small.config.train.accumulation == 1 else 1
    is_divisible = small.config.data.global_batch_size % accumulation == 0
    if is_divisible and not (traits.changes or traits.is_random):
        small = replace(small, cases=[replace(ONE_DEVICE, accumulation=accumulation), *small.cases])
    else:
        why = "the loss is random, or changes the model" if is_divisible else "the batch is odd"
        lines = [*small.lines, f"micro-batches are not compared: {why}"]
        small = replace(small, lines=lines)
    if data is not None:
        rows = range(data.train.global_batch_size)
        read = [columns for columns, _ in data.train.read(rows, Position(), UPDATES)]
        subject = Subject(parts, _in_memory(read))
    return small, subject


def _in_memory(batches: Sequence[Columns]) -> Batches:
    return open_batches(lambda step: batches[step])


def _with_length(config: TrainConfig, batches: Batches) -> TrainConfig:
    # The length of the batches' sequences decides how a decoder splits them.
    shapes = batches.shapes
    inputs = shapes.get("inputs", max(shapes.values(), key=lambda column: column.size))
    if inputs.ndim != 2:
        return config
    return replace_nested(config, {"data.sequence_length": inputs.shape[1]})


def random_batches(config: TrainConfig, loss: Objective) -> list[Columns]:
    """Returns a batch for each update: the example of a loss, with random tokens."""
    example = loss.example(config.data.global_batch_size, config)
    return [_filled(example, batch) for batch in random_tokens(config)]


def _filled(example: Mapping[str, Example], tokens: Columns) -> Columns:
    columns = {}
    for name, column in example.items():
        if not isinstance(column, jax.ShapeDtypeStruct):
            columns[name] = np.asarray(column)
        elif name in tokens:
            columns[name] = tokens[name]
        else:
            columns[name] = np.zeros(column.shape, column.dtype)
    return columns


def random_tokens(config: TrainConfig) -> list[Columns]:
    """Returns a random batch for each update; later rows have fewer labels.

    In a packed batch the last row and half of the row before it are padding.
    """
    batches = []
    shape = (config.data.global_batch_size, config.data.sequence_length + 1)
    for update in range(UPDATES):
        random = np.random.default_rng(update)
        tokens = random.integers(config.model.vocab_size, size=shape, dtype=np.int32)
        masked = random.random(shape) < np.linspace(0, 0.5, shape[0])[:, None]
        labels = np.where(masked, IGNORE, tokens)[:, 1:]
        batch = {"inputs": tokens[:, :-1], "labels": labels}
        if config.data.packed:
            begins = random.random(labels.shape) < DOCUMENTS / labels.shape[1]
            batch[SEGMENTS] = np.cumsum(begins, axis=1, dtype=np.int32)
            for row, begin in ((-1, 0), (-2, labels.shape[1] // 2)):
                batch[SEGMENTS][row, begin:] = 0
                labels[row, begin:] = IGNORE
        batches.append(batch)
    return batches
