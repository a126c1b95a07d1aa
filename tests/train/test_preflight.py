"""The preflight of a run of several processes: one of them lies about each thing that is compared."""

import copy
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from runs import SMALL, mesh
from support import journeys

import jaxtp
from jaxtp.config.schema import ConfigError
from jaxtp.distributed import agreement
from jaxtp.mesh import AXES, mesh_of
from jaxtp.tools.launch.__main__ import main as launch
from jaxtp.train import preflight
from jaxtp.train.config import LaunchConfig, TrainConfig
from jaxtp.train.preflight import (
    check_clocks,
    check_folder,
    check_gpus,
    check_hosts_of_tp,
    compare,
    record,
)

DATA = {"source": "text", "train_tokens": 100, "sha256": "ab", "order": {"rows": {"sha256": "ab"}}}


@pytest.fixture
def records():
    """What three processes that are alike say."""
    first = record(TrainConfig(), DATA)
    return [copy.deepcopy(first) | {"host": f"node{index}"} for index in range(3)]


def test_processes_that_are_alike_pass(records):
    compare(records)
    check_clocks([1e9, 1e9 + 59, 1e9 - 59], records)


@pytest.mark.parametrize(
    ("path", "lie", "message"),
    [
        (("kind",), "NVIDIA A100", "different kinds of devices, NVIDIA A100 and cpu"),
        (("devices",), 3, "different numbers of devices, 3 and 16"),
        (("versions", "jax"), "0.1", r"differ in their versions.*\n  jax: .* -> 0.1"),
        (("versions", "NVIDIA's driver"), "550", "NVIDIA's driver: .*550"),
        (("configuration", "train", "steps"), 7, r"differ in their configuration.*\n  train.steps: \d+ -> 7"),
        (("data", "sha256"), "cd", r"differ in their data.*\n  sha256: ab -> cd"),
        (("data", "order", "rows", "sha256"), "cd", r"differ in their data.*\n  order.rows.sha256: ab -> cd"),
    ],
)
def test_a_process_that_differs_is_named_with_both_values(path, lie, message, records):
    *parents, last = path
    place = records[2]
    for name in parents:
        place = place[name]
    place[last] = lie
    with pytest.raises(ConfigError, match=rf"(?s)process 2 \(on node2\) and process 0 \(on node0\) .*{message}"):
        compare(records)


@pytest.mark.parametrize(
    ("visible", "driven", "idle"),
    [
        ([["0", "1"], ["0", "1"]], [[0], [1]], None),
        ([["4", "5"], ["6", "7"]], [[0, 1], [0, 1]], None),
        ([["0"], ["0"]], [[0], [0]], None),  # each is shown a GPU of its own as number 0
        ([[], []], [[], []], None),
        (
            [["0", "1", "2"], ["0", "1", "2"]],
            [[0], [1]],
            "a has 3 visible GPUs, and its 2 processes drive 2 of them (not 2)",
        ),
        (
            [["4", "5"], ["6", "7"]],
            [[0, 1], [0]],
            "a has 4 visible GPUs, and its 2 processes drive 3 of them: start 1, 2 or 4",
        ),
    ],
)
def test_gpus_that_nobody_drives_are_named(visible, driven, idle):
    records = [{"host": "a", "visible": v, "driven": d} for v, d in zip(visible, driven, strict=True)]
    if idle is None:
        check_gpus(records)
        return
    with pytest.raises(ConfigError, match=re.escape(idle)):
        check_gpus(records)


@pytest.mark.parametrize(
    ("sizes", "spread"),
    [((1, 2, 1, 4), False), ((2, 2, 1, 2), False), ((1, 1, 1, 8), True), ((2, 1, 1, 4), False), ((1, 1, 4, 2), False)],
)
def test_layers_stay_on_one_host(sizes, spread):
    """Two hosts of two processes of two devices; sequences may reach over them."""
    mesh = mesh_of(dict(zip(AXES, sizes, strict=True)))
    devices = np.array([SimpleNamespace(process_index=device.id // 2) for device in mesh.devices.flat], object)
    faked = SimpleNamespace(
        devices=devices.reshape(mesh.devices.shape), axis_names=mesh.axis_names, shape=mesh.shape, size=mesh.size
    )
    hosts = ["a", "a", "b", "b"]
    if not spread:
        check_hosts_of_tp(hosts, faked)
        return
    with pytest.raises(ConfigError, match=r"mesh.tp=8 spreads layers over the hosts a and b.* tp can be 1, 2, 4, and"):
        check_hosts_of_tp(hosts, faked)


@pytest.mark.parametrize("seconds", [3600.0, -61.0])
def test_a_clock_that_is_off_is_named(seconds, records):
    now = time.time()
    with pytest.raises(ConfigError, match=r"clock of process 1 \(on node1\) says"):
        check_clocks([now, now + seconds, now], records)


def test_a_folder_that_one_host_does_not_see_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "PAUSES", ())
    monkeypatch.setattr(agreement, "all_gather_json", lambda seen: [seen, ["node1", False], seen])
    with pytest.raises(ConfigError, match=r"is not one folder for all: process 1 \(on node1\) does not see"):
        check_folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_each_axis_of_several_devices_is_measured():
    mesh = jaxtp.make_mesh(1, 2, 2)
    config = TrainConfig(launch=LaunchConfig(preflight_bandwidth=True))
    lines = preflight.preflight(config, mesh, DATA)
    assert [line.split(": each")[0] for line in lines] == ["axis    fsdp 2", "axis    tp 2"]
    assert all(float(line.split("receives ")[1].split()[0]) > 0 for line in lines)


LIES = {
    "['--train.steps', '3']": "differ in their configuration",
    "['--run.dir', 'elsewhere']": "differ in their configuration",
    "['--data.path', '/nowhere']": (
        "process 1 (on {host}) cannot continue: data.path=/nowhere: there is no such file or dataset"
    ),
    "['--nonsense']": "process 1 (on {host}) cannot continue: --nonsense: jaxtp train has no such setting; ",
}


@pytest.mark.parametrize("lie", journeys([*LIES], *list(LIES)[1:3]))
def test_all_processes_end_with_the_mistake_of_one(lie, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = (
        "import os, sys\nfrom jaxtp.train.__main__ import main\n"
        f"sys.exit(main(sys.argv[1:] + ({lie} if os.environ['JAX_PROCESS_ID'] == '1' else [])))"
    )
    flags = [*SMALL, *mesh(1, 2, 1), "--train.steps", "2", "--run.dir", "run"]
    assert launch(["--processes", "2", "--devices", "1", "--", "-c", code, *flags]) == 2
    for index in range(2):
        assert "error" in (said := (tmp_path / f"logs/process-{index}.log").read_text()) or "nonsense" in said
    assert LIES[lie].format(host=preflight.socket.gethostname()) in (tmp_path / "logs/process-0.log").read_text()
    assert "checkpoints" not in {path.name for path in tmp_path.glob("run/*")}


@pytest.mark.parametrize(
    ("places", "axes"),
    [("aaaa", []), ("aabb", ["dp"]), ("abab", ["tp"]), ("abcd", ["dp", "tp"])],
)
def test_axes_between_hosts(places, axes):
    there = np.array([SimpleNamespace(process_index=process) for process in range(4)]).reshape(2, 1, 1, 2)
    made = SimpleNamespace(devices=there, axis_names=AXES)
    assert preflight.axes_between_hosts(made, list(places)) == axes
