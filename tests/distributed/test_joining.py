"""Joining from the variables that launchers set, as recorded, and from invalid variables."""

import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from unittest.mock import Mock

import jax
import pytest
from runs import free_address, run_program
from tables import assert_errors, raised_by, read_table

from jaxtp.distributed import joining
from jaxtp.distributed.devices import build_mesh, most_devices, request_virtual_devices
from jaxtp.distributed.environment import LaunchError, bypass_proxy, num_processes, require_joinable
from jaxtp.distributed.joining import gpus_of_process, join_processes
from jaxtp.train import __main__ as train

LAUNCHERS = read_table(__file__, "launchers")
RECORDED = LAUNCHERS["recorded"]
SLURM, OPEN_MPI, BY_HAND = (RECORDED[name] for name in ("slurm", "open_mpi", "by_hand"))
ON_ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
NOBODY = SLURM | {"SLURM_STEP_NODELIST": "no-such-host.invalid"}
JAX_NAMES = ("JAX_COORDINATOR_ADDRESS=HOST:PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
ENDLESS = "9" * 5000


@pytest.fixture
def alone(monkeypatch):
    """Nothing looks up the names of these hosts."""
    monkeypatch.setattr(joining.Wait, "reach", lambda self: None)


@pytest.fixture
def joined(alone, monkeypatch):
    calls = []
    monkeypatch.setattr(joining, "rendezvous", lambda *_: None)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **kwargs: calls.append((*args, kwargs))
    )
    return calls


def test_environment_without_launcher_is_one_process(joined):
    alone = SLURM | {"JAX_NUM_PROCESSES": "1"}
    for environment in ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_JOB_ID": "1"}, alone):
        join_processes(environment, gpus=8)
    assert not joined


def test_process_finds_its_id_and_gpus(joined):
    nameless = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    rows = [*LAUNCHERS["places"], {"environment": nameless, "gpus": 0, "place": [None, 2, 1, None]}]
    for row in rows:
        join_processes(row["environment"], gpus=row["gpus"])
        ((address, settings),) = joined
        joined.clear()
        known = ("num_processes", "process_id", "local_device_ids")
        assert [address, *(settings.get(name) for name in known)] == row["place"], row
        assert settings["coordinator_bind_address"] == (
            address if address and "127.0.0.1" in address else None
        )
        assert num_processes(row["environment"]) == settings["num_processes"]
        assert settings["initialization_timeout"] > joining.JOIN_SECONDS


def test_processes_of_unsupported_launchers_are_refused():
    rows = [row | {"says": [*row["says"], *JAX_NAMES]} for row in LAUNCHERS["alone"]]
    assert_errors(
        rows, lambda row: raised_by(require_joinable, row["environment"], kind=LaunchError)
    )


def test_single_and_joined_processes_are_accepted():
    for environment in (*LAUNCHERS["accepted"], RECORDED["pytorch_job"] | {"WORLD_SIZE": ENDLESS}):
        require_joinable(environment)


def test_devices_are_refused_under_unsupported_launcher(monkeypatch):
    for name, value in RECORDED["pytorch_job"].items():
        monkeypatch.setenv(name, value)
    sizes = {"dp": 1, "fsdp": 1, "cp": 1, "tp": len(jax.devices())}
    for start in (partial(build_mesh, sizes), partial(request_virtual_devices, 1), most_devices):
        with pytest.raises(LaunchError, match="WORLD_SIZE=2"):
            start()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)  # by the user's program
    monkeypatch.setattr("jaxtp.distributed.devices.host_names", lambda: ["here"])
    assert build_mesh(sizes).size == len(jax.devices())


@pytest.mark.journey
def test_train_under_unsupported_launcher_fails_but_prints_help(tmp_path):
    command = [sys.executable, "-m", "jaxtp", "train"]
    settings = {
        "env": os.environ | RECORDED["pytorch_job"],
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }
    refused = subprocess.run([*command, f"--run.dir={tmp_path}/run"], **settings)
    assert refused.returncode == 2
    assert refused.stderr.startswith("jaxtp train: error: Kubeflow's PyTorchJob")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    helped = subprocess.run([*command, "--help"], **settings)
    assert helped.returncode == 0, helped.stderr


def test_processes_bypass_the_proxy():
    for before, after in LAUNCHERS["proxies"]:
        environment = dict(before)
        bypass_proxy(environment)
        assert environment.get("grpc_proxy") == after


def test_each_gpu_of_a_host_belongs_to_one_process():
    for tasks in (1, 2, 4, 8):
        driven = [gpu for index in range(tasks) for gpu in gpus_of_process({}, tasks, index, 8)]
        assert sorted(driven) == list(range(8))


def test_invalid_variables_are_errors(joined):
    endless = [
        {"environment": BY_HAND | {"JAX_PROCESS_ID": ENDLESS}, "says": ["ID=999", "number"]},
        {"environment": BY_HAND | {"JAX_COORDINATOR_ADDRESS": f"h:{ENDLESS}"}, "says": "HOST:PORT"},
    ]

    def error_of(row):
        return raised_by(partial(join_processes, row["environment"], gpus=8), kind=LaunchError)

    assert_errors([*LAUNCHERS["wrong"], *endless], error_of)
    assert not joined


def at(host):
    return BY_HAND | {"JAX_COORDINATOR_ADDRESS": f"{host}:1"}


LISTENS = LAUNCHERS["listens"]


def test_process_0_listens_on_loopback_or_at_the_bind_address(joined):
    for bind, host, bound in LISTENS:
        join_processes(at(host), gpus=0, bind=bind)
        address, settings = joined.pop()
        assert (address, settings["coordinator_bind_address"]) == (f"{host}:1", bound)


def test_bind_address_must_match_the_loopback_address(joined):
    for bind, environment in (
        ("10.0.0.7", at("localhost")),
        ("::1", at("127.0.0.1")),
        ("10.0.0.7", ON_ONE_HOST),
    ):
        with pytest.raises(
            LaunchError, match=f"^launch.bind={bind}: the processes meet at (localhost|127.0.0.1)"
        ):
            join_processes(environment, gpus=0, bind=bind)
    assert not joined


def test_bind_address_must_belong_to_this_host(joined):
    with pytest.raises(
        LaunchError, match=r"^192\.0\.2\.77:61445: this host cannot listen there \("
    ):
        join_processes(
            SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, gpus=0, bind="192.0.2.77"
        )
    assert not joined


def test_long_wait_prints_one_line(monkeypatch, capsys):
    """An unreachable address is also reported at once, because JAX would not report it."""
    said = []

    def wait_for_others(*_, **__):
        until = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < until:
            time.sleep(0.02)
            said.extend(capsys.readouterr().err.splitlines())

    monkeypatch.setattr(joining, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(joining, "LONG_WAIT", 0.1)
    monkeypatch.setattr(jax.distributed, "initialize", wait_for_others)
    join_processes(NOBODY | {"JAXTP_JOIN_SECONDS": "70"}, gpus=8)
    where = "process 1 of 2 at no-such-host.invalid:61445: "
    assert re.fullmatch(rf"{where}the host has no address \(.+\); still trying", said[0])
    assert re.fullmatch(
        rf"{where}still waiting for all to start, up to 70 s \(the host has no address \(.+\)\)",
        said[1],
    )


def test_timeout_under_a_scheduler_names_the_node(monkeypatch, capsys):
    ended = threading.Event()
    end = Mock(side_effect=lambda code: ended.set())
    monkeypatch.setattr(joining.os, "_exit", end)
    monkeypatch.setattr(joining, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: ended.wait(60))
    join_processes(NOBODY | {"JAXTP_JOIN_SECONDS": "1"}, gpus=8)
    end.assert_called_once_with(2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "error: process 1 of 2 at no-such-host.invalid:61445: not all processes joined within 1 s: "
        "the host has"
    )
    assert "JAX_COORDINATOR_ADDRESS=HOST:PORT names another" in last


def test_jax_error_while_joining_is_one_message(alone, monkeypatch):
    monkeypatch.setattr(joining, "rendezvous", lambda *_: None)
    for error, message in (
        (
            RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore"),
            r"of 2 at host:1: .*timed out\.$",
        ),
        (
            ValueError("coordinator_address should be defined."),
            "defined.; set JAX_COORDINATOR_ADDRESS=HOST",
        ),
    ):
        monkeypatch.setattr(jax.distributed, "initialize", Mock(side_effect=error))
        with pytest.raises(LaunchError, match=message):
            join_processes(BY_HAND)


@pytest.mark.journey
def test_process_that_times_out_ends_with_one_line():
    """JAX itself would abort the process. Each of two processes waits for the other."""
    messages = {
        "0": "process 1 of 2 did not join within 3 s: is it running",
        "1": "process 1 of 2 at {}: nothing answers there after",
    }
    for process, message in messages.items():
        address = free_address()
        place = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": process,
        }
        variables = os.environ | place | {"JAXTP_JOIN_SECONDS": "3"}
        command = [sys.executable, "-m", "jaxtp.train"]
        done = run_program(*command, env=variables)
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"jaxtp train: error: {message.format(address)}")
        assert done.returncode == 2


class MeetingError(Exception):
    """Ends a command when its processes meet."""


def test_bind_address_is_read_before_joining(monkeypatch, tmp_path, capsys):
    """A mistake in the flags is reported later, to all processes."""
    meet = Mock(side_effect=MeetingError)
    monkeypatch.setattr(joining, "join_processes", meet)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    (tmp_path / "run.yaml").write_text("launch:\n  bind: fd00::7\n")
    binds = {
        "--launch.bind 10.0.0.7": "10.0.0.7",
        f"--config {tmp_path}/run.yaml": "fd00::7",
        "": None,
        "--no-such-flag": None,
        "--config /nowhere": None,
        "--launch.bind 10.0.0.7 --help": None,
    }
    for flags, bind in binds.items():
        with pytest.raises(MeetingError):
            train.main(flags.split())
        assert meet.call_args.kwargs["bind"] == bind, flags
    assert capsys.readouterr() == ("", "")
