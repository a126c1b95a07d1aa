"""Links, rings and the parts of a step's time."""

import dataclasses
import itertools
import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import sweep_of

import jaxtp
from jaxtp.analysis.collective import Collective
from jaxtp.analysis.hardware import TABLE, find
from jaxtp.analysis.schedule import read_parts, read_schedule
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.tools.estimate.compiler import roofline, trace
from jaxtp.tools.estimate.roofline import collective_seconds, leaves_domain, link_speed
from jaxtp.tools.estimate.search import Target, describe_model, estimate
from jaxtp.train.config import DataConfig, MeshConfig, TrainConfig

H100 = dataclasses.replace(find("h100"), link_efficiency=1.0, latency=0.0, hop=0.0, network_hop=0.0)
MODEL = jaxtp.ModelConfig(vocab_size=512, d_model=1024, num_heads=16, num_kv_heads=8, head_dim=64, d_ff=4096)
CONFIG = TrainConfig(model=MODEL, data=DataConfig(sequence_length=1024, global_batch_size=64))


def sizes(dp, fsdp, tp):
    return mesh_shape(dp=dp, fsdp=fsdp, tp=tp)


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


def test_all_to_all_each_device_sends_through_its_own_share_of_the_network():
    """A ring through eight hosts of eight has all shares; of 63 parts, 56 go to other hosts."""
    ring, exchange = (seconds_of(H100, sizes(1, 64, 1), ("fsdp",), kind, 63e9) for kind in ("all-gather", "all-to-all"))
    assert ring == pytest.approx(63 / 400)
    assert exchange == pytest.approx(56 / 50)
    inside = [seconds_of(H100, sizes(1, 8, 1), ("fsdp",), kind, 1e9) for kind in ("all-gather", "all-to-all")]
    assert inside[0] == inside[1]


US = 1e-6
WAITING = dataclasses.replace(find("h100"), latency=8.4 * US, hop=3.4 * US, network_hop=14 * US)
HUGE = 1e12


def seconds_of(hardware, mesh, axes, kind, sent):
    """Of a collective of which each device sends so many bytes; none where it is alone."""
    group = math.prod(mesh[axis] for axis in axes)
    whole = sent / (Collective(kind, axes, group, 1).bytes_sent or 1)
    return collective_seconds(hardware, mesh, Collective(kind, axes, group, whole))


ONE_HOST, HOSTS, ALONE = sizes(1, 1, 8), sizes(64, 1, 1), sizes(1, 4, 8)
"""Over tp; over dp, eight hosts of eight; over fsdp, one device on each of four hosts."""


@pytest.mark.parametrize(
    ("mesh", "axes", "kind", "us"),
    [
        (ONE_HOST, ("tp",), "all-gather", 6.6 + 7 * 0.6),
        (ONE_HOST, ("tp",), "permute", 6.6 + 0.6),
        (HOSTS, ("dp",), "permute", 6.6 + 2.7),  # the slowest of all: between hosts
        (ONE_HOST, ("tp",), "all-reduce", 6.6 + 2 * 7 * 0.6),  # a tree inside a host is a chain
        (sizes(1, 16, 1), ("fsdp",), "reduce-scatter", 6.6 + 14 * 1.0 + 2.7),
        (HOSTS, ("dp",), "all-reduce", 6.8 + 2 * (7 * 0.6 + 3 * 5.0)),  # the tree
        (ALONE, ("fsdp",), "all-gather", 6.6 + 3 * 5.0),  # waits for the network as a tree does
        (sizes(1, 64, 8), ("fsdp",), "all-gather", 8.4 + 6 * 14 / 3.5 + 64 * 2.8),  # one in each of many hosts: PAT
    ],
)
def test_a_collective_that_sends_nothing_waits_for_the_steps_of_ll(mesh, axes, kind, us):
    assert seconds_of(WAITING, mesh, axes, kind, 0.0) == pytest.approx(us * US)


@pytest.mark.parametrize(
    ("mesh", "axes", "kind", "us"),
    [
        (ONE_HOST, ("tp",), "all-gather", 8.4 + 7 * 3.4),
        (ONE_HOST, ("tp",), "all-reduce", 8.4 + 2 * 7 * 3.4),
        (sizes(1, 16, 1), ("fsdp",), "reduce-scatter", 8.4 + 14 * 3.4 + 14),
        (HOSTS, ("dp",), "all-reduce", 8.4 + 2 * (56 * 3.4 + 7 * 14)),
        (ALONE, ("fsdp",), "all-gather", 8.4 + 3 * 14),
    ],
)
def test_a_large_collective_is_a_ring_by_simple(mesh, axes, kind, us):
    seconds = seconds_of(WAITING, mesh, axes, kind, HUGE) - HUGE / link_speed(WAITING, mesh, axes)
    assert seconds == pytest.approx(us * US)


def test_between_them_nvlink_has_ll128_and_pcie_has_not():
    sent, axes = 2**23, ("tp",)
    seconds = seconds_of(WAITING, ONE_HOST, axes, "all-gather", sent)
    assert seconds == pytest.approx((14 + 7 * 1.9) * US + sent / 0.92 / link_speed(WAITING, ONE_HOST, axes))
    slow = find("l40s")
    waits = [(8.4 * US + 7 * slow.hop, 1.0), (6.6 * US + 7 * slow.hop * 0.6 / 3.4, 0.38)]
    for sent in (2.0**i for i in range(10, 30)):
        fastest = min(wait + sent / share / link_speed(slow, ONE_HOST, axes) for wait, share in waits)
        assert seconds_of(slow, ONE_HOST, axes, "all-gather", sent) == pytest.approx(fastest)


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@given(
    name=st.sampled_from(sorted(TABLE)),
    mesh=st.sampled_from([ONE_HOST, HOSTS, ALONE, sizes(1, 16, 1), sizes(2, 4, 2)]),
    axes=st.sampled_from([("tp",), ("fsdp",), ("dp",), ("dp", "fsdp")]),
    kind=st.sampled_from(KINDS),
    sent=st.floats(0, 1e12),
    more=st.floats(1, 1e3),
)
def test_time_grows_with_bytes_and_never_with_a_faster_link(name, mesh, axes, kind, sent, more):
    hardware = find(name)
    seconds = seconds_of(hardware, mesh, axes, kind, sent)
    assert seconds_of(hardware, mesh, axes, kind, more * sent) >= seconds
    for key in ("link", "network"):
        faster = dataclasses.replace(hardware, **{key: more * getattr(hardware, key)})
        assert seconds_of(faster, mesh, axes, kind, sent) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("changed", ["hop", "network_hop"])
def test_a_measured_latency_has_the_protocols_already(changed):
    hardware = dataclasses.replace(WAITING, **{changed: 0.0})
    wait = 8.4 + (0 if changed == "hop" else 7 * 3.4)
    assert seconds_of(hardware, ONE_HOST, ("tp",), "all-gather", 0.0) == pytest.approx(wait * US)


def test_tpus_have_no_protocols_and_amds_have_those_of_rccl():
    v5e, mi300x = find("v5e"), find("mi300x")
    wait = v5e.latency + 2 * 7 * v5e.hop
    assert seconds_of(v5e, ONE_HOST, ("tp",), "all-reduce", 0.0) == pytest.approx(wait)
    assert seconds_of(mi300x, ONE_HOST, ("tp",), "all-gather", 0.0) == pytest.approx((12 + 7 * 0.8) * US)


def test_each_host_more_waits_longer():
    waits = [seconds_of(find("h100"), sizes(1, n, 8), ("fsdp",), "all-gather", 1e6) for n in (2, 8, 64)]
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


def test_products_are_as_fast_as_their_dtype():
    def products(**precision):
        model = dataclasses.replace(MODEL, precision=jaxtp.Precision(compute="bfloat16", matmul_least=16, **precision))
        config = dataclasses.replace(CONFIG, model=model)
        return estimate(config, Target(H100, 1, 1e12), describe_model(config)).time.products

    compute, half, both = products(), products(matmul="float8", matmul_layers="*.mlp.*"), products(matmul="float8")
    assert 5 / 8 * compute < both < half < compute  # one of four products, the gradient of a weight, stays as it is


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


TINY = jaxtp.ModelConfig(
    vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, loss_chunk=8
)


@pytest.mark.parametrize(
    ("remat", "experts"), sweep_of([["none", "save_dots", "full"], [0, 4]], ("none", 0), ("full", 0))
)
def test_a_compiled_part_does_no_less_than_the_least(remat, experts):
    """Without recomputation as much, but for logits, computed twice, and masked scores of attention."""
    mesh = mesh_shape(fsdp=2, tp=2)
    model = dataclasses.replace(TINY, remat=remat, attention="xla", num_experts=experts, experts_per_token=2)
    data = DataConfig(sequence_length=32, global_batch_size=4)
    config = TrainConfig(model=model, data=data, mesh=MeshConfig(fsdp=2, tp=2))
    with jax.set_mesh(mesh_of(mesh)):
        text = trace(config, mesh_of(mesh)).lower().compile().as_text()
    setting = estimate(config, Target(find("h100"), 4, 80e9), describe_model(config))
    found = roofline(setting, read_parts(text), read_schedule(text, mesh))
    parts = {name: found[name] for name in ("MLP", "projections", "embedding, loss", "attention", "all")}
    parts["attention"]["flops"] += found["other"]["flops"]  # a CPU's compiler drops the names of its products
    more = {name: part["flops"] / part["least_flops"] for name, part in parts.items()}
    sent = [
        part["bytes_sent"] / part["least_bytes"]
        for name, part in found.items()
        if name in ("sent over fsdp", "sent over tp")
    ]
    assert min([*more.values(), *sent]) >= 1
    assert more["embedding, loss"] == 4 / 3
    assert found["optimizer"]["product_bytes"] + found["optimizer"]["other_bytes"] >= found["optimizer"]["least_bytes"]
    if (remat, experts) == ("none", 0):
        assert list(more.values())[:2] == [1, 1]
        assert more["attention"] == 2
        assert sent == pytest.approx([1, 1], rel=3e-3)
    if (remat, experts) == ("full", 0):
        assert list(more.values())[:2] == [11 / 9, 4 / 3]
