"""Runs three updates on a mesh, and compares losses, gradients and states with one device.

Rounding decides between experts with almost equal scores, and between neighbouring numbers in 8
bits; a different decision changes all later numbers. So every mesh replays one device's expert
choices, and with products in 8 bits its state before each update. A mesh's own choices may differ
where scores are equal up to rounding.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxtp.analysis.audit import audit
from jaxtp.checkpoint.logical import abstract_logical, from_logical, to_logical
from jaxtp.collectives import batch_spec
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.data.loader import Batch
from jaxtp.layers.context import to_natural
from jaxtp.layers.lora import stored_kernels
from jaxtp.mesh import CP, make_mesh, mesh_of, mesh_sizes
from jaxtp.tools.check.shrink import ONE_DEVICE, Case, on_case
from jaxtp.tools.check.subject import Subject
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss_checks import require_sums
from jaxtp.train.memory import costs_of_step
from jaxtp.train.parts import step_settings
from jaxtp.train.state import OPTIMIZER_SCOPE, Blueprint
from jaxtp.train.step import fetch, make_train_step
from jaxtp.train.validation import share_of

NOISE = 0.1  # standard deviation added to every weight: zero biases and equal scales hide mistakes
LAST_DIGITS = 2.0**-21  # relative; four units in the last place of float32
# On CPUs, a program compiles in less than half the time with this option.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Tolerance:
    """Allowed relative errors."""

    scalar: float  # for losses and gradient norms, in which rounding averages out over tokens
    tensor: float  # for each gradient and each updated array


LOSS = "the loss"
GRAD_NORM = "the gradient norm"

TOLERANCES = {
    # 84 units in the last place; another order of summation changes about ten.
    "float32": Tolerance(scalar=1e-5, tensor=1e-5),
    # A difference of eps moves one in 2^-4 / eps elements over a boundary of rounding, by up to
    # 2^-3 of itself. So an operand differs by sqrt(eps) / 2 in norm: 2^-11.5 at eps = 2^-21, and
    # 2^-6.75 in a product of such products. Wrong scales move most elements, by 2^-5 in norm.
    "float8": Tolerance(scalar=2.0**-9, tensor=2.0**-6),
    # 1 and 8 units in the last place: a row layer rounds partial sums to bfloat16 before the
    # reduction.
    "bfloat16": Tolerance(scalar=2.0**-7, tensor=8 * 2.0**-7),
    "float16": Tolerance(scalar=2.0**-10, tensor=8 * 2.0**-10),
}
"""Tolerances by the coarsest dtype of a configuration."""

Arrays = Mapping[str, np.ndarray]
Choices = Sequence[tuple[np.ndarray, np.ndarray] | None]
"""Chosen experts `[B, layers, T, k]` and margins of their scores `[B, layers, T]`, by kind of
block; None for dense blocks."""


@dataclass(frozen=True)
class Numbers:
    """Results of three updates; arrays are unsharded and unpadded."""

    losses: np.ndarray
    grad_norms: np.ndarray
    gradients: Arrays  # of the first batch, by parameter
    state: Arrays  # parameters and optimizer after the last update
    problems: tuple[str, ...] = ()  # from the audit
    choices: tuple[Choices, ...] = ()  # expert choices by update
    states: tuple[Arrays, ...] = ()  # before each update but the first, with products in 8 bits

    @property
    def arrays(self) -> Arrays:
        """All arrays by name, with `LOSS` and `GRAD_NORM`."""
        return {LOSS: self.losses, GRAD_NORM: self.grad_norms, **self.gradients, **self.state}


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
    """Difference of each array, `LOSS` and `GRAD_NORM` between two runs on one device: in float32,
    or with other last digits of the weights (a user's task, float8, and a mesh that differs in
    float32). Cancellation, as in the gradient of a norm's scale, makes it larger than the precision
    of the dtype. The gradient of the keys' bias in attention consists only of rounding errors."""

    def allowed(self, name: str, tolerance: Tolerance) -> float:
        """Returns the tolerance of an array, `LOSS` or `GRAD_NORM`.

        The tolerance is at least twice the array's rounding error on one device.
        """
        minimum = tolerance.scalar if name in (LOSS, GRAD_NORM) else tolerance.tensor
        rounding = self.rounding.get(name, 0.0)
        # The array consists of rounding errors. A mistake makes it thousands of times larger.
        return 100.0 if rounding > 0.25 else max(minimum, 2 * rounding)

    def worst(self, tolerance: Tolerance) -> tuple[str, str]:
        """Returns the gradient and updated array with the largest errors.

        Errors are relative to their tolerance, and NaN comes first.
        """

        def badness(item: tuple[str, float]) -> tuple[bool, float]:
            name, error = item
            return bool(np.isnan(error)), error / self.allowed(name, tolerance)

        gradient, _ = max(self.gradients.items(), key=badness)
        update, _ = max(self.updates.items(), key=badness)
        return gradient, update

    def within(self, tolerance: Tolerance) -> bool:
        """Returns whether all errors are allowed; NaN never is."""
        errors = {LOSS: self.loss, GRAD_NORM: self.grad_norm, **self.gradients, **self.updates}
        allowed = all(error <= self.allowed(name, tolerance) for name, error in errors.items())
        return allowed and self.margin <= tolerance.tensor


def initial_arrays(
    config: TrainConfig, subject: Subject = Subject(), noise: float = NOISE
) -> Arrays:
    """Returns the unpadded initial state, with noise added to the weights.

    In a user's model only the parameters get noise.
    """
    blueprint = subject.blueprint(config, make_mesh())
    if config.model.lora.base != "full":
        unquantized = replace_nested(config, {"model.lora.base": "full"})
        arrays = dict(initial_arrays(unquantized, subject, noise))
        for kernel, form in stored_kernels(blueprint.abstract).items():
            stored = form.of(arrays.pop(kernel))._asdict()
            arrays |= {f"{kernel}.{field}": np.asarray(array) for field, array in stored.items()}
        return arrays
    arrays = on_host(blueprint.create(config.run.seed), blueprint.mesh)
    names = {name for name in arrays if name.startswith("model.")}
    names &= {f"model.{name}" for name in subject.parts.model.weights(blueprint)}
    return arrays | {name: _with_noise(name, arrays[name], noise) for name in names}


def on_one_device(
    config: TrainConfig, initial: Arrays, subject: Subject, *, replayed: Numbers | None = None
) -> tuple[Arrays, Numbers, Numbers]:
    """Returns the initial state, and the numbers of two runs on one device.

    The second run is for `Errors.rounding`. For a user's task, and in float8, it changes the last
    digits of the weights. If noise makes a loss infinite, the initial state has no noise.

    Raises:
      ConfigError: the numbers of a user's task are not finite or not repeatable, or its loss is a
        mean.
    """
    run_updates = program(config, ONE_DEVICE, replayed=replayed, subject=subject)
    numbers = run_updates(initial)
    if not subject.is_own:
        again = numbers
        if numbers.states:
            again = run_updates(*in_other_digits(initial, *numbers.states))
        return initial, numbers, again
    if not np.isfinite(numbers.losses).all():
        initial = initial_arrays(config, subject, noise=0)
        numbers = run_updates(initial)
    if not np.isfinite(numbers.losses).all():
        raise ConfigError(
            f"the losses of three updates on one device are {', '.join(map(str, numbers.losses))}"
        )
    replay = program(config, ONE_DEVICE, replayed=replayed or numbers, subject=subject)
    errors = compare(replay(initial), numbers)
    if not errors.within(TOLERANCES["float32"]):
        raise ConfigError(
            f"two runs on one device differ: the loss by {errors.loss:.1e}, the gradient norm by "
            f"{errors.grad_norm:.1e}. Draw all random numbers from the key of the loss or from "
            "nnx.Rngs, not from NumPy's or Python's generator"
        )
    loss = subject.parts.loss
    if not loss.is_by_row and replayed is None:
        mesh = make_mesh()
        blueprint = subject.blueprint(config, mesh)
        with jax.set_mesh(mesh):
            state = place(initial, blueprint.abstract, mesh)
            batch = next(subject.on_mesh(config, mesh))
            if warning := require_sums(loss, blueprint, state, batch, config.train.accumulation):
                print(warning)
    return initial, numbers, replay(*in_other_digits(initial, *numbers.states))


def in_other_digits(*states: Arrays) -> Iterator[Arrays]:
    """Yields states with other last digits of the weights, to show how rounding errors grow."""
    for state in states:
        changed = dict(state)
        for name, array in state.items():
            if name.startswith("model."):
                changed[name] = _with_noise(name, array, 0, LAST_DIGITS)
        yield changed


def run(config: TrainConfig, case: Case, *states: Arrays, **options: Any) -> Numbers:
    """Compiles and runs a `program`."""
    return program(config, case, **options)(*states)


def program(
    config: TrainConfig,
    case: Case,
    *,
    audited: bool = False,
    replayed: Numbers | None = None,
    subject: Subject = Subject(),
) -> "Updates":
    """Compiles three updates, which start from one state or from a state for each.

    The updates use the expert choices of `replayed`.
    """
    config = replace_nested(on_case(config, case), {"metrics.norm_groups": ()})
    mesh = mesh_of(case.sizes)
    blueprint = subject.blueprint(config, mesh)
    settings = step_settings(config, subject.parts)
    step = make_train_step(settings, blueprint, with_choices=True, with_grads=True)
    batches = list(subject.on_mesh(config, mesh))
    experts = _experts(replayed, mesh) or [{}] * len(batches)
    problems: tuple[str, ...] = ()
    with jax.set_mesh(mesh):
        traced = step.trace(blueprint.sharded, batches[0], **experts[0])
        if not audited:
            compiled = traced.lower().compile(compiler_options=COMPILER_OPTIONS)
    if audited:
        modelled = subject.parts.optimizer is None and optimizers.is_modelled(config.optimizer)
        result = audit(
            traced,
            blueprint.sharded,
            mesh=mesh,
            budget=costs_of_step(config, case.sizes).budget,
            global_view=() if modelled else (OPTIMIZER_SCOPE,),
            compiler_options=COMPILER_OPTIONS,
        )
        compiled = result.compiled
        problems = tuple(result.problems())
    return Updates(
        step=compiled,
        blueprint=blueprint,
        batches=batches,
        experts=experts,
        problems=problems,
        is_zigzag=config.model.zigzag(share_of(config, case.sizes)),
        keeps_states=config.model.precision.matmul != "compute",
    )


def _experts(replayed: Numbers | None, mesh: Mesh) -> list[dict[str, object]]:
    """Returns the argument of the step for each update; an empty list without experts."""
    if replayed is None or all(kind is None for kind in replayed.choices[0]):
        return []
    sharding = NamedSharding(mesh, batch_spec(None))
    experts = []
    for choices in replayed.choices:
        chosen = tuple(kind and kind[0] for kind in choices)
        experts.append({"experts": jax.device_put(chosen, sharding)})
    return experts


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The updates of a case: a compiled step, and a batch for each.

    Args:
      experts: argument of the step, by update.
      problems: from the audit.
      is_zigzag: whether a device along cp has two pieces of a sequence, one from each end.
      keeps_states: whether the numbers have the state after each update.
    """

    step: jax.stages.Compiled
    blueprint: Blueprint
    batches: Sequence[Batch]
    experts: Sequence[Mapping[str, object]]
    problems: tuple[str, ...]
    is_zigzag: bool
    keeps_states: bool

    def __call__(self, *states: Arrays) -> Numbers:
        """Runs the step for each batch, from one state or from a state for each."""
        mesh = self.blueprint.mesh
        parts = mesh_sizes(mesh)[CP]
        losses: list[float] = []
        norms: list[float] = []
        choices: list[Choices] = []
        gradients: Arrays = {}
        later_states: list[Arrays] = []
        for update, batch in enumerate(self.batches):
            if update < len(states):
                state = place(states[update], self.blueprint.abstract, mesh)
            state, output = self.step(state, batch, **self.experts[update])
            metrics = fetch(output)
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
            chosen = jax.tree.map(np.asarray, output.choices or [])
            if chosen and self.is_zigzag:
                chosen = jax.tree.map(lambda x: to_natural(x, parts, 2), chosen)
            choices.append(chosen)
            gradients = gradients or on_host(output.grads, mesh)
            if self.keeps_states or update + 1 == len(self.batches):
                later_states.append(on_host(state, mesh))
        return Numbers(
            losses=np.array(losses),
            grad_norms=np.array(norms),
            gradients=gradients,
            state=later_states.pop(),
            problems=self.problems,
            choices=tuple(choices),
            states=tuple(later_states),
        )


def compare(actual: Numbers, expected: Numbers, exact: Numbers | None = None) -> Errors:
    """Returns a mesh's errors relative to one device.

    `exact` is another run on one device, for `Errors.rounding`.
    """
    margins, choices = _differing_choices(actual, expected)
    return Errors(
        loss=relative_error(actual.losses, expected.losses),
        grad_norm=relative_error(actual.grad_norms, expected.grad_norms),
        gradients=_errors(actual.gradients, expected.gradients),
        updates=_errors(actual.state, expected.state),
        flips=margins.size,
        margin=float(np.max(margins, initial=0.0)),
        choices=choices,
        rounding={} if exact is None else _errors(expected.arrays, exact.arrays),
    )


def _errors(actual: Arrays, expected: Arrays) -> dict[str, float]:
    return {name: relative_error(actual[name], array) for name, array in expected.items()}


def _differing_choices(actual: Numbers, expected: Numbers) -> tuple[np.ndarray, int]:
    """Returns the margins of differing expert choices, and the number of all choices."""
    margins = [np.zeros(0)]
    total = 0
    for actual_kinds, expected_kinds in zip(actual.choices, expected.choices, strict=True):
        for choice, expected_choice in zip(actual_kinds, expected_kinds, strict=True):
            if choice is not None and expected_choice is not None:
                experts, _ = choice
                expected_experts, margin = expected_choice
                differ = np.any(np.sort(experts) != np.sort(expected_experts), axis=-1)
                margins.append(margin[differ].astype(np.float64))
                total += differ.size
    return np.concatenate(margins), total


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the relative L2 error in float64; absolute if the expected value is zero."""
    reference = np.float64(expected)
    difference = float(np.linalg.norm(np.float64(actual) - reference))
    return difference / (float(np.linalg.norm(reference)) or 1.0)


def place(arrays: Arrays, abstract: nnx.State, mesh: Mesh) -> nnx.State:
    """Returns a padded and sharded state from unpadded arrays."""
    placed = {}
    for name, target in abstract_logical(abstract, mesh).items():
        placed[name] = jax.device_put(arrays[name], target.sharding)
    with jax.set_mesh(mesh):
        return from_logical(placed, abstract, mesh)


def _with_noise(name: str, array: np.ndarray, noise: float, relative: float = 0.0) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.inexact) and array.dtype.kind != "V":
        return array
    random = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(array.shape)
    return (array + (noise + relative * np.abs(array)) * random).astype(array.dtype)


def on_host(state: nnx.State, mesh: Mesh) -> dict[str, np.ndarray]:
    """Returns a state's arrays, unpadded and unsharded."""
    return {name: np.asarray(array) for name, array in to_logical(state, mesh).items()}
