"""The files for clusters: Slurm's script with stubs for its commands, and what those for Kubernetes say."""

import os
import re
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import jax
import pytest
import yaml

from jaxtp import entry
from jaxtp.launch.joining import JOIN_SECONDS
from jaxtp.train.__main__ import COMMAND as TRAIN

ROOT = Path(__file__).parent.parent.parent
CLUSTER = ROOT / "scripts/cluster"
SBATCH = (CLUSTER / "slurm.sbatch").read_text()


def flags_of(arguments):
    """They are flags that train takes."""
    config, _ = TRAIN.load(arguments)
    return config


@pytest.fixture
def slurm(tmp_path):
    """Starts the script with an srun that does what it is given, and an scontrol that says what it was asked."""

    def start(does, **variables):
        stubs = tmp_path / "stubs"
        stubs.mkdir()
        for name, code in {
            "srun": f'echo "srun $*" >> {tmp_path}/said\n{does}',
            "scontrol": f'echo "$*" >> {tmp_path}/said',
        }.items():
            (stubs / name).write_text(f"#!/bin/bash\n{code}\n")
            (stubs / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "https_proxy": "x"}
        environment["SETTINGS"] = str(CLUSTER / "gpu.env")
        command = ["bash", str(CLUSTER / "slurm.sbatch"), "--train.steps", "5"]
        return subprocess.Popen(command, env=environment | variables, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    start.said = tmp_path / "said"
    return start


@pytest.mark.parametrize(
    ("does", "failures", "code", "again"),
    [
        ("exit 0", 0, 0, False),
        ("exit 2", 0, 2, False),
        ("exit 3", 0, 3, False),
        ("exit 75", 4, 75, True),
        ("exit 75", 5, 75, False),
        ('[ -z "$https_proxy" ] && [ "$JAXTP_JOIN_SECONDS" = 300 ] && [ "$NCCL_DEBUG" = WARN ]', 0, 0, False),
    ],
)
def test_slurm_queues_again_what_failed_and_was_no_mistake(slurm, tmp_path, does, failures, code, again):
    (tmp_path / "slurm-7.failures").write_text("exit code 1\n" * failures)
    process = slurm(does)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    started, *asked = slurm.said.read_text().splitlines()
    assert started.endswith(
        "python -m jaxtp.train --train.stall-abort-seconds 1800 --train.verify-every 1000 --train.steps 5"
    )
    assert asked == (["requeue 7"] if again else [])
    gave_up = "not queued again: more than 5 failures, in slurm-7.failures\n" if failures == 5 else ""
    assert error == (f"queued again after exit code {code}\n" if again else gave_up)


def test_slurm_asks_the_run_to_stop_and_queues_it_again(slurm):
    does = "trap 'sleep 0.3; exit 0' TERM\necho up >> $OUT\nwhile true; do sleep 0.05; done"
    process = slurm(does, OUT=str(slurm.said), SETTINGS="nowhere")
    deadline = time.monotonic() + 60
    while not (slurm.said.exists() and "up" in slurm.said.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate(timeout=60)
    assert error == (
        "no settings at nowhere: sbatch is for the folder that has it, or SETTINGS names it\n"
        "queued again after exit code 0\n"
    )
    assert process.returncode == 0
    assert slurm.said.read_text().splitlines()[-1] == "requeue 7"


def test_what_the_files_say_fits_together():
    (signalled,) = re.findall(r"^#SBATCH --signal=B:(\w+)@180$", SBATCH, re.MULTILINE)
    assert f"trap stop {signalled}" in SBATCH
    (command,) = re.findall(r"^# sbatch scripts/cluster/slurm.sbatch (.*)", SBATCH, re.MULTILINE)
    assert (
        flags_of([str(ROOT / word) if word.startswith("configs/") else word for word in command.split()]).mesh.fsdp == 2
    )
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    (hosts,) = jobset["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    name = jobset["metadata"]["name"]
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-{hosts['name']}-0-0.{name}:")
    assert int(variables["JAX_NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    assert int(variables["JAXTP_JOIN_SECONDS"]) > JOIN_SECONDS
    assert flags_of([word.replace("=configs/", f"={ROOT}/configs/") for word in container["args"]]).mesh.fsdp == 2
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [entry.MISTAKE, entry.WRONG]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert f"--train.stopped-exit-code={entry.PASSING}" in container["args"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


def test_the_settings_for_gpus_are_variables_and_flags_that_there_are():
    """Docker and Kubernetes take such a file as it is: no quotes, nothing after a value."""
    lines = (CLUSTER / "gpu.env").read_text().splitlines()
    settings = [line for line in lines if line and not line.startswith("# ")]
    assert all(re.fullmatch(r"#?[A-Z_]+=[^\s'\"#]+", line) for line in settings if line.strip("#"))
    flags = dict(re.findall(r"--(xla_\w+)=(\w+)", "\n".join(settings)))
    assert len(flags) == 2
    lowered = jax.jit(lambda x: x).lower(1.0)
    lowered.compile(compiler_options={name: value == "true" for name, value in flags.items()})
    assert hasattr(jax.config, "jax_optimization_level")


def test_the_image_is_made_of_what_is_there():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / word).exists() for word in copied)
    ignored = (ROOT / ".dockerignore").read_text()
    assert all(f"!{word}\n" in ignored for word in copied)
    (extras,) = re.findall(r'"\.\[(.*?)\]"', "\n".join(lines))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys()
    assert lines.index("USER 1000") > max(i for i, line in enumerate(lines) if line.startswith(("RUN", "COPY")))
