"""`jaxtp train` as its users meet it: runs, resumes, survives a kill, refuses what is wrong."""

import json
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from runs import SMALL, TEXT, contents, finish, free_address, mesh, records, wait_for_step
from support import journeys

import jaxtp.__main__
from jaxtp.train.__main__ import main

VIT = Path(__file__).parent.parent.parent / "scripts/examples/vit.py"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return ["--data.path", str(tmp_path / "text.txt")]


LONG = ["--train.steps", "40", "--checkpoint.every", "20"]


def test_a_run_leaves_what_it_should_and_learns(tmp_path, text, capsys):
    assert main([*SMALL, *text, "--run.dir", str(tmp_path / "run"), *mesh(1, 2, 4), *LONG]) == 0
    out = capsys.readouterr().out
    assert "dp 1 x fsdp 2 x cp 1 x tp 4 = 8 virtual CPU devices" in out
    assert "blocks.mlp.down.kernel" not in out
    assert "step 40/40" in out
    assert "profile" not in out
    assert "validation loss" in out
    losses = records(tmp_path / "run")
    assert list(losses) == list(range(1, 41))
    assert losses[40] < losses[1] - 1
    evaluated = records(tmp_path / "run", "eval_loss")
    assert list(evaluated) == [0, 20, 40], "the first shows what the run improves on"
    assert evaluated[0] == pytest.approx(np.log(256), abs=0.2)
    assert evaluated[40] < evaluated[0] - 1
    beginning = ("making the initial state: ", "checking that", "evaluating at step 0: 2 batches\n", "compiling the")
    places = [out.index(f"\n{words}") for words in (*beginning, "step 0: validation loss", "compiled the", "step 1/40")]
    assert places == sorted(places), "each line comes before its work"
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[1])
    assert row.keys() >= {"step", "loss", "grad_norm", "param_norm", "learning_rate", "tokens", "tokens_per_second"}
    assert row.keys() >= {"step_seconds", "data_wait_seconds", "goodput", "lost_to_compile"}
    assert not {"mfu", "memory_bytes"} & row.keys(), "a CPU's peak is not known, nor its memory"
    assert row["tokens_per_second"] == pytest.approx(8 * row["tokens_per_second_per_device"])
    assert row["tokens"] == 8 * 32
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "tensorboard",
        ".lock",
    }


@pytest.mark.journey
def test_the_written_config_repeats_the_run(tmp_path, text):
    first = tmp_path / "first"
    assert main([*SMALL, *text, "--run.dir", str(first), "--train.steps", "3", *mesh(1, 1, 2)]) == 0
    again = ["--config", str(first / "config.yaml"), "--run.dir", str(tmp_path / "again")]
    assert main(again) == 0
    assert records(first) == records(tmp_path / "again")


@pytest.mark.journey
def test_the_same_command_on_a_finished_run_says_so(tmp_path, text, capsys):
    run = ["--run.dir", str(tmp_path / "run"), "--eval.every", "0"]
    command = [*SMALL, *text, *run, "--train.steps", "3", *mesh(1, 1, 2)]
    assert main(command) == 0
    assert "blocks.mlp.down.kernel" not in capsys.readouterr().out
    assert main([*command, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "blocks.mlp.down.kernel            2x64x32             None, tp, fsdp              2x32x32" in out
    assert "already at step 3, and train.steps=3: raise it, or train.epochs if you give epochs" in out
    assert list(records(tmp_path / "run", "eval_loss")) == [0, 3], "a run that resumes does not repeat the first"
    assert list(records(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.journey
def test_a_padded_run_goes_on_over_another_tp(tmp_path, text, capsys):
    heads = ["--model.num-heads", "9", "--model.num-kv-heads", "3", "--optimizer.schedule", "constant"]
    command = [*SMALL, *text, *heads, "--train.log-every", "1", "--run.dir"]
    assert main([*command, str(tmp_path / "run"), "--train.steps", "2", *mesh(1, 1, 2)]) == 0
    assert "padding with tp 2: 9 query heads to 12, 3 kv heads to 4" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "run"), "--train.steps", "4", *mesh(1, 2, 4)]) == 0
    assert main([*command, str(tmp_path / "one"), "--train.steps", "4", *mesh(1, 1, 1)]) == 0
    one, padded = (records(tmp_path / name, "loss") for name in ("one", "run"))
    assert padded == pytest.approx(one, rel=1e-4)


@pytest.mark.journey
def test_resuming_says_what_changed(tmp_path, text, capsys):
    """And so does a run that is too short for its warm-up, which the configuration keeps."""
    run = [*SMALL, *text, "--run.dir", str(tmp_path / "run"), "--optimizer.warmup-steps", "20"]
    assert main([*run, "--train.steps", "3", *mesh(1, 1, 2)]) == 0
    assert "the warm-up of 20 steps (optimizer.warmup_steps) is cut to these 3" in capsys.readouterr().out
    assert main([*run, "--train.steps", "4", *mesh(2, 2, 2)]) == 0
    out = capsys.readouterr().out
    assert "the warm-up of 20 steps (optimizer.warmup_steps) is cut to these 4" in out
    rates = np.array(list(records(tmp_path / "run", "learning_rate").values()))
    np.testing.assert_allclose(rates / 5e-3, [0, 1 / 3, 2 / 3, 3 / 4], rtol=1e-6)
    assert "warmup_steps: 20\n" in (tmp_path / "run/config.yaml").read_text()
    assert "resumed from the checkpoint at step 3" in out
    assert "changed since: mesh.tp: 1 -> 2" not in out
    assert "changed since, without effect on the numbers: mesh.dp: 1 -> 2" in out
    assert "changed since: train.steps: 3 -> 4" in out


@pytest.mark.journey
def test_a_run_goes_on_in_float8_and_is_used_in_its_compute_dtype(tmp_path, text, capsys):
    run = [*SMALL, *text, "--run.dir", str(tmp_path / "run"), *mesh(1, 2, 2)]
    assert main([*run, "--train.steps", "2"]) == 0
    assert "matmul" not in capsys.readouterr().out
    float8 = ["--model.precision.matmul", "float8", "--model.precision.matmul-least", "32"]
    assert main([*run, "--train.steps", "4", *float8]) == 0
    out = capsys.readouterr().out
    taken = "float8 products in attention.out, attention.qkv, mlp.down, mlp.gate_up"
    assert f"matmul  {taken}; float32 in gradients of weights, the head\n" in out
    assert "changed since: model.precision.matmul: compute -> float8" in out
    model = ["--model", str(tmp_path / "run")]
    assert jaxtp.__main__.main(["generate", *model, "--prompt", "line", "--max-tokens", "3"]) == 0
    assert jaxtp.__main__.main(["evaluate", *model, "--text", text[1], "--json", str(tmp_path / "loss.json")]) == 0
    assert json.loads((tmp_path / "loss.json").read_text())["dtype"] == "float32"
    assert jaxtp.__main__.main(["convert", "export", model[1], str(tmp_path / "hf")]) == 0


MISTAKES = {
    "unknown section": ("--modle.d-model 3", "--model.d-model"),
    "unknown flag": ("--mesh.tpp 4", "--mesh.tp"),
    "not a number": ("--mesh.tp four", "--mesh.tp"),
    "out of range": ("--train.steps 0", "--train.steps 0: should be greater than or equal to 1"),
    "several out of range": (
        "--optimizer.beta1 2 --optimizer.learning-rate -1",
        "--optimizer.learning-rate -1:",
    ),
    "heads": (
        "--mesh.tp 3 --mesh.no-allow-padding",
        "mesh.tp=3 pads 8 query heads to 9, and mesh.allow_padding is false",
    ),
    "ffn": (
        "--model.d-ff 65 --mesh.tp 2 --mesh.no-allow-padding",
        "mesh.tp=2 pads 65 d_ff to 66, and mesh.allow_padding is false; tp can be 1",
    ),
    "batch": (
        "--data.global-batch-size 7",
        "data.global_batch_size=7 is not divisible by mesh.dp*fsdp * train.accumulation=2",
    ),
    "sequence": (
        "--model.sequence-parallel True --data.sequence-length 30",
        "data.sequence_length=30 is not divisible by mesh.tp=4",
    ),
    "sequence over cp": (
        "--data.sequence-length 33 --mesh.cp 2",
        "data.sequence_length=33 is not divisible by mesh.cp=2; cp can be 1, or sequence_length 32 or 34",
    ),
    "sequence over cp and tp": (
        "--model.sequence-parallel True --mesh.cp 2 --data.sequence-length 36",
        "data.sequence_length=36 is not divisible by mesh.cp * mesh.tp=8; cp can be 1, or tp can be 1, 2, 3, or "
        "sequence_length 32 or 40",
    ),
    "more cp than tokens": (
        "--mesh.cp 16 --mesh.tp 1 --mesh.fsdp 1 --data.sequence-length 8",
        "data.sequence_length=8 is not divisible by mesh.cp=16; cp can be 1, 2, 4, 8, or sequence_length 16",
    ),
    "a width that cp does not divide": (
        "--mesh.cp 3 --mesh.fsdp 1 --data.sequence-length 33",
        "model.d_model=32 is not divisible by mesh.cp=3; cp can be 1, or d_model 30 or 33",
    ),
    "heads over cp": (
        "--mesh.cp 4 --mesh.fsdp 1 --mesh.context ulysses",
        "mesh.context=ulysses: mesh.cp=4 does not divide the 2 query heads of a device over mesh.tp=4; use gather or "
        "auto; cp can be 1, 2",
    ),
    "a kernel of whole sequences": (
        "--model.attention cudnn --mesh.cp 2 --mesh.context gather --model.precision.compute bfloat16 "
        "--data.packing concatenated --model.head-dim 8",
        "it needs whole sequences, which devices have with mesh.context=ulysses, but not with gather; use auto",
    ),
    "cp of zero": ("--mesh.cp 0", "cp=0: a mesh axis is a positive number of devices"),
    "a negative cp": (
        "--mesh.cp -2",
        "cp=-2: a mesh axis is a positive number of devices, or -1 for the remaining ones",
    ),
    "two axes left over, one of them cp": ("--mesh.cp -1 --mesh.tp -1", "only one axis can be -1"),
    "no such method": ("--mesh.context nonsense", "--mesh.context nonsense: should be 'auto', 'ulysses' or 'gather'"),
    "more cp than devices": (
        "--mesh.cp 4",
        "the mesh dp 1 x fsdp 2 x cp 4 x tp 4 needs 32 devices, and there are 16; fsdp can be 1, or cp can be 1, 2",
    ),
    "mesh of zero": ("--mesh.tp 0", "tp=0: a mesh axis is a positive number of devices"),
    "two axes left over": ("--mesh.tp -1 --mesh.dp -1", "only one axis can be -1"),
    "mesh larger than the machine": ("--mesh.dp 4", "needs 32 devices, and there are 16"),
    "mesh larger than any machine": (
        "--mesh.dp 1000000 --data.global-batch-size 2000000",
        "needs 8000000 devices, and there are 16; dp can be 1, 2\n",
    ),
    "no such config": ("--config nowhere.yaml", "nowhere.yaml: No such file"),
    "config without a file": ("--config", "--config needs a value"),
    "no such text": ("--data.path nowhere.txt", "data.path=nowhere.txt: there is no such file or dataset"),
    "folder for text": ("--data.path .", "has no dataset.json: it is not a dataset"),
    "vocabulary too small": ("--model.vocab-size 100", "go up to 255, and model.vocab_size=100 has fewer"),
    "sequence longer than the text": (
        "--data.sequence-length 200000 --model.num-layers 1",
        "less than one sequence of data.sequence_length=200000",
    ),
    "infinite rate": ("--optimizer.learning-rate inf", "--optimizer.learning-rate inf: should be a finite number"),
    "profile after the end": ("--profile.start 500", "profile.start=500 is after the last step, train.steps=400"),
    "no such optimizer": ("--optimizer.name sgd", "--optimizer.name"),
    "more than the machine has": ("--model.d-model 16384 --model.d-ff 65536 --model.num-layers 400", "GB and no GPU"),
    "seed beyond 32 bits": ("--run.seed 99999999999999999999", "--run.seed 99999999999999999999: should be less than"),
    "kernel of another platform": (
        "--model.attention fused",
        "fused: it runs on cuda, not on cpu; use auto",
    ),
    "unwritable folder": ("--run.dir /proc/run", "run.dir=/proc/run"),
    "more experts for a token than there are": (
        "--model.num-experts 4 --model.experts-per-token 5",
        "model.experts_per_token=5 is more than model.num_experts=4; at most 4 works",
    ),
    "float8 of no layer": (
        "--model.precision.matmul float8",
        "float8 applies to no layer (blocks.mlp.gate_up: 32 features are below matmul_least=2,048)",
    ),
    "float8 of layers that are not there": (
        "--model.precision.matmul float8 --model.precision.matmul-layers *.out|*.mpl.*",
        "matmul_layers: no layer matches '*.mpl.*'; there are blocks.attention.out, blocks.attention.qkv, blocks.mlp.",
    ),
    "float8 of a model of your own": (
        f"--model.build {VIT}:build --train.loss {VIT}:loss --model.precision.matmul float8",
        "model.precision.matmul=float8: it is for projections of jaxtp's decoder, and the model is your own",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(tmp_path, text, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "300")
    flags, message = MISTAKES[name]
    command = [*SMALL, *mesh(1, 2, 4), *text, "--run.dir", str(tmp_path / "run"), *flags.split()]
    assert main(command) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err + output.out
    assert not (tmp_path / "run").exists()


OTHER_RUNS = {
    "--model.d-model 64": "model.d_model: 32 -> 64",
    "--model.tie-embeddings": "model.tie_embeddings: False -> True",
    "--run.seed 1": "run.seed: 0 -> 1",
    "--optimizer.name lion": "optimizer.name: adamw -> lion",
    "--data.sequence-length 16": "data.sequence_length: 32 -> 16",
}


@pytest.mark.journey
def test_a_checkpoint_of_another_run_is_refused_and_left_alone(tmp_path, text, capsys):
    command = [*SMALL, *text, "--run.dir", str(tmp_path / "run"), "--train.steps", "2", *mesh(1, 1, 1)]
    assert main(command) == 0
    before = contents(tmp_path / "run")
    for change, message in OTHER_RUNS.items():
        assert main([*command, *change.split()]) == 2
        assert message in capsys.readouterr().err
        assert contents(tmp_path / "run") == before


@pytest.mark.journey
def test_tokens_count_what_was_trained_on_when_the_batch_changes(tmp_path, text):
    command = [*SMALL, *text, "--run.dir", str(tmp_path / "run"), *mesh(1, 1, 1), "--train.steps"]
    assert main([*command, "2"]) == 0
    assert main([*command, "3", "--data.global-batch-size", "4"]) == 0
    assert list(records(tmp_path / "run", "tokens").values()) == [8 * 32, 16 * 32, 20 * 32]


def test_an_empty_checkpoint_is_named_with_the_way_out(tmp_path, text, capsys):
    (tmp_path / "run/checkpoints/5").mkdir(parents=True)
    assert main([*SMALL, *text, "--run.dir", str(tmp_path / "run"), "--train.steps", "2", *mesh(1, 1, 1)]) == 2
    assert "name another --run.dir" in capsys.readouterr().err


@pytest.mark.journey
def test_a_checkpoint_of_other_data_is_refused(tmp_path, text, capsys):
    command = [*SMALL, *text, "--run.dir", str(tmp_path / "run"), "--train.steps", "2", *mesh(1, 1, 1)]
    assert main(command) == 0
    (tmp_path / "text.txt").write_text(TEXT + "more")
    assert main(command) == 2
    assert "data: sha256" in capsys.readouterr().err


@pytest.mark.journey
def test_killed_at_a_random_step_and_resumed_on_another_mesh(tmp_path, text, start):
    """The joined losses are those of a run that was never killed, so the data had no gap and no repeat."""
    command = [*SMALL, *text, "--train.steps", "60"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, "--run.dir", str(whole), *mesh(1, 2, 4)]) == 0
    for next_mesh in (mesh(1, 2, 4), mesh(2, 1, 2)):
        process = start([*command, "--run.dir", str(killed), *next_mesh])
        done = max(records(killed), default=0) if (killed / "metrics.jsonl").exists() else 0
        wait_for_step(killed, random.randint(done + 1, min(done + 25, 55)), process)
        process.kill()  # SIGKILL
        process.wait()
    finish(start([*command, "--run.dir", str(killed), *mesh(1, 4, 1)]))
    expected, actual = records(whole), records(killed)
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), atol=1e-4, rtol=0)


@pytest.mark.journey
def test_killed_and_resumed_on_another_cp(tmp_path, text, start):
    """Over cp 2, cp 4 x tp 2 and none, verified on the way: neither data nor checkpoints know of cp."""
    command = [*SMALL, *text, "--train.steps", "40", "--eval.every", "10", "--train.verify-every", "10"]
    command += ["--model.num-kv-heads", "2", "--model.dropout", "0.1", "--train.accumulation", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, "--run.dir", str(whole), *mesh(1, 1, 1)]) == 0
    for next_mesh in ([*mesh(1, 1, 1, cp=2), "--mesh.context", "ulysses"], mesh(1, 1, 2, cp=4)):
        process = start([*command, "--run.dir", str(killed), *next_mesh])
        done = max(records(killed), default=0) if (killed / "metrics.jsonl").exists() else 0
        wait_for_step(killed, random.randint(done + 6, min(done + 15, 35)), process)
        process.kill()
        process.wait()
    said = finish(start([*command, "--run.dir", str(killed), *mesh(1, 2, 1)]))
    assert "step 40: verified" in said
    for key in ("loss", "eval_loss"):
        expected, actual = records(whole, key), records(killed, key)
        assert actual.keys() == expected.keys()
        np.testing.assert_allclose(list(actual.values()), list(expected.values()), atol=1e-4, rtol=0)


@pytest.mark.journey
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path, text, start):
    """Though the next step that is logged is far away."""
    address, folder = free_address(), tmp_path / "run"
    flags = [*SMALL, *text, *mesh(1, 2, 2), "--train.steps", "1000000", "--train.log-every", "1000000"]
    flags += ["--train.stopped-exit-code", "7"]
    processes = [
        start(
            [*flags, "--run.dir", str(folder)],
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(process),
            JAX_NUM_CPU_DEVICES="2",
        )
        for process in range(2)
    ]
    until = time.monotonic() + 180
    while not (folder / "checkpoints/5").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGUSR1)
    first, _ = (process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [7, 7]
    (step,) = re.findall(r"stopped by a signal to process 1 at step (\d+) and saved", first)
    assert (folder / "checkpoints" / step).exists()


ACROSS = {"auto": mesh(1, 2, 4), "ulysses": mesh(1, 1, 4, cp=2), "gather": mesh(1, 1, 2, cp=4)}


@pytest.mark.parametrize("context", journeys(list(ACROSS), "auto", "ulysses"))
def test_two_processes_equal_one(tmp_path, text, start, context):
    """Two processes of four devices, fsdp or cp across them, then one process goes on."""
    address, over = free_address(), [*ACROSS[context], "--mesh.context", context]
    command = [*SMALL, *text, "--train.steps", "10"]
    two, one = tmp_path / "two", tmp_path / "one"
    processes = [
        start(
            [*command, "--run.dir", str(two), *over],
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(process),
            JAX_NUM_CPU_DEVICES="4",
        )
        for process in range(2)
    ]
    outputs = [finish(process) for process in processes]
    assert "step 10/10" in outputs[0]
    assert "step 10/10" not in outputs[1]
    assert main([*command, "--run.dir", str(one), *over]) == 0
    np.testing.assert_allclose(list(records(two).values()), list(records(one).values()), atol=1e-5, rtol=0)
    longer = [*command[:-1], "12", *mesh(1, 1, 2)]
    assert main([*longer, "--run.dir", str(two)]) == 0
    assert main([*longer, "--run.dir", str(one)]) == 0
    np.testing.assert_allclose(list(records(two).values()), list(records(one).values()), atol=1e-5, rtol=0)
