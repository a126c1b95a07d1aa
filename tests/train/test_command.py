"""`jaxtp train` as its users meet it: runs, resumes, survives a kill, refuses what is wrong."""

import contextlib
import json
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from made_once import made_once
from numpy.testing import assert_allclose
from quick_run import quick_flags, start_together
from runs import TEXT, contents, finish, mesh, records, wait_for_step, wait_until
from support import assert_refused
from tables import read_json, read_table

import jaxtp.__main__
from jaxtp.train.__main__ import main

VIT = Path(__file__).parent.parent.parent / "scripts/examples/vit.py"
LOGGED = {
    "step",
    "loss",
    "grad_norm",
    "param_norm",
    "learning_rate",
    "step_seconds",
    "data_wait_seconds",
    "goodput",
}


@pytest.mark.heavy
def test_a_run_leaves_what_it_should_and_learns(tmp_path, text, capsys):
    command = quick_flags(tmp_path / "run", text, 1, 1, 2)
    command += ["--train.steps=24", "--checkpoint.every=12", f"--json={tmp_path}/end.json"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "dp 1 x fsdp 1 x cp 1 x tp 2 = 2 virtual CPU devices" in out
    announced = [
        "making the initial state: ",
        "evaluating at step 0\n",
        "compiling the",
        "step 1/24",
    ]
    places = [out.index(f"\n{words}") for words in announced]
    assert places == sorted(places), "each line comes before its work"
    run = tmp_path / "run"
    losses = records(run)
    assert list(losses) == list(range(1, 25))
    assert losses[24] < losses[1] - 1
    evaluated = records(run, "eval_loss")
    assert list(evaluated) == [0, 20, 24], "the first shows what the run improves on"
    assert evaluated[24] < evaluated[0] - 1
    assert read_json(tmp_path / "end.json")["metrics"]["eval_loss"] == evaluated[24]
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert row.keys() >= LOGGED
    assert not {"mfu", "memory_bytes"} & row.keys(), "a CPU's peak is not known, nor its memory"
    assert row["tokens_per_second"] == pytest.approx(2 * row["tokens_per_second_per_device"])
    left = "config.yaml metrics.jsonl checkpoints tensorboard .lock"
    assert {path.name for path in run.iterdir()} == set(left.split())


FINISHED = [
    *quick_flags("run", "text.txt", 1, 1, 2),
    "--train.steps=3",
    "--optimizer.warmup-steps=20",
]


@pytest.fixture
def finished(tmp_path_factory, tmp_path, monkeypatch):
    """What a run of these flags printed; its folder and its text are in the current folder."""

    def make(folder):
        (folder / "text.txt").write_text(TEXT)
        with (
            contextlib.chdir(folder),
            Path("said").open("w") as said,
            contextlib.redirect_stdout(said),
        ):
            assert main(FINISHED) == 0

    shutil.copytree(
        made_once(tmp_path_factory, "finished run of three steps", make),
        tmp_path,
        dirs_exist_ok=True,
    )
    monkeypatch.chdir(tmp_path)
    return Path("said").read_text()


@pytest.mark.journey
def test_the_written_config_repeats_the_run_bit_for_bit(finished):
    assert main(["--config=run/config.yaml", "--run.dir=again"]) == 0
    for key in ("loss", "grad_norm", "eval_loss"):
        assert records("run", key) == records("again", key)


@pytest.mark.journey
def test_the_same_command_on_a_finished_run_says_so(finished, capsys):
    assert main(FINISHED) == 0
    out = capsys.readouterr().out
    assert "already at step 3" in out
    assert list(records("run", "eval_loss")) == [0, 3], (
        "a run that resumes does not repeat the first"
    )
    assert list(records("run")) == [1, 2, 3]


@pytest.mark.journey
def test_resuming_says_what_changed(finished, capsys):
    """And so does a run that is too short for its warm-up, which the configuration keeps."""
    assert "the warm-up of 20 steps (optimizer.warmup_steps) is cut to these 3" in finished
    assert main([*FINISHED, "--train.steps=4", *mesh(2, 2, 2), "--data.global-batch-size=4"]) == 0
    out = capsys.readouterr().out
    assert "the warm-up of 20 steps (optimizer.warmup_steps) is cut to these 4" in out
    rates = np.array(list(records("run", "learning_rate").values()))
    assert_allclose(rates / 5e-3, [0, 1 / 3, 2 / 3, 3 / 4], rtol=1e-6)
    assert "warmup_steps: 20\n" in Path("run/config.yaml").read_text()
    assert "resumed from the checkpoint at step 3" in out
    assert "changed since, without effect on the numbers: mesh.dp: 1 -> 2" in out
    assert "changed since: train.steps: 3 -> 4" in out
    assert list(records("run", "tokens").values()) == [8 * 32, 16 * 32, 24 * 32, 28 * 32]


OTHER_RUNS = {
    "--model.d-model 64": "model.d_model: 32 -> 64",
    "--model.tie-embeddings": "model.tie_embeddings: False -> True",
    "--run.seed 1": "run.seed: 0 -> 1",
    "--optimizer.name lion": "optimizer.name: adamw -> lion",
    "--data.sequence-length 16": "data.sequence_length: 32 -> 16",
    "--data.path other.txt": "data: sha256",
}


@pytest.mark.journey
def test_a_checkpoint_of_another_run_is_refused_and_left_alone(finished, capsys):
    Path("other.txt").write_text(TEXT + "more")
    before = contents("run")
    for change, message in OTHER_RUNS.items():
        assert_refused(main, [*FINISHED, *change.split()], message, capsys)
        assert contents("run") == before


def test_an_empty_checkpoint_is_named_with_the_way_out(tmp_path, command, capsys):
    (tmp_path / "run/checkpoints/5").mkdir(parents=True)
    assert_refused(main, command, "name another --run.dir", capsys)


@pytest.mark.journey
def test_a_run_goes_on_in_float8_and_is_used_in_its_compute_dtype(tmp_path, command, text, capsys):
    assert main([*command, "--train.steps=1"]) == 0
    assert "matmul" not in capsys.readouterr().out
    float8 = ["--model.precision.matmul=float8", "--model.precision.matmul-least=32"]
    assert main([*command, "--train.steps=2", *float8]) == 0
    out = capsys.readouterr().out
    assert "matmul  float8 products in attention.out, attention.qkv, mlp.down, mlp.gate_up; " in out
    assert "changed since: model.precision.matmul: compute -> float8" in out
    run = str(tmp_path / "run")
    evaluate = [
        "evaluate",
        "--model",
        run,
        "--text",
        str(text),
        f"--json={tmp_path}/loss.json",
    ]
    assert jaxtp.__main__.main(evaluate) == 0
    assert read_json(tmp_path / "loss.json")["dtype"] == "float32"


MISTAKES = read_table(__file__)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(tmp_path, text, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "300")
    words = MISTAKES[name]["flags"].format(vit=VIT).split()
    assert (
        main([*quick_flags(tmp_path / "run", text, 1, 2, 4), "--model.num-layers=2", *words]) == 2
    )
    error = capsys.readouterr().err
    assert MISTAKES[name]["says"] in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.journey
def test_a_killed_run_goes_on_over_other_axes(tmp_path, command, start):
    """Its losses are those of a run that was never killed, so the data had no gap and no repeat.

    Over fsdp and tp, cp alone, cp and tp, and one device, verified on the way: neither data nor
    checkpoints know of the mesh.
    """
    command += [
        "--train.steps=30",
        "--eval.every=10",
        "--train.verify-every=10",
        "--model.num-kv-heads=2",
        "--model.dropout=0.1",
        "--train.accumulation=2",
    ]
    whole = tmp_path / "whole"
    killed = tmp_path / "run"
    assert main([*command, *mesh(1, 1, 1), f"--run.dir={whole}"]) == 0
    first = 0
    for axes in ([], [*mesh(1, 1, 1, cp=2), "--mesh.context=ulysses"]):
        process = start([*command, *axes])
        wait_for_step(killed, random.randint(first + 6, first + 12), process)
        process.kill()
        process.wait()
        first = max(records(killed))
    assert main([*command, *mesh(1, 1, 2, cp=4)]) == 0
    for key in ("loss", "eval_loss"):
        assert records(killed, key) == pytest.approx(records(whole, key), abs=1e-4)


@pytest.mark.journey
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path, command, start):
    """Though the next step that is logged is far away."""
    flags = [
        *command,
        "--train.steps=1000000",
        "--train.log-every=1000000",
        "--train.stopped-exit-code=7",
    ]
    processes = start_together(start, flags, 2, devices=2)
    wait_until((tmp_path / "run/checkpoints/5").exists)
    processes[1].send_signal(signal.SIGUSR1)
    first, _ = (process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [7, 7]
    (step,) = re.findall(r"stopped by a signal to process 1 at step (\d+) and saved", first)
    assert (tmp_path / "run/checkpoints" / step).exists()


@pytest.mark.journey
def test_a_run_goes_on_with_more_processes_and_with_fewer(tmp_path, command, start):
    """With one process, then two that split the sequence, then one: as a run that was never
    stopped.
    """
    assert main([*command, "--train.steps=2"]) == 0
    both = [*command, "--train.steps=6", *mesh(1, 1, 2, cp=2)]
    both += ["--mesh.context=ulysses"]
    first, second = map(finish, start_together(start, both, 2, devices=2))
    assert "step 6/6" in first
    assert "step 6/6" not in second
    assert main([*command, "--train.steps=8", *mesh(1, 1, 2)]) == 0
    assert main([*command, "--train.steps=8", f"--run.dir={tmp_path}/whole"]) == 0
    assert records(tmp_path / "run") == pytest.approx(records(tmp_path / "whole"), abs=1e-5)
