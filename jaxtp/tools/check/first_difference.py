"""Finds the first module whose output, or its gradient, differs between two meshes.

Each wrapped module call records its output and adds a zero, whose gradient is the output's
gradient. A decoder runs block by block. Calls inside another transformation (`nnx.scan`,
`nnx.remat`) cannot be recorded; the module around it is named instead.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.extend.core import get_opaque_trace_state

from jaxtp.config.python_object import user_code_error
from jaxtp.data.loader import Batch
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.context import Sequences
from jaxtp.mesh import mesh_of
from jaxtp.models.decoder import Decoder, split_keys
from jaxtp.parallelize.layouts import Copies
from jaxtp.parallelize.module_wrappers import Model, set_class, subclass, with_calls
from jaxtp.tools.check.parity import Arrays, place, relative_error
from jaxtp.tools.check.shrink import ONE_DEVICE, Case, on_case
from jaxtp.tools.check.subject import Subject
from jaxtp.train import user_loss
from jaxtp.train.config import TrainConfig
from jaxtp.train.step import dropout_key, row_keys

DECODER_LOSS = "head and loss"
LOSS = "the loss"
Outputs = dict[str, list[Any]]  # Arrays of the outputs, or their gradients, by call


@dataclass
class _Recorder:
    zeros: Outputs = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)
    failed_in: str | None = None
    order: Sequences = Sequences()  # of tokens in a decoder
    length: int | None = None  # number of these tokens
    calls: Counter[str] = field(default_factory=Counter)
    trace: object = None

    def wrap(self, module: Model, prefix: str = "") -> Model:
        def called(
            path: str, _: str, method: Callable[..., Any], /, *args: object, **kwargs: object
        ) -> Any:
            if jax.sharding.get_abstract_mesh().manual_axes:
                return method(*args, **kwargs)  # inside the `device_view` of another module
            name = ".".join(filter(None, (prefix, path))) or "the model"
            try:
                output = method(*args, **kwargs)
            except Exception:
                self.failed_in = self.failed_in or name
                raise
            return output if get_opaque_trace_state() != self.trace else self.record(name, output)

        return with_calls(module, called)

    def wrap_model(self, model: nnx.Module) -> None:
        if not isinstance(model, Decoder):
            self.wrap(model)
            return
        for name in ("embedding", "norm"):
            self.wrap(getattr(model, name), name)
        set_class(model, subclass(type(model), {"with_routing": self.run_blocks}))

    def run_blocks(
        self,
        _: object,
        model: Decoder,
        ids_BT: Array,
        keys: Array | None,
        sequences: Sequences,
        experts: object = None,
    ) -> tuple[Array, list[None]]:
        """Replaces `Decoder.with_routing`.

        Its scan and remat would hide the modules of its blocks.
        """
        self.order = replace(sequences, segments=None, experts=None)
        self.length = ids_BT.shape[1]
        layer_keys = (
            [None] * model.config.num_layers
            if keys is None
            else split_keys(keys, model.config.num_layers)
        )
        x_BTD = model.embed(ids_BT, sequences)
        for index, block in enumerate(model.in_order()):
            x_BTD = self.wrap(block, f"blocks.{index}")(x_BTD, layer_keys[index], sequences)
        return model.norm(x_BTD), []

    def record(self, name: str, output: Any) -> Any:
        self.calls[name] += 1
        if (count := self.calls[name]) > 1:
            name = f"{name} (call {count})"
        leaves, tree = jax.tree.flatten(output, is_leaf=lambda leaf: isinstance(leaf, Copies))
        recorded = [at for at, leaf in enumerate(leaves) if _is_float(leaf)]
        for at, zero in zip(recorded, self.zeros.get(name, ()), strict=False):
            leaves[at] = _plus(leaves[at], zero)
        if recorded:
            self.outputs[name] = [_array(leaves[at]) for at in recorded]
        return jax.tree.unflatten(tree, leaves) if recorded else output

    def natural(self, x: Array) -> np.ndarray:
        """Returns an output with its tokens in natural order."""
        has_tokens = self.length is not None and x.ndim > 1 and x.shape[1] == self.length
        return np.asarray(self.order.natural(np.asarray(x)) if has_tokens else x)


def first_difference(
    config: TrainConfig, case: Case, initial: Arrays, tolerance: float, subject: Subject = Subject()
) -> str | None:
    """Names the first module whose output or backward pass differs.

    It has a relative L2 error above `tolerance`.
    """
    traces = []
    for each in (ONE_DEVICE, case) if case != ONE_DEVICE else (case,):
        recorder = _Recorder()
        try:
            traces.append(_trace(on_case(config, each), each, initial, recorder, subject))
        except Exception as error:
            return describe_error(f"{recorder.failed_in or 'the step'} on {each}", error)
    outputs, gradients = traces[0]
    actual_outputs, actual_gradients = traces[-1]
    for name, output in outputs.items():
        if (difference := _error(actual_outputs.get(name, []), output)) > tolerance:
            return f"{name}: its output is off by {difference:.1e}"
    reader, *_ = reversed(outputs)
    for name, gradient in [*reversed(gradients.items())][1:]:
        if (difference := _error(actual_gradients.get(name, []), gradient)) > tolerance:
            return (
                f"{reader}: its backward pass is off by {difference:.1e}, in the gradient of "
                f"the output of {name}"
            )
        reader = name
    return None


def _trace(
    config: TrainConfig, case: Case, initial: Arrays, recorder: _Recorder, subject: Subject
) -> tuple[Outputs, Outputs]:
    mesh = mesh_of(case.sizes)
    user = subject.task.loss
    batch = next(iter(subject.on_mesh(config, mesh)))
    blueprint = subject.blueprint(config, mesh)
    key = dropout_key(config.run.seed, 0)
    with jax.set_mesh(mesh):
        state = place(initial, blueprint.abstract, mesh)

        def loss(
            zeros: Outputs, state: nnx.State, batch: Any, recorder: _Recorder
        ) -> tuple[Array, Outputs]:
            recorder.zeros = zeros
            recorder.trace = get_opaque_trace_state()
            model: Any = blueprint.merge(state, key).model
            recorder.wrap_model(model)
            if user is None:
                total, count = _decoder_loss(model, batch, config, key)
            else:
                terms = user_loss.call(user, model, batch, key)
                total = terms.loss
                count = terms.count
            mean: Array = recorder.record(DECODER_LOSS if user is None else LOSS, total / count)
            return mean, recorder.outputs

        _, shapes = jax.eval_shape(
            lambda state, batch: loss({}, state, batch, recorder), state, batch
        )
        zeros = {
            name: [jnp.zeros(each.shape, each.dtype) for each in arrays]
            for name, arrays in shapes.items()
        }
        backward = jax.jit(
            jax.grad(
                lambda zeros, state, batch: loss(zeros, state, batch, _Recorder()), has_aux=True
            )
        )
        gradients, outputs = backward(zeros, state, batch)
        # The order of execution; JAX transformations sort the keys of a dict.
        order = list(recorder.outputs)

        def in_order(arrays: Outputs) -> Outputs:
            return {name: [recorder.natural(array) for array in arrays[name]] for name in order}

        return in_order(outputs), in_order(gradients)


def _decoder_loss(
    model: Decoder, batch: Batch, config: TrainConfig, key: Array
) -> tuple[Array, Array]:
    keys = row_keys(key, jnp.arange(len(batch["inputs"]))) if model.config.dropout else None
    options = {
        "segments_BT": batch.get(SEGMENTS),
        "dropout_keys": keys,
        "context": config.mesh.context,
    }
    return model.loss(batch["inputs"], batch["labels"], **options)  # type: ignore[arg-type]


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, Array | Copies) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _array(leaf: Array | Copies) -> Array:
    return leaf.array if isinstance(leaf, Copies) else leaf


def _plus(leaf: Array | Copies, zero: Array) -> Array | Copies:
    if not isinstance(leaf, Copies):
        return leaf + zero
    return Copies(
        leaf.array + zero, None if leaf.copies is None else leaf.copies + zero, leaf.context
    )


def _error(actual: list[Any], expected: list[Any]) -> float:
    """Skips replicated kv heads, whose shapes differ."""
    errors = [
        relative_error(a, e) for a, e in zip(actual, expected, strict=False) if a.shape == e.shape
    ]
    return max((float("inf") if np.isnan(error) else error for error in errors), default=0.0)


def describe_error(what: str, error: Exception) -> str:
    """Returns one line with the type of an error and, in a user's code, its line."""
    return str(user_code_error(what, error)).splitlines()[0]
