"""`jaxtp launch`: several processes that succeed, fail, hang, or get a signal to end."""

import fcntl
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from runs import SMALL, records, wait_until
from tables import assert_errors, read_table

from jaxtp.config.entry import FILES
from jaxtp.config.schema import ConfigError
from jaxtp.distributed import supervisor
from jaxtp.distributed.devices import build_mesh
from jaxtp.distributed.environment import LaunchError
from jaxtp.distributed.supervisor import Group, supervise
from jaxtp.mesh import MeshError
from jaxtp.tools.launch.__main__ import main
from jaxtp.train.__main__ import main as train

ME = "import os, signal, sys, time; me = os.environ.get('JAX_PROCESS_ID', 'none')\n"


def group(tmp_path, count, code, **settings):
    return Group(count, ["-c", ME + code], tmp_path / "logs", **settings)


def runs(pid):
    try:
        # not reaped yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(logs):
    """Waits until the processes whose ids are in the logs have ended."""
    processes = [int(log.read_text()) for log in logs]
    wait_until(lambda: not any(map(runs, processes)))


def logs_of(folder, count):
    return [folder / f"process-{index}.log" for index in range(count)]


def launched(folder, count, code, *flags, shell=()):
    """Starts `jaxtp launch`, and waits until each process has written a line to its log; returns
    both.
    """
    command = [
        *shell,
        sys.executable,
        "-m",
        "jaxtp",
        "launch",
        f"--processes={count}",
        f"--logs={folder}",
        *flags,
        "--",
        "-c",
        ME + code,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    logs = logs_of(folder, count)
    wait_until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
    return process, logs


def test_successful_processes_return_0_and_write_logs(tmp_path, capsys):
    code = "print(me, os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_NUM_CPU_DEVICES'])"
    assert supervise(group(tmp_path, 3, code, devices=4)) == 0
    assert [log.read_text() for log in logs_of(tmp_path / "logs", 3)] == [
        "0 3 4\n",
        "1 3 4\n",
        "2 3 4\n",
    ]
    logs = f"logs: {tmp_path}/logs/process-0.log to process-2.log\n"
    assert capsys.readouterr() == ("0 3 4\n", logs)


def test_all_end_after_one_fails_and_its_last_lines_are_shown(tmp_path, monkeypatch, capsys):
    """Processes that ignore SIGTERM are killed, with their children."""
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    child = (
        "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'])"
    )
    stay = (
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {child}; print(child.pid, flush=True); "
        "time.sleep(600)"
    )
    wait = "time.sleep(1); print('last words', flush=True)"
    assert supervise(group(tmp_path, 3, f"if me == '1':\n    {wait}; os.kill(0, 9)\n{stay}")) == 137
    error = capsys.readouterr().err
    assert "killed by SIGKILL" in error
    assert "  last words\n" in error
    wait_for_end(logs_of(tmp_path / "logs", 3)[::2])


def test_processes_restart_at_most_the_requested_number_of_times(tmp_path, monkeypatch, capsys):
    """Those that only lost another process, too."""
    monkeypatch.setattr(supervisor, "_CAUSE_SECONDS", 0.0)
    count = tmp_path / "count"
    code = (
        f"open({str(count)!r}, "
        f"'a').write(me)\ntime.sleep(0.5)\nsys.exit(75 * (os.path.getsize({str(count)!r}) < 5))"
    )
    assert supervise(group(tmp_path, 2, code), restarts=5) == 0
    assert count.stat().st_size == 6
    assert "restarts all processes (restart 2 of 5)" in capsys.readouterr().err
    assert supervise(group(tmp_path, 1, f"sys.exit({FILES})"), restarts=1) == FILES, (
        "lost files are worth another try"
    )
    assert "restarts all processes (restart 1 of 1)" in capsys.readouterr().err


def test_log_of_a_failed_process_is_kept(tmp_path, capsys):
    """Another start keeps it too, and the last lines that are shown are those of the last start."""
    log = tmp_path / "logs/process-1.log"
    for words in ("first", "second"):
        assert (
            supervise(
                group(tmp_path, 2, f"print('{words}', flush=True); sys.exit(me == '1')"), restarts=1
            )
            == 1
        )
        shown = re.findall(
            r"process-1.log:\n(.*?)\n(?!  )", capsys.readouterr().err + "\n", re.DOTALL
        )
        assert shown == [f"  {words}"] * 2
    starts = re.split(
        r"\n--- started again by jaxtp launch, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---\n",
        log.read_text(),
    )
    assert starts == ["first\n", "first\n", "second\n", "second\n"]


def test_user_error_is_not_retried(tmp_path, capsys):
    assert supervise(group(tmp_path, 1, "print(me); sys.exit(2)"), restarts=3) == 2
    # one process needs to meet nobody
    assert (tmp_path / "logs/process-0.log").read_text() == "none\n"
    assert "restarts" not in capsys.readouterr().err


def test_signal_reaches_all_processes_and_ends_the_launch(tmp_path):
    code = (
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(me == '1'))\nprint('up', "
        "flush=True)\ntime.sleep(600)"
    )
    process, _ = launched(tmp_path, 2, code, "--restarts=3")
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "\nprocess 1 ended with exit code 1" in error
    assert "restarts" not in error


def test_gloo_log_lines_are_hidden(tmp_path, capsys):
    noise = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number is : 1"
    code = (
        f"print('{noise}'); print('words of', me); print('{noise}', flush=True); "
        "sys.exit(me == '1')"
    )
    assert supervise(group(tmp_path, 2, f"time.sleep(me == '1')\n{code}")) == 1
    shown, error = capsys.readouterr()
    assert shown == "words of 0\n"
    assert noise in (tmp_path / "logs/process-0.log").read_text()
    assert error.endswith("process-1.log:\n  words of 1\n")


def with_gpus(monkeypatch, *counts):
    """Sets the number of GPUs that each look finds."""
    monkeypatch.setattr(supervisor, "gpus_present", Mock(side_effect=counts))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_divided_evenly_or_an_error(monkeypatch, tmp_path):
    with_gpus(monkeypatch, 8, 8, 8)
    for count in (3, 16):
        with pytest.raises(
            LaunchError, match=f"--processes {count}: 8 GPUs can be divided among 1, 2, 4 or 8"
        ):
            group(tmp_path, count, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shares = [own["CUDA_VISIBLE_DEVICES"] for own in group(tmp_path, 2, "").environments]
    assert shares == ["4,5", "6,7"]


def test_restart_uses_fewer_processes_if_gpus_disappear(monkeypatch, tmp_path, capsys):
    with_gpus(monkeypatch, 8, 6, 8, 0)
    code = "print(os.environ['CUDA_VISIBLE_DEVICES'])\nsys.exit(os.environ['JAX_NUM_PROCESSES'] == '4')"  # noqa: E501
    assert supervise(group(tmp_path, 4, code), restarts=1) == 0
    assert "restarts only 3 processes (restart 1 of 1)" in capsys.readouterr().err
    assert (tmp_path / "logs/process-2.log").read_text().splitlines()[-1] == "4,5"
    assert supervise(group(tmp_path, 2, "sys.exit(4)"), restarts=1) == 4
    assert "no GPU is left: no restart" in capsys.readouterr().err


def test_two_launches_cannot_share_a_log_folder(tmp_path):
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="logs: another jaxtp launch writes there"):
            supervise(group(tmp_path, 1, ""))


def test_processes_end_with_their_launcher(tmp_path):
    for number in (signal.SIGKILL, signal.SIGQUIT):
        folder = tmp_path / number.name
        process, logs = launched(folder, 2, "print(os.getpid(), flush=True); time.sleep(600)")
        process.send_signal(number)
        process.communicate(timeout=60)
        wait_for_end(logs)


def test_ignored_sighup_stays_ignored(tmp_path):
    """Under nohup, SIGHUP is ignored."""
    ignoring = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    process, _ = launched(tmp_path, 1, "print('up', flush=True); time.sleep(1)", shell=ignoring)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_invalid_flags_are_one_error(capsys):
    error_of = lambda row: f"{main(row['flags'].split())} {capsys.readouterr().err}"
    rows = read_table(__file__, "mistaken_launches")
    assert_errors([row | {"says": ["2 ", row["says"]]} for row in rows], error_of)


LISTENERS = """
import socket
import jax
from jaxtp.distributed.joining import join_processes
join_processes()
host, _, port = os.environ['JAX_COORDINATOR_ADDRESS'].rpartition(':')
socket.create_connection((host, int(port)), timeout=9).close()
try:
    socket.create_connection(('127.0.0.2', int(port)), timeout=9)
except ConnectionRefusedError:
    print('refused', jax.process_count(), len(os.environ['JAXTP_TOKEN']), flush=True)
"""


@pytest.mark.journey
def test_local_processes_meet_on_loopback_and_bypass_the_proxy(tmp_path, monkeypatch):
    """Linux answers on all of 127.0.0.0/8, so 127.0.0.2 represents another interface."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("JAXTP_JOIN_SECONDS", "60")
    assert supervise(group(tmp_path, 2, LISTENERS, devices=1)) == 0
    for log in logs_of(tmp_path / "logs", 2):
        assert log.read_text().endswith("refused 2 64\n")


def test_processes_must_divide_the_mesh(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("jaxtp.distributed.devices.host_names", lambda: ["here"])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(
        MeshError, match="3 processes cannot divide 4 evenly: start 1, 2 or 4 processes"
    ):
        build_mesh({"dp": 1, "fsdp": 2, "cp": 1, "tp": 2})


@pytest.mark.journey
def test_cpu_processes_divide_the_mesh_and_equal_one_process(tmp_path, capfd):
    run = [*SMALL, "--mesh=fsdp=2,tp=2", "--train.steps=4", "--run.dir"]
    launch = [f"--logs={tmp_path}", "--", "jaxtp", "train"]
    assert main(["--processes=2", *launch, *run, str(tmp_path / "two")]) == 0
    assert "processes (2 of 2 devices: " in "".join(capfd.readouterr())
    assert train([*run, str(tmp_path / "one")]) == 0
    assert records(tmp_path / "two") == pytest.approx(records(tmp_path / "one"), rel=1e-5)


def test_logs_are_not_written_through_links(tmp_path):
    for name in (".lock", "process-0.log", "process-1.log"):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        (folder / "victim").write_text("precious")
        path = folder / "logs" / name
        path.symlink_to("../victim")
        with pytest.raises(OSError, match="a link, and jaxtp does not write through") as caught:
            supervise(group(folder, 2, "time.sleep(60)"))
        assert caught.value.filename == str(path)
        assert (folder / "victim").read_text() == "precious"
