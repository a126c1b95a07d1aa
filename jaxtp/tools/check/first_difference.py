"""Finds the first module whose output, or its gradient, differs between two meshes.

The model runs block by block. Each wrapped module call records its output and adds a zero, whose gradient is the
output's gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxtp.data.rows import SEGMENTS
from jaxtp.mesh import mesh_of
from jaxtp.models.decoder import Decoder, abstract_decoder, split_keys
from jaxtp.parallelize.module_wrappers import Model, with_calls
from jaxtp.tools.check.parity import Arrays, batches, place, relative_error
from jaxtp.tools.check.shrink import ONE_DEVICE, Case, on_case
from jaxtp.train.config import TrainConfig
from jaxtp.train.step import dropout_key, row_keys

LOSS = "head and loss"
Outputs = dict[str, Any]
"""Outputs, or their gradients, by module."""


@dataclass
class _Recorder:
    zeros: Outputs
    outputs: Outputs = field(default_factory=dict)
    failed_in: str | None = None

    def wrap(self, module: Model, prefix: str) -> Model:
        def called(path: str, _: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if jax.sharding.get_abstract_mesh().manual_axes:
                return method(*args, **kwargs)  # inside the `device_view` of another module
            name = f"{prefix}.{path}" if path else prefix
            try:
                return self.record(name, method(*args, **kwargs))
            except Exception:
                self.failed_in = self.failed_in or name
                raise

        return with_calls(module, called)

    def record(self, name: str, output: Any) -> Any:
        if name in self.zeros:
            output = jax.tree.map(jnp.add, output, self.zeros[name])
        self.outputs[name] = output
        return output


def first_difference(config: TrainConfig, case: Case, initial: Arrays, tolerance: float) -> str | None:
    """Names the first module whose output or backward pass has a relative L2 error above `tolerance`."""
    traces = []
    for each in (ONE_DEVICE, case) if case != ONE_DEVICE else (case,):
        recorder = _Recorder({})
        try:
            traces.append(_trace(on_case(config, each), each, initial, recorder))
        except Exception as error:
            return f"{recorder.failed_in or 'the step'} cannot be traced on {each}: {describe_error(error)}"
    (outputs, gradients), (actual_outputs, actual_gradients) = traces[0], traces[-1]
    for name, output in outputs.items():
        if (difference := _error(actual_outputs[name], output)) > tolerance:
            return f"{name}: its output is off by {difference:.1e}"
    reader = LOSS
    for name, gradient in reversed(gradients.items()):
        if (difference := _error(actual_gradients[name], gradient)) > tolerance:
            return f"{reader}: its backward pass is off by {difference:.1e}, in the gradient of the output of {name}"
        reader = name
    return None


def _trace(config: TrainConfig, case: Case, initial: Arrays, recorder: _Recorder) -> tuple[Outputs, Outputs]:
    mesh = mesh_of(case.sizes)
    batch = batches(config)[0]
    with jax.set_mesh(mesh):
        graph, abstract = abstract_decoder(config.model)
        weights = {name.removeprefix("model."): a for name, a in initial.items() if name.startswith("model.")}
        state = place(weights, abstract, mesh)

        def loss(zeros: Outputs, state: nnx.State, recorder: _Recorder) -> tuple[Array, Outputs]:
            recorder.zeros = zeros
            total = _run(nnx.merge(graph, state), batch, config, recorder)
            return total, recorder.outputs

        _, shapes = jax.eval_shape(lambda state: loss({}, state, recorder), state)
        zeros = {name: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape) for name, shape in shapes.items()}
        backward = jax.jit(jax.grad(lambda zeros, state: loss(zeros, state, _Recorder({})), has_aux=True))
        gradients, outputs = backward(zeros, state)
        order = list(recorder.outputs)  # order of execution; JAX transformations sort the keys of a dict
        sequences = nnx.merge(graph, state).sequences(jnp.asarray(batch["inputs"]), None, config.mesh.context)

        def natural(x: Array) -> np.ndarray:
            has_tokens = x.ndim > 1 and x.shape[1] == batch["inputs"].shape[1]
            return np.asarray(sequences.natural(np.asarray(x)) if has_tokens else x)

        def in_order(tree: Outputs) -> Outputs:
            return {name: jax.tree.map(natural, tree[name]) for name in order}

        return in_order(outputs), in_order(gradients)


def _run(model: Decoder, batch: dict[str, Any], run: TrainConfig, recorder: _Recorder) -> Array:
    # Runs blocks without scan and remat, which would hide their modules.
    config, keys = model.config, None
    if config.dropout:
        rows = jnp.arange(len(batch["inputs"]))
        keys = split_keys(row_keys(dropout_key(run.run.seed, 0), rows), config.num_layers)
    sequences = model.sequences(jnp.asarray(batch["inputs"]), batch.get(SEGMENTS), run.mesh.context)
    recorder.wrap(model.embedding, "embedding")
    x_BTD = model.embed(jnp.asarray(batch["inputs"]), sequences)
    for index, block in enumerate(model.in_order()):
        layer_keys = None if keys is None else keys[index]
        x_BTD = recorder.wrap(block, f"blocks.{index}")(x_BTD, layer_keys, sequences)
    x_BTD = recorder.wrap(model.norm, "norm")(x_BTD)
    total, count = model.loss_of_hidden(x_BTD, sequences.local_tokens(jnp.asarray(batch["labels"])))
    mean: Array = recorder.record(LOSS, total / count)
    return mean


def _error(actual: Any, expected: Any) -> float:
    """Skips replicated kv heads, whose shapes differ."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    errors = [relative_error(a, e) for a, e in pairs if a.shape == e.shape]
    return max((float("inf") if np.isnan(error) else error for error in errors), default=0.0)


def describe_error(error: Exception) -> str:
    """Returns the type and the first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
