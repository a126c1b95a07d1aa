"""Counting in jaxprs: loops, groups, and the names of modules."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import Collective
from jaxtp.analysis.hlo import parse_module, walk
from jaxtp.layers.experts import RARELY
from jaxtp.mesh import mesh_sizes


def collectives_of(body, *args):
    """Returns what `body` of a shard of eight numbers moves over tp, and how often each."""
    mesh = jaxtp.make_mesh(tp=4)
    with jax.set_mesh(mesh):
        run = jax.shard_map(body, in_specs=(P("tp"), *[P()] * len(args)), out_specs=P("tp"))
        return count_collectives(jax.make_jaxpr(run)(jnp.ones(8), *args), mesh_sizes(mesh))


def counts_of(body, *args):
    """Returns `{(kind, counted): times}` of the same."""
    return {(c.kind, c.counted): times for c, times in collectives_of(body, *args).items()}


def moved(x):
    return jax.lax.pcast(jax.lax.psum(x, "tp"), "tp", to="varying")


def test_scan_counts_every_turn():
    found = collectives_of(
        lambda x: jax.lax.scan(lambda carry, _: (moved(carry), None), x, length=5)[0]
    )
    ((collective, times),) = found.items()
    assert (collective.kind, collective.shape, times) == ("all-reduce", (2,), 5)
    assert collective.bytes_sent == 2 * 3 / 4 * 2 * 4


def test_a_loop_has_a_count_if_its_bounds_are_constants():
    turn = lambda i, x: moved(x)
    assert counts_of(lambda x: jax.lax.fori_loop(1, 5, turn, x)) == {("all-reduce", ""): 4}
    going = lambda c: (c[0] < 5) & (jax.lax.psum(c[1], "tp")[0] > 0)
    loop = lambda x: jax.lax.while_loop(going, lambda c: (c[0] + 1, moved(c[1])), (0, x))[1]
    assert counts_of(loop) == {("all-reduce", "a turn"): 2}, "the condition counts, too"


def test_a_number_of_turns_that_is_an_argument_is_unknown():
    loop = lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: moved(moved(x)), x)
    assert counts_of(loop, jnp.int32(3)) == {("all-reduce", "a turn"): 2}


def test_a_loop_that_rarely_runs_counts_nothing():
    def loop(x, n, scope):
        with jax.named_scope(scope):
            return jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(moved(x)), x)

    assert counts_of(partial(loop, scope=RARELY), jnp.int32(3)) == {("all-reduce", ""): 0}
    assert counts_of(partial(loop, scope="rarely"), jnp.int32(3)) == {
        ("all-reduce", "a turn"): 1
    }, "a user's name"
    for scope, wave, turns in ((RARELY, "sine", {0}), ("rarely", "cosine", {1})):
        module, entry = parse_module(
            jax.jit(partial(loop_alone, scope)).lower(jnp.ones(2), 3).compile().as_text()
        )
        assert {times for _, one, _, times, _ in walk(module, entry) if one.opcode == wave} == turns


def loop_alone(scope, x, n):
    """Programs differ in more than their names: the compilation cache ignores these."""
    with jax.named_scope(scope):
        return jax.lax.fori_loop(
            0, n, lambda _, x: jnp.sin(x) if scope == RARELY else jnp.cos(x), x
        )


def test_branches_count_as_what_they_move_at_most():
    twice = lambda x: moved(moved(x))
    gathered = lambda x: jax.lax.all_gather(x, "tp", tiled=True)[:2]
    assert counts_of(lambda x, p: jax.lax.cond(p, twice, gathered, x), True) == {
        ("all-reduce", "at most"): 2,
        ("all-gather", "at most"): 1,
    }


MODULES = {
    "jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/mlp/row_parallel_linear/shard_map/psum": (  # noqa: E501
        "mlp/row_parallel_linear"
    ),
    "jit(step)/jvp(rms_norm)/shard_map/all_gather": "rms_norm",
    "jit(f)/transpose(jvp(layer_0))/eval_jaxpr/rematted_computation/mlp/attend": "layer_0/mlp/attend",  # noqa: E501
    "jit(step)/optimizer/reduce_sum": "optimizer/reduce_sum",
    "jit(step)/router/cond/branch_1_fun/mlp": "router/mlp",
    "": "",
}


def test_module_is_the_scope_without_plumbing():
    assert {
        scope: Collective("all-reduce", ("tp",), 4, 8, scope).module for scope in MODULES
    } == MODULES


def test_axes_of_one_device_are_left_out():
    mesh = jaxtp.make_mesh(fsdp=2, tp=2)
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            lambda x: jax.lax.psum(x, ("tp", "dp", "fsdp")),
            in_specs=P(("dp", "fsdp", "tp")),
            out_specs=P(),
        )
        counts = count_collectives(jax.make_jaxpr(run)(jnp.ones(8)), mesh_sizes(mesh))
    assert [(c.axes, c.group) for c in counts] == [(("fsdp", "tp"), 4)]
