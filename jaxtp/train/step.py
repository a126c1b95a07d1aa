"""The programs of a run: training step and evaluation.

A step computes the summed loss and its gradient by micro-batch (`loss_and_grads`), divides by the number of tokens,
applies the Optax chain (`sharded_optimizer.py`: clipping, rule, decay and learning rate of `optimizer.py`),
moves the selection biases of experts, and selects the old state if the step is not finite (`_skip_if_nonfinite`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Traced

from jaxtp.checkpoint.checksum import device_checksums
from jaxtp.checkpoint.logical import named_variables
from jaxtp.collectives import batch_spec, constrain
from jaxtp.data.loader import Batch, abstract_batch
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.balance import Routing
from jaxtp.layers.parameter import mark_unreduced, spec_of, sum_over_replicas
from jaxtp.layers.sequence_parallel import Context
from jaxtp.mesh import batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder, LossTerms
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import OPTIMIZER_SCOPE, Blueprint
from jaxtp.train.stopping import STOP, abstract_flags, stop_requested


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalars:
    """Metrics of a step in one replicated array."""

    names: tuple[str, ...] = field(metadata={"static": True})
    values: Array  # a float32 for each name

    @classmethod
    def of(cls, named: Mapping[str, Array]) -> "Scalars":
        """Stacks scalars."""
        return cls(tuple(named), jnp.stack([scalar.astype(jnp.float32) for scalar in named.values()]))


TrainStep = Callable[[nnx.State, Batch], tuple[Any, ...]]
"""See `make_train_step`."""
EvalStep = Callable[[nnx.State, Batch], tuple[Array, Array]]
JittedTrainStep = Any
"""A `TrainStep` from `jax.jit`, which can also be traced and lowered."""

Choices = list[tuple[Array, Array] | None] | None
"""For each kind of block the router's choices and their margin, if they are recorded."""

Loss = Callable[[Any, Batch], tuple[Array, Array]]
"""Takes a model and a batch; returns the summed loss of its labels and their number, as float32 scalars."""

EXPERTS = "experts"
"""Key of a batch in `jaxtp check`: for each kind of block the experts of each token `[B, layers, T, k]`, which replace
the router's choice."""


def make_train_step(
    config: TrainConfig,
    blueprint: Blueprint,
    *,
    with_checksums: bool = False,
    with_choices: bool = False,
    with_grads: bool = False,
    loss: Loss | None = None,
) -> JittedTrainStep:
    """Returns the jitted training step `state, batch -> state, scalars, ...`, which donates the state.

    The scalars are `loss`, the mean over the batch's `loss_tokens` valid tokens; `grad_norm`, the global L2 norm before
    clipping; `learning_rate`; `param_norm` after the update; `skipped`, the number of non-finite steps in a row; norms
    such as `grad_norm/blocks.mlp.*` for each of `metrics.norm_groups`; and the balance of experts. If `loss` or
    `grad_norm` is not finite, the state stays as it is; if only `param_norm` is not finite, the update overflowed.

    Args:
      with_checksums: also return the gradients' `device_checksums`, after reduction and before clipping, in the order
        of `trained_parameters`.
      with_choices: also return, for each kind of block, the router's choices `[B, layers, T, k]` and their margin `[B,
        layers, T]`, tokens in device order; None without experts.
      with_grads: also return the gradients, last, in the parameters' shardings.
      loss: replaces the decoder's.
    """
    groups = config.metrics.norm_groups
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)

    def step(state: nnx.State, batch: Batch) -> tuple[Any, ...]:
        train_state = nnx.merge(blueprint.graph, state, copy=True)  # else it would share the state's variables
        model: Any = train_state.model  # a `Decoder`, unless `loss` is given
        num_updates = train_state.optimizer.step[...]

        arrays = {name: array for name, array in batch.items() if name != STOP}
        key = dropout_key(config.run.seed, num_updates)
        terms, choices, grads = loss_and_grads(model, arrays, config, key, loss, record=with_choices)
        mean = terms.loss / terms.count

        norms = _norms("grad_norm", grads, groups)
        others: list[Any] = [_checksums(grads)] if with_checksums else []
        others += [choices] if with_choices else []
        others += [grads] if with_grads else []

        with jax.named_scope(OPTIMIZER_SCOPE):
            train_state.optimizer.update(model, grads, mean)
        if terms.balance is not None and not blueprint.config.lora.rank:
            model.move_selection_biases(terms.balance, config.train.selection_bias_rate)

        finite = jnp.isfinite(mean) & jnp.isfinite(norms["grad_norm"])
        new, skipped = _skip_if_nonfinite(nnx.state(train_state), state, finite, config.train.skips_allowed)

        norms |= _norms("param_norm", nnx.filter_state(new["model"], nnx.Param), groups)
        rate = jnp.asarray(schedule(num_updates))
        scalars = {"loss": mean, "loss_tokens": terms.count, "learning_rate": rate, **norms, "skipped": skipped}
        if terms.balance is not None:
            scalars |= terms.balance.scalars(terms.count)
        return new, Scalars.of(scalars | stop_requested(batch)), *others

    shardings: list[object] = [blueprint.shardings, _replicated(blueprint)]
    shardings += [_replicated(blueprint)] if with_checksums else []
    shardings += [None] if with_choices else []
    shardings += [nnx.filter_state(blueprint.shardings["model"], nnx.Param)] if with_grads else []
    return jax.jit(step, donate_argnums=0, out_shardings=tuple(shardings))


def loss_and_grads(
    model: Any, batch: Batch, config: TrainConfig, key: Array, loss: Loss | None = None, *, record: bool = False
) -> tuple[LossTerms, Choices, nnx.State]:
    """Returns the loss terms of a batch, the routers' choices if `record`, and the gradient of the mean loss.

    The mean is over the batch's valid tokens (`count`, at least 1), not over means of micro-batches. With accumulation,
    each replica sums its own gradients, and one reduction follows (`layers/parameter.py`).

    Args:
      model: a `Decoder`, unless `loss` is given.
    """
    accumulation, precision = config.train.accumulation, config.model.precision
    graph, stored, frozen = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    params = mark_unreduced(stored) if accumulation > 1 else stored

    def objective(params: nnx.State, micro: Batch, rows: Array) -> tuple[Array, tuple[LossTerms, Choices]]:
        merged = nnx.merge(graph, params, frozen, copy=True)  # the frozen ones belong to the outer trace
        if loss is None:
            keys = row_keys(key, rows) if merged.config.dropout else None
            return _decoder_objective(merged, micro, config, keys, record)
        terms = LossTerms(*loss(merged, micro), None)
        return terms.loss, (terms, None)

    def micro_fn(micro: tuple[Batch, Array]) -> tuple[Any, Any]:
        (_, (terms, choices)), grads = jax.value_and_grad(objective, has_aux=True)(params, *micro)
        return (terms, grads), choices

    zero = jnp.zeros((), jnp.float32)
    no_terms = model.no_terms() if loss is None else LossTerms(zero, zero, None)
    # Summing in a 16-bit parameter's own dtype would lose digits.
    no_grads = jax.tree.map(lambda param: jnp.zeros_like(param, dtype=precision.sum_dtype(param.dtype)), params)
    inputs = batch, jnp.arange(len(batch["inputs"]))
    (terms, grads), choices = _sum_over_micro_batches(micro_fn, inputs, accumulation, (no_terms, no_grads))
    if accumulation > 1:
        grads = sum_over_replicas(grads, stored, precision.reduce)
    # A batch may be all prompts or padding.
    terms = replace(terms, count=jnp.maximum(terms.count, 1))
    return terms, choices, jax.tree.map(lambda g, p: (g / terms.count).astype(p.dtype), grads, stored)


def _decoder_objective(
    model: Decoder, batch: Batch, config: TrainConfig, dropout_keys: Array | None, record: bool
) -> tuple[Array, tuple[LossTerms, Choices]]:
    sequences = model.sequences(batch["inputs"], batch.get(SEGMENTS), config.mesh.context)
    terms, routings = model.loss_terms(
        batch["inputs"],
        batch["labels"],
        replace(sequences, record=record),
        z_loss=config.train.z_loss,
        dropout_keys=dropout_keys,
        experts=batch.get(EXPERTS),  # type: ignore[arg-type]  # a pytree
    )
    choices = [_choices(routing) for routing in routings] if record else None
    return terms.objective(config.train.balance_loss, config.train.router_z_loss), (terms, choices)


def _sum_over_micro_batches(fn: Callable[[Any], tuple[Any, Any]], inputs: Any, count: int, zeros: Any) -> Any:
    # Sums the first result of `fn` over micro-batches of `inputs [B, ...]`; concatenates the second, which is per row.
    if count == 1:
        return fn(inputs)

    def add(sums: Any, micro: Any) -> tuple[Any, Any]:
        more, per_row = fn(micro)
        return jax.tree.map(jnp.add, sums, more), per_row

    sums, per_row = jax.lax.scan(add, zeros, jax.tree.map(lambda array: _split_rows(array, count), inputs))
    return sums, jax.tree.map(_join_rows, per_row)


def _skip_if_nonfinite(new: nnx.State, old: nnx.State, finite: Array, max_skipped: int) -> tuple[nnx.State, Array]:
    # Also returns the number of non-finite steps in a row; too many of them freeze the state.
    # Loss and gradient norm are known before the update, so XLA updates in place. Selecting by the new parameters' norm
    # would keep both states in memory (Llama 3 70B over tp 8: 176 instead of 150 GB). With finite gradients only an
    # absurd learning rate makes a non-finite update; the loop ends such a run before it saves. The frozen state is for
    # the host, which reads one step behind and still finds it untouched.
    before = jnp.asarray(old["skipped"][...])
    halted = before > max_skipped
    skipped = jnp.where(halted, before, jnp.where(finite, 0, before + 1))
    selected: Any = jax.tree.map(lambda n, o: jnp.where(finite & ~halted, n, o), new, old)
    selected["skipped"] = selected["skipped"].replace(skipped)
    return selected, skipped


def _norms(name: str, state: nnx.State, groups: tuple[str, ...]) -> dict[str, Array]:
    # Also `name/group` for each pattern of paths; in float32.
    state = optax.tree.cast(state, "float32")
    variables = named_variables(state)
    parts = {
        f"{name}/{group}": [v[...] for path, v in variables.items() if optimizers.matches(group, path)]
        for group in groups
    }
    with jax.named_scope(name):
        return {key: optax.tree.norm(part) for key, part in {name: state, **parts}.items()}


def _checksums(state: nnx.State) -> Array:
    variables = named_variables(state).values()
    return device_checksums([variable[...] for variable in variables], tuple(spec_of(each) for each in variables))


def make_eval_step(
    blueprint: Blueprint, micro_batches: int = 1, context: Context = "auto", loss: Loss | None = None
) -> EvalStep:
    """Returns a jitted `state, batch -> summed loss, number of valid tokens`.

    With the training step's `micro_batches` it needs no more memory.
    """

    def step(state: nnx.State, batch: Batch) -> tuple[Array, Array]:
        def loss_sum(micro: Batch) -> tuple[Array, Array]:
            model: Any = nnx.merge(blueprint.graph, state, copy=True).model
            if loss is not None:
                return loss(model, micro)
            segments = micro.get(SEGMENTS)
            return model.loss(micro["inputs"], micro["labels"], segments_BT=segments, context=context)

        sums: tuple[Array, Array]
        sums, _ = _sum_over_micro_batches(lambda micro: (loss_sum(micro), None), batch, micro_batches, (0.0, 0.0))
        return sums

    return jax.jit(step, out_shardings=_replicated(blueprint))


def fetch(scalars: Scalars) -> dict[str, float]:
    """Waits for a step and returns its metrics."""
    return dict(zip(scalars.names, np.asarray(scalars.values).tolist(), strict=True))


def trace_step(
    config: TrainConfig, blueprint: Blueprint, step: JittedTrainStep | None = None, state: nnx.State | None = None
) -> Traced:
    """Traces the training step on its mesh, which may be abstract.

    Args:
      step: from `make_train_step`, if already made.
      state: the abstract state if None.
    """
    data, mesh = config.data, blueprint.mesh
    batch = abstract_batch(mesh, data.global_batch_size, data.sequence_length, packed=data.packed) | abstract_flags(
        mesh
    )
    with jax.set_mesh(mesh):
        return (step or make_train_step(config, blueprint)).trace(blueprint.sharded if state is None else state, batch)


def compiler_options(config: TrainConfig, platform: str) -> dict[str, bool | str]:
    """Returns the compiler options of the step."""
    # Verification needs bitwise reproducible programs. On CPUs they are (tested). XLA of jax 0.10.2 and 0.12 compiles
    # the step with this option for an H100, but no GPU has run it. Not tried: whether cuDNN's attention respects the
    # option, and whether NCCL always sums in the same order; otherwise copies differ by rounding, which is reported
    # although no device is at fault.
    gpu = platform in ("cuda", "rocm")
    return {"xla_gpu_exclude_nondeterministic_ops": True} if gpu and config.train.verify_every else {}


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
    sizes = mesh_sizes(jax.sharding.get_abstract_mesh())
    devices = batch_parts(sizes)
    rest = array.shape[1:]
    micro = array.reshape(devices, steps, -1, *rest).swapaxes(0, 1)
    return constrain(micro.reshape(steps, -1, *rest), PartitionSpec(None, *batch_spec()))


def _join_rows(micro: Array) -> Array:
    # The inverse of `_split_rows`.
    devices, rest = batch_parts(mesh_sizes(jax.sharding.get_abstract_mesh())), micro.shape[2:]
    return micro.reshape(micro.shape[0], devices, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)


def _replicated(blueprint: Blueprint) -> NamedSharding:
    return NamedSharding(blueprint.mesh, PartitionSpec())
