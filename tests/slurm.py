"""A real Slurm cluster of two nodes on this machine, with its own daemons, in one folder.

A node is a `slurmd` with its own name, hosts file and port. Its eight GPUs are empty files: jobs
request GPUs, and run on CPUs. Slurm's waiting times are shortened to seconds.
"""

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")
PATH = f"{os.environ['PATH']}:/usr/sbin"
NODES = ("n1", "n2")
GPUS = 8
KILL_WAIT = 15
"""Seconds between Slurm's SIGTERM and SIGKILL; Slurm's default is 30."""
OF_NODE = 'mount --bind "$1" /etc/hosts && hostname "$0" && exec slurmd -D -N "$0"'
CONFIGURATION = """
ClusterName=jaxtp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
FirstJobId={first}
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again waits until its old credential has expired.
AuthInfo=cred_expire=5,socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n.spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout=10
MessageTimeout=30
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def missing():
    """Returns a text that names the missing requirements of a cluster; empty if there are none."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    made = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True)
    return "" if made.returncode == 0 else "hosts with names of their own need root"


def wait_for(happened, what, seconds=120, logs=lambda: ""):
    """Waits until something has happened."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"waited {seconds} s for {what}\n{logs()}"
        time.sleep(0.1)


def free_ports(count):
    """Returns unused ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def variables_of(process):
    """Returns the variables with which a process started; empty if it has ended."""
    try:
        text = Path(f"/proc/{process}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(each.split("=", 1) for each in text.split("\0") if "=" in each)


def processes_with(**variables):
    """Returns the processes on this machine that started with these variables."""
    every = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [process for process in every if variables.items() <= variables_of(process).items()]


class Cluster:
    """A context manager that runs a cluster, and ends all daemons and tasks.

    Args:
      folder: folder of configuration, state and logs; its path must be short, because socket paths
        are limited.
    """

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": PATH}
        self._daemons = {}

    def __enter__(self):
        try:
            self._configure()
            key = self.folder / "munge.key"
            place = f"{self.folder}/munge"
            key.write_bytes(os.urandom(128))
            key.chmod(0o600)
            files = [
                f"--key-file={key}",
                f"--socket={place}.socket",
                f"--log-file={place}.log",
                f"--pid-file={place}.pid",
                f"--seed-file={place}.seed",
            ]
            self._start("munged", "munged", "--foreground", "--force", *files)
            wait_for(Path(f"{place}.socket").exists, "munged", 30, self.logs)
            self._start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in reversed(list(self._daemons)):
            self.kill(name, signal.SIGTERM)
        # they outlive the daemon of their node
        for process in processes_with(SLURM_CONF=f"{self.folder}/slurm.conf"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def __call__(self, *command):
        """Runs a Slurm command; returns its output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def _configure(self):
        for name in ("state", *(f"{node}.spool" for node in NODES)):
            (self.folder / name).mkdir()
        own = socket.gethostname()
        ports = free_ports(1 + len(NODES))
        about = {
            "host": own,
            "ports": ports,
            "user": getpass.getuser(),
            "folder": self.folder,
            "kill_wait": KILL_WAIT,
        }
        # JAX derives the coordinator's port from the job number: two clusters on a machine need
        # different numbers.
        text = CONFIGURATION.format(**about, first=random.randrange(1, 2**20))
        for node, port in zip(NODES, ports[1:], strict=True):
            text += (
                f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=16 "
                f"Gres=gpu:{GPUS}\n"
            )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {own} {' '.join(NODES)}\n")
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")

    def _start(self, name, *command):
        with (self.folder / f"{name}.out").open("a") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, start_new_session=True, **streams
            )

    def start_node(self, node):
        """Starts the daemon of a node."""
        self._start(
            node, "unshare", "--mount", "--uts", "sh", "-c", OF_NODE, node, f"{self.folder}/hosts"
        )

    def kill(self, name, number=signal.SIGKILL):
        """Ends `slurmctld`, or the daemon of a node."""
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        try:
            daemon.wait(timeout=20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def tasks(self, **variables):
        """Returns the processes of a job's tasks with these variables."""
        return [
            process
            for process in processes_with(SLURM_CONF=f"{self.folder}/slurm.conf", **variables)
            if "SLURM_JOB_ID" in variables_of(process)
        ]

    def wait_until_idle(self):
        """Waits until both nodes can take a job."""
        states = ("sinfo", "--noheader", "--Node", "--format=%t")
        wait_for(
            lambda: self(*states).split() == ["idle"] * len(NODES), "idle nodes", 60, self.logs
        )

    def job(self, job):
        """Returns Slurm's record of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", job)))

    def logs(self):
        """Returns the last part of each daemon's log."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files
        )
