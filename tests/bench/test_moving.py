"""What is timed is the collective that it is called, as often as is said."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.audit.hlo import count_collectives_in_hlo
from jaxtp.bench.moving import KINDS, measure_messages, repeated
from jaxtp.bench.timing import Repeats
from jaxtp.mesh import AXES, make_mesh

SIZES = {"dp": 1, "fsdp": 2, "cp": 2, "tp": 4}
AXIS = {axis: dim for dim, axis in enumerate(AXES)}
EACH = 8
TIMES = 3


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(**SIZES)


def compiled(mesh, kind, axis, times):
    x = np.random.default_rng(0).normal(size=(mesh.size, EACH)).astype(np.float32)
    placed = jax.device_put(x.reshape(-1), NamedSharding(mesh, P(AXES)))
    with jax.set_mesh(mesh):
        return x, placed, jax.jit(repeated(kind, axis, times)).lower(placed).compile()


def expected(kind, x, axis):
    """By numpy, of all devices at once: `x [dp, fsdp, cp, tp, EACH]`."""
    along, n = AXIS[axis], SIZES[axis]
    sums = np.broadcast_to(x.sum(along, keepdims=True), x.shape)
    if kind == "all-reduce":
        return sums
    if kind == "permute":
        return np.roll(x, 1, along)
    part = EACH // n
    if kind == "all-to-all":
        pieces = np.stack(np.split(x, n, -1), 0)  # [to, ..., from, ..., part]
        return np.concatenate(list(np.moveaxis(np.swapaxes(np.moveaxis(pieces, along + 1, 1), 0, 1), 1, along + 1)), -1)
    if kind == "all-gather":
        joined = np.concatenate(np.split(x[..., :part], n, along), -1)
        return np.broadcast_to(joined, x.shape)
    result = x.copy()
    for i in range(n):
        mine = [slice(None)] * 5
        mine[along], mine[4] = slice(i, i + 1), slice(0, part)
        theirs = [slice(None)] * 5
        theirs[along], theirs[4] = slice(0, 1), slice(i * part, (i + 1) * part)
        result[tuple(mine)] = sums[tuple(theirs)]
    return result


@pytest.mark.parametrize("axis", ["cp", "tp"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_is_the_collective_that_it_is_called(kind, axis, mesh):
    x, placed, program = compiled(mesh, kind, axis, TIMES)
    x = x.reshape(*SIZES.values(), EACH)
    for _ in range(TIMES):
        x = expected(kind, x, axis)
    np.testing.assert_allclose(np.asarray(program(placed)), x.reshape(-1), rtol=1e-5)
    ((left, times),) = count_collectives_in_hlo(program.as_text(), dict(mesh.shape)).items()
    parts = SIZES[axis] if kind == "all-to-all" else 1  # of which the compiler for CPUs makes arrays of their own
    assert (left.kind, left.axes, left.bytes * parts, times) == (kind, (axis,), 4 * EACH, TIMES * parts), (
        "the compiler keeps all of them"
    )


def test_bytes_and_speeds(mesh):
    messages = list(measure_messages(mesh, "float32", (64, 1000), Repeats(1, 2), axes=("tp",)))
    assert [(one.collective.kind, one.collective.bytes) for one in messages] == [
        (kind, size) for size in (64, 992) for kind in KINDS
    ]
    for one in messages:
        moved, record = one.collective, one.record()
        share = {"all-reduce": 2 * 3 / 4, "permute": 1}.get(moved.kind, 3 / 4)
        assert (record["axis"], record["devices"], record["bytes_sent"]) == ("tp", 4, share * moved.bytes)
        assert one.speed * one.seconds == pytest.approx(moved.bytes_sent)
        assert 0 < one.seconds < 10


def test_axes_of_one_device_are_left_out():
    assert not list(measure_messages(make_mesh(), "float32", (64,), Repeats(1, 1)))
