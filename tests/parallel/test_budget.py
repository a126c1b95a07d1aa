"""One block moves what DESIGN says it must, and nothing else, counted in its jaxpr."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.mesh import mesh_sizes
from jaxtp.models import remat
from jaxtp.parallel.census import count_collectives

B, T = 8, 16
CONFIG = {"d_model": 64, "d_ff": 96, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
NUM_WEIGHTS = 9  # q, k, v, out, gate, up, down and two norm scales


def block_collectives(mesh, policy, **config):
    """Collectives of one block's forward and backward pass."""
    config = jaxtp.ModelConfig(**CONFIG, **config)
    mesh = jaxtp.make_mesh(*mesh)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(nnx.eval_shape(lambda: jaxtp.DecoderBlock(config, rngs=nnx.Rngs(0))))
        block = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x), policy=remat.policy(policy))
        x = jax.ShapeDtypeStruct((B, T, config.d_model), jnp.float32)
        jaxpr = jax.make_jaxpr(jax.grad(lambda state, x: block(state, x).sum(), argnums=(0, 1)))(state, x)
    return count_collectives(jaxpr, mesh_sizes(mesh))


def kinds(collectives, axes):
    counts = Counter()
    for collective, times in collectives.items():
        if collective.axes == axes:
            counts[collective.kind] += times
    return dict(counts)


def units_over_tp(collectives, mesh):
    """Volume over tp in units of (tp-1)/tp x batch x sequence x d_model x bytes, as in the design."""
    dp, fsdp, tp = mesh
    activations = {c: times for c, times in collectives.items() if c.axes == ("tp",) and len(c.shape) == 3}
    sent = sum(c.bytes_sent * times for c, times in activations.items())
    return sent / ((tp - 1) / tp * (B // (dp * fsdp)) * T * CONFIG["d_model"] * 4)


# DESIGN: volume over tp of a layer, forward and backward, by remat policy.
ALL_REDUCE = {"none": 8, "save_dots": 8, "save_gathered": 8, "full": 10}
SEQUENCE_PARALLEL = {"none": 8, "save_dots": 10, "save_gathered": 8, "full": 11}


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 1, 8), (1, 2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("policy", ALL_REDUCE)
def test_all_reduce_tensor_parallelism(mesh, policy):
    found = block_collectives(mesh, policy, sequence_parallel=False)
    assert kinds(found, ("tp",)) == {"all-reduce": ALL_REDUCE[policy] / 2}
    assert units_over_tp(found, mesh) == ALL_REDUCE[policy]
    over_fsdp = {} if mesh[1] == 1 else {"all-gather": 2 * NUM_WEIGHTS, "reduce-scatter": NUM_WEIGHTS}
    assert kinds(found, ("fsdp",)) == over_fsdp
    assert kinds(found, ("dp",)) == ({} if mesh[0] == 1 else {"all-reduce": NUM_WEIGHTS})
    assert {c.axes for c in found} <= {("tp",), ("fsdp",), ("dp",)}


@pytest.mark.parametrize("mesh", [(1, 1, 8), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("policy", SEQUENCE_PARALLEL)
def test_sequence_parallelism(mesh, policy):
    found = block_collectives(mesh, policy)  # on by itself: tp divides the sequence
    assert units_over_tp(found, mesh) == SEQUENCE_PARALLEL[policy]
    assert set(kinds(found, ("tp",))) <= {"all-gather", "reduce-scatter", "all-reduce"}
    norms = [c for c in found if "all-reduce" in c.kind and "tp" in c.axes]
    assert all(c.shape in {(CONFIG["d_model"],), (CONFIG["d_model"] // mesh[1],)} for c in norms)


def test_nothing_over_fsdp_has_the_shape_of_an_activation():
    found = block_collectives((1, 2, 4), "none")
    rows = {c.shape[0] for c in found if c.axes == ("fsdp",)}
    assert B // 2 not in rows  # a weight's leading dim is 64, or a part of 96 or 64 over tp
    assert all(len(c.shape) <= 2 for c in found if c.axes == ("fsdp",))


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
