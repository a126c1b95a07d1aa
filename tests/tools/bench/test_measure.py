"""What is timed is the collective or product that it is called, as often as is said, in turns."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis.hlo import count_collectives_in_hlo
from jaxtp.analysis.step_costs import step_costs
from jaxtp.mesh import AXES, make_mesh, mesh_shape
from jaxtp.tools.bench.__main__ import (
    KINDS,
    WARM_UP,
    measure_messages,
    measure_products,
    medians,
    repeated,
)

EACH = 8
TIMES = 3


@pytest.mark.parametrize("axis", ["cp", "tp"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_program_is_the_collective_of_its_name(kind, axis):
    mesh = make_mesh(fsdp=2, cp=2, tp=4)
    x = jax.ShapeDtypeStruct((mesh.size * EACH,), np.float32, sharding=NamedSharding(mesh, P(AXES)))
    with jax.set_mesh(mesh):
        program = jax.jit(repeated(kind, axis, TIMES)).lower(x).compile()
    ((left, times),) = count_collectives_in_hlo(program.as_text(), dict(mesh.shape)).items()
    # the compiler for CPUs makes arrays of their own
    parts = mesh.shape[axis] if kind == "all-to-all" else 1
    assert (left.kind, left.axes, left.bytes * parts) == (kind, (axis,), 4 * EACH)
    assert times == TIMES * parts, "the compiler keeps all of them"


def test_messages_have_their_bytes_and_times():
    assert not list(measure_messages(make_mesh(), "float32", (64,), 1, 1)), (
        "axes of one device are left out"
    )
    messages = list(measure_messages(make_mesh(tp=4), "float32", (64, 1000), 1, 2))
    assert [(one.bytes, one.kind) for one in messages] == list(itertools.product((64, 992), KINDS))
    for one in messages:
        share = {"all-reduce": 2 * 3 / 4, "permute": 1}.get(one.kind, 3 / 4)
        assert (one.axis, one.devices, one.bytes_sent) == ("tp", 4, share * one.bytes)
        assert 0 < one.seconds < 10


def test_products_are_those_of_a_block():
    rows = 2
    length = 8
    model = jaxtp.ModelConfig(
        d_model=8, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=2, num_layers=1, remat="none"
    )
    for tp in (1, 2):
        found = list(measure_products(model, [tp], rows, length, 1, 1))
        work = step_costs(model, mesh_shape(tp=tp), batch_size=rows, sequence_length=length)
        block = [product for product in work.products if product.name != "head"]
        assert {one.name: 3 * one.flops for one in found} == {
            product.name: product.flops for product in block
        }
        assert all(one.seconds > 0 for one in found)


def test_programs_take_turns_and_medians_are_of_timed_calls():
    calls = []

    def program(name, *seconds):
        left = iter([100.0] * WARM_UP + list(seconds))  # a slow start, which counts nowhere
        return lambda: calls.append((name, next(left)))

    programs = {"a": program("a", 1, 1, 5, 5, 2, 2), "b": program("b", 30, 10, 20, 10, 10, 90)}
    now = lambda: sum(seconds for _, seconds in calls)
    assert medians(programs, 3, calls=2, clock=now) == {"a": 2.0, "b": 20.0}
    assert "".join(name for name, _ in calls[2 * WARM_UP :]) == "aabb" * 3
