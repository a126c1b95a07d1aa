"""A pair of layers and its computing alone are the same work, with and without communication."""

import jax
import pytest

import jaxtp
from jaxtp.audit.hlo import count_collectives_in_hlo, count_flops_in_hlo
from jaxtp.bench.computing import Pair, hidden_width, measure_pairs, measure_products, pair_program
from jaxtp.bench.timing import Repeats
from jaxtp.mesh import make_mesh, sized
from jaxtp.models.costs import step_costs

ROWS, LENGTH = 2, 8


@pytest.mark.parametrize(
    ("setting", "moves"),
    [
        ({}, {"all-gather": 2, "reduce-scatter": 2}),
        ({"sequence_parallel": False}, {"all-reduce": 2}),
        ({"overlap": "ring"}, {"permute": 5 * 3}),
    ],
)
def test_only_communication_is_between_them(setting, moves):
    model = jaxtp.ModelConfig(d_model=8, d_ff=16, **setting)
    mesh = make_mesh(tp=4)
    with jax.set_mesh(mesh):
        together = pair_program(model, 16, ROWS, LENGTH).func.as_text()
    alone = pair_program(model, 4, ROWS, LENGTH).func.as_text()
    flops = 6 * 2 * ROWS * LENGTH * 8 * 16 / 4  # two products forward, four backward
    assert count_flops_in_hlo(together) == count_flops_in_hlo(alone) == flops
    counts = count_collectives_in_hlo(together, dict(mesh.shape))
    found = {kind: sum(times for one, times in counts.items() if one.kind == kind) for kind in moves}
    assert found == moves
    assert counts.total() == sum(moves.values())
    assert all(one.axes == ("tp",) for one in counts)
    assert not any(word in alone for word in ("all-reduce", "all-gather", "reduce-scatter"))


def test_pairs_at_each_tp():
    one, two = measure_pairs(jaxtp.ModelConfig(d_model=8, d_ff=16), [1, 2], ROWS, LENGTH, Repeats(1, 1))
    assert one.seconds == one.computing > 0
    assert two.seconds > 0
    assert Pair(2, 1.0, 1.5).moving == 0


def test_products_are_those_of_a_block():
    model = jaxtp.ModelConfig(d_model=8, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=2, num_layers=1, remat="none")
    for tp in (1, 2):
        found = list(measure_products(model, [tp], ROWS, LENGTH, Repeats(1, 1)))
        work = step_costs(model, sized(tp=tp), batch_size=ROWS, sequence_length=LENGTH)
        block = [product for product in work.products if product.name != "head"]
        assert {one.name: 3 * one.flops for one in found} == {product.name: product.flops for product in block}
        assert all(one.seconds > 0 for one in found)


@pytest.mark.parametrize(("experts", "width"), [(0, 16), (4, 32)])
def test_the_pair_is_as_wide_as_what_a_token_uses(experts, width):
    assert hidden_width(jaxtp.ModelConfig(d_model=8, d_ff=16, num_experts=experts)) == width
