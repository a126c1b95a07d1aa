"""What a run survives: signals, damaged checkpoints, numbers that are not finite, a second run
on its folder.
"""

import contextlib
import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from accidents import WEIGHT, poisoned
from runs import finish, records, run_program, wait_for_step
from small_net import Net, train
from structures import plant, watched
from tables import raised_by

from jaxtp.__main__ import main as jaxtp_command
from jaxtp.checkpoint.manager import CheckpointError, Checkpoints
from jaxtp.checkpoint.storage import open_checkpoint
from jaxtp.config.entry import FILES, INTERRUPTED, TEMPORARY, WRONG, NumericsError
from jaxtp.guards import nonfinite
from jaxtp.guards.hook import FinishedStep
from jaxtp.guards.nonfinite import replacing
from jaxtp.guards.stopping import Watchdog
from jaxtp.train import run_folder
from jaxtp.train.__main__ import main
from jaxtp.train.run_folder import RunFolderError, locked, writing

ACCIDENTS = Path(__file__).parents[1] / "accidents.py"


@pytest.mark.journey
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(tmp_path, command, start):
    """Also with moments that are rounded with random bits."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "run"
    command = [
        *command,
        "--train.steps=120",
        "--checkpoint.every=0",
        "--optimizer.first-moment=bfloat16",
    ]
    last = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start(command)
        wait_for_step(stopped, last + 3, process)
        process.send_signal(number)
        out = finish(process)
        assert f"stopped by {signal.Signals(number).name} at step" in out
        assert "Traceback" not in out
        last = max(records(stopped))
        assert last < 120
    assert main(command) == 0
    assert main([*command, f"--run.dir={whole}"]) == 0
    for key in ("loss", "grad_norm", "eval_loss"):
        assert records(stopped, key) == records(whole, key)


@pytest.mark.journey
@pytest.mark.parametrize("delay", [0, 1.0])
def test_repeated_ctrl_c_while_the_step_is_compiled_ends_without_a_crash(
    tmp_path, command, start, delay
):
    """The interpreter's exit would crash threads in which XLA compiles."""
    process = start([*command, "--model.num-layers=3"])
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


@pytest.fixture
def in_terminal():
    """Starts a run in a terminal of its own; returns the process and the other end of the
    terminal.
    """
    processes = []

    def start_in_terminal(flags):
        ours, theirs = os.openpty()
        command = [sys.executable, "-c", IN_ITS_TERMINAL, "-m", "jaxtp.train", *flags]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        processes.append(subprocess.Popen(command, **streams, start_new_session=True))
        os.close(theirs)
        return processes[-1], ours

    yield start_in_terminal
    for process in processes:
        process.kill()


@pytest.mark.journey
def test_a_closed_terminal_saves_and_ends_well(tmp_path, command, in_terminal):
    run = tmp_path / "run"
    process, terminal = in_terminal([*command, "--train.steps=100000"])
    seen = b""
    while b"loss" not in seen.rpartition(b"compiled")[2]:
        seen += os.read(terminal, 65536)
    os.close(terminal)
    assert process.wait(timeout=120) == 0
    assert max(records(run)) in Checkpoints(run / "checkpoints").steps()


@pytest.mark.journey
@pytest.mark.parametrize("seen", ["making the initial", "compiling the"])
def test_ctrl_c_in_a_terminal_before_the_first_step_ends_at_once(
    tmp_path, command, in_terminal, seen
):
    flags = [*command, "--train.steps=2", "--model.num-layers=3"]
    process, terminal = in_terminal(flags)
    shown = b""
    while seen.encode() not in shown:
        shown += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # at its end
        while more := os.read(terminal, 65536):
            shown += more
    os.close(terminal)
    assert process.wait(timeout=120) == INTERRUPTED
    assert b"nothing is lost" in shown
    assert not [words for words in (b"Traceback", b"step 1/2", b"ignored") if words in shown]
    assert not Checkpoints(tmp_path / "run/checkpoints").steps()
    assert main(flags) == 0
    assert list(records(tmp_path / "run")) == [1, 2]


EXPLODE = [
    "--optimizer.learning-rate=1e15",
    "--optimizer.warmup-steps=0",
    "--train.steps=20",
]
"""Weights that are finite after the first step, and whose loss is not."""

OVERFLOW = [*EXPLODE, "--optimizer.learning-rate=1e30", "--checkpoint.every=1"]
"""Weights whose norm is not finite after the first step."""


@pytest.mark.journey
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, command, capsys):
    run = tmp_path / "run"
    (run / "non_finite").mkdir(parents=True)
    assert main([*command, *EXPLODE, "--checkpoint.every=1"]) == WRONG
    error = capsys.readouterr().err
    assert "not finite. The update was not applied" in error
    assert "the checkpoint at step 1" in error
    assert "--train.non-finite skip" in error
    (batch,) = (run / "non_finite").glob("[0-9]*/batch_0.npz")
    with np.load(batch) as arrays:
        assert arrays["inputs_0"].shape == (4, 32)
    assert "NaN" not in (run / "metrics.jsonl").read_text()


@pytest.mark.journey
def test_an_update_that_is_not_finite_is_never_saved(tmp_path, command, capsys):
    assert main([*command, *OVERFLOW, "--train.non-finite=skip"]) == WRONG
    error = capsys.readouterr().err
    assert "norm of the new weights inf: the update is not finite" in error
    assert "there is no checkpoint yet" in error
    assert not Checkpoints(tmp_path / "run/checkpoints").steps()
    assert not (tmp_path / "run/non_finite").exists()


@pytest.mark.journey
def test_what_is_not_finite_never_enters_the_weights(tmp_path, command, capsys):
    """What is kept for inspection is finite, the optimizer's moments too."""
    assert main([*command, *EXPLODE, "--train.non-finite=skip", "--train.max-skipped=2"]) == WRONG
    captured = capsys.readouterr()
    for count in (1, 2):
        assert f"the update is skipped, {count} in a row of at most 2" in captured.out
    assert "not finite" in captured.err
    kept = open_checkpoint(tmp_path / "run/non_finite")
    assert len(kept.arrays) > 30
    assert not [name for name in kept.arrays if kept.verify(name)]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    for text in ("first", "second"):
        with replacing(tmp_path / "kept") as new:
            (new / text).touch()
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "kept") as new:
        (new / "third" / "fails").touch()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["second"]


def test_a_full_disk_does_not_hide_what_was_not_finite(tmp_path, monkeypatch):
    def full(folder):
        raise CheckpointError("no space")

    monkeypatch.setattr(nonfinite, "Checkpoints", full)
    checkpoints = SimpleNamespace(describe_newest=lambda: "", steps=lambda: [2])
    policy = nonfinite.NonFinitePolicy(
        tmp_path / "non_finite",
        may_skip=True,
        max_skipped=1,
        checkpoints=checkpoints,
        mesh=None,
        stored=lambda state: state,
    )
    metrics = {"loss": np.nan, "grad_norm": np.nan}
    step = FinishedStep(3, {}, metrics, weight=1.0, skipped=2, flag=0, checksums=None)
    error = raised_by(
        lambda: policy.after_step(SimpleNamespace(state={}), step), kind=NumericsError
    )
    assert "could not be saved for inspection (no space)" in error
    assert "the checkpoint at step 2" in error


@pytest.mark.journey
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(
    tmp_path, command, capsys
):
    run = tmp_path / "run"
    assert main([*command, "--train.steps=4", "--checkpoint.every=2"]) == 0
    arrays = max((run / "checkpoints/4/state").rglob("*"), key=lambda path: path.stat().st_size)
    arrays.write_bytes(arrays.read_bytes()[:100])
    assert main([*command, "--train.steps=5"]) == 0
    out = capsys.readouterr().out
    assert "checkpoints/4 is damaged" in out
    assert "resumed from the checkpoint at step 2" in out
    assert (run / "damaged/4").is_dir()
    assert [*records(run)] == [*range(1, 6)]


def test_a_folder_that_another_run_uses_is_refused_with_its_name(tmp_path):
    (tmp_path / ".lock").write_text("process 7 on somewhere\n")
    with (tmp_path / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(RunFolderError, match="in use by process 7 on somewhere"),
            locked(tmp_path),
        ):
            pytest.fail("it was locked twice")
    with locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_not_another_run(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(RunFolderError, match=r"cannot be locked .No locks available"),
        locked(tmp_path),
    ):
        pytest.fail("it was not locked")


@pytest.mark.journey
def test_a_full_disk_stops_the_run_with_the_last_checkpoint_whole(
    tmp_path, command, capsys, monkeypatch
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    assert main([*command, "--train.steps=2"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        assert main([*command, "--train.steps=3"]) == FILES
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "the checkpoint at step 2 is complete" in error
    assert main([*command, "--train.steps=3"]) == 0


def accident(name):
    return ["--train.callbacks", f"{ACCIDENTS}:{name}"]


@pytest.mark.journey
@pytest.mark.parametrize("name", ["delete_the_run", "replace_the_checkpoints_by_a_file"])
def test_a_folder_that_is_lost_is_not_said_to_be_whole(command, capsys, name):
    assert main([*command, "--train.steps=11", *accident(name)]) == FILES
    assert "there is no checkpoint" in capsys.readouterr().err


@pytest.mark.journey
def test_a_checkpoint_that_lost_its_end_does_not_end_the_run(command, capsys):
    assert main([*command, "--train.steps=11", *accident("unfinish_the_checkpoint")]) == 0
    assert "is complete" not in capsys.readouterr().err


def test_an_error_of_a_file_in_mid_run_is_worth_another_try(tmp_path):
    for error, code in (
        (OSError(errno.ENOSPC, "No space left"), FILES),
        (IsADirectoryError(21, "Is a directory"), 2),
    ):
        with pytest.raises(RunFolderError) as raised, writing(tmp_path / "metrics.jsonl"):
            raise error
        assert raised.value.exit_code == code


@pytest.mark.journey
def test_a_weight_that_is_not_finite_is_named_and_never_saved(tmp_path, command, capsys):
    """With train.non_finite=skip the steps would go on, and their checkpoints take the place of
    the finite ones.
    """
    flags = ["--train.non-finite=skip", "--train.max-skipped=9", *accident("poison_a_weight")]
    assert main([*command, "--train.steps=12", *flags]) == WRONG
    error = capsys.readouterr().err
    assert f"{WEIGHT} has 1 element that is not finite" in error
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [5]


@pytest.mark.journey
def test_an_interrupted_run_logs_the_means_of_the_undisturbed_one(tmp_path, command):
    """A line of the log is the mean of the steps since the line before; the run is interrupted
    between two lines.
    """
    every = [*command, "--train.steps=9"]
    assert main([*every, f"--run.dir={tmp_path}/whole"]) == 0
    by_step = records(tmp_path / "whole")
    flags = [*every, "--train.log-every=3"]
    assert main([*flags, *accident("interrupt")]) == INTERRUPTED
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [5]
    assert main(flags) == 0
    parts = {1: [1], 3: [2, 3], 6: [4, 5, 6], 9: [7, 8, 9]}
    means = {step: np.mean([by_step[each] for each in part]) for step, part in parts.items()}
    assert records(tmp_path / "run") == pytest.approx(means, rel=1e-12)


@pytest.mark.journey
def test_a_finished_run_prints_commands_that_work(tmp_path, command, capsys):
    assert main([*command, "--train.steps=2"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    commands = [shlex.split(text)[1:] for text in f"{first};{second}".split(";")]
    assert [words[0] for words in commands] == ["evaluate", "generate", "convert"]
    for words in commands:
        assert jaxtp_command(words) == 0
    assert (tmp_path / "run-hf/model.safetensors").is_file()


class Infinite(Net):
    """A model that begins with weights that are not finite."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.up.bias[...] = jnp.full(32, jnp.inf)


@pytest.mark.journey
def test_a_run_that_begins_with_what_is_not_finite_says_so(tmp_path, command, capsys, monkeypatch):
    with pytest.raises(
        NumericsError, match=r"step 0: .*up.bias has 32 elements .*begin with other weights"
    ):
        train(tmp_path / "own", model=Infinite)
    assert main([*command, "--train.steps=1"]) == 0
    restore = Checkpoints.restore
    monkeypatch.setattr(Checkpoints, "restore", lambda *args: poisoned(restore(*args), WEIGHT))
    assert main([*command, "--train.steps=2"]) == WRONG
    error = capsys.readouterr().err
    assert f"{WEIGHT} has 1 element that is not finite" in error
    assert f"{tmp_path / 'run/checkpoints/1'} has them: move it away" in error


def test_a_stalled_step_prints_the_stacks_once(capfd):
    watchdog = Watchdog(0.1)
    watchdog.on_activity()
    time.sleep(0.5)
    watchdog.close()
    error = capfd.readouterr().err
    assert "no step for 0.1 s" in error
    assert error.count("test_a_stalled_step_prints_the_stacks_once") == 1


STUCK = """
import time
from jaxtp.guards.stopping import Watchdog
watchdog = Watchdog(0.2, 1.0)
watchdog.on_activity()
time.sleep(0.5)
watchdog.on_activity()
time.sleep(600)
"""


@pytest.mark.journey
def test_a_stuck_process_is_ended():
    done = run_program(sys.executable, "-c", STUCK)
    assert done.returncode == TEMPORARY
    assert "no step for 1 s (train.stall_abort_seconds): the process ends" in done.stderr
    assert done.stderr.count("(train.stall_seconds)") == 2


def test_between_cells_nothing_stalls(capfd):
    watchdog = Watchdog(0.1, 0.2)
    watchdog.on_activity()
    watchdog.rest()
    time.sleep(0.5)
    watchdog.close()
    assert capfd.readouterr().err == ""


def test_a_stall_of_absurd_length_is_watched_without_an_error(capfd):
    watchdog = Watchdog(1e300)
    watchdog.on_activity()
    time.sleep(0.05)
    watchdog.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.journey
def test_a_run_saves_and_ends_in_silence_when_nobody_reads_its_output(tmp_path, command):
    words = [sys.executable, "-m", "jaxtp.train", *command, "--train.steps=100000"]
    piped = f"set -o pipefail; {shlex.join(words)} | head -n 1"
    done = run_program("bash", "-c", piped)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert [
        folder.name for folder in (tmp_path / "run/checkpoints").iterdir() if folder.name.isdigit()
    ]


@pytest.mark.journey
def test_a_run_starts_from_the_weights_of_another(tmp_path, command, capsys):
    first = tmp_path / "run"
    second = [f"--run.dir={tmp_path}/second", "--train.steps"]
    assert main([*command, "--train.steps=20"]) == 0
    assert main([*command, *second, "2", f"--run.init-from={first}"]) == 0
    assert f"weights from {first / 'checkpoints/20'}" in capsys.readouterr().out
    assert records(tmp_path / "second")[1] < records(first)[1] - 1
    (tmp_path / "checkpoints").symlink_to(first / "checkpoints")
    assert main([*command, *second, "3", f"--run.init-from={tmp_path}"]) == 0
    config = (tmp_path / "second/config.yaml").read_text()
    assert f"init_from: {first}\n" in config, "a run that resumes began where it began"


def test_no_report_is_written_through_a_link_but_checkpoints_may_be_on_another_disk(tmp_path):
    run = tmp_path / "run"
    for name in ("tensorboard", "wandb", "hf", "non_finite", "profile", "damaged"):
        run.mkdir(exist_ok=True)
        (run / name).symlink_to(tmp_path)
        with pytest.raises(RunFolderError, match=rf"run/{name} is a link"):
            run_folder.prepare(run)
        (run / name).unlink()
    (run / "checkpoints").symlink_to(tmp_path)
    run_folder.prepare(run)


@pytest.mark.parametrize(
    "kind", ["link to another file", "link to nothing", "pipe", "device", "folder"]
)
def test_what_is_in_the_place_of_the_lock_is_one_error_and_left_alone(kind, tmp_path):
    (tmp_path / "victim").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    plant(run / ".lock", kind)
    with (
        watched(),
        pytest.raises(RunFolderError, match=r"/run/\.lock cannot be written") as caught,
        locked(run),
    ):
        pytest.fail("it was locked")
    assert caught.value.exit_code == 2
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (run / "absent").exists()
