import threading

import jax
import pytest

from jaxtp import launch


@pytest.fixture
def joined(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def test_an_ordinary_environment_is_one_process(joined):
    launch.join_processes({"SLURM_STEP_NUM_TASKS": "1"})
    assert not joined


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_launchers_are_left_to_jax(joined, name):
    launch.join_processes({name: "2"})
    assert joined == [((), {})]


def test_by_hand(joined):
    launch.join_processes({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"})
    assert joined == [(("host:1",), {"num_processes": 4, "process_id": 3})]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, "not JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "JAX_NUM_PROCESSES=two: should be a number",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "9" * 5000}, "ID=999.*number"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "count from 0 to 1"),
        ({"JAX_COORDINATOR_ADDRESS": "host", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "=host: .*HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "h:99999", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "=h:99999: .*65535"),
        ({"JAX_COORDINATOR_ADDRESS": "h:0", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "=h:0: .*HOST:PORT"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many: should be a number"),
    ],
)
def test_half_an_environment_is_an_error(joined, environment, message):
    with pytest.raises(launch.LaunchError, match=message):
        launch.join_processes(environment)


BY_HAND = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def test_a_process_that_waits_for_the_others_says_so(monkeypatch, capsys):
    said = threading.Event()
    monkeypatch.setattr(launch, "_PATIENCE", 0.0)
    monkeypatch.setattr(launch, "print", lambda *args, **kwargs: (print(*args, **kwargs), said.set()), raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: said.wait(60))
    launch.join_processes(BY_HAND)
    assert capsys.readouterr().err == "process 1 of 2 at host:1: still waiting for all to start\n"


def test_others_that_do_not_come_are_an_error(monkeypatch):
    def initialize(*args, **kwargs):
        raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(launch.LaunchError, match=r"process 1 of 2 at host:1: .*Barrier timed out.$"):
        launch.join_processes(BY_HAND)


SKIP = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


@pytest.mark.parametrize(
    ("files", "before", "after"),
    [
        ([], {}, {SKIP: "1"}),
        ([], {SKIP: ""}, {SKIP: ""}),
        (["nvidiactl"], {}, {}),
        (["dxg"], {}, {}),
    ],
)
def test_cudas_libraries_are_not_looked_for_without_a_gpu(files, before, after, tmp_path):
    for file in files:
        (tmp_path / file).touch()
    environment = dict(before)
    launch.accept_absent_gpus(environment, [tmp_path / "nvidia0", tmp_path / "nvidiactl", tmp_path / "dxg"])
    assert environment == after


@pytest.mark.parametrize(
    ("listed", "visible"),
    [(None, 4), ("", 0), ("1", 1), ("0,1,2", 3), ("GPU-8932f937, GPU-1", 2), ("0,-1,2", 1), ("0,1,2,3,4", 4)],
)
def test_gpus_that_may_be_used(listed, visible):
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert launch.visible_gpus(4, environment) == visible
