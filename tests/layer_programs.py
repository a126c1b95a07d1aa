"""Runs a layer on a mesh or on none: its output and all gradients."""

from contextlib import nullcontext

import jax
import numpy as np
from flax import nnx
from support import by_name, sizes_of, state_on_mesh, without_mesh

import jaxtp
from jaxtp.layers.context import Sequences
from jaxtp.layers.gated_delta import GatedDeltaNet, KimiDeltaAttention
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.mamba2 import Mamba2
from jaxtp.mesh import mesh_of


def called(layer, x, *others):
    return layer(x, *others)


def delta_layer(config, features, **context):
    """Returns a function that builds the layer with states of a configuration."""
    kind = Mamba2 if config.delta_kind == "mamba2" else GatedDeltaNet
    if config.delta_gate_rank:
        kind = KimiDeltaAttention
    context = LayerContext(lora=config.lora, **context)
    return lambda: kind(features, config, context, norm=config, rngs=nnx.Rngs(0))


def in_order(zigzag, packed=True):
    """Returns a call of a layer whose tokens are in their natural order, before and after it."""

    def call(layer, x, segments):
        sequences = Sequences(segments=segments if packed else None, zigzag=zigzag)
        order = sequences.positions(x.shape[1])
        return sequences.natural(layer(x[:, order], sequences))

    return call


def in_float64(formula, weights, x, grad):
    """Returns what a `LayerProgram` does, of `formula(weights, x)` in float64."""
    with jax.enable_x64(True):
        wide = {path: np.asarray(array, np.float64) for path, array in weights.items()}
        y, backward = jax.vjp(jax.jit(formula), wide, x)
        grads, grad_x = backward(grad)
        return {"y": y, "x": grad_x, **grads}


class LayerProgram:
    """`call(layer, x, *others)` on a mesh or on none, with its gradients.

    A call with x, the gradient of the output and the others returns the output as `y`, the gradient
    of x as `x`, and the gradients of the trained params by their names.
    """

    def __init__(self, build, weights, mesh=None, *, trained=nnx.Param, call=called):
        self.mesh = mesh and mesh_of(sizes_of(mesh))
        graph, state = (
            state_on_mesh(build, weights, self.mesh) if mesh else without_mesh(build, weights)
        )
        self.params, rest = nnx.split_state(state, trained, ...)

        @jax.jit
        def run(params, x, grad, *others):
            y, backward = jax.vjp(
                lambda params, x: call(nnx.merge(graph, params, rest), x, *others), params, x
            )
            return y, *backward(grad)

        self.run = run

    def context(self):
        return jax.set_mesh(self.mesh) if self.mesh else nullcontext()

    def jaxpr(self, x, grad, *others):
        with self.context():
            return self.run.trace(self.params, x, grad, *others).jaxpr

    def __call__(self, x, grad, *others):
        with self.context():
            y, grads, grad_x = self.run(self.params, x, grad, *others)
            return {"y": y, "x": grad_x, **by_name(grads, self.mesh or jaxtp.make_mesh())}
