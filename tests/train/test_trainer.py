"""The trainer's methods: what is logged, evaluated, saved and stopped, before, within and after
its block.
"""

import json
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_array_equal
from runs import records, run_program
from small_net import ROWS, Net, batches, checkpoints_in, loss, losses_of, train, trainer_of
from tables import assert_errors, raised_by, read_table

from jaxtp import Trainer, make_mesh
from jaxtp.config.entry import NumericsError, UserError
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import MeshError, mesh_shape, mesh_sizes
from jaxtp.train import session
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss import call
from jaxtp.train.metrics import check_names
from jaxtp.train.task import Task


def test_the_trainer_logs_evaluates_saves_and_stops(tmp_path, capsys):
    def callback(trainer, step):
        trainer.log({"half": step.metrics["loss"] / 2})
        if step.index in (2, 4):
            trainer.save()
            assert step.metrics["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])
        if step.index == 4:
            trainer.stop("enough")

    settings = {"eval.every": 2, "checkpoint.every": 2, "checkpoint.keep": 1, "train.log_every": 1}
    worse = optax.sgd(-0.1)
    train(
        tmp_path,
        steps=9,
        callbacks=[callback],
        validation=batches,
        optimizer=worse,
        settings=settings,
    )
    assert "stopped and saved at step 4: enough" in capsys.readouterr().out
    evaluated = records(tmp_path, "eval_loss")
    assert min(evaluated, key=evaluated.get) == 0
    assert checkpoints_in(tmp_path) == [2, 4], "2 is the best saved one"
    halves = records(tmp_path, "half")
    assert {step: half * 2 for step, half in halves.items()} == pytest.approx(records(tmp_path))


def test_a_run_goes_back_to_an_older_checkpoint_in_a_new_folder(tmp_path):
    def run(steps, **settings):
        kept = {"checkpoint.every": 2, "checkpoint.keep": 9, "train.log_every": 1}
        train(tmp_path / "a", steps=steps, settings=kept | settings)

    run(5)
    with pytest.raises(UserError, match=r"checkpoints 2, 4, 5; the nearest is --run.resume-at 2"):
        run(5, **{"run.resume_at": 3})
    # The second of these resumes in the new folder.
    for steps in (4, 5):
        run(steps, **{"run.resume_at": 2})
    whole = records(tmp_path / "a")
    assert records(tmp_path / "a-at-2") == {step: whole[step] for step in (3, 4, 5)}
    assert checkpoints_in(tmp_path / "a") == checkpoints_in(tmp_path / "a-at-2") == [2, 4, 5]


def test_validation_turns_dropout_off_and_a_batch_of_one_row_is_trained(tmp_path):
    row = {"x": np.ones((1, 16)), "y": np.zeros(1, int)}
    step_losses = []

    def callback(trainer, step):
        step_losses.append(step.metrics["loss"])
        # Each access makes another model.
        model = trainer.model
        model.eval()
        expected = float(losses_of(model, row).mean())
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)

    parts = {"batches": lambda step: row, "validation": [row], "callbacks": [callback]}
    train(tmp_path, steps=9, **parts)
    assert step_losses[-1] < step_losses[0]


COLUMNS = ("stop", "experts", "key", "model", "batch", "state", "flags", "weights")
"""Names that jaxtp uses for other things, but a run does not log."""


def with_columns(step):
    named = {name: np.full(ROWS, place + 1.0) for place, name in enumerate(COLUMNS)}
    return batches(step) | named | {"step": np.zeros(ROWS), "loss": np.zeros(ROWS)}


@pytest.mark.wide
def test_columns_and_metrics_may_have_any_name_that_a_run_does_not_log_itself(tmp_path):
    def reading(model, batch, key):
        return *loss(model, batch, key)[:2], {name: batch[name].sum() for name in COLUMNS}

    seen = []

    def callback(trainer, step):
        seen.append([step.metrics[name] for name in COLUMNS])
        seen.append([step.metrics[f"eval_{name}"] for name in COLUMNS])

    settings = {"eval.every": 1, "train.log_every": 1, "train.accumulation": 2}
    parts = {"loss": reading, "batches": with_columns, "validation": with_columns}
    train(tmp_path, steps=2, callbacks=[callback], settings=settings, **parts)
    assert_array_equal(seen, [np.arange(len(COLUMNS)) + 1.0] * 4)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logged = set().union(*map(json.loads, lines))
    for name in logged - {*COLUMNS} - {f"eval_{name}" for name in COLUMNS}:
        with pytest.raises(UserError, match="which a run logs itself"):
            check_names([name], "the loss returns")


def test_a_column_of_weights_that_the_loss_does_not_read_pads_nothing(tmp_path):
    row = {"x": np.ones(16, np.float32), "y": 0, "weights": 1.0}
    evaluated = []

    def callback(trainer, step):
        evaluated.append(trainer.evaluate()["eval_rows_seen"])

    def counting(model, batch, key):
        return *loss(model, batch, key)[:2], {"rows_seen": ((batch["x"] != 0).all(1).sum(), ROWS)}

    train(tmp_path, steps=1, loss=counting, validation=[row] * (ROWS + 1), callbacks=[callback])
    assert evaluated == [1.0], "of the first batch alone"


NOT_TO_LOG = [
    ({"step": 1.0}, "'step'"),
    ({"mine": "text"}, "'mine' that is 'text', a str"),
    ({"fine": 1, "mine": np.ones(3)}, r"'mine' that is an array float64\[3\]"),
    ({"mine": jnp.ones(1)}, r"'mine' that is an array float32\[1\]; .* shape \(\)"),
    ({"mine": [1.0]}, "'mine' that is a list"),
    (1.0, "1.0; metrics are a dict"),
]


def test_what_is_logged_is_a_number_with_a_name_of_its_own(tmp_path):
    def callback(trainer, step):
        for values, message in NOT_TO_LOG:
            with pytest.raises(UserError, match=f"trainer.log has .*{message}") as error:
                trainer.log(values)
            assert "\n" not in str(error.value)
        trainer.log({"good": np.float32(2.5), "array": jnp.array(3), "flag": True})

    train(tmp_path, steps=1, callbacks=[callback])
    assert [records(tmp_path, name) for name in ("good", "array", "flag")] == [
        {1: 2.5},
        {1: 3.0},
        {1: 1.0},
    ]
    assert not records(tmp_path, "fine"), "all of a call, or nothing"


def test_a_loss_returns_numbers_with_names():
    assert_errors(
        read_table(__file__),
        lambda row: raised_by(call, lambda *_: tuple(row["result"]), None, {}, None),
    )


@jax.custom_vjp
def without_gradient(x):
    return x


def fail(*_):
    raise RuntimeError("no step")


without_gradient.defvjp(lambda x: (x, None), fail)


def loss_without_gradient(model, batch, key):
    total, *others = loss(model, batch, key)
    return without_gradient(total), *others


def test_the_first_evaluation_reports_although_the_step_fails_to_compile_meanwhile(tmp_path):
    with pytest.raises(UserError, match="no step"):
        train(tmp_path, validation=batches, loss=loss_without_gradient)
    assert list(records(tmp_path, "eval_loss")) == [0]


@pytest.mark.wide
def test_a_block_that_is_left_saves_one_that_fails_does_not_and_both_are_entered_again(tmp_path):
    trainer = trainer_of(tmp_path, validation=batches)
    with trainer:
        steps = iter(trainer)
        loss = next(steps).metrics["loss"]
    assert repr(trainer) == (
        f"<Trainer folder='{tmp_path}', closed at step 1, loss {loss:.4f} at step 1>"
    )
    assert not trainer.done
    with pytest.raises(ConfigError, match="ended at step 1, where the trainer was closed"):
        next(steps)
    assert trainer.save() == tmp_path / "checkpoints/1", "it is there"
    assert trainer.evaluate()["eval_loss"] > 0

    def fail():
        with trainer:
            assert next(iter(trainer)).index == 2
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert checkpoints_in(tmp_path) == [1]
    assert trainer.metrics_of(2)["loss"] > 0
    with trainer:
        assert [step.index for step in trainer] == [2, 3]
    assert trainer.done


def test_an_old_spelling_names_the_new_one():
    for old in (Net, TrainConfig(), Task(model=Net)):
        with pytest.raises(ConfigError, match=r"by name, without a Task: jaxtp.Trainer\(model="):
            Trainer(old)


@pytest.mark.wide
def test_a_mesh_has_several_forms(tmp_path):
    mesh = make_mesh(fsdp=2, tp=2)
    forms = ("fsdp=2,tp=2", {"fsdp": 2, "tp": 2}, mesh, mesh.abstract_mesh)
    for number, mesh in enumerate(forms):
        trainer = trainer_of(tmp_path / str(number), mesh)
        assert mesh_sizes(trainer.mesh) == mesh_shape(fsdp=2, tp=2)
        trainer.close()


USES = {
    "loop": lambda trainer: next(iter(trainer)),
    "log": lambda trainer: trainer.log({"a": 1.0}),
    "line": lambda trainer: trainer.line("text"),
    "paused": lambda trainer: trainer.paused("x").__enter__(),
    "evaluate": lambda trainer: trainer.evaluate(),
    "model": lambda trainer: trainer.model,
    "config": lambda trainer: trainer.config,
}


@pytest.mark.wide
@pytest.mark.parametrize("use", USES)
def test_a_trainer_starts_at_its_first_use(use, tmp_path):
    trainer = trainer_of(tmp_path)
    assert repr(trainer) == f"<Trainer folder='{tmp_path}', not started>"
    USES[use](trainer)
    assert repr(trainer).startswith(f"<Trainer folder='{tmp_path}', at step")
    trainer.close()
    trainer.close()


@pytest.mark.wide
def test_a_trainer_is_used_over_cells(tmp_path, capsys):
    """The cells in between keep their mesh and their signal handlers; `close` saves."""
    handler = signal.getsignal(signal.SIGINT)
    settings = {"train.log_every": 1, "checkpoint.every": 0}
    trainer = trainer_of(tmp_path, "fsdp=2", validation=batches, settings=settings)
    for step in trainer:
        assert signal.getsignal(signal.SIGINT) is handler
        assert jax.sharding.get_abstract_mesh().empty
        if step.index == 1:
            break
    trainer.log({"mine": 1.0})
    first = step.metrics["loss"]
    assert trainer.evaluate()["eval_loss"] > 0
    assert next(iter(trainer)).index == 2, "it goes on where the cell before left it"
    trainer.close()
    assert checkpoints_in(tmp_path) == [2]
    assert "resumed" not in capsys.readouterr().out
    assert trainer.run_to_end()
    assert "resumed from the checkpoint at step 2" in capsys.readouterr().out
    assert list(trainer) == []
    assert records(tmp_path)[1] == first
    assert records(tmp_path, "mine") == {1: 1.0}
    assert list(records(tmp_path)) == [1, 2, 3]
    train(tmp_path / "whole", "fsdp=2", validation=batches, settings=settings)
    assert records(tmp_path) == records(tmp_path / "whole")


@pytest.mark.wide
@pytest.mark.parametrize("place", ["body", "callback"])
def test_an_interrupted_or_failed_cell_leaves_the_trainer_usable(place, tmp_path, capsys):
    """In the body of the loop nothing is lost. Within a step, it goes on from the checkpoint."""

    def callback(trainer, step):
        if place == "callback" and step.index == 2 and not failed:
            failed.append(step.index)
            raise KeyboardInterrupt

    failed = []
    trainer = trainer_of(tmp_path, callbacks=[callback], settings={"checkpoint.every": 1})
    seen = []

    def cell():
        for step in trainer:
            seen.append(step.index)
            if place == "body" and step.index == 2 and seen.count(2) == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cell()
    cell()
    assert trainer.done
    assert seen == [1, 2, 3]
    assert ("resumed from the checkpoint at step 1" in capsys.readouterr().out) == (
        place == "callback"
    )


def test_an_argument_of_the_wrong_kind_is_named():
    with pytest.raises(ConfigError, match=r"settings are a dict .* not 3"):
        Trainer(settings=3)
    with pytest.raises(MeshError, match=r"^mesh tq=2: 'tq' is not an axis"):
        Trainer(mesh="tq=2")


def test_ctrl_c_in_a_cell_saves_and_the_next_cell_goes_on(tmp_path, capsys):
    def callback(trainer, step):
        if step.index == 1:
            signal.raise_signal(signal.SIGINT)

    trainer = trainer_of(tmp_path, callbacks=[callback])
    assert not trainer.run_to_end()
    assert "stopped by SIGINT at step 1 and saved" in capsys.readouterr().out
    assert trainer.run_to_end()


def test_a_trainer_starts_in_one_thread_and_trains_in_another_which_the_exit_leaves_alone(tmp_path):
    def callback(trainer, step):
        if step.index == 2:
            in_step_2.set()
            assert may_go_on.wait(60)

    in_step_2, may_go_on = threading.Event(), threading.Event()
    trainer = trainer_of(tmp_path, callbacks=[callback])
    assert trainer.step == 0
    thread = threading.Thread(target=trainer.run_to_end)
    thread.start()
    assert in_step_2.wait(60)
    session._close_at_exit()
    may_go_on.set()
    thread.join()
    assert trainer.done
    assert checkpoints_in(tmp_path) == [3]


def test_ctrl_c_before_the_first_step_ends_one_cell_and_not_the_next(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(KeyboardInterrupt, match="nothing is lost"), trainer.paused("a cell"):
        signal.raise_signal(signal.SIGINT)
    assert trainer.run_to_end()


def test_after_stop_the_first_signal_is_recorded_as_before(tmp_path):
    trainer = trainer_of(tmp_path)
    for _ in trainer:
        trainer.stop("enough")
        with trainer.paused("a signal"):
            signal.raise_signal(signal.SIGTERM)
    assert checkpoints_in(tmp_path) == [1]


@pytest.mark.wide
def test_a_trainer_starts_under_another_mesh(tmp_path):
    with jax.set_mesh(make_mesh(tp=2)):
        outer = trainer_of(tmp_path / "outer", "fsdp=2,tp=2")
        with outer, trainer_of(tmp_path / "inner", "tp=2") as inner:
            assert next(iter(inner)).index == 1
        assert mesh_sizes(jax.sharding.get_abstract_mesh()) == mesh_shape(tp=2)


@pytest.mark.wide
def test_a_cell_that_makes_a_trainer_may_be_run_again(tmp_path):
    first = trainer_of(tmp_path)
    assert next(iter(first)).index == 1
    second = trainer_of(tmp_path)
    other = trainer_of(tmp_path / "other", "fsdp=2")
    assert next(iter(other)).index == 1
    assert next(iter(second)).index == 2, "from what the first one saved"
    assert "closed at step 1" in repr(first)
    second.close()
    assert next(iter(other)).index == 2
    other.close()
    assert checkpoints_in(tmp_path / "other") == [2]


LEFT_OPEN = """
import sys
sys.path.insert(0, {tests!r})
from small_net import trainer_of
trainer = trainer_of({folder!r}, settings={{"checkpoint.every": 0}})
for step in trainer:
    if step.index == 2:
        break
{end}
"""


FORK = """
import multiprocessing
from pathlib import Path
worker = multiprocessing.get_context("fork").Process(target=print)
worker.start()
worker.join(60)
assert worker.exitcode == 0
assert not list(Path(trainer.config.run.dir).glob("checkpoints/*"))
"""


@pytest.mark.journey
@pytest.mark.parametrize("end", ["", "1 / 0", FORK], ids=["end", "error", "fork"])
def test_a_trainer_that_is_left_open_is_closed_at_the_end_of_the_program(end, tmp_path):
    program = LEFT_OPEN.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path), end=end)
    done = run_program(sys.executable, "-c", program)
    assert done.returncode == (end == "1 / 0"), done.stderr
    assert checkpoints_in(tmp_path) == [2]


@pytest.mark.wide
def test_an_error_of_a_callback_names_its_line_and_an_error_of_the_run_passes(tmp_path):
    def ending(trainer, step):
        raise SystemExit

    def failing(trainer, step):
        raise NumericsError("copies differ")

    with pytest.raises(
        UserError, match=r"test_trainer.py, line \d+: raise SystemExit\): .* sys.exit\(None\)"
    ):
        train(tmp_path / "one", steps=1, callbacks=[ending])
    with pytest.raises(NumericsError, match="copies differ"):
        train(tmp_path / "two", steps=1, callbacks=[failing])
