"""Links, rings and the parts of a step's time."""

import dataclasses
import itertools

import pytest

import jaxtp
from jaxtp.estimate.roofline import leaves_domain, link_speed
from jaxtp.estimate.search import Target, describe_model, estimate
from jaxtp.hardware import find
from jaxtp.train.config import DataConfig, MeshConfig, TrainConfig

H100 = dataclasses.replace(find("h100"), link_efficiency=1.0, latency=0.0)
MODEL = jaxtp.ModelConfig(vocab_size=512, d_model=1024, num_heads=16, num_kv_heads=8, head_dim=64, d_ff=4096)
CONFIG = TrainConfig(model=MODEL, data=DataConfig(sequence_length=1024, global_batch_size=64))


def sizes(dp, fsdp, tp):
    return {"dp": dp, "fsdp": fsdp, "tp": tp}


@pytest.mark.parametrize(
    ("mesh", "axes", "speed"),
    [
        (sizes(1, 1, 8), ("tp",), 450e9),
        (sizes(1, 8, 8), ("tp",), 450e9),
        (sizes(1, 8, 8), ("fsdp",), 50e9),  # each of eight rings has a device in each host
        (sizes(1, 16, 4), ("fsdp",), 100e9),  # two devices of each ring in each host
        (sizes(1, 64, 1), ("fsdp",), 400e9),  # one ring through all
        (sizes(4, 2, 4), ("dp",), 50e9),
        (sizes(4, 2, 4), ("fsdp",), 450e9),
        (sizes(8, 4, 2), ("dp", "fsdp"), 200e9),
        (sizes(1, 1, 16), ("tp",), 400e9),
        (sizes(1, 4, 6), ("tp",), 100e9),  # six do not divide a host: half of the rings lie in two
    ],
)
def test_the_slowest_link_of_a_ring(mesh, axes, speed):
    assert link_speed(H100, mesh, axes) == speed
    assert leaves_domain(H100, mesh, axes) == (speed < 450e9)


def timed(hardware=H100, devices=8, **mesh):
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(**(sizes(1, 1, 1) | mesh)))
    return estimate(config, Target(hardware, devices, 1e12), describe_model(config)).time


def test_better_hardware_is_faster_in_its_own_part():
    base = timed(tp=8)
    faster = {
        name: timed(dataclasses.replace(H100, **{name: 2 * getattr(H100, name)}), tp=8) for name in ("flops", "link")
    }
    assert faster["flops"].products < base.products
    assert faster["flops"].communication == base.communication
    assert faster["link"].moving == pytest.approx(base.moving / 2)
    assert faster["link"].computing == base.computing


def test_the_range_holds_its_middle():
    for mesh in ({"tp": 8}, {"fsdp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}):
        time = timed(**mesh)
        assert 0 < time.overlapped <= time.expected <= time.serial
        assert time.serial == pytest.approx(time.computing + time.moving)
        assert time.overlapped >= time.computing


def test_one_device_moves_nothing():
    time = timed(devices=1)
    assert time.moving == 0
    assert time.serial == time.overlapped == time.computing


def test_more_tensor_parallelism_computes_less_and_moves_more():
    times = [timed(tp=tp) for tp in (1, 2, 4, 8)]
    assert all(a.products > b.products for a, b in itertools.pairwise(times))
    assert all(a.computing_share > b.computing_share for a, b in itertools.pairwise(times))
