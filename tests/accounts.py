"""What a step really moves, computes and keeps, to hold against what its layers declare."""

import jax
from flax import nnx
from support import sizes_of

import jaxtp
from jaxtp.audit.census import count_collectives
from jaxtp.audit.compiling import compile_with_spmd_text
from jaxtp.audit.hlo import count_flops_in_hlo
from jaxtp.communication import bytes_by_place
from jaxtp.data.loader import abstract_batch
from jaxtp.layers import remat
from jaxtp.layers.lora import trained
from jaxtp.mesh import mesh_of
from jaxtp.models.costs import step_costs
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, MeshConfig, TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import make_train_step

B, T = 16, 16
"""Sequences of a step, and their length."""


def step_of(config, mesh, accumulation, context="auto"):
    """A training step, and the plan of its state."""
    run = TrainConfig(model=config, train=LoopConfig(accumulation=accumulation), mesh=MeshConfig(context=context))
    plan = plan_state(config, optimizers.build(run.optimizer, run.train.steps), mesh)
    return make_train_step(run, plan), plan


def step_bytes(config, mesh, accumulation=1, context="auto"):
    """Bytes sent by place: counted in the jaxpr of a whole step, and as budgeted."""
    sizes = sizes_of(mesh)
    counted = bytes_by_place(step_collectives(config, sizes, accumulation, context))
    rows = {"batch_size": B, "sequence_length": T, "accumulation": accumulation, "context": context}
    return counted, step_costs(config, sizes, **rows).budget


def step_collectives(config, sizes, accumulation=1, context="auto"):
    """Collectives in the jaxpr of a whole step, and how often each runs."""
    mesh = mesh_of(sizes)
    step, plan = step_of(config, mesh, accumulation, context)
    with jax.set_mesh(mesh):
        return count_collectives(step.trace(plan.abstract, abstract_batch(mesh, B, T)).jaxpr, sizes)


def compiled_flops(config, mesh, accumulation):
    """Operations in the products of a whole step, after partitioning."""
    mesh = jaxtp.make_mesh(*mesh)
    step, plan = step_of(config, mesh, accumulation)
    with jax.set_mesh(mesh):
        lowered = step.lower(plan.sharded, abstract_batch(mesh, B, T))
    _, text = compile_with_spmd_text(lowered, {"xla_backend_optimization_level": 0})
    return count_flops_in_hlo(text)


def equations(jaxpr):
    """Every equation of a jaxpr, and of those that they run."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def kept(config, rows, length, tp=1):
    """The arrays that autodiff keeps of one block, abstract and whole."""
    with jax.set_mesh(jaxtp.make_mesh(tp=tp)):
        abstract = nnx.eval_shape(lambda: jaxtp.DecoderBlock(config, rngs=nnx.Rngs(0)))
        graph, params, frozen = nnx.split(abstract, trained(config.lora), ...)
        block = jax.checkpoint(lambda x, *states: nnx.merge(graph, *states)(x), policy=remat.policy(config.remat))
        x = jax.ShapeDtypeStruct((rows, length, config.d_model), config.precision.compute)
        backward = jax.eval_shape(
            lambda x, params, frozen: jax.vjp(lambda x, params: block(x, params, frozen), x, params)[1],
            *(x, params, frozen),
        )
    return jax.tree.leaves(backward)


def kept_activations(config, rows, length, tp=1):
    """Bytes of what is kept of a block on all devices, but for its weights."""
    return sum(array.size * array.dtype.itemsize for array in kept(config, rows, length, tp) if array.ndim > 2)
