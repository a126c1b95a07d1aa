"""The loss of a step, its metrics and all gradients, on a mesh."""

import jax
from flax import nnx
from support import by_name, random_weights, state_on_mesh, use_mesh

from jaxtp.train.step import loss_and_grads


def loss_and_gradients(build, batch, settings, mesh):
    """Returns them by name; the weights are random, and do not depend on the mesh."""
    with use_mesh():
        weights = random_weights(build)
    graph, state = state_on_mesh(build, weights, mesh)

    @jax.jit
    def run(state, batch):
        model = nnx.merge(graph, state)
        terms, _, grads = loss_and_grads(model, batch, settings, jax.random.key(0))
        sums = jax.tree.leaves_with_path(terms.pairs)
        return {jax.tree_util.keystr(path): leaf for path, leaf in sums}, grads

    with jax.set_mesh(mesh):
        numbers, grads = run(state, batch)
    return numbers | by_name(grads, mesh)
