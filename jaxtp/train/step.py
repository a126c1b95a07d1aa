"""The programs of a run: training step and evaluation.

A step computes the summed loss and its gradient by micro-batch (`loss_and_grads`), divides by the
number of tokens, applies the Optax chain (`sharded_optimizer.py`: clipping, rule, decay and
learning rate of `optimizer.py`), moves the selection biases of experts, and selects the old state
if the step is not finite, or has no weight (`_skip_if_useless`).
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
from jax.stages import Traced
from jax.tree_util import PyTreeDef

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
from jaxtp.data.loader import Batch, abstract_batch
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.balance import Routing
from jaxtp.layers.parameter import Precision, mark_unreduced, spec_of, sum_over_replicas
from jaxtp.mesh import AXES, axes_of, batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder, LossTerms
from jaxtp.train import optimizer as optimizers
from jaxtp.train import user_loss
from jaxtp.train.config import OptimizerConfig, TrainConfig
from jaxtp.train.state import OPTIMIZER_SCOPE, STORED, Blueprint, rng_state
from jaxtp.train.stopping import abstract_flags
from jaxtp.train.task import Loss, Task


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalars:
    """Metrics of a step in one replicated array.

    It also has the maximum of the flags of all devices, if there are flags.
    """

    names: tuple[str, ...] = field(metadata={"static": True})
    # A float32 for each name, then the maximum of the flags: it has no name that a metric may have
    # too
    values: Array

    @classmethod
    def of(cls, named: Mapping[str, Array], flags: Array | None = None) -> "Scalars":
        """Stacks scalars, and the maximum of `flags`."""
        maximum = [] if flags is None else [jnp.max(flags)]
        return cls(
            tuple(named),
            jnp.stack([scalar.astype(jnp.float32) for scalar in [*named.values(), *maximum]]),
        )

    @property
    def flag(self) -> int:
        """The maximum of the flags, or 0; waits for the step."""
        rest = np.asarray(self.values)[len(self.names) :]
        return int(rest.max(initial=0))


TrainStep = Callable[..., tuple[Any, ...]]  # See `make_train_step` and `on_leaves`.
EvalStep = jax.stages.Wrapped  # See `make_eval_step`.
JittedTrainStep = Any  # A `TrainStep` from `jax.jit`, which can also be traced and lowered.

Norm = Callable[[Sequence[Variable]], Array]
NORM = "norm"  # Name in profiles of the sum of squares over devices

Choices = list[tuple[Array, Array] | None] | None
"""For each kind of block the router's choices and their margin, if they are recorded."""

Experts = tuple[Array | None, ...] | None
"""For each kind of block the experts to use for each token, `[B, layers, T, k]`, instead of the
router's choices."""


class Replay(NamedTuple):
    """Settings of `jaxtp check`.

    A step records the choices of its routers, or takes those from another mesh.
    """

    record: bool = False
    experts: Experts = None


def make_train_step(
    config: TrainConfig,
    blueprint: Blueprint,
    *,
    with_checksums: bool = False,
    with_choices: bool = False,
    with_grads: bool = False,
    task: Task = Task(),
) -> JittedTrainStep:
    """Returns the jitted training step `state, batch -> state, scalars, ...`.

    It donates the state.

    It takes `stop`, the flags of all devices (`stopping.py`), and `experts`, which replace the
    routers' choices, by keyword: as columns of the batch they would hide a user's columns of these
    names.

    The scalars are `loss`, the mean over the batch's `loss_tokens` valid tokens; `grad_norm`, the
    global L2 norm before clipping; `learning_rate`, if known; `param_norm` after the update;
    `skipped`, the number of non-finite steps in a row; norms such as `grad_norm/blocks.mlp.*` for
    each of `metrics.norm_groups`; the balance of experts; and the metrics of a user's loss. The
    state stays as it is if `loss` or `grad_norm` is not finite, or `loss_tokens` is 0; if only
    `param_norm` is not finite, the update overflowed.

    Args:
      with_checksums: also return the gradients' `device_checksums`, after reduction and before
        clipping, in the order of `trained_parameters`.
      with_choices: also return, for each kind of block, the router's choices `[B, layers, T, k]`
        and their margin `[B, layers, T]`, tokens in device order; None without experts.
      with_grads: also return the gradients, last, in the parameters' shardings.
      task: parts that replace the decoder's loss and the optimizer of `config`.
    """
    groups = config.metrics.norm_groups
    norm = _norm if blueprint.is_decoder and task.loss is None else _norm_by_one_sum
    is_own = task.optimizer is not None and not isinstance(task.optimizer, OptimizerConfig)
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)

    def step(
        state: nnx.State, batch: Batch, *, stop: Array | None = None, experts: Experts = None
    ) -> tuple[Any, ...]:
        train_state = blueprint.merge(state)
        model: Any = train_state.model
        num_updates = train_state.optimizer.step[...]

        key = dropout_key(config.run.seed, num_updates)
        replay = Replay(with_choices, experts)
        terms, choices, grads = loss_and_grads(model, batch, config, key, task.loss, replay=replay)
        mean = terms.loss / _divisor(terms.count)

        norms = _norms("grad_norm", grads, groups, norm)
        others: list[Any] = [_checksums(grads)] if with_checksums else []
        others += [choices] if with_choices else []
        others += [grads] if with_grads else []

        with jax.named_scope(OPTIMIZER_SCOPE):
            train_state.optimizer.update(model, grads, mean)
        if terms.balance is not None and not blueprint.config.lora.rank:
            model.move_selection_biases(terms.balance, config.train.selection_bias_rate)

        finite = jnp.isfinite(mean) & jnp.isfinite(norms["grad_norm"])
        updated = nnx.state(train_state, STORED)
        allowed = config.train.skips_allowed
        new, skipped = _skip_if_useless(updated, state, finite, terms.count != 0, allowed)

        norms |= _norms("param_norm", nnx.filter_state(new["model"], nnx.Param), groups, norm)
        scalars = {"loss": mean, "loss_tokens": terms.count}
        own_rate = (
            optimizers.current_learning_rate(train_state.optimizer.optax_state())
            if is_own
            else None
        )
        if (rate := own_rate if is_own else schedule(num_updates)) is not None:
            scalars["learning_rate"] = jnp.asarray(rate)
        scalars |= {**norms, "skipped": skipped}
        if terms.balance is not None:
            scalars |= terms.balance.scalars(terms.count)
        scalars |= {name: total / weight for name, (total, weight) in terms.metrics.items()}
        return new, Scalars.of(scalars, stop), *others

    shardings: list[object] = [blueprint.shardings, _replicated(blueprint)]
    shardings += [_replicated(blueprint)] if with_checksums else []
    shardings += [None] if with_choices else []
    shardings += [nnx.filter_state(blueprint.shardings["model"], nnx.Param)] if with_grads else []
    return jax.jit(step, donate_argnums=0, out_shardings=tuple(shardings))


def on_leaves(step: JittedTrainStep, blueprint: Blueprint, tree: PyTreeDef) -> JittedTrainStep:
    """Returns a training step from and to the leaves of a state.

    To flatten a state takes as long as a tiny step.
    """

    def flat(
        leaves: Sequence[Array], batch: Batch, *, stop: Array | None = None
    ) -> tuple[object, object]:
        new, *others = step.__wrapped__(jax.tree.unflatten(tree, leaves), batch, stop=stop)
        return jax.tree.leaves(new), others

    return jax.jit(
        flat,
        donate_argnums=0,
        out_shardings=(jax.tree.leaves(blueprint.shardings), _replicated(blueprint)),
    )


def loss_and_grads(
    model: Any,
    batch: Batch,
    config: TrainConfig,
    key: Array,
    loss: Loss | None = None,
    *,
    replay: Replay = Replay(),
) -> tuple[LossTerms, Choices, nnx.State]:
    """Returns a batch's loss terms, the routers' choices, and the gradient of the mean loss.

    Choices are returned if `replay` asks for them.

    The mean is over the batch's valid tokens (`count`, or a user's weight), not over means of
    micro-batches. With accumulation, each replica sums its own gradients of jaxtp's layers, and one
    reduction follows (`layers/parameter.py`).

    Args:
      model: a `Decoder`, unless `loss` is given. A user's loss may change variables that are not
        parameters, such as the statistics of `nnx.BatchNorm`; they are updated in place.
    """
    accumulation = config.train.accumulation
    precision = config.model.precision
    graph, stored, rngs, frozen = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]
    unreduced = accumulation > 1 and loss is None
    params = mark_unreduced(stored) if unreduced else stored

    def objective(
        params: nnx.State, micro: Batch, experts: Experts, rows: Array, index: Array
    ) -> tuple[Array, tuple[LossTerms, Choices, nnx.State]]:
        # The frozen ones belong to the outer trace.
        if loss is None:
            merged = nnx.merge(graph, params, rngs, frozen, copy=True)
            keys = row_keys(key, rows) if merged.config.dropout else None
            total, terms, choices = _decoder_objective(
                merged, micro, config, keys, Replay(replay.record, experts)
            )
            return total, (terms, choices, nnx.State({}))
        micro_key = jax.random.fold_in(key, index)
        merged = nnx.merge(graph, params, rng_state(rngs, micro_key), frozen, copy=True)
        terms = user_loss.call(loss, merged, micro, micro_key)
        return terms.loss, (
            terms,
            None,
            user_loss.changeable(merged, frozen) if accumulation == 1 else nnx.State({}),
        )

    def differentiate(
        micro: tuple[Batch, Experts, Array], index: Array
    ) -> tuple[LossTerms, Any, Callable[..., nnx.State]]:
        # Also returns what a micro-batch has for each row, and a function that computes the
        # gradients, into `refs` or as its result.
        rows_of_batch, experts, rows = micro
        total_of = partial(objective, micro=rows_of_batch, experts=experts, rows=rows, index=index)
        total, backward, (terms, *per_row) = jax.vjp(total_of, params, has_aux=True)

        def gradients(*refs: nnx.State) -> nnx.State:
            compute = backward.with_refs(*refs) if refs else backward  # type: ignore[attr-defined]
            (grads,) = compute(jnp.ones_like(total))
            return grads

        return terms, per_row, gradients

    inputs = batch, replay.experts, jnp.arange(len(jax.tree.leaves(batch)[0]))
    if accumulation == 1:
        terms, (choices, changed), gradients = differentiate(inputs, jnp.zeros((), jnp.int32))
        grads = gradients()
    else:
        sums = _no_gradients(params, precision)

        def add(micro: tuple[Batch, Experts, Array], index: Array) -> tuple[LossTerms, Any]:
            terms, per_row, gradients = differentiate(micro, index)
            _add_gradients(gradients, sums, params)
            return terms, per_row

        def terms_of(micro: tuple[Batch, Experts, Array], index: Array) -> LossTerms:
            _, (terms, *_) = objective(params, *micro, index)
            return terms

        no_terms = model.no_terms() if loss is None else _no_terms(terms_of, inputs, accumulation)
        terms, (choices, changed) = _sum_over_micro_batches(add, inputs, accumulation, no_terms)
        grads = jax.tree.map(jax.freeze, sums)
    if unreduced:
        grads = sum_over_replicas(grads, stored, precision.reduce)
    nnx.update(model, changed)
    count = _divisor(terms.count)
    return terms, choices, jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, stored)


def _divisor(count: Array) -> Array:
    # NaN for a batch of prompts or padding alone, or a weight that is not finite: the loss is NaN,
    # so the step is skipped. XLA computes a quotient once, and would compute a condition again in
    # the update of each parameter.
    return jnp.where(jnp.isfinite(count) & (count != 0), count, jnp.nan)


def _decoder_objective(
    model: Decoder, batch: Batch, config: TrainConfig, dropout_keys: Array | None, replay: Replay
) -> tuple[Array, LossTerms, Choices]:
    sequences = model.sequences(batch["inputs"], batch.get(SEGMENTS), config.mesh.context)
    terms, routings = model.loss_terms(
        batch["inputs"],
        batch["labels"],
        replace(sequences, record=replay.record),
        z_loss=config.train.z_loss,
        dropout_keys=dropout_keys,
        experts=replay.experts,
    )
    choices = [_choices(routing) for routing in routings] if replay.record else None
    return terms.objective(config.train.balance_loss, config.train.router_z_loss), terms, choices


# A second tree of gradients would not fit where accumulation is needed most. So each backward pass
# adds to the sums block by block, and holds the gradients of one block at a time; adding after the
# pass would hold the gradients of all blocks. The sums are mutable arrays: JAX carries them through
# the scan over blocks and updates them in place.


def _no_gradients(params: nnx.State, precision: Precision) -> nnx.State:
    # Summing in a 16-bit parameter's own dtype would lose digits.
    def zeros(param: Array) -> jax.Ref:
        return jax.new_ref(jnp.zeros_like(param, dtype=precision.sum_dtype(param.dtype)))

    return jax.tree.map(zeros, params)


def _add_gradients(
    gradients: Callable[[nnx.State], object], sums: nnx.State, params: nnx.State
) -> None:
    # JAX adds a gradient only to a sum of its own dtype. Any other leaf than a mutable array, such
    # as the parameter itself, asks it to return the gradient, which is added here.
    def place(total: jax.Ref, param: Array) -> object:
        return total if total.dtype == param.dtype else param

    returned = jax.tree.leaves(gradients(jax.tree.map(place, sums, params)))
    pairs = zip(jax.tree.leaves(sums), jax.tree.leaves(params), strict=True)
    wider = [total for total, param in pairs if total.dtype != param.dtype]
    for total, grad in zip(wider, returned, strict=True):
        total[...] += grad.astype(total.dtype)


def _no_terms(
    terms_of: Callable[[Any, Array], LossTerms], inputs: object, count: int
) -> LossTerms | None:
    # Zeros for the terms of a user's loss. One micro-batch needs none, and is not traced twice.
    if count == 1:
        return None
    micro = jax.tree.map(lambda array: array[: len(array) // count], inputs)
    terms = jax.eval_shape(terms_of, micro, jnp.zeros((), jnp.int32))
    return jax.tree.map(lambda term: jnp.zeros(term.shape, term.dtype), terms)


def _sum_over_micro_batches(
    fn: Callable[[Any, Array], tuple[Any, Any]], inputs: Any, count: int, zeros: Any
) -> Any:
    # Sums the first result of `fn`, which takes a micro-batch of `inputs [B, ...]` and its number;
    # concatenates the second, which is per row.
    if count == 1:
        return fn(inputs, jnp.zeros((), jnp.int32))

    def add(sums: Any, micro: Any) -> tuple[Any, Any]:
        more, per_row = fn(*micro)
        return jax.tree.map(jnp.add, sums, more), per_row

    split = jax.tree.map(lambda array: _split_rows(array, count), inputs)
    sums, per_row = jax.lax.scan(add, zeros, (split, jnp.arange(count)))
    return sums, jax.tree.map(_join_rows, per_row)


def _skip_if_useless(
    new: nnx.State, old: nnx.State, finite: Array, has_weight: Array, max_skipped: int
) -> tuple[nnx.State, Array]:
    # Also returns the number of non-finite steps in a row; too many of them freeze the state. A
    # step without weight has no gradient, and would move the parameters by old momentum and by
    # decay; it does not count. Loss and gradient norm are known before the update, so XLA updates
    # in place. Selecting by the new parameters' norm would keep both states in memory (Llama 3 70B
    # over tp 8: 176 instead of 150 GB). With finite gradients only an absurd learning rate makes a
    # non-finite update; the loop ends such a run before it saves. The frozen state is for the host,
    # which reads one step behind and still finds it untouched.
    before = jnp.asarray(old["skipped"][...])
    halted = before > max_skipped
    counted = jnp.where(finite, 0, before + 1)
    skipped = jnp.where(halted | ~has_weight, before, counted)
    selected: Any = jax.tree.map(lambda n, o: jnp.where(finite & ~halted, n, o), new, old)
    selected["skipped"] = selected["skipped"].replace(skipped)
    return selected, skipped


def _norms(name: str, state: nnx.State, groups: tuple[str, ...], norm: Norm) -> dict[str, Array]:
    # Also `name/group` for each pattern of paths; in float32.
    variables = named_variables(state)
    parts = {name: [*variables.values()]}
    for group in groups:
        parts[f"{name}/{group}"] = [
            each for path, each in variables.items() if matches(group, path)
        ]
    with jax.named_scope(name):
        return {key: norm(part) for key, part in parts.items()}


def _norm(variables: Sequence[Variable]) -> Array:
    return optax.tree.norm([variable[...].astype(jnp.float32) for variable in variables])


def _norm_by_one_sum(variables: Sequence[Variable]) -> Array:
    # One all-reduce. The compiler would sum each array of a model without stacks by itself.
    specs = tuple(map(spec_of, variables))

    def squares(*shards: Array) -> Array:
        total = vary_everywhere(jnp.zeros((), jnp.float32))
        for shard, spec in zip(shards, specs, strict=True):
            copies = axis_size(*set(AXES).difference(*map(axes_of, spec)))
            total += vary_everywhere(jnp.sum(jnp.square(shard.astype(jnp.float32))) / copies)
        return all_reduce(total, *AXES)

    return jnp.sqrt(
        device_view(squares, NORM, specs, PartitionSpec())(
            *(variable[...] for variable in variables)
        )
    )


def _checksums(state: nnx.State) -> Array:
    variables = named_variables(state).values()
    return device_checksums(
        [variable[...] for variable in variables], tuple(spec_of(each) for each in variables)
    )


def make_eval_step(config: TrainConfig, blueprint: Blueprint, loss: Loss | None = None) -> EvalStep:
    """Returns a jitted `state, batch, number of the batch -> terms`, summed over the batch.

    With the training step's micro-batches it needs no more memory. A user's model is as after
    `nnx.Module.eval()`.
    """

    def step(state: nnx.State, batch: Batch, number: Array | int = 0) -> LossTerms:
        def terms_of(micro: Batch, index: Array) -> LossTerms:
            key = jax.random.fold_in(
                jax.random.key(config.run.seed), number * config.train.accumulation + index
            )
            model: Any = blueprint.merge(state, key).model
            if loss is not None:
                model.eval()
                return user_loss.call(loss, model, micro, key)
            segments = micro.get(SEGMENTS)
            context = config.mesh.context
            total, count = model.loss(
                micro["inputs"], micro["labels"], segments_BT=segments, context=context
            )
            return LossTerms(total, count, None)

        def micro_fn(micro: Batch, index: Array) -> tuple[LossTerms, None]:
            return terms_of(micro, index), None

        no_terms = _no_terms(terms_of, batch, config.train.accumulation)
        sums, _ = _sum_over_micro_batches(micro_fn, batch, config.train.accumulation, no_terms)
        return sums

    return jax.jit(step, out_shardings=_replicated(blueprint))


def fetch(scalars: Scalars) -> dict[str, float]:
    """Waits for a step and returns its metrics."""
    values = np.asarray(scalars.values)[: len(scalars.names)]
    return dict(zip(scalars.names, values.tolist(), strict=True))


def trace_step(
    config: TrainConfig,
    blueprint: Blueprint,
    step: JittedTrainStep | None = None,
    state: nnx.State | list[Array] | None = None,
    batch: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> Traced:
    """Traces the training step on its mesh, which may be abstract.

    Args:
      batch: the abstract batch, by default rows of tokens.
      step: from `make_train_step`, if already made.
      state: what the step takes; the abstract state if None.
    """
    data = config.data
    mesh = blueprint.mesh
    if batch is None:
        batch = abstract_batch(
            mesh, data.global_batch_size, data.sequence_length, packed=data.packed
        )
    step = step or make_train_step(config, blueprint)
    with jax.set_mesh(mesh):
        return step.trace(
            blueprint.sharded if state is None else state, batch, **abstract_flags(mesh)
        )


def compiler_options(config: TrainConfig, platform: str) -> dict[str, bool | str]:
    """Returns the compiler options of the step."""
    options: dict[str, bool | str] = {}
    if platform in ("cuda", "rocm"):
        # Verification needs bitwise reproducible programs, and a user may want them. On CPUs they
        # are (tested). XLA of jax 0.10.2 and 0.12 compiles the step with this for an H100, but no
        # GPU has run it. Not tried: whether cuDNN's attention respects it, and whether NCCL always
        # sums in the same order; otherwise copies differ by rounding, which is reported although no
        # device is at fault.
        if config.train.excludes_nondeterministic:
            options["xla_gpu_exclude_nondeterministic_ops"] = True
        # Else XLA times Triton's tiles, 100 times slower than cuBLAS, and Triton's products add to
        # no ring's sum.
        if config.model.precision.matmul == "float8" or config.model.overlap == "ring":
            options["xla_gpu_enable_triton_gemm"] = False
    return options


def dropout_key(seed: int, updates: Array | int) -> Array:
    """Returns the random key after `updates` updates."""
    return jax.random.fold_in(jax.random.key(seed), updates)


def row_keys(key: Array, rows: Array) -> Array:
    """Returns a random key per row index `[B]`."""
    return jax.vmap(partial(jax.random.fold_in, key))(rows)


def _choices(routing: Routing | None) -> tuple[Array, Array] | None:
    if routing is None or routing.experts is None or routing.margin is None:
        return None
    return routing.experts.swapaxes(0, 1), routing.margin.swapaxes(0, 1)


def _split_rows(array: Array, steps: int) -> Array:
    # [B, ...] -> [steps, B / steps, ...]: each device splits its own rows, so nothing moves.
    devices = batch_parts(mesh_sizes(jax.sharding.get_abstract_mesh()))
    rest = array.shape[1:]
    micro = array.reshape(devices, steps, -1, *rest).swapaxes(0, 1)
    return constrain(micro.reshape(steps, -1, *rest), PartitionSpec(None, *batch_spec()))


def _join_rows(micro: Array) -> Array:
    # The inverse of `_split_rows`.
    devices = batch_parts(mesh_sizes(jax.sharding.get_abstract_mesh()))
    rest = micro.shape[2:]
    return micro.reshape(micro.shape[0], devices, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)


def _replicated(blueprint: Blueprint) -> NamedSharding:
    return NamedSharding(blueprint.mesh, PartitionSpec())
