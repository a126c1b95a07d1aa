"""Finds the first module whose output, or its gradient, differs between two meshes.

Each wrapped module call records its output and adds a zero, whose gradient is the output's
gradient. A decoder runs block by block. Calls inside another transformation (`nnx.scan`,
`nnx.remat`) cannot be recorded; the module around it is named instead.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.extend.core import get_opaque_trace_state

from jaxtp.config.python_object import user_code_error
from jaxtp.layers.context import Sequences
from jaxtp.mesh import mesh_of
from jaxtp.models.decoder import Decoder, split_keys
from jaxtp.plans.layouts import Copies
from jaxtp.plans.module_wrappers import Method, Model, set_class, subclass, with_calls
from jaxtp.tools.check.parity import Arrays, place, relative_error
from jaxtp.tools.check.shrink import ONE_DEVICE, Case, on_case
from jaxtp.tools.check.subject import Subject
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss import Micro
from jaxtp.train.parts import step_settings
from jaxtp.train.step import dropout_key

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
        def called(path: str, _: str, method: Method, /, *args: object, **kwargs: object) -> Any:
            if jax.sharding.get_abstract_mesh().manual_axes:
                return method(*args, **kwargs)  # inside the `device_view` of another module
            name = ".".join(filter(None, (prefix, path))) or "the model"
            try:
                output = method(*args, **kwargs)
            except Exception:
                self.failed_in = self.failed_in or name
                raise
            if get_opaque_trace_state() != self.trace:
                return output
            return self.record(name, output)

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
        """Replaces `Decoder.with_routing`, whose scan and remat would hide the blocks' modules."""
        self.order = replace(sequences, segments=None, experts=None)
        self.length = ids_BT.shape[1]
        num_layers = model.config.num_layers
        layer_keys = [None] * num_layers if keys is None else split_keys(keys, num_layers)
        x_BTD = model.embed(ids_BT, sequences)
        for index, block in enumerate(model.in_order()):
            x_BTD = self.wrap(block, f"blocks.{index}")(x_BTD, layer_keys[index], sequences)
        return model.norm(x_BTD), []

    def record(self, name: str, output: Any) -> Any:
        self.calls[name] += 1
        if self.calls[name] > 1:
            name = f"{name} (call {self.calls[name]})"
        leaves, tree = jax.tree.flatten(output, is_leaf=lambda leaf: isinstance(leaf, Copies))
        zeros = iter(self.zeros.get(name, ()))
        outputs = []
        for position, leaf in enumerate(leaves):
            if _is_float(leaf):
                leaves[position] = _plus(leaf, next(zeros, None))
                outputs.append(_array(leaves[position]))
        if not outputs:
            return output
        self.outputs[name] = outputs
        return jax.tree.unflatten(tree, leaves)

    def natural(self, x: Array) -> np.ndarray:
        """Returns an output with its tokens in natural order."""
        array = np.asarray(x)
        has_tokens = self.length is not None and x.ndim > 1 and x.shape[1] == self.length
        return np.asarray(self.order.natural(array)) if has_tokens else array

    def in_order(self, arrays: Outputs) -> Outputs:
        """Returns arrays in the order of execution, with their tokens in natural order."""
        # `self.outputs` has this order; JAX's transformations sort the keys of a dict.
        return {name: list(map(self.natural, arrays[name])) for name in self.outputs}


def first_difference(
    config: TrainConfig, case: Case, initial: Arrays, tolerance: float, subject: Subject = Subject()
) -> str | None:
    """Names the first module whose output or gradient has a relative L2 error above `tolerance`."""
    traces = []
    for traced in (ONE_DEVICE, case):
        recorder = _Recorder()
        try:
            traces.append(_trace(on_case(config, traced), traced, initial, recorder, subject))
        except Exception as error:
            return describe_error(f"{recorder.failed_in or 'the step'} on {traced}", error)
    outputs, gradients = traces[0]
    actual_outputs, actual_gradients = traces[1]
    for name, output in outputs.items():
        difference = _error(actual_outputs.get(name, []), output)
        if difference > tolerance:
            return f"{name}: its output is off by {difference:.1e}"
    reader, *names = reversed(outputs)
    for name in names:
        difference = _error(actual_gradients.get(name, []), gradients[name])
        if difference > tolerance:
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
    batch = next(iter(subject.on_mesh(config, mesh)))
    blueprint = subject.blueprint(config, mesh)
    key = dropout_key(config.run.seed, 0)
    objective = step_settings(config, subject.parts).objective

    def loss(
        zeros: Outputs, state: nnx.State, batch: Any, recorder: _Recorder
    ) -> tuple[Array, Outputs]:
        recorder.zeros = zeros
        recorder.trace = get_opaque_trace_state()
        model: Any = blueprint.merge(state, key).model
        recorder.wrap_model(model)
        micro = Micro(batch, jnp.arange(len(jax.tree.leaves(batch)[0])))
        terms, _ = objective.terms(model, micro, key, step_key=key)
        return recorder.record(LOSS, terms.loss / terms.weight), recorder.outputs

    with jax.set_mesh(mesh):
        state = place(initial, blueprint.abstract, mesh)
        _, shapes = jax.eval_shape(partial(loss, {}, recorder=recorder), state, batch)
        zeros = jax.tree.map(jnp.zeros_like, shapes)
        backward = jax.jit(jax.grad(partial(loss, recorder=_Recorder()), has_aux=True))
        gradients, outputs = backward(zeros, state, batch)
        # The natural order of tokens depends on the mesh.
        return recorder.in_order(outputs), recorder.in_order(gradients)


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, Array | Copies) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _array(leaf: Array | Copies) -> Array:
    return leaf.array if isinstance(leaf, Copies) else leaf


def _plus(leaf: Array | Copies, zero: Array | None) -> Array | Copies:
    if zero is None:
        return leaf
    if not isinstance(leaf, Copies):
        return leaf + zero
    return Copies(
        leaf.array + zero, None if leaf.copies is None else leaf.copies + zero, leaf.context
    )


def _error(actual: list[Any], expected: list[Any]) -> float:
    """Returns the largest relative error; replicated kv heads, whose shapes differ, are skipped."""
    errors = []
    for array, reference in zip(actual, expected, strict=False):
        if array.shape == reference.shape:
            errors.append(relative_error(array, reference))
    # `max` would ignore a NaN that is not the first.
    return float("inf") if np.isnan(errors).any() else max(errors, default=0.0)


def describe_error(name: str, error: Exception) -> str:
    """Returns one line with the type of an error and, in a user's code, its line."""
    return str(user_code_error(name, error)).splitlines()[0]
