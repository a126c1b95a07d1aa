"""`scripts/bench.py`: from collectives and products to a hardware file, and back in an estimate."""

import re

import bench
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tables import read_table

from jaxtp.analysis.collective import Collective
from jaxtp.analysis.hardware import find, read
from jaxtp.analysis.hlo import count_collectives_in_hlo
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import AXES, make_mesh, mesh_shape
from jaxtp.tools.estimate.roofline import leaves_domain, link_speed

SIZES = [2**14, 2**18, 2**22, 2**26]
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")


def test_local_devices_are_measured_and_estimate_can_read_the_file(tmp_path, capsys):
    out = tmp_path / "new/mine.yaml"
    quick = ["--rounds=2", "--in-a-row=2", "--message-bytes", "1024", "1048576"]
    config = tmp_path / "tiny.yaml"
    config.write_text("{model: {d_ff: 256}, data: {sequence_length: 64}}")
    flags = [*quick, f"--config={config}", "--mesh=tp=2", "--like=h100", f"--out={out}"]
    assert bench.main(flags) == 0
    printed = capsys.readouterr().out
    assert [name for name in (*KINDS, "gate, up", "down") if name not in printed] == []
    hardware = read(out)
    assert hardware.like == "h100"
    assert 0 < hardware.matmul_efficiency < 1
    assert f"{out}x2" in printed
    assert re.search(r"slowest: device [01] of process 0 \(on .*\) takes \d+\.\d\d times", printed)
    assert bench.main([*flags, "--mesh=tp=1000000"]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_program_is_the_collective_of_its_name(kind):
    mesh = make_mesh(fsdp=2, tp=4)
    x = jax.ShapeDtypeStruct((8 * mesh.size,), np.float32, sharding=NamedSharding(mesh, P(AXES)))
    with jax.set_mesh(mesh):
        program = jax.jit(bench.repeated(kind, "tp", 3)).lower(x).compile()
    ((moved, times),) = count_collectives_in_hlo(program.as_text(), dict(mesh.shape)).items()
    # The compiler for CPUs makes arrays of their own.
    arrays = 4 if kind == "all-to-all" else 1
    assert (moved.kind, moved.axes, moved.bytes * arrays) == (kind, ("tp",), 4 * 8)
    assert times == 3 * arrays, "the compiler keeps all of them"


def messages(bench, axis, devices, speed, noise=(1, 1, 1, 1)):
    """As if a ring's took `20 us + bytes sent / speed`, times noise; a permute takes 1 s."""
    timed = []
    for size, factor in zip(SIZES, noise, strict=True):
        for kind in KINDS[:3]:
            moved = Collective(kind, (axis,), devices, size)
            timed.append(bench.Message(moved, (2e-5 + moved.bytes_sent / speed) * factor))
        timed.append(bench.Message(Collective("permute", (axis,), devices, size), 1.0))
    return timed


@pytest.mark.parametrize(
    ("like", "axes", "speeds"),
    read_table(__file__),
)
def test_an_estimate_reckons_with_what_was_measured(like, axes, speeds, tmp_path):
    sizes = mesh_shape(**axes)
    table = find(like)
    lines = []
    for axis, speed in speeds.items():
        lines.append(bench.fit_line(axis, messages(bench, axis, sizes[axis], speed)))
    fields = bench.measured_fields(table, sizes, lines, 0.5)
    (tmp_path / "mine.yaml").write_text(bench.hardware_file(table, fields, "8 devices"))
    hardware = read(tmp_path / "mine.yaml")
    assert (hardware.like, hardware.matmul_efficiency) == (like, 0.5)
    assert (hardware.memory, hardware.bandwidth) == (table.memory, table.bandwidth)
    assert hardware.latency == pytest.approx(2e-5 if speeds else table.latency, rel=1e-3)
    widest = {leaves_domain(table, sizes, (axis,)): axis for axis in sorted(speeds, key=sizes.get)}
    for axis in widest.values():
        assert link_speed(hardware, sizes, (axis,)) == pytest.approx(speeds[axis], rel=1e-3)
    if True not in widest:
        network = table.network * table.link_efficiency
        assert hardware.network * hardware.link_efficiency == pytest.approx(network, rel=1e-3)


def test_without_a_line_there_is_no_file():
    shrinking = messages(bench, "tp", 4, 1e15, [1, 1 / 2, 1 / 3, 1 / 4])
    assert bench.fit_line("tp", shrinking) is None
    with pytest.raises(ConfigError, match="the times along tp do not increase"):
        bench.measured_fields(find("h100"), mesh_shape(tp=4), [], 0.5)
