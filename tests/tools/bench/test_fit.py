"""From times to a hardware file, and back in an estimate."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtp.analysis.hardware import find, read
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import mesh_shape
from jaxtp.tools.bench.__main__ import Measured, Message, TimedProduct, fit_line
from jaxtp.tools.estimate.roofline import leaves_domain, link_speed

SHARES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}
SIZES = [2**14, 2**18, 2**22, 2**26]


def messages(axis, devices, latency, speed, noise=(1, 1, 1, 1), permute=1.0):
    """As if each took `latency + bytes sent / speed`, times noise; a permute something else."""
    found = []
    for size, factor in zip(SIZES, noise, strict=True):
        for kind, share in SHARES.items():
            sent = share * (devices - 1) / devices * size
            found.append(
                Message(axis, devices, kind, size, sent, (latency + sent / speed) * factor)
            )
        found.append(Message(axis, devices, "permute", size, size, permute))
    return found


@given(
    latency=st.floats(0, 1e-3),
    speed=st.floats(1e8, 1e12),
    devices=st.sampled_from([2, 4, 8, 64]),
    permute=st.floats(1e-6, 1),
)
def test_latency_and_speed_of_a_line_are_found_again(latency, speed, devices, permute):
    line = fit_line(messages("tp", devices, latency, speed, permute=permute))
    assert line.speed == pytest.approx(speed, rel=1e-3)
    assert line.latency == pytest.approx(latency, rel=1e-3, abs=SIZES[0] / speed / 1000)
    assert line.error < 1e-3
    assert (line.axis, line.devices) == ("tp", devices)


@given(st.lists(st.floats(0.8, 1.25), min_size=len(SIZES), max_size=len(SIZES)))
def test_noise_moves_a_fitted_line_by_as_much(noise):
    line = fit_line(messages("tp", 4, 2e-5, 1e11, noise))
    assert 0.5e11 < line.speed < 2e11
    assert 1e-5 < line.latency < 4e-5


def measured(sizes, found, like="h100", **changes):
    place = {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "dtype": "bfloat16"}
    products = [TimedProduct(tp, "down", 1000, 1000, 1000, 1e-5 * tp) for tp in (1, 2, 4)]
    return Measured(
        **(place | changes), sizes=sizes, hardware=find(like), messages=found, products=products
    )


def written(sizes, speeds, file, like="h100"):
    """Returns the hardware of the file that is written after measuring these speeds."""
    found = []
    for axis, speed in speeds.items():
        found += messages(axis, sizes[axis], 2e-5, speed)
    file.write_text(measured(sizes, found, like=like).hardware_file())
    return read(file)


@pytest.mark.parametrize(
    ("sizes", "speeds"),
    [
        (mesh_shape(tp=8), {"tp": 3e11}),
        (mesh_shape(fsdp=2, tp=4), {"fsdp": 1e11, "tp": 3e11}),
        (mesh_shape(fsdp=8, tp=8), {"fsdp": 2e10, "tp": 3e11}),
        (mesh_shape(fsdp=16), {"fsdp": 8e10}),
        (mesh_shape(), {}),
    ],
)
def test_an_estimate_reckons_with_what_was_measured(sizes, speeds, tmp_path):
    hardware = written(sizes, speeds, tmp_path / "mine.yaml")
    table = find("h100")
    speed = hardware.flops * hardware.matmul_efficiency
    assert speed == pytest.approx(2e9 / (1e-5 * min(sizes["tp"], 4)), rel=1e-3)
    assert hardware.like == "h100"
    assert (hardware.memory, hardware.bandwidth) == (table.memory, table.bandwidth)
    assert hardware.latency == pytest.approx(2e-5 if speeds else table.latency, rel=1e-3)
    widest = {leaves_domain(table, sizes, (axis,)): axis for axis in sorted(speeds, key=sizes.get)}
    for axis in widest.values():
        assert link_speed(hardware, sizes, (axis,)) == pytest.approx(speeds[axis], rel=1e-3)
    if True not in widest:
        ours, theirs = (each.network * each.link_efficiency for each in (hardware, table))
        assert ours == pytest.approx(theirs)


def test_links_between_pairs_are_measured_as_those_that_a_ring_has(tmp_path):
    sizes = mesh_shape(fsdp=2, tp=4)
    speeds = {"fsdp": 5e10, "tp": 1.5e11}
    hardware = written(sizes, speeds, tmp_path / "mine.yaml", like="mi300x")
    assert hardware.link == pytest.approx(3.5e11, rel=1e-3)
    for axis, speed in speeds.items():
        assert link_speed(hardware, sizes, (axis,)) == pytest.approx(speed, rel=1e-3)


def test_float32_has_half_of_the_peak():
    one = measured(mesh_shape(), [])
    half = replace(one, dtype="float32")
    assert half.matmul_efficiency == pytest.approx(2 * one.matmul_efficiency)


def test_virtual_devices_are_named_in_the_file_and_the_record():
    one = measured(mesh_shape(), [], platform="cpu")
    assert "mean nothing for hardware" in one.hardware_file()
    assert "mean nothing for hardware" in one.record()["note"]
    assert "note" not in measured(mesh_shape(), []).record()


def test_without_a_line_there_is_no_file():
    shrinking = messages("tp", 4, 2e-5, 1e15, [1, 1 / 2, 1 / 3, 1 / 4])
    assert fit_line(shrinking) is None
    with pytest.raises(
        ConfigError, match="the times along tp do not increase with the message size"
    ):
        measured(mesh_shape(tp=4), shrinking).hardware_file()
