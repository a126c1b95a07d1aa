"""Runs three updates on a mesh, and compares losses, gradients and states with one device.

Rounding decides between experts with almost equal scores, and all later numbers differ. So every mesh replays the
expert choices of one device. Its own choices are compared separately: if they differ, the scores must be equal up to
rounding.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jaxtp.analysis.audit import audit
from jaxtp.checkpoint.logical import abstract_logical, from_logical, to_logical
from jaxtp.collectives import batch_spec
from jaxtp.config.schema import replace_nested
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.context import to_natural
from jaxtp.layers.loss import IGNORE
from jaxtp.mesh import CP, make_mesh, mesh_of
from jaxtp.tools.check.shrink import UPDATES, Case, on_case
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import costs_of_step
from jaxtp.train.state import OPTIMIZER_SCOPE, Blueprint, plan_state
from jaxtp.train.step import EXPERTS, fetch, make_train_step
from jaxtp.train.validation import share_of

NOISE = 0.1  # standard deviation added to every weight: zero biases and equal scales hide mistakes
DOCUMENTS = 4  # mean number in a row of a packed batch
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}  # compiles in less than half the time on CPUs


@dataclass(frozen=True)
class Tolerance:
    """Allowed relative errors."""

    scalar: float  # for losses and gradient norms, in which rounding averages out over tokens
    tensor: float  # for each gradient and each updated array


TOLERANCES = {
    # 84 units in the last place; another order of summation changes about ten.
    "float32": Tolerance(scalar=1e-5, tensor=1e-5),
    # 1 and 8 units in the last place: a row layer rounds partial sums to bfloat16 before the reduction.
    "bfloat16": Tolerance(scalar=2.0**-7, tensor=8 * 2.0**-7),
    "float16": Tolerance(scalar=2.0**-10, tensor=8 * 2.0**-10),
}
"""Tolerances by the coarsest dtype of a configuration."""

Arrays = Mapping[str, np.ndarray]
Choices = Sequence[tuple[np.ndarray, np.ndarray] | None]
"""Chosen experts `[B, layers, T, k]` and margins of their scores `[B, layers, T]`, by kind of block; None for dense
blocks."""


@dataclass(frozen=True)
class Numbers:
    """Results of three updates; arrays are unsharded and unpadded."""

    losses: np.ndarray
    grad_norms: np.ndarray
    gradients: Arrays  # of the first batch, by parameter
    state: Arrays  # parameters and optimizer after the last update
    problems: tuple[str, ...] = ()  # from the audit
    choices: tuple[Choices, ...] = ()  # expert choices by update


@dataclass(frozen=True)
class Errors:
    """Relative L2 errors of `Numbers`."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, float]
    updates: Mapping[str, float]  # parameters and optimizer after the last update
    flips: int = 0  # expert choices that differ
    margin: float = 0.0  # largest margin, on one device, of a choice that differs
    choices: int = 0  # expert choices
    rounding: Mapping[str, float] = field(default_factory=dict)
    """Error of each array on one device, relative to float32. Cancellation, as in the gradient of a norm's scale, makes
    it larger than the precision of the dtype."""

    def allowed(self, name: str, tolerance: Tolerance) -> float:
        """Returns an array's tolerance: at least twice its rounding error on one device."""
        return max(tolerance.tensor, 2 * self.rounding.get(name, 0.0))

    def worst(self, tolerance: Tolerance) -> tuple[str, str]:
        """Returns the gradient and updated array with the largest errors relative to their tolerance; NaN first."""

        def worst(errors: Mapping[str, float]) -> str:
            return max(errors, key=lambda name: (np.isnan(errors[name]), errors[name] / self.allowed(name, tolerance)))

        return worst(self.gradients), worst(self.updates)

    def within(self, tolerance: Tolerance) -> bool:
        """Returns whether all errors are allowed; NaN never is."""
        scalars = self.loss <= tolerance.scalar and self.grad_norm <= tolerance.scalar
        arrays = {**self.gradients, **self.updates}
        allowed = all(error <= self.allowed(name, tolerance) for name, error in arrays.items())
        return scalars and allowed and self.margin <= tolerance.tensor


def initial_arrays(config: TrainConfig) -> Arrays:
    """Returns the unpadded initial state, with noise added to the weights."""
    blueprint = _plan(config, make_mesh())
    arrays = to_logical(blueprint.create(config.run.seed), blueprint.mesh)
    return {n: _with_noise(n, a) if n.startswith("model.") else np.asarray(a) for n, a in arrays.items()}


def batches(config: TrainConfig) -> list[dict[str, np.ndarray]]:
    """Returns a random batch for each update; later rows have fewer labels.

    In a packed batch the last row and half of the row before it are padding.
    """
    made, shape = [], (config.data.global_batch_size, config.data.sequence_length + 1)
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
                batch[SEGMENTS][row, begin:], labels[row, begin:] = 0, IGNORE
        made.append(batch)
    return made


def run(
    config: TrainConfig, case: Case, initial: Arrays, *, audited: bool = False, replayed: Numbers | None = None
) -> Numbers:
    """Runs three updates on the mesh of a case, with the expert choices of `replayed`."""
    config = replace_nested(on_case(config, case), {"metrics.norm_groups": ()})
    mesh = mesh_of(case.sizes)
    blueprint = _plan(config, mesh)
    step = make_train_step(config, blueprint, with_choices=True, with_grads=True)
    state = place(initial, blueprint.abstract, mesh)
    host: list[dict[str, Any]] = list(batches(config))
    if replayed is not None and any(kind is not None for kind in replayed.choices[0]):
        for batch, choices in zip(host, replayed.choices, strict=True):
            batch[EXPERTS] = tuple(None if kind is None else kind[0] for kind in choices)
    placed = jax.device_put(host, NamedSharding(mesh, batch_spec(None)))
    problems: list[str] = []
    options: dict[str, Any] = {"compiler_options": COMPILER_OPTIONS}
    if audited:
        options["budget"] = costs_of_step(config, case.sizes).budget
        options["global_view"] = () if optimizers.is_modelled(config.optimizer) else (OPTIMIZER_SCOPE,)
        result = audit(step, state, placed[0], mesh=mesh, **options)
        problems, step = result.problems(), result.compiled
    else:
        with jax.set_mesh(mesh):
            step = step.lower(state, placed[0]).compile(**options)
    scalars: list[list[float]] = []
    all_choices: list[Choices] = []
    gradients: Arrays = {}
    zigzag = config.model.zigzag(share_of(config, case.sizes))
    for batch in placed:
        state, values, choices, grads = step(state, batch)
        choices = jax.tree.map(np.asarray, choices)
        all_choices.append(jax.tree.map(lambda x: to_natural(x, case.sizes[CP], 2), choices) if zigzag else choices)
        metrics = fetch(values)
        scalars.append([metrics["loss"], metrics["grad_norm"]])
        gradients = gradients or on_host(grads, mesh)
    losses, norms = np.array(scalars).T
    return Numbers(losses, norms, gradients, on_host(state, mesh), tuple(problems), tuple(all_choices))


def compare(actual: Numbers, expected: Numbers, exact: Numbers | None = None) -> Errors:
    """Returns a mesh's errors relative to one device; `exact` is one device in float32."""
    margins, choices = _flipped(actual, expected)
    rounding: dict[str, float] = {}
    if exact is not None:
        rounding = _errors(expected.gradients, exact.gradients) | _errors(expected.state, exact.state)
    return Errors(
        loss=relative_error(actual.losses, expected.losses),
        grad_norm=relative_error(actual.grad_norms, expected.grad_norms),
        gradients=_errors(actual.gradients, expected.gradients),
        updates=_errors(actual.state, expected.state),
        flips=margins.size,
        margin=float(np.max(margins, initial=0.0)),
        choices=choices,
        rounding=rounding,
    )


def _errors(actual: Arrays, expected: Arrays) -> dict[str, float]:
    return {name: relative_error(actual[name], array) for name, array in expected.items()}


def _flipped(actual: Numbers, expected: Numbers) -> tuple[np.ndarray, int]:
    """Returns the margins of differing expert choices, and the number of choices."""
    margins, total = [np.zeros(0)], 0
    for update in zip(actual.choices, expected.choices, strict=True):
        for choice, reference in zip(*update, strict=True):
            if choice is not None and reference is not None:
                (experts, _), (expected_experts, margin) = choice, reference
                differ = np.any(np.sort(experts) != np.sort(expected_experts), axis=-1)
                margins.append(margin[differ].astype(np.float64))
                total += differ.size
    return np.concatenate(margins), total


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the relative L2 error in float64; absolute if the expected value is zero."""
    difference = float(np.linalg.norm(np.float64(actual) - np.float64(expected)))
    return difference / (float(np.linalg.norm(np.float64(expected))) or 1.0)


def place(arrays: Arrays, abstract: nnx.State, mesh: Mesh) -> nnx.State:
    """Returns a padded and sharded state from unpadded arrays."""
    targets = abstract_logical(abstract, mesh)
    with jax.set_mesh(mesh):
        return from_logical({n: jax.device_put(arrays[n], t.sharding) for n, t in targets.items()}, abstract, mesh)


def _plan(config: TrainConfig, mesh: Mesh) -> Blueprint:
    return plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)


def _with_noise(name: str, array: Array) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return (np.asarray(array) + NOISE * random.standard_normal(array.shape)).astype(array.dtype)


def on_host(state: nnx.State, mesh: Mesh) -> dict[str, np.ndarray]:
    """Returns a state's arrays, unpadded and unsharded."""
    return {name: np.asarray(array) for name, array in to_logical(state, mesh).items()}
