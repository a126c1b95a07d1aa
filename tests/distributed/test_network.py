"""Two hosts with their own names and addresses, by Linux's namespaces, if possible."""

import os
import signal
import subprocess
import sys

import pytest
from runs import SMALL, mesh, records, wait_until

ADDRESS = "10.77.0.1:4321"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "gw")
HOSTS = f"jaxtp-{WORKER}-0", f"jaxtp-{WORKER}-1"
LINKS = dict(zip(HOSTS, ("10.77.0.1/24", "10.77.0.2/24"), strict=True))
"""The hosts, which are the ends of one cable; each worker has its own."""


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True)


def can_make_hosts():
    try:
        made = ip("netns", "add", f"jaxtp-probe-{WORKER}", check=False).returncode == 0
        ip("netns", "del", f"jaxtp-probe-{WORKER}", check=False)
        named = subprocess.run(["unshare", "-u", "-m", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
    return made and named


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces here"),
]


@pytest.fixture
def cable():
    """Connects the hosts."""
    first, second = LINKS
    for host in LINKS:
        ip("netns", "del", host, check=False)
        ip("netns", "add", host)
    ip("link", "add", "v0", "netns", first, "type", "veth", "peer", "name", "v1", "netns", second)
    for link, (host, address) in zip(("v0", "v1"), LINKS.items(), strict=True):
        ip("-n", host, "addr", "add", address, "dev", link)
        ip("-n", host, "link", "set", link, "up")
        ip("-n", host, "link", "set", "lo", "up")
    yield
    for host in LINKS:
        ip("netns", "del", host, check=False)


@pytest.fixture
def start(tmp_path, cable):
    """Starts one of the two processes of a run on its host."""
    processes = []

    def start(process, *flags):
        host = list(LINKS)[process]
        place = {
            "JAX_COORDINATOR_ADDRESS": ADDRESS,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(process),
            "JAX_NUM_CPU_DEVICES": "2",
            "JAXTP_JOIN_SECONDS": "60",
            "PYTHONUNBUFFERED": "1",
        }
        train = [
            sys.executable,
            "-m",
            "jaxtp.train",
            *SMALL,
            f"--run.dir={tmp_path}/run",
            *flags,
        ]
        (tmp_path / "hosts").write_text(
            "".join(f"{at.partition('/')[0]} {name}\n" for name, at in LINKS.items())
        )
        own = f'mount --bind {tmp_path}/hosts /etc/hosts && hostname {host} && exec "$@"'
        with log(process).open("a") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            command = [
                "ip",
                "netns",
                "exec",
                host,
                "unshare",
                "-u",
                "-m",
                "sh",
                "-c",
                own,
                "sh",
                *train,
            ]
            processes.append(subprocess.Popen(command, env=os.environ | place, **streams))
        return processes[-1]

    def log(process):
        return tmp_path / f"{process}.log"

    start.said = lambda process: log(process).read_text()
    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_hosts_are_distinguished_and_the_coordinator_may_start_late(start, tmp_path):
    flags = [*mesh(1, 2, 2), "--train.steps=3"]
    first = start(0, *flags)
    wait_until(lambda: "still waiting for all to start" in start.said(0))
    first.send_signal(signal.SIGKILL)
    first.wait()
    other = start(1, *flags)
    wait_until(lambda: "still waiting for all to start" in start.said(1))
    assert [start(0, *flags).wait(180), other.wait(180)] == [0, 0]
    said = start.said(0)
    assert "axes between hosts: fsdp)" in said
    assert len(records(tmp_path / "run")) == 3


def test_tp_across_hosts_is_refused_and_names_the_hosts(start):
    processes = [start(process, *mesh(1, 1, 4)) for process in range(2)]
    assert [process.wait(180) for process in processes] == [2, 2]
    assert f"mesh.tp=4 spreads layers over the hosts {HOSTS[0]} and {HOSTS[1]}" in start.said(0)


def test_both_hosts_end_after_the_network_fails(start):
    processes = [start(process, *mesh(1, 2, 2), "--train.steps=1000000") for process in range(2)]
    wait_until(lambda: "step 5/" in start.said(0))
    ip("-n", HOSTS[0], "link", "set", "v0", "down")
    assert all(process.wait(60) != 0 for process in processes)
    for process in range(2):
        assert (
            f"process {1 - process} (on {HOSTS[1 - process]}) has sent no heartbeat for 25 s"
            in start.said(process)
        )
