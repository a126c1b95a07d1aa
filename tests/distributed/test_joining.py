"""Joining: from the variables that launchers set, as recorded, and from bad ones."""

import os
import re
import subprocess
import sys
import threading

import jax
import pytest
from runs import free_address

from jaxtp.distributed import joining
from jaxtp.distributed.devices import build_mesh
from jaxtp.distributed.environment import LaunchError, bypass_proxy, num_processes, require_joinable
from jaxtp.distributed.joining import gpus_of_process, join_processes
from jaxtp.train import __main__ as train

SLURM = {
    "SLURM_JOB_ID": "65541",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "8",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}
"""One task on each of two nodes: srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8."""
EIGHT = SLURM | {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}
"""Eight tasks on each, which see all GPUs of their node."""
BOUND = EIGHT | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}
"""Eight tasks on each, to each of which Slurm shows a GPU of its own, as number 0."""
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train:1234",
    "JAX_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture
def alone(monkeypatch):
    """Nobody looks for the names of these hosts."""
    monkeypatch.setattr(joining.Wait, "reach", lambda self: None)


@pytest.fixture
def joined(alone, monkeypatch):
    calls = []
    monkeypatch.setattr(joining, "rendezvous", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((*args, kwargs)))
    return calls


@pytest.mark.parametrize("environment", [{}, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_JOB_ID": "1"}])
def test_an_ordinary_environment_is_one_process(environment, joined):
    join_processes(environment, gpus=8)
    assert not joined


@pytest.mark.parametrize(
    ("environment", "gpus", "expected"),
    [
        (SLURM, 8, ("node001:61445", 2, 1, list(range(8)))),
        (SLURM, 0, ("node001:61445", 2, 1, None)),
        (EIGHT, 8, ("node001:61445", 16, 11, [3])),
        (BOUND, 8, ("node001:61445", 16, 11, [0])),
        (EIGHT | {"SLURM_STEP_TASKS_PER_NODE": "12,4", "SLURM_LOCALID": "1"}, 8, ("node001:61445", 16, 11, [2, 3])),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "10.0.0.7:99"}, 8, ("10.0.0.7:99", 2, 1, list(range(8)))),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1,4-5]b[2-3],c", "JAX_COORDINATOR_PORT": "7"}, 0, ("a1b2:7", 2, 1, None)),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, 0, (None, 2, 1, None)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}, 0, ("127.0.0.1:61445", 2, 1, None)),
        (OPEN_MPI, 8, ("10.96.0.1:62624", 4, 3, [4, 5, 6, 7])),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1;tcp6://[fe80::1]:43"}, 0, (None, 4, 3, None)),
        (OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "6"}, 8, ("10.96.0.1:62624", 4, 3, [0])),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 0, ("127.0.0.1:62624", 4, 3, None)),
        (JOBSET, 8, ("train-workers-0-0.train:1234", 4, 2, None)),
        (BY_HAND, 8, ("host:1", 2, 1, None)),
        (SLURM | BY_HAND | {"JAX_PROCESS_ID": "0"}, 8, ("host:1", 2, 0, None)),
    ],
)
def test_a_process_finds_its_place_and_its_gpus(environment, gpus, expected, joined):
    join_processes(environment, gpus=gpus)
    ((address, settings),) = joined
    place = (address, settings["num_processes"], settings["process_id"], settings.get("local_device_ids"))
    assert place == expected
    assert settings["coordinator_bind_address"] == (address if address and "127.0.0.1" in address else None)
    assert num_processes(environment) == settings["num_processes"]
    assert settings["initialization_timeout"] > joining.JOIN_SECONDS


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8"}
"""The variables of MPICH 4.0; Intel MPI has the same process manager."""
PALS = {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2"}
JAX_NAMES = "JAX_COORDINATOR_ADDRESS=HOST:PORT.*JAX_NUM_PROCESSES.*JAX_PROCESS_ID"
ONE_TASK = SLURM | {"SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (TORCHRUN, r"torchrun.*\(RANK=0, WORLD_SIZE=2\)"),
        (MPICH, r"MPICH, Intel MPI.*\(PMI_RANK=1, PMI_SIZE=2\)"),
        (PALS, r"Cray PALS.*\(PALS_RANKID=0, PALS_LOCAL_SIZE=2\)"),
        ({"PALS_RANKID": "3"}, r"Cray PALS.*\(PALS_RANKID=3\)"),
        (PALS | {"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "1"}, "Cray PALS"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "8"}, "MVAPICH"),
        (ONE_TASK | TORCHRUN, "torchrun"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"} | TORCHRUN, "torchrun"),
    ],
)
def test_processes_that_would_each_run_alone_are_refused(environment, found):
    with pytest.raises(LaunchError, match=f"{found}.*{JAX_NAMES}"):
        require_joinable(environment)


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN | {"WORLD_SIZE": "1"},
        MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        PALS | {"PALS_LOCAL_SIZE": "1"},
        {"RANK": "3"},
        {"WORLD_SIZE": "8"},
        TORCHRUN | {"WORLD_SIZE": "all"},
        TORCHRUN | {"WORLD_SIZE": "9" * 5000},
        TORCHRUN | BY_HAND,
        MPICH | JOBSET,
        SLURM | TORCHRUN,
        OPEN_MPI | MPICH,
    ],
)
def test_one_process_and_processes_that_are_joined_are_not_refused(environment):
    require_joinable(environment)


def test_the_mesh_of_a_run_is_refused_where_another_launcher_started_it(monkeypatch):
    for name, value in MPICH.items():
        monkeypatch.setenv(name, value)
    sizes = {"dp": 1, "fsdp": 1, "cp": 1, "tp": len(jax.devices())}
    with pytest.raises(LaunchError, match="PMI_SIZE=2"):
        build_mesh(sizes)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)  # by the user's program
    monkeypatch.setattr("jaxtp.distributed.devices.host_names", lambda: ["here"])
    assert build_mesh(sizes).size == len(jax.devices())


@pytest.mark.journey
def test_a_training_under_another_launcher_is_one_error_and_its_help_is_printed(tmp_path):
    command = [sys.executable, "-m", "jaxtp", "train"]
    settings = {"env": os.environ | TORCHRUN, "capture_output": True, "text": True, "timeout": 300}
    refused = subprocess.run([*command, "--run.dir", str(tmp_path / "run")], **settings)
    assert refused.returncode == 2
    assert re.fullmatch(f"jaxtp train: error: torchrun.*{JAX_NAMES}.*\n", refused.stderr)
    assert not (tmp_path / "run").exists()
    helped = subprocess.run([*command, "--help"], **settings)
    assert helped.returncode == 0, helped.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://proxy"}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://proxy"}, "node1"),
        ({"https_proxy": "http://proxy", "no_proxy": "a.org,b.org"}, "a.org,b.org,node1"),
        ({"grpc_proxy": "http://proxy", "no_proxy": "a.org", "no_grpc_proxy": "c.org"}, "c.org,node1"),
    ],
)
def test_the_processes_do_not_meet_through_a_proxy(before, after):
    environment = dict(before)
    bypass_proxy("node1", environment)
    assert environment.pop("no_grpc_proxy", None) == after
    assert environment == {name: value for name, value in before.items() if name != "no_grpc_proxy"}


@pytest.mark.parametrize("tasks", [1, 2, 4, 8])
def test_every_gpu_of_a_host_is_driven_by_one_process(tasks):
    driven = [gpu for index in range(tasks) for gpu in gpus_of_process({}, tasks, index, 8)]
    assert sorted(driven) == list(range(8))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, "not JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
        (BY_HAND | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two: should be a number"),
        (BY_HAND | {"JAX_PROCESS_ID": "9" * 5000}, "ID=999.*number"),
        (BY_HAND | {"JAX_PROCESS_ID": "2"}, "count from 0 to 1"),
        (JOBSET | {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4 of JAX_NUM_PROCESSES=4: .* 0 to 3"),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "host"}, "=host: .*HOST:PORT"),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "h:99999"}, "=h:99999: .*65535"),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "h:0"}, "=h:0: .*HOST:PORT"),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "h:" + "9" * 9999}, "HOST:PORT"),
        (BY_HAND | {"JAXTP_JOIN_SECONDS": "0"}, "JAXTP_JOIN_SECONDS=0: should be a number of seconds from 1"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many: should be a number"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_NODEID is not set"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x9"}, r"PER_NODE=1\(x9: should be a list such as 8\(x2\),4"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2: .* has 2 nodes"),
        (
            EIGHT | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"},
            "8 GPUs .* 3 processes of this host; start 1, 2, 4 or 8 on each",
        ),
    ],
)
def test_what_cannot_be_is_an_error(joined, environment, message):
    with pytest.raises(LaunchError, match=message):
        join_processes(environment, gpus=8)
    assert not joined


@pytest.mark.parametrize(
    ("bind", "host", "bound"),
    [
        (None, "host", None),
        ("10.0.0.7", "host", "10.0.0.7:1"),
        ("fd00::7", "host", "[fd00::7]:1"),
        (None, "localhost", "127.0.0.1:1"),
        (None, "127.0.0.1", "127.0.0.1:1"),
        (None, "[::1]", "[::1]:1"),
    ],
)
def test_process_0_listens_on_loopback_where_all_meet_there_or_where_it_is_to(bind, host, bound, joined):
    join_processes(BY_HAND | {"JAX_COORDINATOR_ADDRESS": f"{host}:1"}, gpus=0, bind=bind)
    ((address, settings),) = joined
    assert address == f"{host}:1"
    assert settings["coordinator_bind_address"] == bound


@pytest.mark.parametrize(("bind", "host"), [("10.0.0.7", "localhost"), ("::1", "127.0.0.1")])
def test_an_address_at_which_the_others_do_not_look_is_an_error(bind, host, joined):
    with pytest.raises(LaunchError, match=f"^launch.bind={bind}: the processes meet at {host}, on this host only"):
        join_processes(BY_HAND | {"JAX_COORDINATOR_ADDRESS": f"{host}:1"}, gpus=0, bind=bind)
    assert not joined


def test_so_it_is_where_a_launcher_starts_all_on_one_host(joined):
    with pytest.raises(LaunchError, match=r"^launch.bind=10\.0\.0\.7: the processes meet at 127\.0\.0\.1"):
        join_processes(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, gpus=0, bind="10.0.0.7")
    assert not joined


def test_an_address_that_is_not_of_this_host_is_an_error(joined):
    with pytest.raises(LaunchError, match=r"^192\.0\.2\.77:61445: this host cannot listen there \("):
        join_processes(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, gpus=0, bind="192.0.2.77")
    assert not joined


def test_a_process_that_waits_for_the_others_says_so(monkeypatch, capsys):
    """And that it does not reach a node: at once, since JAX would not say it."""
    said = threading.Event()
    say = joining.Wait.print
    monkeypatch.setattr(joining, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(joining, "LONG_WAIT", 0.1)
    monkeypatch.setattr(
        joining.Wait, "print", lambda self, text: (say(self, text), "waiting for all" in text and said.set())
    )
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: said.wait(60))
    nowhere = {"SLURM_STEP_NODELIST": "no-such-host.invalid", "JAXTP_JOIN_SECONDS": "70"}
    join_processes(SLURM | nowhere, gpus=8)
    first, second = capsys.readouterr().err.splitlines()
    where = "process 1 of 2 at no-such-host.invalid:61445: "
    assert re.fullmatch(rf"{where}the host has no address \(.+\); still trying", first)
    assert re.fullmatch(
        rf"{where}still waiting for all to start, up to 70 s \(the host has no address \(.+\)\)", second
    )


def test_who_waits_in_vain_for_a_scheduler_names_the_node(monkeypatch, capsys):
    codes, ended = [], threading.Event()
    monkeypatch.setattr(joining.os, "_exit", lambda code: (codes.append(code), ended.set()))
    monkeypatch.setattr(joining, "_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: ended.wait(60))
    join_processes(SLURM | {"SLURM_STEP_NODELIST": "no-such-host.invalid", "JAXTP_JOIN_SECONDS": "1"}, gpus=8)
    assert codes == [2]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "error: process 1 of 2 at no-such-host.invalid:61445: not all came within 1 s: the host has no address ("
    )
    assert "JAX_COORDINATOR_ADDRESS=HOST:PORT names another" in last


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore"),
            r"of 2 at host:1: .*timed out.",
        ),
        (ValueError("coordinator_address should be defined."), "should be defined.; set JAX_COORDINATOR_ADDRESS=HOST"),
    ],
)
def test_others_that_do_not_come_are_an_error(error, message, alone, monkeypatch):
    def initialize(*args, **kwargs):
        raise error

    monkeypatch.setattr(joining, "rendezvous", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(LaunchError, match=message):
        join_processes(BY_HAND)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("process", "message"),
    [
        ("0", "process 1 of 2 did not come within 3 s: does it run"),
        ("1", "process 1 of 2 at {address}: nothing answers there after"),
    ],
)
def test_who_waits_in_vain_ends_with_one_line(process, message):
    """JAX itself would abort the process."""
    address = free_address()
    place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": process}
    environment = {**os.environ, **place, "JAXTP_JOIN_SECONDS": "3"}
    command = [sys.executable, "-m", "jaxtp.train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"jaxtp train: error: {message.format(address=address)}")
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("flags", "bind"),
    [
        (["--launch.bind", "10.0.0.7"], "10.0.0.7"),
        (["--config", "{folder}/run.yaml"], "fd00::7"),
        ([], None),
        (["--no-such-flag"], None),
        (["--config", "/nowhere"], None),
        (["--launch.bind", "10.0.0.7", "--help"], None),
    ],
)
def test_the_address_to_listen_at_is_read_before_the_processes_meet(flags, bind, monkeypatch, tmp_path, capsys):
    """A mistake is reported later, to all."""

    class MeetingError(Exception):
        pass

    def stop(**settings):
        bound.append(settings["bind"])
        raise MeetingError

    bound = []
    (tmp_path / "run.yaml").write_text("launch:\n  bind: fd00::7\n")
    monkeypatch.setattr(joining, "join_processes", stop)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(MeetingError):
        train.main([flag.format(folder=tmp_path) for flag in flags])
    assert bound == [bind]
    assert capsys.readouterr() == ("", "")
