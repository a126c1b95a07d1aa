"""What a run survives: signals, damaged checkpoints, numbers that are not finite, a second run on its folder."""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import SMALL, TEXT, finish, mesh, records, wait_for_step
from structures import plant, watched
from support import journeys

import jaxtp
from jaxtp.checkpoint.logical import replace_arrays
from jaxtp.checkpoint.manager import CheckpointError, Checkpoints
from jaxtp.checkpoint.storage import open_checkpoint
from jaxtp.config.entry import FILES, INTERRUPTED, TEMPORARY, WRONG
from jaxtp.train import run_folder, verify
from jaxtp.train.__main__ import main
from jaxtp.train.config import TrainConfig
from jaxtp.train.run_folder import RunFolderError, locked, replacing, writing
from jaxtp.train.state import named_arrays
from jaxtp.train.stopping import Watchdog
from jaxtp.train.trainer import Trainer
from jaxtp.train.verify import nonfinite_gradient


@pytest.fixture
def command(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return [*SMALL, "--data.path", str(tmp_path / "text.txt"), *mesh(1, 2, 2)]


@pytest.mark.journey
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(tmp_path, command, start):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    command = [*command, "--train.steps", "120", "--checkpoint.every", "0"]
    finish(start([*command, "--run.dir", str(whole)]))
    again = [*command, "--run.dir", str(stopped)]
    last = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = start(again)
        wait_for_step(stopped, last + 3, process)
        process.send_signal(number)
        out = finish(process)
        assert (f"resumed from the checkpoint at step {last}" in out) == bool(last)
        assert f"stopped by {signal.Signals(number).name} at step" in out
        assert "Traceback" not in out
        last = max(records(stopped))
        assert last < 120
    assert f"resumed from the checkpoint at step {last}" in finish(start(again))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert records(stopped, key) == records(whole, key)


@pytest.mark.journey
@pytest.mark.parametrize("delay", [0, 0.4, 1.5])
def test_repeated_ctrl_c_while_the_step_is_compiled_ends_without_a_crash(tmp_path, command, start, delay):
    """The interpreter's exit would crash threads in which XLA compiles."""
    process = start([*command, "--run.dir", str(tmp_path / "run"), "--model.num-layers", "3"])
    while not (tmp_path / "run").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(delay)
    for _ in range(100):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
            break
    assert process.returncode in (0, INTERRUPTED)


IN_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.journey
def test_a_closed_terminal_saves_and_ends_well(tmp_path, command):
    run = tmp_path / "run"
    train = ["-m", "jaxtp.train", *command, "--train.steps", "100000", "--run.dir", str(run)]
    ours, theirs = os.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen([sys.executable, "-c", IN_ITS_TERMINAL, *train], **streams, start_new_session=True)
    os.close(theirs)
    try:
        seen = b""
        while b"loss" not in seen.rpartition(b"compiled")[2]:
            seen += os.read(ours, 65536)
        os.close(ours)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
    assert max(records(run)) in Checkpoints(run / "checkpoints").steps()


@pytest.mark.journey
@pytest.mark.parametrize("seen", ["making the initial", "checking that", "evaluating at", "compiling the"])
def test_ctrl_c_in_a_terminal_before_the_first_step_ends_at_once(tmp_path, command, seen):
    run = tmp_path / "run"
    flags = ["-m", "jaxtp.train", *command, "--train.steps", "2", "--model.num-layers", "3", "--run.dir", str(run)]
    ours, theirs = os.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen([sys.executable, "-c", IN_ITS_TERMINAL, *flags], **streams, start_new_session=True)
    os.close(theirs)
    shown = b""
    try:
        while seen.encode() not in shown:
            shown += os.read(ours, 65536)
        os.write(ours, b"\x03")
        with contextlib.suppress(OSError):  # at its end
            while more := os.read(ours, 65536):
                shown += more
        assert process.wait(timeout=120) == INTERRUPTED
    finally:
        process.kill()
        os.close(ours)
    assert b"interrupted before the first step; nothing is lost, and the same command starts again\r\n" in shown
    assert b"Traceback" not in shown
    assert b"step 1/2" not in shown
    assert b"ignored" not in shown
    assert not Checkpoints(run / "checkpoints").steps()
    assert main([*flags[2:]]) == 0
    assert list(records(run)) == [1, 2]


@pytest.mark.journey
def test_the_same_seed_repeats_bit_for_bit(tmp_path, command):
    for name in ("a", "b"):
        assert main([*command, "--train.steps", "6", "--run.dir", str(tmp_path / name)]) == 0
    for key in ("loss", "grad_norm", "eval_loss"):
        assert records(tmp_path / "a", key) == records(tmp_path / "b", key)


EXPLODE = ["--optimizer.learning-rate", "1e15", "--optimizer.warmup-steps", "0", "--train.steps", "20"]
"""Weights that are finite after the first step, and whose loss is not."""

OVERFLOW = ["--optimizer.learning-rate", "1e30", *EXPLODE[2:]]
"""Weights whose norm is not finite after the first step."""


@pytest.mark.journey
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, command, capsys):
    run = tmp_path / "run"
    (run / "non_finite").mkdir(parents=True)
    assert main([*command, *EXPLODE, "--run.dir", str(run), "--checkpoint.every", "1"]) == WRONG
    error = capsys.readouterr().err
    assert "not finite. The weights do not contain it" in error
    assert "The same command resumes from the checkpoint at step 1" in error
    assert "--train.non-finite skip" in error
    (kept,) = (run / "non_finite").glob("[0-9]*")
    with np.load(kept / "batch_0.npz") as batch:
        assert batch["inputs_0"].shape == (4, 32)
        assert batch["inputs_4"].dtype == np.int32
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("reaction", journeys(["stop", "skip"], "skip"))
def test_an_update_that_is_not_finite_is_never_saved(tmp_path, command, capsys, reaction):
    run = tmp_path / "run"
    saving = ["--checkpoint.every", "1", "--train.non-finite", reaction]
    assert main([*command, *OVERFLOW, "--run.dir", str(run), *saving]) == WRONG
    error = capsys.readouterr().err
    assert "norm of the weights after it inf: the update is not finite" in error
    assert "The same command starts again: there is no checkpoint yet" in error
    assert not Checkpoints(run / "checkpoints").steps()
    assert not (run / "non_finite").exists()


@pytest.mark.journey
def test_what_is_not_finite_never_enters_the_weights(tmp_path, command, capsys):
    """What is kept for inspection is finite, the optimizer's moments too, and takes the place of what was there."""
    run = tmp_path / "run"
    before = Checkpoints(run / "non_finite", keep=9)
    for step in (1, 2, 3, 4, 5, 99):
        before.save(step, nnx.State({"x": nnx.Param(jnp.zeros(1))}), jaxtp.make_mesh(), {})
    before.close()
    assert (
        main([*command, *EXPLODE, "--run.dir", str(run), "--train.non-finite", "skip", "--train.max-skipped", "2"])
        == WRONG
    )
    captured = capsys.readouterr()
    assert "the update is skipped, 1 in a row of at most 2" in captured.out
    assert "the update is skipped, 2 in a row of at most 2" in captured.out
    assert "not finite" in captured.err
    (folder,) = (run / "non_finite").iterdir()
    assert (folder / "batch_0.npz").exists()
    kept = open_checkpoint(run / "non_finite")
    assert len(kept.arrays) > 30
    assert [kept.verify(name) for name in kept.arrays] == [None] * len(kept.arrays)


def test_what_takes_a_folder_s_place_does_so_whole(tmp_path):
    for text in ("first", "second"):
        with replacing(tmp_path / "kept") as new:
            (new / text).touch()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["second"]
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "kept") as new:
        (new / "third" / "fails").touch()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["second"]


def test_a_full_disk_does_not_hide_what_was_not_finite(monkeypatch):
    def full(*_):
        raise CheckpointError("a checkpoint could not be written (no space)")

    monkeypatch.setattr(verify, "_save_state_and_batch", full)
    checkpoints = SimpleNamespace(describe_newest=lambda: "", steps=lambda: [2])
    said = str(nonfinite_gradient(SimpleNamespace(config=TrainConfig(), checkpoints=checkpoints), "step 3", 3, {}, {}))
    assert "they and the batch could not be saved for inspection (a checkpoint could not be written (no space))" in said
    assert "The same command resumes from the checkpoint at step 2" in said


@pytest.mark.journey
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(tmp_path, command, capsys):
    damaged = tmp_path / "damaged"
    assert main([*command, "--train.steps", "10", "--run.dir", str(damaged)]) == 0
    arrays = max((damaged / "checkpoints/10/state").rglob("*"), key=lambda path: path.stat().st_size)
    arrays.write_bytes(arrays.read_bytes()[:100])
    assert main([*command, "--train.steps", "15", "--run.dir", str(damaged)]) == 0
    out = capsys.readouterr().out
    assert "checkpoints/10 is damaged" in out
    assert "resuming from step 5" in out
    assert "resumed from the checkpoint at step 5" in out
    assert (damaged / "damaged/10").is_dir()
    assert [*records(damaged)] == [*range(1, 16)]


@pytest.mark.journey
def test_two_runs_on_one_folder(tmp_path, command, capsys):
    run = tmp_path / "run"
    run.mkdir()
    with (run / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("process 7 on somewhere\n")
        held.flush()
        assert main([*command, "--train.steps", "2", "--run.dir", str(run)]) == 2
    assert "is in use by process 7 on somewhere; wait until it ends" in capsys.readouterr().err
    assert main([*command, "--train.steps", "2", "--run.dir", str(run)]) == 0


def test_a_file_system_without_locks_is_not_another_run(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunFolderError, match=r"cannot be locked .No locks available"), locked(tmp_path):
        pytest.fail("it was not locked")


@pytest.mark.journey
def test_a_full_disk_stops_the_run_with_the_last_checkpoint_whole(tmp_path, command, capsys, monkeypatch):
    from jaxtp.checkpoint import manager

    run = tmp_path / "run"
    assert main([*command, "--train.steps", "5", "--run.dir", str(run)]) == 0

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manager.ocp.CheckpointManager, "save", full)
    assert main([*command, "--train.steps", "6", "--run.dir", str(run)]) == FILES
    error = capsys.readouterr().err
    assert "written (No space left on device); the checkpoint at step 5 is complete; free some space" in error
    monkeypatch.undo()
    assert main([*command, "--train.steps", "6", "--run.dir", str(run)]) == 0


def lose(loss, run, monkeypatch):
    """Something happens to the folder of a run after its sixth step."""
    between = Trainer._between_steps

    def lost(self):
        between(self)
        if self._run.step == 6:
            self._run.checkpoints.wait()
            loss(run)

    monkeypatch.setattr(Trainer, "_between_steps", lost)


def forbid(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")


@pytest.mark.parametrize(
    ("loss", "left"),
    [
        pytest.param(shutil.rmtree, "there is no checkpoint", marks=pytest.mark.journey),
        pytest.param(forbid, "there is no checkpoint", marks=pytest.mark.slow),
        pytest.param(
            lambda run: (run / "checkpoints/5").rename(run / "checkpoints/5.orbax-checkpoint-tmp"),
            "",
            marks=pytest.mark.journey,
        ),
    ],
)
def test_a_folder_that_is_lost_is_not_said_to_be_whole(tmp_path, command, capsys, monkeypatch, loss, left):
    run = tmp_path / "run"
    lose(loss, run, monkeypatch)
    code = main([*command, "--train.steps", "11", "--run.dir", str(run)])
    error = capsys.readouterr().err
    assert code == (FILES if left else 0)
    assert left in error
    assert "is complete" not in error
    assert "orbax" not in error.lower()


def test_an_error_of_a_file_in_mid_run_is_worth_another_try(tmp_path):
    for error, code in ((OSError(errno.ENOSPC, "No space left"), FILES), (IsADirectoryError(21, "Is a directory"), 2)):
        with pytest.raises(RunFolderError) as raised, writing(tmp_path / "metrics.jsonl"):
            raise error
        assert raised.value.exit_code == code


def poisoned(state, name, value=np.nan):
    arrays = named_arrays(state)
    host = np.array(arrays[name])
    host.reshape(-1)[0] = value
    return replace_arrays(state, arrays | {name: jax.device_put(host, arrays[name].sharding)})


@pytest.mark.journey
def test_a_weight_that_is_not_finite_is_named_and_never_saved(tmp_path, command, capsys, monkeypatch):
    """With train.non_finite=skip the steps would go on, and their checkpoints take the place of the finite ones."""
    run, name = tmp_path / "run", "model.blocks.mlp.down.kernel"

    loops = []
    monkeypatch.setattr(Trainer, "run_to_end", lambda self, go=Trainer.run_to_end: loops.append(self._run) or go(self))
    lose(lambda _: setattr(loops[-1], "state", poisoned(loops[-1].state, name)), run, monkeypatch)
    flags = ["--train.non-finite", "skip", "--train.max-skipped", "9", "--checkpoint.every", "1"]
    assert main([*command, "--train.steps", "12", "--run.dir", str(run), *flags]) == WRONG
    error = capsys.readouterr().err
    assert f"{name} has 1 element that is not finite" in error
    assert "learning rate" not in error
    assert Checkpoints(run / "checkpoints").steps() == [5, 6]
    assert all(stored.verify(each) is None for stored in [open_checkpoint(run)] for each in stored.arrays)


@pytest.mark.journey
def test_an_interrupted_run_logs_the_means_of_the_undisturbed_one(tmp_path, command, monkeypatch):
    """A line of the log is the mean of the steps since the line before; the run is interrupted between two lines."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    every = [*command, "--train.steps", "12", "--checkpoint.every", "4"]
    assert main([*every, "--run.dir", str(whole)]) == 0
    by_step = records(whole)
    flags = [*every, "--run.dir", str(cut), "--train.log-every", "3"]

    def interrupted(run):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        lose(interrupted, cut, patch)
        assert main(flags) == INTERRUPTED
    assert Checkpoints(cut / "checkpoints").steps() == [4]
    assert main(flags) == 0
    logged = (1, 3, 6, 9, 12)
    expected = {
        step: np.mean([by_step[each] for each in range(before + 1, step + 1)])
        for before, step in zip((0, *logged), logged, strict=False)
    }
    assert records(cut) == pytest.approx(expected, rel=1e-12)


@pytest.mark.journey
def test_a_finished_run_prints_commands_that_work(tmp_path, command, capsys):
    run = tmp_path / "run"
    assert main([*command, "--train.steps", "2", "--run.dir", str(run)]) == 0
    *_, last, _, saved, first, second = capsys.readouterr().out.splitlines()
    assert last == "step 2 is the last: evaluates and saves"
    assert saved.startswith(f"saved in {run / 'checkpoints/2'}")
    commands = [text.strip() for line in (first, second) for text in line.split(";")]
    assert [each.split()[1] for each in commands] == ["evaluate", "generate", "convert"]
    for each in commands:
        done = subprocess.run([sys.executable, "-m", *shlex.split(each)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run-hf/model.safetensors").is_file()


@pytest.mark.journey
def test_a_run_that_begins_with_what_is_not_finite_says_so(tmp_path, command, capsys, monkeypatch):
    run, name, begin = tmp_path / "run", "model.norm.scale", Trainer.run_to_end
    flags = [*command, "--run.dir", str(run), "--train.steps"]

    def poison_and_begin(self):
        self._run.state = poisoned(self._run.state, name, np.inf)
        return begin(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_to_end", poison_and_begin)
        assert main([*flags, "2"]) == WRONG
    error = capsys.readouterr().err
    assert (
        f"step 0: the run cannot start from this state: {name} has 1 element that is not finite; begin with other"
        in error
    )
    assert main([*flags, "2"]) == 0
    monkeypatch.setattr(Trainer, "run_to_end", poison_and_begin)
    assert main([*flags, "4"]) == WRONG
    assert f"{run / 'checkpoints/2'} has them: move it away" in capsys.readouterr().err


def test_a_stalled_step_prints_the_stacks(capfd):
    watchdog = Watchdog(0.1)
    watchdog.feed()
    time.sleep(0.5)
    watchdog.stop()
    error = capfd.readouterr().err
    assert "no step for 0.1 s" in error
    assert error.count("test_a_stalled_step_prints_the_stacks") == 1, "once for each stall"


@pytest.mark.journey
@pytest.mark.parametrize("print_after", [0, 0.2])
def test_a_stuck_process_is_ended(print_after):
    stuck = (
        "import time\nfrom jaxtp.train.stopping import Watchdog\n"
        f"watchdog = Watchdog({print_after}, 1.0)\nwatchdog.feed()\ntime.sleep(0.5)\nwatchdog.feed()\ntime.sleep(600)"
    )
    done = subprocess.run([sys.executable, "-c", stuck], capture_output=True, text=True, timeout=60)
    assert done.returncode == TEMPORARY
    assert "no step for 1 s (train.stall_abort_seconds): the process ends; it waited on:\n" in done.stderr
    assert done.stderr.count("(train.stall_seconds)") == (2 if print_after else 0)


@pytest.mark.parametrize("seconds", [1e-9, 1e300])
def test_a_stall_of_absurd_length(seconds, capfd):
    watchdog = Watchdog(seconds)
    watchdog.feed()
    time.sleep(0.05)
    watchdog.stop()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.journey
def test_a_run_saves_and_ends_in_silence_when_nobody_reads_its_output(tmp_path, command):
    train = [
        sys.executable,
        "-m",
        "jaxtp.train",
        *command,
        "--train.steps",
        "100000",
        "--run.dir",
        str(tmp_path / "run"),
    ]
    piped = f"set -o pipefail; {shlex.join(train)} | head -n 1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir() if folder.name.isdigit()]


@pytest.mark.journey
def test_weights_of_another_run(tmp_path, command, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*command, "--train.steps", "40", "--run.dir", str(first)]) == 0
    assert main([*command, "--train.steps", "2", "--run.dir", str(second), "--run.init-from", str(first)]) == 0
    assert f"weights from {first / 'checkpoints/40'}" in capsys.readouterr().out
    assert records(second)[1] < records(first)[1] - 1
    third = [*command, "--train.steps", "3", "--run.dir", str(second), "--run.init-from", str(tmp_path)]
    (tmp_path / "checkpoints").symlink_to(first / "checkpoints")
    assert main(third) == 0
    assert f"init_from: {first}\n" in (second / "config.yaml").read_text(), "a run that resumes began where it began"
    assert main([*command, "--train.steps", "2", "--run.dir", str(tmp_path / "x"), "--run.init-from", "nowhere"]) == 2
    assert "nowhere: no finished checkpoint there" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "hf", "non_finite", "corruption", "profile", "damaged"])
@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_no_report_is_written_through_a_link(target, name, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / target)
    with pytest.raises(RunFolderError, match=rf"run/{name} is a link, .*; delete it, or name another folder"):
        run_folder.prepare(tmp_path / "run")


def test_checkpoints_may_be_on_another_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    run_folder.prepare(tmp_path / "run")


@pytest.mark.parametrize("kind", ["link to another file", "link to nothing", "pipe", "device", "folder"])
def test_what_is_no_lock_of_a_run_is_one_error(kind, tmp_path):
    (tmp_path / "victim").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    plant(run / ".lock", kind)
    with watched(), pytest.raises(RunFolderError, match=r"/run/\.lock cannot be written") as caught, locked(run):
        pytest.fail("it was locked")
    assert caught.value.exit_code == 2
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (run / "absent").exists()
