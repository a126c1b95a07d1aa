"""The two programs of a run: the training step and the evaluation.

Accumulation adds up sums of losses and gradients and divides once, so that masked labels weigh the same in any
micro-batch. The sums are in the reduction dtype, because 16-bit ones would lose each gradient's last digits. An
evaluation reads micro-batches too, so memory that suffices for a step suffices for it.

A step that is not finite changes nothing: the device chooses the new state or the old one by loss and gradient norm.
Both are there before the update, so XLA makes it in place. The choice by the norm of the new parameters was tried: it
keeps them beside the old (for Llama 3 70B over tp 8, 176 instead of 150 GB), even where that norm came from an update
of its own. With finite gradients only an absurd learning rate makes an update that is not finite; the loop ends such a
run before it saves anything. After too many skipped steps in a row the state stays as it is, so that the host, which
reads a step behind, finds it untouched.
"""

import fnmatch
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

from jaxtp.checkpoint.checksum import device_checksums
from jaxtp.checkpoint.logical import named_variables
from jaxtp.collectives import batch_spec, constrain
from jaxtp.data.loader import Batch, abstract_batch
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.activations import Context
from jaxtp.layers.balance import Routing
from jaxtp.layers.gradients import keep_apart, sum_copies
from jaxtp.layers.lora import trained
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import AXES, batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder, LossTerms
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, TrainConfig
from jaxtp.train.optimizer_state import OPTIMIZER_SCOPE
from jaxtp.train.state import Blueprint
from jaxtp.train.stopping import STOP, abstract_flags, asked


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalars:
    """The numbers that a step gives, in one array, so that the host fetches them at once."""

    names: tuple[str, ...] = field(metadata={"static": True})
    values: Array
    """A float32 for each name."""

    @classmethod
    def of(cls, named: Mapping[str, Array]) -> "Scalars":
        """Returns scalars by name as one array."""
        return cls(tuple(named), jnp.stack([scalar.astype(jnp.float32) for scalar in named.values()]))

    def fetch(self) -> dict[str, float]:
        """Waits for the step and returns its scalars by name."""
        return dict(zip(self.names, np.asarray(self.values).tolist(), strict=True))


TrainStep = Callable[[nnx.State, Batch], tuple[Any, ...]]
"""The function that `make_train_step` describes."""
EvalStep = Callable[[nnx.State, Batch], tuple[Array, Array]]
JittedTrainStep = Any
"""`jax.jit`'s result has no public type; it is a `TrainStep` that can also be lowered."""


EXPERTS = "experts"
"""Key of a batch: for each kind of block the experts of each token `[B, layers, T, k]`, in place of a router's choice;
only a check of parity has it."""


def trace_step(
    config: TrainConfig, blueprint: Blueprint, step: JittedTrainStep | None = None, state: nnx.State | None = None
) -> Any:
    """Returns the `jax.stages.Traced` training step of a run on its mesh, whose devices need not be there.

    Args:
      config: the run.
      blueprint: the description of its state.
      step: what `make_train_step` returns, if it is there.
      state: the state; by default its description.
    """
    data, mesh = config.data, blueprint.mesh
    batch = abstract_batch(mesh, data.global_batch_size, data.sequence_length, packed=data.packed) | abstract_flags(
        mesh
    )
    with jax.set_mesh(mesh):
        return (step or make_train_step(config, blueprint)).trace(blueprint.sharded if state is None else state, batch)


def make_train_step(
    config: TrainConfig,
    blueprint: Blueprint,
    *,
    with_checksums: bool = False,
    with_choices: bool = False,
    with_grads: bool = False,
) -> JittedTrainStep:
    """Returns the training step of a run, not traced yet.

    It makes of `state, batch` the new state and the scalars `loss, learning_rate, grad_norm, param_norm, skipped`, with
    a norm more of each kind, such as `grad_norm/blocks.mlp.*`, for each of `metrics.norm_groups`, and the balance of
    experts (`layers/balance.py`), if there are any.

    The state is donated: its memory becomes that of the new one. `loss` is the mean over the valid tokens of the
    whole batch, `grad_norm` the global L2 norm before clipping, both of the parameters before the update; if one of the
    two is not finite, the step leaves the state as it is, and `skipped` counts it. `param_norm` is that of the
    parameters after the step: not finite if the update itself was not.

    Args:
      config: the run.
      blueprint: the description of its state.
      with_checksums: returns too, as the next result, the `device_checksums` of the gradients after their sums and
        before clipping, in the order of `trained_parameters`.
      with_choices: returns too, as the next result, for each kind of block with experts, which ones each token would
        choose, `[B, layers, T, k]`, and by what margin, `[B, layers, T]`; None for the others. Tokens are in the order
        in which devices hold them.
      with_grads: returns the gradients too, as the last result, in the parameters' shardings.
    """
    kind, groups = trained(blueprint.config.lora), config.metrics.norm_groups
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)

    def step(state: nnx.State, batch: Batch) -> tuple[Any, ...]:
        train_state = nnx.merge(blueprint.graph, state, copy=True)  # else its variables would be the state's own
        updates = train_state.optimizer.step[...]
        key = dropout_key(config.run.seed, updates)
        rows = {name: array for name, array in batch.items() if name != STOP}
        terms, choices, grads = loss_and_grads(
            train_state.model, rows, config.train, key, config.mesh.context, record=with_choices
        )
        loss = terms.loss / terms.count
        summed = [_checksums(grads)] if with_checksums else []
        norms = _norms("grad_norm", grads, groups)
        with jax.named_scope(OPTIMIZER_SCOPE):
            train_state.optimizer.update(train_state.model, grads)
        if terms.balance is not None and kind is nnx.Param:
            train_state.model.move_selection_biases(terms.balance, config.train.selection_bias_rate)
        finite = jnp.isfinite(loss) & jnp.isfinite(norms["grad_norm"])
        new, skipped = _guarded(nnx.state(train_state), state, finite, config.train.skips_allowed)
        norms |= _norms("param_norm", nnx.filter_state(new["model"], kind), groups)
        scalars = {"loss": loss, "learning_rate": jnp.asarray(schedule(updates)), **norms, "skipped": skipped}
        if terms.balance is not None:
            scalars |= terms.balance.scalars(terms.count)
        others = (*summed, *([choices] if with_choices else []), *([grads] if with_grads else []))
        return new, Scalars.of(scalars | asked(batch)), *others

    of_checksums = [NamedSharding(blueprint.mesh, PartitionSpec(None, AXES))] if with_checksums else []
    of_grads = [nnx.filter_state(blueprint.shardings["model"], kind)] if with_grads else []
    of_choices = [None] if with_choices else []
    shardings = (blueprint.shardings, _replicated(blueprint), *of_checksums, *of_choices, *of_grads)
    return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def _checksums(state: nnx.State) -> Array:
    """Returns the `device_checksums` of a state's arrays."""
    variables = named_variables(state).values()
    return device_checksums([variable[...] for variable in variables], tuple(spec_of(each) for each in variables))


def _norms(name: str, state: nnx.State, groups: tuple[str, ...]) -> dict[str, Array]:
    """Returns the L2 norm of a state, and as `name/group` that of what each pattern of path matches; in float32."""
    state = optax.tree.cast(state, "float32")
    variables = named_variables(state)
    parts = {f"{name}/{group}": [variables[path][...] for path in fnmatch.filter(variables, group)] for group in groups}
    with jax.named_scope(name):
        return {key: optax.tree.norm(part) for key, part in {name: state, **parts}.items()}


def _guarded(new: nnx.State, old: nnx.State, finite: Array, max_skipped: int) -> tuple[nnx.State, Array]:
    """Returns the new state, or the old one if the step or too many before it were not finite; and how many are not."""
    before = jnp.asarray(old["skipped"][...])
    halted = before > max_skipped
    skipped = jnp.where(halted, before, jnp.where(finite, 0, before + 1))
    kept = jax.tree.map(lambda n, o: jnp.where(finite & ~halted, n, o), new, old)
    kept["skipped"] = kept["skipped"].replace(skipped)
    return kept, skipped


def make_eval_step(blueprint: Blueprint, micro_batches: int = 1, context: Context = "auto") -> EvalStep:
    """Compiles `state, batch -> summed loss, number of valid tokens`.

    Args:
      blueprint: the description of the state.
      micro_batches: number of micro-batches of a batch, one after the other. As many as the training step's, so that
        an evaluation takes no more memory than training: it is the forward pass alone.
      context: method of attention over cp.
    """

    def step(state: nnx.State, batch: Batch) -> tuple[Array, Array]:
        def loss_sum(micro: Batch) -> tuple[Array, Array]:
            model: Decoder = nnx.merge(blueprint.graph, state, copy=True).model
            segments = micro.get(SEGMENTS)
            return model.loss(micro["inputs"], micro["labels"], segments_BT=segments, context=context)

        sums: tuple[Array, Array]
        sums, _ = _sum_over_micro_batches(lambda micro: (loss_sum(micro), None), batch, micro_batches, (0.0, 0.0))
        return sums

    return jax.jit(step, out_shardings=_replicated(blueprint))


def loss_and_grads(
    model: Decoder, batch: Batch, loop: LoopConfig, key: Array, context: Context = "auto", *, record: bool = False
) -> tuple[LossTerms, Any, nnx.State]:
    """Returns the terms of the loss of a batch, and the gradient of its mean in each parameter that is trained.

    The mean is that over the valid tokens, of which `count` is at least 1, not the mean of the micro-batches' means.
    Sums are in the reduction dtype, or the parameter's own if that is the wider. Devices that hold copies of a
    parameter add up gradients of their own, which are summed over them once (`layers/gradients.py`).

    The second result is what `make_train_step` describes as `with_choices`, if `record`.
    """
    graph, stored, frozen = nnx.split(model, trained(model.config.lora), ...)  # type: ignore[misc]
    params = keep_apart(stored) if loop.accumulation > 1 else stored

    def objective(params: nnx.State, micro: Batch, rows: Array) -> tuple[Array, tuple[LossTerms, Any]]:
        merged: Decoder = nnx.merge(graph, params, frozen, copy=True)  # the frozen are of the trace outside
        sequences = replace(merged.sequences(micro["inputs"], micro.get(SEGMENTS), context), record=record)
        terms, routings = merged.loss_terms(
            micro["inputs"],
            micro["labels"],
            sequences,
            z_loss=loop.z_loss,
            dropout_keys=row_keys(key, rows) if merged.config.dropout else None,
            experts=micro.get(EXPERTS),  # type: ignore[arg-type]  # a pytree
        )
        choices = [_choices(routing) for routing in routings] if record else None
        return terms.objective(loop.balance_loss, loop.router_z_loss), (terms, choices)

    def of_micro(micro: tuple[Batch, Array]) -> tuple[Any, Any]:
        (_, (terms, choices)), grads = jax.value_and_grad(objective, has_aux=True)(params, *micro)
        return (terms, grads), choices

    # In a dtype that loses no digits of gradients that are added up, as a 16-bit parameter's own would.
    precision = model.config.precision
    zeros = (
        model.no_terms(),
        jax.tree.map(lambda param: jnp.zeros_like(param, dtype=precision.sum_dtype(param.dtype)), params),
    )
    rows = jnp.arange(len(batch["inputs"]))
    (terms, grads), choices = _sum_over_micro_batches(of_micro, (batch, rows), loop.accumulation, zeros)
    if loop.accumulation > 1:
        grads = sum_copies(grads, stored, precision.reduce)
    # A batch may be all prompts or padding: then nothing is learnt from it.
    terms = replace(terms, count=jnp.maximum(terms.count, 1))
    return terms, choices, jax.tree.map(lambda g, p: (g / terms.count).astype(p.dtype), grads, stored)


def _choices(routing: Routing | None) -> tuple[Array, Array] | None:
    """Returns the experts that tokens would choose and their margin, rows first."""
    if routing is None or routing.experts is None or routing.margin is None:
        return None
    return routing.experts.swapaxes(0, 1), routing.margin.swapaxes(0, 1)


def _sum_over_micro_batches(of_micro: Callable[[Any], tuple[Any, Any]], inputs: Any, count: int, zeros: Any) -> Any:
    """Returns what a function gives for `count` micro-batches of `[B, ...]`: sums, and what it has of each row.

    Args:
      of_micro: returns what is to be summed, in the dtypes of `zeros` then, and arrays of its rows.
      inputs: arrays `[B, ...]`.
      count: number of micro-batches.
      zeros: of the sums.
    """
    if count == 1:
        return of_micro(inputs)

    def add(sums: Any, micro: Any) -> tuple[Any, Any]:
        more, of_rows = of_micro(micro)
        return jax.tree.map(jnp.add, sums, more), of_rows

    sums, of_rows = jax.lax.scan(add, zeros, jax.tree.map(lambda array: _split_rows(array, count), inputs))
    return sums, jax.tree.map(_join_rows, of_rows)


def dropout_key(seed: int, updates: Array | int) -> Array:
    """Returns the random key of a step, after so many updates."""
    return jax.random.fold_in(jax.random.key(seed), updates)


def row_keys(key: Array, rows: Array) -> Array:
    """Returns a random key for each row of the global batch `[B]`, by its index."""
    return jax.vmap(partial(jax.random.fold_in, key))(rows)


def _split_rows(array: Array, steps: int) -> Array:
    """Returns `[steps, B / steps, ...]` of `[B, ...]`, each device's rows cut on that device: nothing moves."""
    sizes = mesh_sizes(jax.sharding.get_abstract_mesh())
    devices = batch_parts(sizes)
    rest = array.shape[1:]
    micro = array.reshape(devices, steps, -1, *rest).swapaxes(0, 1)
    return constrain(micro.reshape(steps, -1, *rest), PartitionSpec(None, *batch_spec()))


def _join_rows(micro: Array) -> Array:
    """Returns `[B, ...]` of `[steps, B / steps, ...]`, in the order that `_split_rows` takes them from."""
    devices, rest = batch_parts(mesh_sizes(jax.sharding.get_abstract_mesh())), micro.shape[2:]
    return micro.reshape(micro.shape[0], devices, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)


def _replicated(blueprint: Blueprint) -> NamedSharding:
    """Returns the sharding of scalars, which every process can read."""
    return NamedSharding(blueprint.mesh, PartitionSpec())
