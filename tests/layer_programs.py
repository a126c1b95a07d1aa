"""Runs a layer on a mesh or on none: its output and all gradients."""

from contextlib import nullcontext

import jax
from flax import nnx
from support import by_name, sizes_of, state_on_mesh, without_mesh

import jaxtp
from jaxtp.mesh import mesh_of


def called(layer, x, *others):
    return layer(x, *others)


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
