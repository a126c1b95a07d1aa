"""Links, rings and the parts of a step's time."""

import dataclasses
import itertools

import pytest

import jaxtp
from jaxtp.estimate.links import collective_seconds, leaves_domain, link_speed
from jaxtp.estimate.search import Target, describe_model, estimate
from jaxtp.hardware import find
from jaxtp.train.config import DataConfig, MeshConfig, TrainConfig

H100 = dataclasses.replace(find("h100"), link_efficiency=1.0, latency=0.0, hop=0.0, network_hop=0.0)
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


@pytest.mark.parametrize(
    ("mesh", "axes", "speed"),
    [
        (sizes(1, 1, 2), ("tp",), 64e9),
        (sizes(1, 2, 4), ("tp",), 192e9),
        (sizes(1, 2, 4), ("fsdp",), 64e9),
        (sizes(1, 1, 8), ("tp",), 448e9),
        (sizes(1, 4, 8), ("fsdp",), 50e9),
        (sizes(1, 16, 4), ("fsdp",), 64e9),  # two of each ring in each host: their one link is slower than two networks
        (sizes(1, 1, 32), ("tp",), 400e9),
    ],
)
def test_where_links_join_pairs_a_ring_has_its_own(mesh, axes, speed):
    hardware = dataclasses.replace(find("mi300x"), link_efficiency=1.0)
    assert link_speed(hardware, mesh, axes) == pytest.approx(speed)


US = 1e-6
WAITING = dataclasses.replace(find("h100"), latency=1 * US, hop=2 * US, network_hop=10 * US)


@pytest.mark.parametrize(
    ("mesh", "axes", "kind", "us"),
    [
        (sizes(1, 1, 8), ("tp",), "all-gather", 1 + 7 * 2),
        (sizes(1, 1, 8), ("tp",), "all-reduce", 1 + 2 * 7 * 2),  # a tree inside a host is a chain
        (sizes(1, 16, 1), ("fsdp",), "reduce-scatter", 1 + 14 * 2 + 10),
        (sizes(64, 1, 1), ("dp",), "all-reduce", 1 + 2 * (7 * 2 + 3 * 10)),  # eight hosts: the tree
        (sizes(1, 4, 8), ("fsdp",), "all-gather", 1 + 2 * 10 / 3.5 + 4 * 2.8),  # one in each host: PAT
    ],
)
def test_a_collective_that_sends_nothing_waits_for_its_steps(mesh, axes, kind, us):
    assert collective_seconds(WAITING, mesh, axes, kind, 0.0) == pytest.approx(us * US)


def test_the_fastest_way_depends_on_what_is_sent():
    """The tree for little, the ring, which has more steps and all of the links, for much; it never gets better."""
    far, sent = sizes(64, 1, 1), [10.0**i for i in range(12)]
    times = [collective_seconds(WAITING, far, ("dp",), "all-reduce", size) for size in sent]
    assert times == sorted(times)
    ring = 1 * US + 2 * (56 * 2 + 7 * 10) * US
    assert times[0] < ring / 2
    assert times[-1] == pytest.approx(ring + sent[-1] / link_speed(WAITING, far, ("dp",)))


def test_each_host_more_waits_longer():
    waits = [collective_seconds(find("h100"), sizes(1, n, 8), ("fsdp",), "all-gather", 1e6) for n in (2, 8, 64)]
    assert waits == sorted(waits)
    assert waits[-1] > 3 * waits[0]


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
