"""The programs of a run: training step and evaluation.

A step computes the summed loss and its gradient by micro-batch (`loss_and_grads`), divides by the
weight (the number of labels, unless a loss has its own), applies the Optax chain
(`sharded_optimizer.py`: clipping, rule, decay and learning rate of `optimizer.py`), moves the
selection biases of experts, and selects the old state if the step is not finite, or has no weight
(`_skip_if_useless`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Traced, Wrapped

from jaxtp.checkpoint.checksum import device_checksums
from jaxtp.checkpoint.logical import Variable, named_variables
from jaxtp.collectives import (
    all_reduce,
    axis_size,
    batch_spec,
    constrain,
    device_view,
    vary_everywhere,
)
from jaxtp.config.hints import matches
from jaxtp.data.loader import Batch
from jaxtp.layers.parameter import Precision, mark_unreduced, spec_of, sum_over_replicas
from jaxtp.mesh import AXES, axes_of, batch_parts, mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.train.loss import (
    Choices,
    Experts,
    Micro,
    NextToken,
    Objective,
    Terms,
    call,
    changeable,
)
from jaxtp.train.optimizer import current_learning_rate
from jaxtp.train.sharded_optimizer import Optimizer
from jaxtp.train.state import OPTIMIZER_SCOPE, STORED, Blueprint, rng_state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalars:
    """Metrics of a step in one replicated array.

    It also has the maximum of the flags of all devices, if there are flags.
    """

    names: tuple[str, ...] = field(metadata={"static": True})
    # A float32 for each name, then the maximum of the flags, which has no name: a user's metric
    # might have the same one
    values: Array

    @classmethod
    def of(cls, metrics: Mapping[str, Array], flags: Array | None = None) -> "Scalars":
        """Stacks metrics, and the maximum of `flags`."""
        scalars = list(metrics.values())
        if flags is not None:
            scalars.append(jnp.max(flags))
        return cls(tuple(metrics), jnp.stack([s.astype(jnp.float32) for s in scalars]))

    @property
    def flag(self) -> int:
        """The maximum of the flags, or 0 without flags; waits for the step."""
        flags = np.asarray(self.values)[len(self.names) :]
        return int(flags.max(initial=0))


TrainStep = Callable[..., tuple[Any, "StepOutput"]]
"""Maps a state and a batch to the next state and the step's output."""


@dataclass(frozen=True)
class StepSettings:
    """The settings of a run that its steps and evaluations read (`parts.step_settings`)."""

    objective: Objective = NextToken()
    accumulation: int = 1
    """Number of micro-batches of a step."""
    precision: Precision = Precision()
    """Dtypes of the gradients' sums over micro-batches and devices."""
    seed: int = 0
    skips_allowed: int = 0
    """Maximum number of steps in a row that may be skipped."""
    norm_groups: tuple[str, ...] = ()
    """Patterns of parameter paths, whose norms are metrics."""
    learning_rate: optax.Schedule | None = None
    """By default the learning rate is read from the optimizer's state, if it has one."""


Norm = Callable[[Sequence[Variable]], Array]
NORM = "norm"  # Name in profiles of the sum of squares over devices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """The output of a training step besides the state; None for parts that were not requested."""

    scalars: Scalars
    checksums: Array | None = None
    """The gradients' `device_checksums`, after reduction and before clipping, in the order of
    `trained_parameters`."""
    choices: Choices = None
    """For each kind of block, the router's choices `[B, layers, T, k]` and their margins
    `[B, layers, T]`, with tokens in device order; None for blocks without experts."""
    grads: nnx.State | None = None
    """The gradients, in the parameters' shardings."""


class _Outcome(NamedTuple):
    terms: Terms
    choices: Choices
    # Variables that the loss may have changed
    changed: nnx.State


def make_train_step(
    settings: StepSettings,
    blueprint: Blueprint,
    *,
    with_checksums: bool = False,
    with_choices: bool = False,
    with_grads: bool = False,
    on_leaves: bool = False,
) -> Wrapped:
    """Returns the jitted training step `state, batch -> state, StepOutput`; donates the state.

    The keyword arguments are `stop`, the flags of all devices (`guards/stopping.py`), `experts`,
    which replace the routers' choices, and `limits` `[2]`, above which a loss and a gradient norm
    count as not finite. They are not columns of the batch, where a user's columns may have the same
    names.

    The scalars are `loss`, the mean over the batch's `loss_tokens` valid tokens; `grad_norm`, the
    global L2 norm before clipping; `learning_rate`, if known; `param_norm` after the update;
    `skipped`, the number of non-finite steps in a row; norms such as `grad_norm/blocks.mlp.*` for
    each of `norm_groups`; the balance of experts; and the metrics of a user's loss. The
    state but for `skipped` is unchanged if `loss` or `grad_norm` is not finite (a norm can also
    overflow float32), if `loss_tokens` is 0, and after more than `skips_allowed` non-finite
    steps. If only `param_norm` is not finite, the update overflowed.

    Args:
      with_checksums: the output has `checksums`.
      with_choices: the output has `choices`.
      with_grads: the output has `grads`.
      on_leaves: the step takes and returns the leaves of a state. Flattening a state in each step
        would take as long as a tiny step itself.
    """
    objective = settings.objective
    norms = partial(
        _norms, settings.norm_groups, _norm if objective.is_by_row else _norm_by_one_sum
    )

    def step(
        state: Any,
        batch: Batch,
        *,
        stop: Array | None = None,
        experts: Experts = None,
        limits: Array | None = None,
    ) -> tuple[Any, StepOutput]:
        if on_leaves:
            state = blueprint.unflatten(state)
        train_state = blueprint.merge(state)
        model: Any = train_state.model
        updates = train_state.optimizer.step[...]

        key = dropout_key(settings.seed, updates)
        terms, choices, grads = loss_and_grads(
            model, batch, settings, key, record=with_choices, experts=experts
        )
        loss = terms.loss / _divisor(terms.weight)

        metrics = norms("grad_norm", grads)
        checksums = _checksums(grads) if with_checksums else None

        with jax.named_scope(OPTIMIZER_SCOPE):
            train_state.optimizer.update(model, grads, loss)
        objective.after_update(model, terms)

        finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        if limits is not None:
            finite &= (loss <= limits[0]) & (metrics["grad_norm"] <= limits[1])
        new, skipped = _skip_if_useless(
            nnx.state(train_state, STORED),
            state,
            finite,
            terms.weight != 0,
            settings.skips_allowed,
        )

        metrics |= norms("param_norm", nnx.filter_state(new["model"], nnx.Param))
        metrics["skipped"] = skipped
        rate = _learning_rate(settings, train_state.optimizer, updates)
        metrics = _with_loss(metrics, loss, terms, rate)
        if on_leaves:
            new = jax.tree.leaves(new)
        return new, StepOutput(
            Scalars.of(metrics, stop), checksums, choices, grads if with_grads else None
        )

    replicated: Any = _replicated(blueprint)
    grads = nnx.filter_state(blueprint.shardings["model"], nnx.Param) if with_grads else None
    # The compiler chooses the shardings of the choices.
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(
            jax.tree.leaves(blueprint.shardings) if on_leaves else blueprint.shardings,
            StepOutput(replicated, replicated, None, grads),
        ),
    )


def _learning_rate(settings: StepSettings, optimizer: Optimizer, updates: Array) -> Array | None:
    if settings.learning_rate is None:
        return current_learning_rate(optimizer.optax_state())
    return jnp.asarray(settings.learning_rate(updates))


def _with_loss(
    metrics: Mapping[str, Array], loss: Array, terms: Terms, rate: Array | None
) -> dict[str, Array]:
    # In the order of the log: the metrics of the loss are last.
    rates = {} if rate is None else {"learning_rate": rate}
    return {"loss": loss, "loss_tokens": terms.weight, **rates, **metrics, **terms.scalars()}


def loss_and_grads(
    model: Any,
    batch: Batch,
    settings: StepSettings,
    key: Array,
    *,
    record: bool = False,
    experts: Experts = None,
) -> tuple[Terms, Choices, nnx.State]:
    """Returns a batch's loss terms, the routers' choices, and the gradient of the mean loss.

    The mean is over the batch's valid tokens (`weight`); it is not a mean of the micro-batches'
    means. With accumulation, each replica sums its own gradients of jaxtp's layers, and one
    reduction follows (`layers/parameter.py`).

    Args:
      model: the loss may change its variables that are not parameters, such as the statistics of
        `nnx.BatchNorm`; they are updated in place.
      record: return the routers' choices, otherwise None; for `jaxtp check`.
      experts: choices of another mesh, which replace the routers' own.
    """
    accumulation = settings.accumulation
    objective = settings.objective
    graph, stored, rngs, frozen = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]
    differentiable = _Differentiable(graph, rngs, frozen, objective, key, record)
    inputs = Micro(batch, jnp.arange(len(jax.tree.leaves(batch)[0])), experts)
    if accumulation == 1:
        outcome, gradients = differentiable.differentiate(stored, inputs, jnp.zeros((), jnp.int32))
        terms, choices, changed = outcome
        grads = gradients()
        nnx.update(model, changed)
    else:
        params = mark_unreduced(stored) if objective.is_by_row else stored
        sums = _no_gradients(params, settings.precision)

        def add(micro: Micro, index: Array) -> tuple[Terms, Choices]:
            outcome, gradients = differentiable.differentiate(params, micro, index)
            _add_gradients(gradients, sums, params)
            return outcome.terms, outcome.choices

        def terms_of(micro: Micro, index: Array) -> Terms:
            _, outcome = differentiable(params, micro, index)
            return outcome.terms

        terms, choices = _sum_over_micro_batches(add, terms_of, inputs, accumulation)
        grads = jax.tree.map(jax.freeze, sums)
        if objective.is_by_row:
            grads = sum_over_replicas(grads, stored, settings.precision.reduce)
    weight = _divisor(terms.weight)
    return terms, choices, jax.tree.map(lambda g, p: (g / weight).astype(p.dtype), grads, stored)


@dataclass(frozen=True)
class _Differentiable:
    """The sum to minimise, as a function of parameters, a micro-batch and its index."""

    graph: nnx.GraphDef[Any]
    rngs: nnx.State
    frozen: nnx.State
    objective: Objective
    key: Array
    record: bool

    def differentiate(
        self, params: nnx.State, micro: Micro, index: Array
    ) -> tuple[_Outcome, Callable[..., nnx.State]]:
        """Returns the outcome, and a function that returns the gradients or adds them to `refs`."""
        total, backward, outcome = jax.vjp(
            partial(self, micro=micro, index=index), params, has_aux=True
        )

        def gradients(*refs: nnx.State) -> nnx.State:
            compute = backward.with_refs(*refs) if refs else backward  # type: ignore[attr-defined]
            (grads,) = compute(jnp.ones_like(total))
            return grads

        return outcome, gradients

    def __call__(self, params: nnx.State, micro: Micro, index: Array) -> tuple[Array, _Outcome]:
        key = jax.random.fold_in(self.key, index)
        # A copy, because the frozen variables belong to the outer trace.
        rngs = rng_state(self.rngs, key)
        model: Any = nnx.merge(self.graph, params, rngs, self.frozen, copy=True)
        terms, choices = self.objective.terms(
            model, micro, key, step_key=self.key, record=self.record
        )
        total = terms.loss if terms.objective is None else terms.objective
        changed: nnx.State = nnx.State({})
        if not self.objective.is_by_row:
            changed = changeable(model, self.frozen)
        return total, _Outcome(replace(terms, objective=None), choices, changed)


def _divisor(count: Array) -> Array:
    # NaN for a batch of prompts or padding alone, or a weight that is not finite: the loss is NaN,
    # so the step is skipped. XLA computes a quotient once, and would compute a condition again in
    # the update of each parameter.
    return jnp.where(jnp.isfinite(count) & (count != 0), count, jnp.nan)


# A second tree of gradients would not fit where accumulation is needed most. So each backward pass
# adds to the sums block by block, and holds the gradients of one block at a time; adding after the
# pass would hold the gradients of all blocks. The sums are mutable arrays: JAX carries them through
# the scan over blocks and updates them in place.


def _no_gradients(params: nnx.State, precision: Precision) -> nnx.State:
    # Sums in the dtype of a 16-bit parameter would lose digits.
    def zeros(param: Array) -> jax.Ref:
        return jax.new_ref(jnp.zeros_like(param, dtype=precision.sum_dtype(param.dtype)))

    return jax.tree.map(zeros, params)


def _add_gradients(
    gradients: Callable[[nnx.State], object], sums: nnx.State, params: nnx.State
) -> None:
    # JAX adds a gradient only to a sum of the same dtype. For a leaf that is not a mutable array,
    # such as the parameter itself, JAX returns the gradient, which is added here.
    def place(total: jax.Ref, param: Array) -> object:
        return total if total.dtype == param.dtype else param

    returned = jax.tree.leaves(gradients(jax.tree.map(place, sums, params)))
    pairs = zip(jax.tree.leaves(sums), jax.tree.leaves(params), strict=True)
    wider = [total for total, param in pairs if total.dtype != param.dtype]
    for total, grad in zip(wider, returned, strict=True):
        total[...] += grad.astype(total.dtype)


def _sum_over_micro_batches(
    fn: Callable[[Any, Array], tuple[Terms, Any]],
    terms_of: Callable[[Any, Array], Terms],
    inputs: Any,
    count: int,
) -> tuple[Terms, Any]:
    # Sums the first result of `fn`, which takes a micro-batch of `inputs [B, ...]` and its number;
    # concatenates the second, which is per row. A trace of `terms_of` gives the shapes of the sums.
    def add(sums: Terms, micro: Any) -> tuple[Terms, Any]:
        terms, per_row = fn(*micro)
        return jax.tree.map(jnp.add, sums, terms), per_row

    first = jax.tree.map(lambda array: array[: len(array) // count], inputs)
    shapes = jax.eval_shape(terms_of, first, jnp.zeros((), jnp.int32))
    zeros = jax.tree.map(lambda term: jnp.zeros(term.shape, term.dtype), shapes)
    split = jax.tree.map(lambda array: _split_rows(array, count), inputs)
    sums, per_row = jax.lax.scan(add, zeros, (split, jnp.arange(count)))
    return sums, jax.tree.map(_join_rows, per_row)


def _skip_if_useless(
    new: nnx.State, old: nnx.State, finite: Array, has_weight: Array, skips_allowed: int
) -> tuple[Any, Array]:
    # Returns the old state if the step is useless, and the number of non-finite steps in a row.
    #
    # A step without weight has no gradient, but momentum and decay would still move the parameters.
    # `_divisor` makes its loss NaN, so it is not finite; `has_weight` keeps it out of the count.
    #
    # The loss and the gradient norm are known before the update, so XLA updates in place. Selecting
    # by the norm of the new parameters would keep both states in memory (Llama 3 70B over tp 8: 176
    # instead of 150 GB). With finite gradients, only an absurd learning rate makes a non-finite
    # update, and the loop ends such a run before it saves.
    #
    # After too many non-finite steps, no further step changes the state: the host reads results one
    # step late, and saves the state that it then finds.
    before = jnp.asarray(old["skipped"][...])
    halted = before > skips_allowed
    counted = jnp.where(finite, 0, before + 1)
    skipped = jnp.where(halted | ~has_weight, before, counted)
    selected: Any = jax.tree.map(lambda n, o: jnp.where(finite & ~halted, n, o), new, old)
    selected["skipped"] = selected["skipped"].replace(skipped)
    return selected, skipped


def _norms(groups: tuple[str, ...], norm: Norm, name: str, state: nnx.State) -> dict[str, Array]:
    # Returns the norm of all variables, and a norm `name/group` for each pattern; in float32.
    variables = named_variables(state)
    parts = {name: [*variables.values()]}
    for group in groups:
        parts[f"{name}/{group}"] = [variables[path] for path in variables if matches(group, path)]
    with jax.named_scope(name):
        return {key: norm(part) for key, part in parts.items()}


def _norm(variables: Sequence[Variable]) -> Array:
    return optax.tree.norm([variable[...].astype(jnp.float32) for variable in variables])


def _norm_by_one_sum(variables: Sequence[Variable]) -> Array:
    # One all-reduce for all arrays. In a model without stacks of layers, the compiler would reduce
    # each array by itself.
    specs = tuple(map(spec_of, variables))

    def squares(*shards: Array) -> Array:
        total = vary_everywhere(jnp.zeros((), jnp.float32))
        for shard, spec in zip(shards, specs, strict=True):
            copies = axis_size(*set(AXES).difference(*map(axes_of, spec)))
            total += vary_everywhere(jnp.sum(jnp.square(shard.astype(jnp.float32))) / copies)
        return all_reduce(total, *AXES)

    sum_of_squares = device_view(squares, NORM, specs, PartitionSpec())
    return jnp.sqrt(sum_of_squares(*(variable[...] for variable in variables)))


def _checksums(state: nnx.State) -> Array:
    variables = named_variables(state).values()
    return device_checksums([v[...] for v in variables], tuple(map(spec_of, variables)))


def make_eval_step(settings: StepSettings, blueprint: Blueprint) -> Wrapped:
    """Returns a jitted `state, batch, number of the batch -> terms`, summed over the batch.

    It computes the training step's micro-batches, so it needs no more memory than the training
    step. Dropout is off; for a user's loss the model is in the mode of `nnx.Module.eval()`.
    """
    accumulation = settings.accumulation
    objective = settings.objective

    def evaluation(state: nnx.State, batch: Batch, number: Array | int = 0) -> Terms:
        def terms_of(micro: Batch, index: Array) -> Terms:
            key = jax.random.fold_in(jax.random.key(settings.seed), number * accumulation + index)
            model: Any = blueprint.merge(state, key).model
            if objective.is_by_row:
                # A `BatchNorm` in an own decoder still reads its batch: `_Differentiable` keeps no
                # changed variables of such an objective, so there are no averages to read.
                model.set_attributes(deterministic=True, raise_if_not_found=False)
            else:
                model.eval()
            return call(objective, model, micro, key)

        if accumulation == 1:
            return terms_of(batch, jnp.zeros((), jnp.int32))
        sums, _ = _sum_over_micro_batches(
            lambda micro, index: (terms_of(micro, index), None), terms_of, batch, accumulation
        )
        return sums

    return jax.jit(evaluation, out_shardings=_replicated(blueprint))


def fetch(output: StepOutput) -> dict[str, float]:
    """Waits for a step and returns its metrics."""
    scalars = output.scalars
    values = np.asarray(scalars.values)[: len(scalars.names)]
    return dict(zip(scalars.names, values.tolist(), strict=True))


def trace_step(
    settings: StepSettings, blueprint: Blueprint, batch: Mapping[str, Any], **options: Any
) -> Traced:
    """Traces the training step on its mesh, which may be abstract.

    `batch` is abstract; the options are of `make_train_step`.
    """
    with jax.set_mesh(blueprint.mesh):
        step = make_train_step(settings, blueprint, **options)
        return step.trace(blueprint.sharded, batch)


def compiler_options(
    model: ModelConfig, platform: str, *, deterministic: bool = False
) -> dict[str, bool | str]:
    """Returns the compiler options of the step."""
    options: dict[str, bool | str] = {}
    if platform in ("cuda", "rocm"):
        # Verification needs bitwise reproducible programs, and a user may want them. Programs for
        # CPUs are reproducible (tested). XLA of jax 0.10.2 and 0.12 compiles the step with this
        # option for an H100, but no GPU has run it. It is unknown whether cuDNN's attention
        # respects the option, and whether NCCL always sums in the same order. If not, copies differ
        # by rounding, and verification blames devices that are not at fault.
        if deterministic:
            options["xla_gpu_exclude_nondeterministic_ops"] = True
        # Otherwise XLA also times Triton's tiles, which are 100 times slower than cuBLAS, and
        # Triton's products cannot add to the sum of a ring.
        if model.precision.matmul == "float8" or model.overlap == "ring":
            options["xla_gpu_enable_triton_gemm"] = False
    return options


def dropout_key(seed: int, updates: Array | int) -> Array:
    """Returns the random key after `updates` updates."""
    return jax.random.fold_in(jax.random.key(seed), updates)


def _split_rows(array: Array, steps: int) -> Array:
    # [B, ...] -> [steps, B / steps, ...]. Each device splits its own rows, so no row moves.
    devices = batch_parts(mesh_sizes(jax.sharding.get_abstract_mesh()))
    row_shape = array.shape[1:]
    micro = array.reshape(devices, steps, -1, *row_shape).swapaxes(0, 1)
    return constrain(micro.reshape(steps, -1, *row_shape), PartitionSpec(None, *batch_spec()))


def _join_rows(micro: Array) -> Array:
    # The inverse of `_split_rows`.
    devices = batch_parts(mesh_sizes(jax.sharding.get_abstract_mesh()))
    steps, _, *row_shape = micro.shape
    rows = micro.reshape(steps, devices, -1, *row_shape).swapaxes(0, 1)
    return rows.reshape(-1, *row_shape)


def _replicated(blueprint: Blueprint) -> NamedSharding:
    return NamedSharding(blueprint.mesh, PartitionSpec())
