"""`jaxtp launch`: several processes that end well, fail, hang and are asked to end."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import SMALL, mesh, records

from jaxtp.config.entry import FILES
from jaxtp.distributed import supervisor
from jaxtp.distributed.environment import LaunchError
from jaxtp.distributed.supervisor import Group, supervise
from jaxtp.tools.launch.__main__ import main

ME = "import os, signal, sys, time; me = os.environ.get('JAX_PROCESS_ID', 'none')\n"


def group(tmp_path, count, code, **settings):
    return Group(count, ["-c", ME + code], tmp_path / "logs", **settings)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # not reaped yet
    except FileNotFoundError:
        return False


def test_processes_that_end_well_are_0_and_each_has_a_log(tmp_path, capsys):
    code = "print(me, os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_NUM_CPU_DEVICES'])"
    assert supervise(group(tmp_path, 3, code, devices=4)) == 0
    assert [(tmp_path / f"logs/process-{i}.log").read_text() for i in range(3)] == [f"{i} 3 4\n" for i in range(3)]
    logs = f"logs: {tmp_path}/logs/process-0.log to process-2.log\n"
    assert capsys.readouterr() == ("0 3 4\n", logs)


@pytest.mark.parametrize(
    ("death", "said", "code"),
    [
        pytest.param("sys.exit('no such thing')", "process 1 ended with exit code 1", 1, marks=pytest.mark.journey),
        ("os.kill(0, 9)", "killed by SIGKILL", 137),
    ],
)
def test_when_one_dies_all_end_and_its_last_words_are_shown(death, said, code, tmp_path, monkeypatch, capsys):
    """Those that ignore being asked to end are killed, with what they have started."""
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    child = "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    stay = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {child}; print(child.pid, flush=True); time.sleep(600)"
    wait = "time.sleep(1.5); print('last words', flush=True)"
    started = time.monotonic()
    assert supervise(group(tmp_path, 3, f"if me == '1':\n    {wait}; {death}\n{stay}")) == code
    assert time.monotonic() - started < 60
    error = capsys.readouterr().err
    assert said in error
    assert "  last words\n" in error
    for index in (0, 2):
        pid = int((tmp_path / f"logs/process-{index}.log").read_text())
        while runs(pid):  # a killed process is there for another moment
            assert time.monotonic() - started < 60
            time.sleep(0.01)


@pytest.mark.journey
def test_they_are_started_again_as_often_as_asked(tmp_path, capsys):
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write(me)\ntime.sleep(0.5)\nsys.exit(os.path.getsize({str(count)!r}) < 5)"
    assert supervise(group(tmp_path, 2, code), restarts=5) == 0
    assert count.stat().st_size == 6
    assert "restarts all processes (restart 2 of 5)" in capsys.readouterr().err
    assert supervise(group(tmp_path, 2, "sys.exit(3)"), restarts=1) == 3


@pytest.mark.journey
def test_the_log_of_a_dead_process_is_kept(tmp_path, capsys):
    """Also by another start; the last lines that are shown are those of the last start."""
    log = tmp_path / "logs/process-1.log"
    for words in ("first", "second"):
        assert supervise(group(tmp_path, 2, f"print('{words}', flush=True); sys.exit(me == '1')"), restarts=1) == 1
        shown = re.findall(r"process-1.log:\n(.*?)\n(?!  )", capsys.readouterr().err + "\n", re.DOTALL)
        assert shown == [f"  {words}"] * 2
    starts = re.split(r"\n--- started again by jaxtp launch, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---\n", log.read_text())
    assert starts == ["first\n", "first\n", "second\n", "second\n"]


def test_a_mistake_is_not_tried_again(tmp_path, capsys):
    assert supervise(group(tmp_path, 1, "print(me); sys.exit(2)"), restarts=3) == 2
    assert (tmp_path / "logs/process-0.log").read_text() == "none\n"  # one process needs to meet nobody
    assert "restarts" not in capsys.readouterr().err


@pytest.mark.journey
def test_lost_files_are_worth_another_try(tmp_path, capsys):
    assert supervise(group(tmp_path, 1, f"sys.exit({FILES})"), restarts=1) == FILES
    assert "restarts all processes (restart 1 of 1)" in capsys.readouterr().err


def test_a_signal_reaches_all_and_ends_it(tmp_path):
    code = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(me == '1'))\nprint('up', flush=True)\ntime.sleep(600)"
    command = [sys.executable, "-m", "jaxtp", "launch", "--processes", "2", "--restarts", "3", "--logs", str(tmp_path)]
    process = subprocess.Popen([*command, "--", "-c", ME + code], stderr=subprocess.PIPE, text=True)
    logs = [tmp_path / f"process-{index}.log" for index in range(2)]
    deadline = time.monotonic() + 60
    while not all(log.exists() and log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "\nprocess 1 ended with exit code 1" in error
    assert "restarts" not in error


@pytest.mark.journey
def test_lines_of_gloo_are_not_shown(tmp_path, capsys):
    noise = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number is : 1"
    code = f"print('{noise}'); print('words of', me); print('{noise}', flush=True); sys.exit(me == '1')"
    assert supervise(group(tmp_path, 2, f"time.sleep(me == '1')\n{code}")) == 1
    shown, error = capsys.readouterr()
    assert shown == "words of 0\n"
    assert noise in (tmp_path / "logs/process-0.log").read_text()
    assert error.endswith("process-1.log:\n  words of 1\n")


@pytest.mark.parametrize(("count", "able"), [(3, "1, 2, 4 or 8"), (16, "1, 2, 4 or 8")])
def test_gpus_that_cannot_be_divided_are_an_error(count, able, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "gpus_present", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(LaunchError, match=f"--processes {count}: 8 GPUs can be divided among {able} processes"):
        group(tmp_path, count, "")


def test_after_a_failure_fewer_go_on_with_the_gpus_that_are_left(monkeypatch, tmp_path, capsys):
    present = iter([8, 6])
    monkeypatch.setattr(supervisor, "gpus_present", lambda: next(present))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = "print(os.environ['CUDA_VISIBLE_DEVICES'])\nsys.exit(os.environ['JAX_NUM_PROCESSES'] == '4')"
    assert supervise(group(tmp_path, 4, code), restarts=1) == 0
    assert "restarts only 3 processes (restart 1 of 1)" in capsys.readouterr().err
    assert (tmp_path / "logs/process-2.log").read_text().splitlines()[-1] == "4,5"


def test_where_no_gpu_is_left_nothing_is_started_again(monkeypatch, tmp_path, capsys):
    present = iter([8, 0])
    monkeypatch.setattr(supervisor, "gpus_present", lambda: next(present))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert supervise(group(tmp_path, 2, "sys.exit(4)"), restarts=1) == 4
    assert "no GPU is left: no restart" in capsys.readouterr().err


def test_two_starts_do_not_write_the_same_logs(tmp_path):
    (tmp_path / "logs").mkdir()
    with (
        supervisor._locked(tmp_path / "logs"),
        pytest.raises(LaunchError, match=r"logs: another jaxtp launch writes there"),
    ):
        supervise(group(tmp_path, 1, ""))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_processes_end_with_the_one_that_started_them(number, tmp_path):
    code = "print(os.getpid(), flush=True); time.sleep(600)"
    command = [
        sys.executable,
        "-m",
        "jaxtp",
        "launch",
        "--processes",
        "2",
        "--logs",
        str(tmp_path),
        "--",
        "-c",
        ME + code,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    logs = [tmp_path / f"process-{index}.log" for index in range(2)]
    deadline = time.monotonic() + 60
    while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(60)
    while any(runs(int(log.read_text())) for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.journey
def test_a_hang_up_that_was_ignored_stays_ignored(tmp_path):
    """As under nohup."""
    code = "print('up', flush=True); time.sleep(2)"
    command = [
        sys.executable,
        "-m",
        "jaxtp",
        "launch",
        "--processes",
        "1",
        "--logs",
        str(tmp_path),
        "--",
        "-c",
        ME + code,
    ]
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command]
    process = subprocess.Popen(ignoring, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log, deadline = tmp_path / "process-0.log", time.monotonic() + 60
    while not (log.exists() and "up" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0


def test_gpus_are_divided(monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "gpus_present", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shares = [own["CUDA_VISIBLE_DEVICES"] for own in group(tmp_path, 2, "").environments]
    assert shares == ["4,5", "6,7"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes", "2"], "no command; it follows --"),
        (["--processes", "0", "--", "x"], "--processes 0: should be greater than or equal to 1"),
        (["--processes", "2", "--devices", "0", "--", "x"], "--devices 0: should be greater than or equal to 1"),
        (["--processes", "2", "--restarts", "-1", "--", "x"], "--restarts -1: should be greater than or equal to 0"),
        (["--processes", "1", "--logs", "/proc/nothing", "--", "-c", "1"], "/proc/nothing"),
    ],
)
def test_bad_flags_are_one_error(flags, message, capsys):
    assert main(flags) == 2
    assert message in capsys.readouterr().err


LISTENERS = """
import socket
from jaxtp.distributed.joining import join_processes
join_processes()
host, _, port = os.environ['JAX_COORDINATOR_ADDRESS'].rpartition(':')
socket.create_connection((host, int(port)), timeout=9).close()
try:
    socket.create_connection(('127.0.0.2', int(port)), timeout=9)
except ConnectionRefusedError:
    print('refused', len(os.environ['JAXTP_TOKEN']), flush=True)
"""


@pytest.mark.journey
def test_the_processes_of_a_machine_meet_on_loopback_alone(tmp_path):
    """Linux answers on all of 127.0.0.0/8, so that 127.0.0.2 stands for another interface."""
    assert supervise(group(tmp_path, 2, LISTENERS, devices=1)) == 0
    assert [(tmp_path / f"logs/process-{i}.log").read_text() for i in range(2)] == ["refused 64\n"] * 2


@pytest.mark.journey
def test_the_processes_of_a_machine_meet_where_a_proxy_is_set(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("JAXTP_JOIN_SECONDS", "30")
    code = (
        "import jax; from jaxtp.distributed.joining import join_processes; join_processes(); print(jax.process_count())"
    )
    assert supervise(Group(2, ["-c", code], tmp_path, devices=1)) == 0
    assert "2\n" in (tmp_path / "process-1.log").read_text()


@pytest.mark.parametrize("python", ["python", "python3.11", "/usr/bin/python3"])
def test_python_is_left_out_of_a_command(python, capsys):
    assert main(["--processes", "2", "--", python, "x.py"]) == 2
    assert f"-- {python}: leave it out; after -- come the arguments for Python" in capsys.readouterr().err


@pytest.mark.journey
@pytest.mark.parametrize(
    ("processes", "code", "said"),
    [
        (2, 0, "hosts   2 processes of 2 devices"),
        (
            3,
            2,
            "cannot divide 4 evenly: start 1, 2 or 4 processes, or choose a mesh whose size is a multiple of 3",
        ),
    ],
)
def test_without_gpus_the_processes_divide_the_mesh(processes, code, said, tmp_path, capsys):
    run = ["jaxtp", "train", *SMALL, "--mesh", "fsdp=2,tp=2", "--train.steps", "1", "--run.dir", str(tmp_path / "run")]
    assert main(["--processes", str(processes), "--logs", str(tmp_path), "--", *run]) == code
    assert said in "".join(capsys.readouterr())


@pytest.mark.wide
@pytest.mark.parametrize("processes", [2, 4])
def test_a_run_of_several_processes_equals_that_of_one(processes, tmp_path):
    losses = []
    for count in (1, processes):
        run = [
            "-m",
            "jaxtp.train",
            *SMALL,
            *mesh(2, 2, 2),
            "--train.steps",
            "4",
            "--run.dir",
            str(tmp_path / str(count)),
        ]
        flags = ["--processes", str(count), "--devices", str(8 // count), "--logs", str(tmp_path / f"logs-{count}")]
        assert main([*flags, "--", *run]) == 0
        losses.append(records(tmp_path / str(count)))
    one, many = losses
    assert one.keys() == many.keys()
    assert all(abs(many[step] - one[step]) < 1e-5 * one[step] for step in one)


@pytest.mark.parametrize("name", [".lock", "process-0.log", "process-1.log"])
def test_no_file_is_written_through_a_link(tmp_path, name):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).symlink_to("../victim")
    with pytest.raises(OSError, match="a link, and jaxtp does not write through it") as caught:
        supervise(group(tmp_path, 2, "time.sleep(60)"))
    assert caught.value.filename == str(tmp_path / "logs" / name)
    assert (tmp_path / "victim").read_text() == "precious"
