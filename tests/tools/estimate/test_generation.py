"""What generating takes; the size of the cache is asserted by the tests of generation."""

import functools
from dataclasses import replace

import pytest
from flax import nnx
from support import decoder

import jaxtp
from jaxtp.analysis.hardware import find
from jaxtp.config.schema import ConfigError
from jaxtp.generate.decode_model import weight_bytes
from jaxtp.mesh import fitting_meshes, mesh_shape
from jaxtp.tools.estimate.generation import cache_bytes, generations, table
from jaxtp.tools.estimate.search import Target, describe_model
from jaxtp.train.config import TrainConfig

MODEL = jaxtp.ModelConfig(
    d_model=64, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=8, d_ff=64
)
CONFIG = TrainConfig(model=MODEL)
facts = functools.cache(lambda: describe_model(CONFIG))
ROWS = 8
LENGTH = 40
WHERE = Target(find("h100"), 8, 1e12)


def found(room=1e12, rows=ROWS, model=MODEL, meshes=fitting_meshes(8)):
    where = replace(WHERE, room=room)
    return generations(model, where, facts(), meshes, rows, LENGTH)


def weights_of(model=MODEL):
    return {tuple(one.sizes.values()): one.weights for one in found(model=model)}


def test_meshes_are_ranked_and_divide_the_rows():
    every = found()
    speeds = [one.tokens_per_second for one in every]
    assert speeds == sorted(speeds, reverse=True)
    assert all(ROWS % (one.sizes["dp"] * one.sizes["fsdp"]) == 0 for one in every)
    assert len(found(rows=2)) < len(every)
    tight = found(room=sorted(one.weights + one.cache for one in every)[len(every) // 2])
    flags = [one.fits for one in tight]
    assert flags == sorted(flags, reverse=True)
    assert len(set(flags)) == 2
    assert table(tight, LENGTH).count("does not fit") == flags.count(False)


def test_weights_are_split_by_tp_and_fsdp_is_counted_as_dp():
    by_mesh = weights_of()
    assert set(by_mesh) == {(8, 1, 1, 1), (4, 1, 1, 2), (2, 1, 1, 4), (1, 1, 1, 8)}
    model = nnx.eval_shape(decoder(MODEL))
    for (_, _, _, tp), weights in by_mesh.items():
        assert weights == weight_bytes(model, mesh_shape(tp=tp))
    precision = jaxtp.Precision(compute="bfloat16")
    halves = weights_of(replace(MODEL, precision=precision))
    assert {mesh: 2 * weights for mesh, weights in halves.items()} == by_mesh
    (one,) = found(meshes=[mesh_shape(fsdp=8)])
    assert one.sizes == mesh_shape(dp=8)


def test_few_rows_read_the_experts_that_they_choose_and_many_read_all():
    """1 - (1 - k / E) ** n of them are expected."""
    model = replace(MODEL, d_model=128, d_ff=512, num_experts=8, experts_per_token=2)
    facts = describe_model(TrainConfig(model=model))

    def seconds(rows, **changes):
        (one,) = generations(
            replace(model, **changes), WHERE, facts, [mesh_shape(tp=8)], rows, LENGTH
        )
        return one.seconds - cache_bytes(model, one.sizes, rows, LENGTH) / speed, one

    speed = WHERE.hardware.bandwidth * WHERE.hardware.bandwidth_efficiency
    experts = 4 * model.num_layers * 3 * 128 * 512  # bytes: one of eight on each device
    for rows, share in ((1, 0.25), (2, 0.4375), (256, 1.0)):
        own, _ = seconds(rows)
        every, one = seconds(rows, grouped="xla")
        assert (every - own) * speed == pytest.approx((1 - share) * experts, abs=1)
        assert one.weights > experts


def test_a_mesh_that_cannot_generate_is_refused():
    for mesh, rows, message in [
        (
            {"dp": 4, "cp": 2},
            8,
            "--generate 8: a cache is not divided over cp; add a mesh with cp=1",
        ),
        ({"dp": 8}, 3, "--generate 3: no mesh of 8 devices"),
    ]:
        with pytest.raises(ConfigError, match=message):
            found(rows=rows, meshes=[mesh_shape(**mesh)])
