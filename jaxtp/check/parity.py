"""Three updates of one model on a mesh, and how far they are from those of another mesh.

A router's choice jumps: where two experts have almost the same score, rounding decides, and all after it differs. So
choices are compared by themselves. Where one is another than on one device, the scores must have been as close as
rounding is large; and whatever a mesh would choose, it computes with the choices of one device.
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

from jaxtp.audit.audit import audit
from jaxtp.check.shrink import UPDATES, Case, on_case
from jaxtp.checkpoint.logical import abstract_logical, from_logical, to_logical
from jaxtp.collectives import batch_spec
from jaxtp.config import changed
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.context import to_natural
from jaxtp.layers.loss import IGNORE
from jaxtp.mesh import CP, make_mesh, mesh_of, mesh_sizes
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig, share_of
from jaxtp.train.memory import costs_of_step
from jaxtp.train.optimizer_state import OPTIMIZER_SCOPE
from jaxtp.train.state import Blueprint, plan_state
from jaxtp.train.step import EXPERTS, make_train_step

NOISE = 0.1
"""Added to every weight: initial values are special (zero biases, equal scales), and hide mistakes."""

DOCUMENTS = 4
"""Number of documents in a row of a packed batch, about."""

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
"""Options for virtual CPU devices: the same program compiles in less than half the time."""


@dataclass(frozen=True)
class Tolerance:
    """Relative errors allowed."""

    scalar: float
    """Tolerance of losses and gradient norms, in which the rounding of many tokens averages out."""

    tensor: float
    """Tolerance of each gradient and each updated array."""


TOLERANCES = {
    # 84 units in the last place; sums in another order differ by about ten.
    "float32": Tolerance(scalar=1e-5, tensor=1e-5),
    # 1 and 8 units: a row layer's partial sums are rounded to bfloat16 on each device before they are added.
    "bfloat16": Tolerance(scalar=2.0**-7, tensor=8 * 2.0**-7),
}
"""Tolerances by compute dtype."""

Arrays = Mapping[str, np.ndarray]

Choices = Sequence[tuple[np.ndarray, np.ndarray] | None]
"""For each kind of block the experts that each token would choose, `[B, layers, T, k]`, and the margin by which,
`[B, layers, T]`; None of blocks without experts."""


@dataclass(frozen=True)
class Numbers:
    """Numbers that three updates give."""

    losses: np.ndarray
    """Before each update."""

    grad_norms: np.ndarray
    """Before each update."""

    gradients: Arrays
    """Gradients of the first batch, by parameter; whole and unpadded, like the next."""

    state: Arrays
    """Parameters and optimizer after the last update."""

    problems: tuple[str, ...] = ()
    """Problems that the audit of the compiled step found."""

    choices: tuple[Choices, ...] = ()
    """Choices of the routers before each update."""


@dataclass(frozen=True)
class Errors:
    """The distance between two `Numbers`: relative L2 norms."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, float]
    """Error of each gradient, by parameter."""
    updates: Mapping[str, float]
    """Error of each array of the updated state, by path."""
    flips: int = 0
    """Choices of experts that are others."""
    margin: float = 0.0
    """The largest margin, on one device, of a choice that is another."""
    choices: int = 0
    """Choices of experts in all."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """Error of each of both on one device, against float32. A sum in which much cancels, such as the gradient of a
    norm's scale, is off by more than its digits on any device."""

    def allowed(self, name: str, tolerance: Tolerance) -> float:
        """Returns the tolerance of an array: at least twice what rounding does to it on one device."""
        return max(tolerance.tensor, 2 * self.rounding.get(name, 0.0))

    def worst(self, errors: Mapping[str, float], tolerance: Tolerance) -> str:
        """Returns the array that is the farthest off, measured by what it is allowed; a NaN is the farthest."""
        return max(errors, key=lambda name: (np.isnan(errors[name]), errors[name] / self.allowed(name, tolerance)))

    def within(self, tolerance: Tolerance) -> bool:
        """Returns whether all of them are tolerated; a NaN is not."""
        scalars = self.loss <= tolerance.scalar and self.grad_norm <= tolerance.scalar
        arrays = {**self.gradients, **self.updates}
        allowed = all(error <= self.allowed(name, tolerance) for name, error in arrays.items())
        return scalars and allowed and self.margin <= tolerance.tensor


def initial_arrays(config: TrainConfig) -> Arrays:
    """Returns the state that every mesh starts from, unpadded: initial values, each weight moved away from its own."""
    blueprint = _plan(config, make_mesh())
    arrays = to_logical(blueprint.create(config.run.seed), blueprint.mesh)
    return {
        name: _moved(name, array) if name.startswith("model.") else np.asarray(array) for name, array in arrays.items()
    }


def batches(config: TrainConfig) -> list[dict[str, np.ndarray]]:
    """Returns random tokens for each update, some labels masked, unevenly over the rows; packed as in the run: then
    the last row is padding alone, and the one before it from its middle on."""
    made = []
    shape = (config.data.global_batch_size, config.data.sequence_length + 1)
    for update in range(UPDATES):
        random = np.random.default_rng(update)
        tokens = random.integers(config.model.vocab_size, size=shape, dtype=np.int32)
        masked = random.random(shape) < np.linspace(0, 0.5, shape[0])[:, None]
        labels = np.where(masked, IGNORE, tokens)[:, 1:]
        batch = {"inputs": tokens[:, :-1], "labels": labels}
        if config.data.packed:
            batch[SEGMENTS] = np.cumsum(
                random.random(labels.shape) < DOCUMENTS / labels.shape[1], axis=1, dtype=np.int32
            )
            for row, begin in ((-1, 0), (-2, labels.shape[1] // 2)):
                batch[SEGMENTS][row, begin:], labels[row, begin:] = 0, IGNORE
        made.append(batch)
    return made


def run(
    config: TrainConfig, case: Case, initial: Arrays, *, audited: bool = False, replayed: Numbers | None = None
) -> Numbers:
    """Runs three updates on the mesh of a case.

    Args:
      config: the (shrunk) run.
      case: mesh, sequence parallelism and method over cp.
      initial: the state to start from.
      audited: also audits the compiled step.
      replayed: numbers of a run whose experts are used, whichever ones are chosen here.
    """
    config = on_case(config, case)
    mesh = mesh_of(case.sizes)
    blueprint = _plan(config, mesh)
    step = make_train_step(changed(config, {"metrics.norm_groups": ()}), blueprint, with_choices=True, with_grads=True)
    state = place(initial, blueprint.abstract, mesh)
    given = [_given(choices) for choices in replayed.choices] if replayed is not None else [{}] * UPDATES
    rows = NamedSharding(mesh, batch_spec(None))
    placed = [jax.device_put({**batch, **own}, rows) for batch, own in zip(batches(config), given, strict=True)]
    problems: list[str] = []
    if audited:
        result = audit(
            step,
            state,
            placed[0],
            mesh=mesh,
            budget=costs_of_step(config, mesh_sizes(mesh)).budget,
            global_view=() if optimizers.is_modelled(config.optimizer) else (OPTIMIZER_SCOPE,),
            compiler_options=COMPILER_OPTIONS,
        )
        problems, step = result.problems(), result.compiled
    else:
        with jax.set_mesh(mesh):
            step = step.lower(state, placed[0]).compile(compiler_options=COMPILER_OPTIONS)
    scalars: list[list[float]] = []
    gradients: Arrays = {}
    choices: list[Choices] = []
    zigzag = config.model.zigzag(share_of(config, case.sizes))
    for batch in placed:
        state, values, chosen, grads = step(state, batch)
        choices.append(
            jax.tree.map(lambda x: to_natural(np.asarray(x), case.sizes[CP], 2) if zigzag else np.asarray(x), chosen)
        )
        scalars.append([values.fetch()[name] for name in ("loss", "grad_norm")])
        gradients = gradients or on_host(grads, mesh)
    losses, norms = np.array(scalars).T
    return Numbers(losses, norms, gradients, on_host(state, mesh), tuple(problems), tuple(choices))


def _given(choices: Choices) -> dict[str, Any]:
    """Returns what a batch has of experts to use; nothing for a model that has none."""
    experts = tuple(None if found is None else found[0] for found in choices)
    return {} if all(found is None for found in experts) else {EXPERTS: experts}


def compare(actual: Numbers, expected: Numbers, exact: Numbers | None = None) -> Errors:
    """Returns the errors of `actual`, relative to `expected`.

    Args:
      actual: numbers of a mesh.
      expected: those of one device.
      exact: those of one device in float32, where the others are in fewer digits.
    """
    gradients, updates = distances(actual, expected)
    margins, choices = _flipped(actual, expected)
    return Errors(
        loss=relative_error(actual.losses, expected.losses),
        grad_norm=relative_error(actual.grad_norms, expected.grad_norms),
        gradients=gradients,
        updates=updates,
        flips=margins.size,
        margin=float(np.max(margins, initial=0.0)),
        choices=choices,
        rounding={} if exact is None else {k: e for errors in distances(expected, exact) for k, e in errors.items()},
    )


def distances(actual: Numbers, expected: Numbers) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the relative error of each gradient, and of each array of the updated state."""
    gradients = {name: relative_error(actual.gradients[name], g) for name, g in expected.gradients.items()}
    return gradients, {name: relative_error(actual.state[name], a) for name, a in expected.state.items()}


def _flipped(actual: Numbers, expected: Numbers) -> tuple[np.ndarray, int]:
    """Returns the margin of each choice of experts that is another than expected, and the number of all choices."""
    margins: list[np.ndarray] = [np.zeros(0)]
    total = 0
    for ours, theirs in zip(actual.choices, expected.choices, strict=True):
        for own, other in zip(ours, theirs, strict=True):
            if own is not None and other is not None:
                (experts, _), (expected_experts, margin) = own, other
                differ = np.any(np.sort(experts) != np.sort(expected_experts), axis=-1)
                margins.append(margin[differ].astype(np.float64))
                total += differ.size
    return np.concatenate(margins), total


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the L2 norm of the difference over that of the expected value, in float64; absolute where it is zero."""
    difference = float(np.linalg.norm(np.float64(actual) - np.float64(expected)))
    return difference / (float(np.linalg.norm(np.float64(expected))) or 1.0)


def place(arrays: Arrays, abstract: nnx.State, mesh: Mesh) -> nnx.State:
    """Returns unpadded arrays as a state of this mesh."""
    targets = abstract_logical(abstract, mesh)
    with jax.set_mesh(mesh):
        return from_logical({n: jax.device_put(arrays[n], t.sharding) for n, t in targets.items()}, abstract, mesh)


def _plan(config: TrainConfig, mesh: Mesh) -> Blueprint:
    return plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)


def _moved(name: str, array: Array) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return (np.asarray(array) + NOISE * random.standard_normal(array.shape)).astype(array.dtype)


def on_host(state: nnx.State, mesh: Mesh) -> dict[str, np.ndarray]:
    """Returns a state's arrays, unpadded and whole."""
    return {name: np.asarray(array) for name, array in to_logical(state, mesh).items()}
