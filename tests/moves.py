"""Measures the communication of a plain Flax model under a plan, in the HLO after SPMD
partitioning."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from support import sizes_of

import jaxtp
from jaxtp.analysis.audit import audit
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.hlo import count_collectives_in_hlo
from jaxtp.mesh import BATCH, TP, mesh_of, mesh_sizes


def mean_of_random_parts(model, *inputs):
    """Returns a loss in which each output has a different gradient."""
    y = jnp.asarray(model(*inputs))
    return jnp.mean(y * jax.random.normal(jax.random.key(3), y.shape))


def collectives_over_tp(build, plan, inputs, mesh, loss=mean_of_random_parts):
    """Returns the collectives over tp of the loss and its gradients, and how often each runs;
    allocates nothing."""
    with jax.set_mesh(mesh):
        model = jaxtp.parallelize(nnx.eval_shape(build), plan, mesh=mesh)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        @jax.jit
        def step(params, rest, *inputs):
            return jax.value_and_grad(
                lambda p: loss(nnx.merge(graph, p, rest, copy=True), *inputs)
            )(params)

        sharding = NamedSharding(mesh, PartitionSpec(BATCH))
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs]
        _, text = compile_with_spmd_text(step.lower(params, rest, *given))
    counts = count_collectives_in_hlo(text, mesh_sizes(mesh))
    return {collective: times for collective, times in counts.items() if TP in collective.axes}


def bytes_over_tp(*args, **kwargs):
    """Returns the bytes that each device sends over tp."""
    return sum(c.bytes_sent * times for c, times in collectives_over_tp(*args, **kwargs).items())


def audit_gradients(mesh, build, shape, split=None):
    """Audits a model's gradients of weights and of an input with this shape."""
    mesh = mesh_of(sizes_of(mesh))
    with jax.set_mesh(mesh):
        graph, state = nnx.split(build())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    loss = lambda state, x: jnp.sum(jnp.square(nnx.merge(graph, state)(x)))
    sharding = None if split is None else NamedSharding(mesh, split)
    given = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return audit(jax.jit(jax.grad(loss, argnums=(0, 1))), abstract, given, mesh=mesh)


def sent(found, axis):
    """Returns the bytes that each device sends over an axis in an audit."""
    return sum(times * c.bytes_sent for c, times in found.realised.items() if axis in c.axes)


def assert_weights_alone_move(found, axis):
    """Checks that over four devices weights are all-gathered twice, and gradients reduce-scattered
    once."""
    weights = sum(h.bytes for h in found.holdings)
    assert not found.added
    assert {c.kind for c in found.realised} == {"all-gather", "reduce-scatter"}
    assert sent(found, axis) == 2 * 3 / 4 * weights
    assert all(h.bytes_per_device * 4 == h.bytes for h in found.holdings)
