"""The first module whose output, or whose gradient, differs between two meshes.

The model is run block by block with the calls of every module wrapped: the output is recorded, and a zero is added to
it, whose gradient is that of the loss at this place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxtp.check.parity import Arrays, batches, place, relative_error
from jaxtp.check.shrink import ONE_DEVICE, Case, on_case
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.context import Sequences
from jaxtp.mesh import mesh_of
from jaxtp.models.decoder import Decoder, abstract_decoder, split_keys
from jaxtp.parallel.calls import Model, with_calls
from jaxtp.train.config import TrainConfig
from jaxtp.train.step import dropout_key, row_keys

LOSS = "head and loss"
Taps = dict[str, Any]


@dataclass
class _Watch:
    """Records what each module returns, by path, in the order in which they return."""

    taps: Taps
    outputs: Taps = field(default_factory=dict)
    failed_in: str | None = None

    def on(self, module: Model, prefix: str) -> Model:
        """Watches a module and all those in it; returns the module."""
        return with_calls(module, partial(self._called, prefix))

    def _called(self, prefix: str, path: str, _: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return method(*args, **kwargs)  # inside another module's view of one device
        name = f"{prefix}.{path}" if path else prefix
        try:
            return self.record(name, method(*args, **kwargs))
        except Exception:
            self.failed_in = self.failed_in or name
            raise

    def record(self, name: str, output: Any) -> Any:
        """Keeps an output, and adds the tap of that name to it, if there is one."""
        if name in self.taps:
            output = jax.tree.map(jnp.add, output, self.taps[name])
        self.outputs[name] = output
        return output


@dataclass(frozen=True)
class _Traces:
    outputs: dict[str, Any]
    gradients: dict[str, Any]


def first_difference(config: TrainConfig, case: Case, initial: Arrays, tolerance: float) -> str | None:
    """Names the first module whose output differs from one device's; else the one whose backward pass does.

    Args:
      config: the (shrunk) run, in float32.
      case: the mesh that disagrees.
      initial: the state that both start from.
      tolerance: relative L2 error allowed.

    Returns:
      A sentence, or None if all outputs and their gradients agree: then only a parameter's own gradient, or its
      update, can differ.
    """
    traces = []
    for each in (ONE_DEVICE, case) if case != ONE_DEVICE else (case,):
        watch = _Watch({})
        try:
            traces.append(_trace(on_case(config, each), each, initial, watch))
        except Exception as error:
            where = watch.failed_in or "the step"
            return f"{where} cannot be traced on {each}: {describe_error(error)}"
    return _compare(traces[0], traces[-1], tolerance)


def _compare(expected: _Traces, actual: _Traces, tolerance: float) -> str | None:
    for name, output in expected.outputs.items():
        if (error := _error(actual.outputs[name], output)) > tolerance:
            return f"{name}: its output is off by {error:.1e}"
    reader = LOSS
    for name, gradient in reversed(expected.gradients.items()):
        if (error := _error(actual.gradients[name], gradient)) > tolerance:
            return f"{reader}: its backward pass is off by {error:.1e}, in the gradient of what {name} gives"
        reader = name
    return None


def _trace(config: TrainConfig, case: Case, initial: Arrays, watch: _Watch) -> _Traces:
    """Returns the outputs and their gradients on one mesh; `watch` is told where it fails, if it does."""
    mesh = mesh_of(case.sizes)
    batch = batches(config)[0]
    with jax.set_mesh(mesh):
        graph, abstract = abstract_decoder(config.model)
        weights = {name.removeprefix("model."): a for name, a in initial.items() if name.startswith("model.")}
        state = place(weights, abstract, mesh)

        def loss(taps: Taps, state: nnx.State, watch: _Watch) -> tuple[Array, Taps]:
            watch.taps = taps
            total = _run(nnx.merge(graph, state), batch, config, watch)
            return total, watch.outputs

        _, shapes = jax.eval_shape(lambda state: loss({}, state, watch), state)
        zeros = {name: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape) for name, shape in shapes.items()}
        gradients, outputs = jax.jit(jax.grad(lambda taps, state: loss(taps, state, _Watch({})), has_aux=True))(
            zeros, state
        )
        order = list(watch.outputs)  # of execution: a dict comes out of a JAX transformation sorted by key
        sequences = nnx.merge(graph, state).sequences(jnp.asarray(batch["inputs"]), None, config.mesh.context)
        on_host = jax.tree.map(lambda x: _in_natural_order(np.asarray(x), sequences, batch), (outputs, gradients))
    return _Traces(*({name: tree[name] for name in order} for tree in on_host))


def _in_natural_order(output: np.ndarray, sequences: Sequences, batch: dict[str, Any]) -> np.ndarray:
    """Returns what a module gives for each token in the order of the tokens in their rows."""
    of_tokens = output.ndim > 1 and output.shape[1] == batch["inputs"].shape[1]
    return np.asarray(sequences.natural(output)) if of_tokens else output


def _run(model: Decoder, batch: dict[str, Any], run: TrainConfig, watch: _Watch) -> Array:
    """Returns the mean loss, block by block, without scan and remat, which would hide what is inside them."""
    config, keys = model.config, None
    if config.dropout:
        rows = jnp.arange(len(batch["inputs"]))
        keys = split_keys(row_keys(dropout_key(run.run.seed, 0), rows), config.num_layers)
    sequences = model.sequences(jnp.asarray(batch["inputs"]), batch.get(SEGMENTS), run.mesh.context)
    watch.on(model.embedding, "embedding")
    x_BTD = model.embed(jnp.asarray(batch["inputs"]), sequences)
    for index, block in enumerate(model.in_order()):
        layer_keys = None if keys is None else keys[index]
        x_BTD = watch.on(block, f"blocks.{index}")(x_BTD, layer_keys, sequences)
    x_BTD = watch.on(model.norm, "norm")(x_BTD)
    total, count = model.loss_of_hidden(x_BTD, sequences.own(jnp.asarray(batch["labels"])))
    mean: Array = watch.record(LOSS, total / count)
    return mean


def _error(actual: Any, expected: Any) -> float:
    """Returns the largest over an output's arrays; a shared kv head is there once for each device, in other shapes."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    errors = [relative_error(a, e) for a, e in pairs if a.shape == e.shape]
    return max((float("inf") if np.isnan(error) else error for error in errors), default=0.0)


def describe_error(error: Exception) -> str:
    """Returns its kind and its first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
