"""Links, rings and the parts of a step's time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import read_table

import jaxtp
from jaxtp.analysis.collective import Collective
from jaxtp.analysis.hardware import TABLE, find
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate.roofline import collective_seconds, leaves_domain, link_speed
from jaxtp.tools.estimate.search import Target, describe_model, estimate
from jaxtp.train.config import DataConfig, MeshConfig, TrainConfig

BY_HAND = read_table(__file__, "rings")
US = 1e-6
IDEAL = {
    "h100": replace(find("h100"), link_efficiency=1.0, latency=0.0, hop=0.0, network_hop=0.0),
    "mi300x": replace(find("mi300x"), link_efficiency=1.0),
}
H100 = IDEAL["h100"]
WAITING = replace(find("h100"), latency=8.4 * US, hop=3.4 * US, network_hop=14 * US)


def sizes(text):
    dp, fsdp, tp = map(int, text.split("x"))
    return mesh_shape(dp=dp, fsdp=fsdp, tp=tp)


def seconds_of(hardware, mesh, axes, kind, sent):
    """Of a collective of which each device sends so many bytes; none where it is alone."""
    group = math.prod(mesh[axis] for axis in axes)
    whole = sent / (Collective(kind, axes, group, 1).bytes_sent or 1)
    return collective_seconds(hardware, mesh, Collective(kind, axes, group, whole))


OVER_TP = sizes("1x1x8"), ("tp",)


@pytest.mark.parametrize("name", IDEAL)
def test_a_ring_is_as_fast_as_its_slowest_link(name):
    hardware = IDEAL[name]
    for text, axes, speed in BY_HAND["speeds"][name]:
        ring = sizes(text), tuple(axes.split())
        assert link_speed(hardware, *ring) == pytest.approx(speed * 1e9), (text, axes)
        if name == "h100":
            assert leaves_domain(hardware, *ring) == (speed < 450), (text, axes)


def test_in_an_all_to_all_each_device_sends_through_its_share_of_the_network():
    """A ring through eight hosts of eight has all shares; of 63 parts, 56 go to other hosts."""
    kinds = ("all-gather", "all-to-all")
    hosts = sizes("1x64x1"), ("fsdp",)
    ring, exchange = (seconds_of(H100, *hosts, kind, 63e9) for kind in kinds)
    assert ring == pytest.approx(63 / 400)
    assert exchange == pytest.approx(56 / 50)
    one_host = sizes("1x8x1"), ("fsdp",)
    ring, exchange = (seconds_of(H100, *one_host, kind, 1e9) for kind in kinds)
    assert ring == exchange


@pytest.mark.parametrize(("size", "sent"), [("small", 0.0), ("large", 1e12)])
def test_a_collective_waits_for_the_steps_of_its_protocol(size, sent):
    for text, axis, kind, wait in BY_HAND["waits"][size]:
        ring = sizes(text), (axis,)
        seconds = seconds_of(WAITING, *ring, kind, sent) - sent / link_speed(WAITING, *ring)
        assert seconds == pytest.approx(wait * US), (text, axis, kind)


@given(
    name=st.sampled_from(sorted(TABLE)),
    mesh=st.sampled_from(["1x1x8", "64x1x1", "1x4x8", "1x16x1", "2x4x2"]).map(sizes),
    axes=st.sampled_from([("tp",), ("fsdp",), ("dp",), ("dp", "fsdp")]),
    kind=st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]),
    sent=st.floats(0, 1e12),
    more=st.floats(1, 1e3),
)
def test_time_grows_with_bytes_and_never_with_a_faster_link(name, mesh, axes, kind, sent, more):
    hardware = find(name)
    seconds = seconds_of(hardware, mesh, axes, kind, sent)
    assert seconds_of(hardware, mesh, axes, kind, more * sent) >= seconds
    for key in ("link", "network"):
        faster = replace(hardware, **{key: more * getattr(hardware, key)})
        assert seconds_of(faster, mesh, axes, kind, sent) <= seconds * (1 + 1e-9)


def test_a_latency_belongs_to_its_hardware():
    tpu = find("v5e")
    hosts = sizes("64x1x1"), ("dp",)
    for hardware, ring, kind, seconds in [
        # A latency that was measured has the protocols already.
        (replace(WAITING, hop=0.0), OVER_TP, "all-gather", 8.4 * US),
        (replace(WAITING, network_hop=0.0), OVER_TP, "all-gather", (8.4 + 7 * 3.4) * US),
        # TPUs have no protocols and no trees.
        (replace(tpu, domain=8), hosts, "all-reduce", tpu.latency + 2 * (56 * 0.5 + 7 * 10) * US),
    ]:
        assert seconds_of(hardware, *ring, kind, 0.0) == pytest.approx(seconds), hardware


MODEL = jaxtp.ModelConfig(
    vocab_size=512, d_model=1024, num_heads=16, num_kv_heads=8, head_dim=64, d_ff=4096
)
CONFIG = TrainConfig(model=MODEL, data=DataConfig(sequence_length=1024, global_batch_size=64))


def timed(hardware=H100, devices=8, model=MODEL, **mesh):
    run = MeshConfig(**mesh_shape(**mesh))
    config = replace(CONFIG, model=model, mesh=run)
    return estimate(config, Target(hardware, devices, 1e12), describe_model(config)).time


def test_better_hardware_is_faster_in_its_own_part():
    base = timed(tp=8)
    faster = {
        name: timed(replace(H100, **{name: 2 * getattr(H100, name)}), tp=8)
        for name in ("flops", "link")
    }
    assert faster["flops"].products < base.products
    assert faster["flops"].communication == base.communication
    assert faster["link"].moving == pytest.approx(base.moving / 2)
    assert faster["link"].computing == base.computing


@pytest.mark.wide
def test_products_are_as_fast_as_their_dtype():
    def products(**precision):
        given = jaxtp.Precision(compute="bfloat16", matmul_least=16, **precision)
        return timed(devices=1, model=replace(MODEL, precision=given)).products

    compute = products()
    # One of four products, the gradient of a weight, stays as it is.
    assert 5 / 8 * compute < products(matmul="float8") < compute


def test_the_range_of_times_holds_its_middle():
    for mesh in ({"tp": 8}, {"fsdp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}):
        time = timed(**mesh)
        assert 0 < time.computing <= time.overlapped <= time.expected <= time.serial
        assert time.serial == pytest.approx(time.computing + time.moving)
    alone = timed(devices=1)
    assert alone.moving == 0
    assert alone.serial == alone.overlapped == alone.computing
