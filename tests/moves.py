"""What a step of a plain Flax model moves over tp under a plan, read from the HLO after SPMD partitioning."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxtp
from jaxtp.audit.compiling import compile_with_spmd_text
from jaxtp.audit.hlo import count_collectives_in_hlo
from jaxtp.mesh import BATCH, TP, mesh_sizes


def mean_of_random_parts(model, *inputs):
    """A loss that every output has its own gradient in."""
    y = jnp.asarray(model(*inputs))
    return jnp.mean(y * jax.random.normal(jax.random.key(3), y.shape))


def collectives_over_tp(build, plan, inputs, mesh, loss=mean_of_random_parts):
    """The collectives over tp of the loss and its gradients, and how often each runs; nothing is allocated."""
    with jax.set_mesh(mesh):
        model = jaxtp.parallelize(nnx.eval_shape(build), plan, mesh=mesh)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        @jax.jit
        def step(params, rest, *inputs):
            return jax.value_and_grad(lambda p: loss(nnx.merge(graph, p, rest, copy=True), *inputs))(params)

        sharding = NamedSharding(mesh, PartitionSpec(BATCH))
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs]
        _, text = compile_with_spmd_text(step.lower(params, rest, *given))
    counts = count_collectives_in_hlo(text, mesh_sizes(mesh))
    return {collective: times for collective, times in counts.items() if TP in collective.axes}


def bytes_over_tp(*args, **kwargs):
    """Bytes that each device sends over tp."""
    return sum(c.bytes_sent * times for c, times in collectives_over_tp(*args, **kwargs).items())
