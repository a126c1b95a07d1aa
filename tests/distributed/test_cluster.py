"""The files for clusters: Slurm's script with stubs for Slurm's commands, and others."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import jax
import pytest
import yaml
from tables import read_table

from jaxtp.config import entry
from jaxtp.distributed.joining import JOIN_SECONDS
from jaxtp.train.__main__ import COMMAND as TRAIN

ROOT = Path(__file__).parent.parent.parent
CLUSTER = ROOT / "scripts/cluster"
SBATCH = (CLUSTER / "slurm.sbatch").read_text()


ENDINGS = read_table(__file__)
"""What srun does: how often the job has failed before, its exit code and what is said."""


@pytest.mark.parametrize("does", ENDINGS)
def test_slurm_requeues_failures_except_user_errors(tmp_path, does):
    """`srun` runs its command, and `scontrol` prints its arguments."""
    failures, code, said = ENDINGS[does]
    (tmp_path / "slurm-7.failures").write_text("exit code 1\n" * failures)
    for name, ends in (("srun", does), ("scontrol", "")):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/said\n{ends}\n')
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
    }
    environment["SETTINGS"] = str(CLUSTER / "gpu.env")
    command = ["bash", str(CLUSTER / "slurm.sbatch"), "--train.steps", "5"]
    done = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, said)
    started, *asked = (tmp_path / "said").read_text().splitlines()
    flags = "--train.stall-abort-seconds 1800 --train.verify-every 1000 --train.steps 5"
    assert started.endswith(f"python -m jaxtp.train {flags}")
    assert asked == ["scontrol requeue 7"] * said.startswith("queued")


def mesh_of(arguments):
    """Returns the mesh in flags of `jaxtp train`, with paths relative to the project's root."""
    config, _ = TRAIN.load([word.replace("configs/", f"{ROOT}/configs/") for word in arguments])
    return config.mesh


def test_slurm_script_matches_its_example():
    (signalled,) = re.findall(r"^#SBATCH --signal=B:(\w+)@180$", SBATCH, re.MULTILINE)
    assert f"trap stop {signalled}" in SBATCH
    (command,) = re.findall(r"^# sbatch scripts/cluster/slurm.sbatch (.*)", SBATCH, re.MULTILINE)
    assert mesh_of(command.split()).fsdp == 2


def test_jobset_runs_a_valid_command():
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    (hosts,) = jobset["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    name = jobset["metadata"]["name"]
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-{hosts['name']}-0-0.{name}:")
    assert int(variables["JAX_NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    assert int(variables["JAXTP_JOIN_SECONDS"]) > JOIN_SECONDS
    assert mesh_of(container["args"]).fsdp == 2
    (rule,) = job["podFailurePolicy"]["rules"]
    exit_codes = rule["onExitCodes"]
    assert (exit_codes["values"], exit_codes["containerName"]) == (
        [entry.MISTAKE, entry.WRONG],
        container["name"],
    )
    assert f"--train.stopped-exit-code={entry.TEMPORARY}" in container["args"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [
        volume["name"] for volume in pod["volumes"]
    ]


def test_skypilot_runs_a_valid_command(tmp_path):
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    (tmp_path / "jaxtp").write_text('#!/bin/bash\nenv\necho "$*"\n')
    (tmp_path / "jaxtp").chmod(0o755)
    hosts = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NODE_RANK": "1"}
    environment = {f"SKYPILOT_{name}": value for name, value in hosts.items()}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", "-c", task["run"]]
    *variables, arguments = subprocess.check_output(
        command, env=environment, text=True, cwd=ROOT
    ).splitlines()
    assert {
        "JAX_COORDINATOR_ADDRESS=10.0.0.1:8476",
        "JAX_NUM_PROCESSES=2",
        "JAX_PROCESS_ID=1",
    } <= set(variables)
    assert mesh_of(arguments.split()[1:]).fsdp == task["num_nodes"] == 2
    again = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {entry.FILES, entry.TEMPORARY} <= set(again)
    assert not {0, entry.MISTAKE, entry.WRONG} & set(again)


def test_skypilot_reads_its_file():
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    assert sky.Task.from_yaml(str(CLUSTER / "skypilot.yaml")).num_nodes == 2


def test_gpu_settings_name_existing_variables_and_flags():
    """Docker and Kubernetes take such a file literally: no quotes, and nothing after a value."""
    lines = (CLUSTER / "gpu.env").read_text().splitlines()
    settings = [line for line in lines if line and not line.startswith("# ")]
    assert all(re.fullmatch(r"#?[A-Z_]+=[^\s'\"#]+", line) for line in settings if line.strip("#"))
    flags = dict(re.findall(r"--(xla_\w+)=(\w+)", "\n".join(settings)))
    assert len(flags) == 3
    lowered = jax.jit(lambda x: x).lower(1.0)
    lowered.compile(compiler_options={name: yaml.safe_load(value) for name, value in flags.items()})
    assert hasattr(jax.config, "jax_optimization_level")


def test_image_copies_existing_files():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    ignored = (ROOT / ".dockerignore").read_text()
    for line in lines:
        for word in line.split()[1:-1] if line.startswith("COPY") else ():
            assert (ROOT / word).exists()
            assert f"!{word}\n" in ignored
    (extras,) = re.findall(r'"\.\[(.*?)\]"', "\n".join(lines))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys()
    assert lines.index("USER 1000") > max(
        i for i, line in enumerate(lines) if line.startswith(("RUN", "COPY"))
    )
