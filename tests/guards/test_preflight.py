"""The preflight of a run of several processes: one of them lies about each thing that is
compared.
"""

import copy
import re
import socket
from types import SimpleNamespace

import numpy as np
import pytest
from runs import SMALL
from support import journeys
from tables import assert_errors, read_table

from jaxtp.config.schema import to_plain
from jaxtp.distributed import agreement
from jaxtp.guards import preflight
from jaxtp.mesh import AXES
from jaxtp.tools.launch.__main__ import main as launch
from jaxtp.train.config import TrainConfig

DATA = {"source": "text", "train_tokens": 100, "sha256": "ab", "order": {"rows": {"sha256": "ab"}}}


@pytest.fixture
def records():
    """Returns what three processes that are alike say."""
    first = preflight.record({"configuration": to_plain(TrainConfig()), "data": DATA})
    return [copy.deepcopy(first) | {"host": f"node{index}"} for index in range(3)]


def test_processes_that_are_alike_pass(records):
    assert list(preflight.differing(records)) == []


TABLES = read_table(__file__)


@pytest.mark.parametrize("path", TABLES["lies"])
def test_a_process_that_differs_is_named_with_both_values(path, records):
    lie, message = TABLES["lies"][path]
    *parents, last = path.split("/")
    place = records[2]["settings"]
    for name in parents:
        place = place[name]
    place[last] = lie
    (error,) = preflight.differing(records)
    said = rf"(?s)process 2 \(on node2\) and process 0 \(on node0\) .*{message}"
    assert re.search(said, str(error))


def test_gpus_that_nobody_drives_are_named():
    def error_of(row):
        each = zip(row["visible"], row["driven"], strict=True)
        records = [{"host": "a", "visible": v, "driven": d} for v, d in each]
        return next(map(str, preflight.idle_gpus(records)), "no error")

    assert_errors(TABLES["gpus"], error_of)


def processes(*shape, devices_each=1):
    """Returns a mesh of such devices of processes."""
    numbers = np.arange(np.prod(shape)) // devices_each
    devices = np.array([SimpleNamespace(process_index=int(number)) for number in numbers], object)
    sizes = dict(zip(AXES, shape, strict=True))
    return SimpleNamespace(
        devices=devices.reshape(shape), axis_names=AXES, shape=sizes, size=devices.size
    )


@pytest.mark.parametrize("sizes", TABLES["meshes"])
def test_layers_stay_on_one_host(sizes):
    """Two hosts of two processes of two devices; sequences may reach over them."""
    mesh = processes(*sizes, devices_each=2)
    hosts = preflight.hosts_of_devices(mesh, ["a", "a", "b", "b"])
    errors = list(map(str, preflight.tp_between_hosts(hosts)))
    assert len(errors) == (sizes[-1] == 8)
    assert all("mesh.tp=8 spreads layers over the hosts a and b" in error for error in errors)


def test_a_folder_that_one_host_does_not_see_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "PAUSES", ())
    monkeypatch.setattr(agreement, "all_gather_json", lambda seen: [seen, ["node1", False], seen])
    (finding,) = preflight.check_folder(tmp_path)
    assert "is not one folder for all: process 1 (on node1) does not see" in finding.text
    assert finding.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (finding,) = preflight.check_folder(tmp_path / "absent")
    assert f"{tmp_path}/absent cannot be written by process 0" in finding.text
    assert "No such file or directory" in finding.text
    (finding,) = preflight.check_folder(tmp_path)
    assert re.fullmatch(r"can be written, [\d.,]+ .?i?B free", finding.text)


MISTAKES = {
    "['--run.dir', 'elsewhere']": "differ in their configuration",
    "['--data.path', '/nowhere']": "data.path=/nowhere: there is no such file or dataset",
    "['--nonsense']": "process 1 (on {host}) cannot continue: --nonsense: jaxtp train has no such "
    "setting; ",
}


@pytest.mark.parametrize("mistake", journeys(list(MISTAKES), *list(MISTAKES)[:2]))
def test_all_processes_end_with_the_mistake_of_one(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = (
        "import os, sys\nfrom jaxtp.train.__main__ import main\n"
        f"sys.exit(main(sys.argv[1:] + ({mistake} if os.environ['JAX_PROCESS_ID'] == '1' else [])))"
    )
    flags = [*SMALL, "--mesh=fsdp=2", "--train.steps=2", "--run.dir=run"]
    assert launch(["--processes=2", "--devices=1", "--", "-c", code, *flags]) == 2
    logs = [(tmp_path / f"logs/process-{index}.log").read_text() for index in range(2)]
    assert all("error" in log or "nonsense" in log for log in logs)
    assert MISTAKES[mistake].format(host=socket.gethostname()) in logs[0]
    assert "checkpoints" not in {path.name for path in tmp_path.glob("run/*")}


def test_axes_between_hosts_are_found():
    axes = {"aaaa": [], "aabb": ["dp"], "abab": ["tp"], "abcd": ["dp", "tp"]}
    for places, between in axes.items():
        hosts = preflight.hosts_of_devices(processes(2, 1, 1, 2), list(places))
        assert preflight.axes_between_hosts(hosts) == between
