"""The trainer's methods: what is logged, evaluated, saved and stopped, before, within and after
its block.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import records
from small_net import ROWS, Net, batches, checkpoints_in, loss, losses_of, train, trainer_of
from tables import assert_errors, raised_by, read_table

import jaxtp
from jaxtp.config.entry import NumericsError, UserError
from jaxtp.config.schema import ConfigError
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss import call
from jaxtp.train.metrics import check_names


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
    np.testing.assert_array_equal(seen, [np.arange(len(COLUMNS)) + 1.0] * 4)
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
        next(steps)
    assert repr(trainer) == f"<Trainer folder='{tmp_path}', ended at step 1>"
    assert not trainer.done
    uses = [
        lambda: trainer.log({"mine": 1.0}),
        lambda: trainer.stop("enough"),
        lambda: iter(trainer),
        trainer.run_to_end,
        lambda: next(steps),
    ]
    for use in uses:
        with pytest.raises(
            ConfigError, match=r"the trainer is closed at step 1: .* enter the trainer again"
        ):
            use()
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
    with pytest.raises(ConfigError, match="the trainer is closed at step 2"):
        trainer.save()
    with trainer:
        assert [step.index for step in trainer] == [2, 3]
    assert trainer.done


def test_what_is_no_task_and_no_mesh_is_refused(tmp_path):
    tasks = [
        (Net, r"not Net: jaxtp.Task\(model=Net, loss=..., batches=..., optimizer=...\)$"),
        (3, r"^Trainer takes a jaxtp.Task, not 3: jaxtp.Task\(model=MODEL, loss=..."),
        (TrainConfig(), "pass a TrainConfig as settings="),
    ]
    for task, message in tasks:
        with pytest.raises(ConfigError, match=message):
            jaxtp.Trainer(task)
    with pytest.raises(
        ConfigError, match=r'makes its own mesh, of given sizes: mesh="fsdp=2,tp=2"$'
    ):
        train(tmp_path, mesh=jaxtp.make_mesh(fsdp=2, tp=2))


USES = {
    "loop": lambda trainer: next(iter(trainer)),
    "run_to_end": lambda trainer: trainer.run_to_end(),
    "metrics_of": lambda trainer: trainer.metrics_of(1),
    "log": lambda trainer: trainer.log({"a": 1.0}),
    "line": lambda trainer: trainer.line("text"),
    "paused": lambda trainer: trainer.paused("x").__enter__(),
    "stop": lambda trainer: trainer.stop("enough"),
    "save": lambda trainer: trainer.save(),
    "evaluate": lambda trainer: trainer.evaluate(),
}
ATTRIBUTES = ("model", "step", "mesh", "config", "done")


def test_before_a_trainer_starts_all_its_uses_are_one_message():
    trainer = jaxtp.Trainer(jaxtp.Task())
    public = {name for name in vars(jaxtp.Trainer) if not name.startswith("_")} - {"of"}
    assert public <= {*USES, *ATTRIBUTES}
    uses = [
        *USES.values(),
        *(lambda trainer, name=name: getattr(trainer, name) for name in ATTRIBUTES),
    ]
    for use in uses:
        with pytest.raises(
            ConfigError,
            match=r"^the trainer has not started; write: with jaxtp.Trainer\(\.\.\.\) as",
        ):
            use(trainer)
    assert not hasattr(trainer, "model")
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018


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
