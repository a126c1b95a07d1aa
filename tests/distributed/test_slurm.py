"""The script for Slurm, with Slurm itself and two nodes on this machine."""

import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from corpora import write_bpe
from runs import SMALL, TEXT, mesh, records, run_program
from slurm import Cluster, missing, wait_for
from support import new_decoder
from test_readme import SIZES, TEMPLATE, WORDS

import jaxtp
from jaxtp.__main__ import main as run_command
from jaxtp.config.schema import from_yaml
from jaxtp.layers.parameter import Precision
from jaxtp.train.__main__ import main as train
from jaxtp.train.config import TrainConfig

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parent.parent.parent
SBATCH = ROOT / "scripts/cluster/slurm.sbatch"
STEPS = 60


@pytest.fixture(scope="module")
def cluster():
    if lacks := missing():
        pytest.skip(f"no Slurm here: {lacks}")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, Cluster(Path(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


def flags(folder, text, axes):
    return [
        *SMALL,
        f"--data.path={text}",
        f"--train.steps={STEPS}",
        f"--run.dir={folder}",
        *mesh(*axes),
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, text):
    """The losses of an uninterrupted run in one process, by step."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(flags(folder, text, (1, 2, 1))) == 0
    return records(folder)


class Job:
    """A job of the script.

    Args:
      cluster: the cluster on which it runs.
      folder: the folder in which `sbatch` is called.
      arguments: flags of `jaxtp train`.
      options: options of `sbatch`, which override the script's.
    """

    def __init__(self, cluster, folder, arguments, *options):
        self.cluster = cluster
        self.folder = folder
        self.run = folder / "run"
        self.pace(0.3)
        variables = {
            "PYTHON": f"{sys.executable} {ROOT}/tests/paced.py",
            "PACE": str(folder / "pace"),
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        }
        cluster.environment.update(variables)
        place = f"--chdir={folder}"
        self.number = cluster("sbatch", "--parsable", place, *options, str(SBATCH), *arguments)

    def pace(self, seconds):
        """Sets the minimum time of a step."""
        (self.folder / "pace").write_text(str(seconds))

    @property
    def log(self):
        path = self.folder / f"slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def failures(self):
        path = self.folder / f"slurm-{self.number}.failures"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_line(self, line, times=1):
        wait_for(
            lambda: self.log.count(line) >= times, f"{line!r}, {times} times", 180, lambda: self.log
        )

    def wait_for_steps(self, more=3):
        """Waits for new steps."""
        metrics = self.run / "metrics.jsonl"
        last = max(records(self.run)) if metrics.exists() else 0
        reached = lambda: metrics.exists() and f'"step": {last + more},' in metrics.read_text()
        wait_for(reached, f"step {last + more}", 180, lambda: self.log)

    def wait_for_state(self, state):
        wait_for(
            lambda: self.cluster.job(self.number)["JobState"] == state, state, 180, lambda: self.log
        )

    def checkpoints(self):
        return sorted(
            int(path.name) for path in (self.run / "checkpoints").glob("*") if path.name.isdecimal()
        )


def same_curve(folder, undisturbed, steps):
    losses = records(folder)
    assert list(losses) == list(range(1, steps + 1))
    assert losses == pytest.approx({step: undisturbed[step] for step in losses}, rel=1e-4)


def test_time_limit_saves_and_resumed_curve_equals_uninterrupted_run(
    cluster, tmp_path, text, undisturbed
):
    arguments = flags(tmp_path / "run", text, (1, 2, 1))
    # Slurm looks at time limits every 30 s and sends the signal up to 30 s too early: here after 30
    # to 60 s.
    job = Job(cluster, tmp_path, arguments, "--time=2", "--signal=B:USR1@60")
    job.pace(2)
    job.wait_for_line("queued again after exit code 0")
    (stopped,) = re.findall(r"stopped by SIGUSR1 at step (\d+) and saved", job.log)
    job.wait_for_line(f"resumed from the checkpoint at step {stopped}\n")
    assert job.failures == []

    job.pace(0.3)
    job.wait_for_steps(1)
    cluster("scancel", "--signal=USR1", job.number)  # the tasks, and not the script
    job.wait_for_state("COMPLETED")
    assert job.log.count("stopped by SIGUSR1") == 2
    assert job.log.count("queued again") == 1

    last = Job(cluster, tmp_path, arguments)
    last.pace(0)
    last.wait_for_state("COMPLETED")
    same_curve(job.run, undisturbed, STEPS)


def test_lost_tasks_are_named_and_scancel_leaves_a_complete_checkpoint(cluster, tmp_path, text):
    job = Job(cluster, tmp_path, flags(tmp_path / "run", text, (1, 2, 1)))
    job.wait_for_steps(7)
    (task,) = cluster.tasks(SLURM_JOB_ID=job.number, SLURM_PROCID="1")
    os.kill(task, signal.SIGKILL)
    job.wait_for_line("queued again after exit code")
    assert "no settings at scripts/cluster/gpu.env: sbatch is for the folder that has it" in job.log
    assert (
        "error: process 1 (on n2) has ended without a message; process 0 (on n1) cannot continue"
        in job.log
    )
    assert "srun: error: n2: task 1: Killed" in job.log
    assert len(job.failures) == 1

    job.wait_for_line("resumed from the checkpoint at step")
    job.wait_for_steps()
    job.pace(2)  # Slurm notices it after half a minute
    cluster.kill("n2")
    job.wait_for_line("srun: error: Node failure on n2")
    job.pace(0.3)
    cluster.start_node("n2")
    job.wait_for_line("resumed from the checkpoint at step", 2)
    job.wait_for_steps()
    assert len(job.failures) == 1, "Slurm itself queues a job again that has lost a node"

    job.pace(60)  # longer than Slurm waits before it kills
    job.wait_for_steps(1)
    time.sleep(5)  # a save under way ends
    before = job.checkpoints()
    stops = job.log.count("stopped by")
    cluster("scancel", job.number)
    job.wait_for_state("CANCELLED")
    cluster.wait_until_idle()
    assert job.checkpoints() == before
    assert job.log.count("stopped by") == stops
    assert run_command(["checkpoint", "verify", str(job.run)]) == 0


def test_two_tasks_per_node_train_and_scancel_saves(cluster, tmp_path, text, undisturbed):
    job = Job(cluster, tmp_path, flags(tmp_path / "run", text, (1, 2, 2)), "--ntasks-per-node=2")
    job.wait_for_steps()
    assert "processes (4 of 1 device: 2 x cpu on n1, 2 x cpu on n2; " in job.log
    cluster("scancel", job.number)
    job.wait_for_state("CANCELLED")
    cluster.wait_until_idle()
    (stopped,) = re.findall(r"stopped by SIGTERM at step (\d+) and saved", job.log) or [job.log]
    assert job.checkpoints()[-1] == int(stopped)
    assert "queued again" not in job.log
    same_curve(job.run, undisturbed, int(stopped))


@pytest.fixture
def shared(tmp_path):
    """The files of the guide's example in /shared: a clone, conversations, and the model, here a
    tiny one.
    """
    (tmp_path / "jaxtp").symlink_to(ROOT)
    words = [" ".join(line) for line in WORDS]
    asked = [
        [{"role": "user", "content": line}, {"role": "assistant", "content": "It says so."}]
        for line in words
    ]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in asked)
    )
    tokenizer = write_bpe(tmp_path / "t", ["\n".join(words)], 512)
    model = tmp_path / "models/Qwen3-8B"
    recipe = from_yaml(TrainConfig, ROOT / "configs/chat_qwen3_8b.yaml").model
    size = {**SIZES, "vocab_size": 512}
    whole = replace(recipe, **size, precision=Precision(), lora=type(recipe.lora)())
    jaxtp.hf.save(new_decoder(whole), model, tokenizer_from=tokenizer)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path, [f"--model.{name.replace('_', '-')}={value}" for name, value in size.items()]


def test_two_node_example_of_the_guide(cluster, shared):
    folder, sizes = shared
    example = (
        (ROOT / "jaxtp/guides/several_hosts.md")
        .read_text()
        .partition("### Example: ")[2]
        .partition("\n## ")[0]
    )
    example = example.replace("/shared/venv/bin/", f"{Path(sys.executable).parent}/").replace(
        "/shared", str(folder)
    )
    once, submit = re.findall(r"^```\n(.*?)^```", example, re.MULTILINE | re.DOTALL)
    # two CPU devices for each process, in place of eight GPUs
    submit = submit.replace("--mesh dp=16", "--mesh dp=4")
    *_, prepare = map(shlex.split, once.splitlines())
    assert run_command(prepare[1:]) == 0
    short = [
        *sizes,
        "--data.sequence-length=64",
        "--train.steps=3",
        "--optimizer.warmup-steps=1",
        "--eval.batches=1",
    ]
    own = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    command = ["bash", "-ec", f"{submit.strip()} {shlex.join(short)}"]
    done = run_program(*command, cwd=folder, env=cluster.environment | own)
    number = done.stdout.split()[-1]
    log = folder / f"runs/slurm-{number}.log"
    wait_for(lambda: cluster.job(number)["JobState"] == "COMPLETED", "its end", 180, log.read_text)
    assert "processes (2 of 2 devices: 2 x cpu on n1, 2 x cpu on n2; " in log.read_text()
    assert "no settings" not in log.read_text()
    assert list(records(folder / "runs/chat")) == [1, 3]
