"""Counting in jaxprs: loops, groups, and the names of modules."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.audit.census import Collective, count_collectives
from jaxtp.mesh import mesh_sizes


def test_scan_counts_every_turn():
    def turn(carry, _):
        return jax.lax.pcast(jax.lax.psum(carry, "tp"), "tp", to="varying"), None

    mesh = jaxtp.make_mesh(tp=4)
    with jax.set_mesh(mesh):
        run = jax.shard_map(lambda x: jax.lax.scan(turn, x, length=5)[0], in_specs=P("tp"), out_specs=P("tp"))
        counts = count_collectives(jax.make_jaxpr(run)(jnp.ones(8)), mesh_sizes(mesh))
    ((collective, times),) = counts.items()
    assert (collective.kind, collective.shape, times) == ("all-reduce", (2,), 5)
    assert collective.bytes_sent == 2 * 3 / 4 * 2 * 4


@pytest.mark.parametrize(
    ("scope", "module"),
    {
        "jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/mlp/row_parallel_linear/shard_map/psum": (
            "mlp/row_parallel_linear"
        ),
        "jit(step)/jvp(rms_norm)/shard_map/all_gather": "rms_norm",
        "jit(f)/transpose(jvp(layer_0))/eval_jaxpr/rematted_computation/mlp/attend": "layer_0/mlp/attend",
        "jit(step)/optimizer/reduce_sum": "optimizer/reduce_sum",
        "": "",
    }.items(),
)
def test_module_is_the_scope_without_plumbing(scope, module):
    assert Collective("all-reduce", ("tp",), 4, (2,), "float32", scope).module == module


def test_axes_of_one_device_are_left_out():
    mesh = jaxtp.make_mesh(fsdp=2, tp=2)
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            lambda x: jax.lax.psum(x, ("tp", "dp", "fsdp")), in_specs=P(("dp", "fsdp", "tp")), out_specs=P()
        )
        counts = count_collectives(jax.make_jaxpr(run)(jnp.ones(8)), mesh_sizes(mesh))
    assert [(c.axes, c.group) for c in counts] == [(("fsdp", "tp"), 4)]
