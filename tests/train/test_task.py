"""A run of a user's model, loss, batches and optimizer: its numbers, its errors, and the trainer's methods."""

import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import free_address, records

import jaxtp
from jaxtp.config.entry import NumericsError, UserError
from jaxtp.config.python_object import reference_to
from jaxtp.config.schema import ConfigError
from jaxtp.models.own_decoder import call_of_load
from jaxtp.tools.launch.__main__ import main as launch
from jaxtp.train.__main__ import main
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.user_loss import check_names

ROWS = 32


class Net(nnx.Module):
    def __init__(self, width=32, *, rngs):
        self.up = nnx.Linear(16, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


class Normalised(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.norm(x))


class Buffer(nnx.Variable):
    pass


class WithConstants(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.table, self.steps = jnp.arange(10.0), np.arange(10.0)
        self.mask = Buffer(jnp.full(10, -jnp.inf).at[:5].set(0.0))

    def __call__(self, x):
        return super().__call__(x) + 0.01 * self.table * self.steps + jnp.maximum(self.mask[...], -1.0)


class DottedKeys(nnx.Module):
    """Two layers, or the states of two dropouts, of which a dict by dotted path has only one."""

    def __init__(self, made=nnx.Linear, *, rngs):
        inputs = (10, 10) if made is nnx.Linear else (0.1,)
        self.up = nnx.Linear(16, 10, rngs=rngs)
        self.parts = nnx.Dict({"a.b": made(*inputs, rngs=rngs), "a": nnx.Dict({"b": made(*inputs, rngs=rngs)})})

    def __call__(self, x):
        return self.parts["a.b"](self.parts["a"]["b"](self.up(x)))


def losses_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def loss(model, batch, key):
    losses = losses_of(model, batch)
    return losses.sum(), losses.size, {"noise": jax.random.normal(key, losses.shape).sum()}


def batches(step):
    random = np.random.default_rng(step)
    y = random.integers(0, 10, ROWS)
    return {"x": np.eye(10, 16)[y] + 0.3 * random.normal(size=(ROWS, 16)), "y": y}


def finite():
    yield from map(batches, range(3))


optimizer = optax.sgd(0.1)
PLAN = {"up": jaxtp.Colwise(), "down": jaxtp.Rowwise()}


def train(folder, mesh="dp=1", steps=3, callbacks=(), settings=None, **parts):
    task = jaxtp.Task(**{"model": Net, "loss": loss, "batches": batches, "optimizer": optimizer} | parts)
    task = jaxtp.Task(**vars(task) | {"callbacks": callbacks})
    with jaxtp.Trainer(task, mesh=mesh, folder=folder, steps=steps, settings=settings or {}) as trainer:
        found = [step.metrics for step in trainer]
        state = nnx.state(trainer.model, nnx.Not(nnx.RngState))
    arrays = {path: np.asarray(each[...]) for path, each in nnx.to_flat_state(state) if isinstance(each, nnx.Variable)}
    return [[each["loss"], each["noise"]] for each in found if "noise" in each], arrays


ONE, ALL = "tp=2", "dp=2,fsdp=2,tp=2"


@pytest.mark.parametrize(
    ("model", "accumulation", "meshes"),
    [
        pytest.param(Net, 1, [ONE, ALL], marks=pytest.mark.wide),
        (Net, 2, [ALL]),
        pytest.param(Net, 2, [ONE], marks=pytest.mark.wide),
        pytest.param(Normalised, 1, [ONE, ALL], marks=pytest.mark.wide),
        pytest.param(WithConstants, 2, [ONE, ALL], marks=pytest.mark.wide),
    ],
    ids=lambda value: str(value),
)
def test_no_mesh_changes_dropout_statistics_constants_or_the_losses_key(tmp_path, model, accumulation, meshes):
    settings = {"train.accumulation": accumulation}
    expected, arrays = train(tmp_path / "one", model=model, settings=settings)
    assert np.ptp([noise for _, noise in expected]) > 0
    for number, mesh in enumerate(meshes):
        found, others = train(tmp_path / str(number), mesh, model=model, plan=PLAN, settings=settings)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for path, array in arrays.items():
            np.testing.assert_allclose(others[path], array, rtol=1e-5, atol=1e-5, err_msg=str(path))


def test_a_run_resumes_on_another_mesh_with_its_statistics(tmp_path):
    settings = {"checkpoint.every": 2, "checkpoint.keep": 3}
    whole, _ = train(tmp_path / "run", "tp=2", steps=5, model=Normalised, settings=settings)
    shutil.rmtree(tmp_path / "run/checkpoints/5")
    rest, source = train(tmp_path / "run", "fsdp=2", steps=5, model=Normalised)
    np.testing.assert_allclose(rest, whole[4:], rtol=1e-5, atol=1e-5)
    settings = {"run.init_from": tmp_path / "run"}
    task = jaxtp.Task(model=Normalised, loss=loss, batches=batches, optimizer=optimizer)
    with jaxtp.Trainer(task, mesh="tp=2", folder=tmp_path / "next", steps=1, settings=settings) as trainer:
        np.testing.assert_allclose(trainer.model.norm.mean[...], source["norm", "mean"], rtol=1e-6)


class RandomFeatures(nnx.Module):
    """Has random numbers in a plain array, which is no variable."""

    def __init__(self, *, scale=1.0, rngs):
        self.frequencies = scale * jax.random.normal(rngs.params(), (16, 32))
        self.down = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.cos(x @ self.frequencies))


def frequencies_of(folder, model=RandomFeatures, mesh="fsdp=2", steps=1, **settings):
    """Returns the plain array and the loss of the first step."""
    task = jaxtp.Task(model=model, loss=loss, batches=batches, optimizer=optimizer)
    with jaxtp.Trainer(task, mesh=mesh, folder=folder, steps=steps, settings=settings) as trainer:
        losses = [step.metrics["loss"] for step in trainer]
        return np.asarray(trainer.model.frequencies), losses[0]


def plain_frequencies(seed):
    model = RandomFeatures(rngs=nnx.Rngs(seed))
    total, weight, _ = loss(model, {name: jnp.asarray(each) for name, each in batches(0).items()}, jax.random.key(0))
    return np.asarray(model.frequencies), total / weight


@pytest.mark.parametrize(
    ("mesh", "seed"), [("fsdp=2", 0), ("dp=2,fsdp=2,tp=2", 5), pytest.param("tp=2", 7, marks=pytest.mark.wide)]
)
def test_plain_arrays_are_of_the_runs_seed(tmp_path, mesh, seed):
    for found, expected in zip(
        frequencies_of(tmp_path, mesh=mesh, **{"run.seed": seed}), plain_frequencies(seed), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_plain_arrays_stay_with_the_weights_they_were_trained_with(tmp_path, capsys):
    first, _ = frequencies_of(tmp_path / "run", **{"run.seed": 5})
    settings = {"run.seed": 3, "run.init_from": tmp_path / "run"}
    from_it, _ = frequencies_of(tmp_path / "next", **settings)
    resumed, _ = frequencies_of(tmp_path / "next", mesh="dp=2,tp=2", steps=2, **settings)
    assert "changed since: the values" not in capsys.readouterr().out
    for found in (from_it, resumed):
        np.testing.assert_array_equal(found, first)


@pytest.mark.wide
def test_plain_arrays_stay_through_several_runs(tmp_path):
    before = None
    for number in range(3):
        settings = {"run.seed": 5 + number} | ({"run.init_from": before} if before else {})
        for steps in (1, 2):
            found, _ = frequencies_of(tmp_path / str(number), steps=steps, **settings)
            np.testing.assert_array_equal(found, plain_frequencies(5)[0])
        before = tmp_path / str(number)


def test_plain_arrays_that_changed_are_reported(tmp_path, capsys):
    frequencies_of(tmp_path, **{"run.seed": 5})
    wider = functools.partial(RandomFeatures, scale=1.1)
    found, _ = frequencies_of(tmp_path, model=wider, steps=2, **{"run.seed": 5})
    np.testing.assert_allclose(found, 1.1 * plain_frequencies(5)[0], rtol=1e-6)
    assert "changed since: the values of model.frequencies" in capsys.readouterr().out


def test_a_checkpoint_without_a_record_has_plain_arrays_of_seed_0(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jaxtp.train.state.Blueprint.record_of_constants", lambda _: {})
        frequencies_of(tmp_path, **{"run.seed": 5})
    for steps in (2, 3):
        found, _ = frequencies_of(tmp_path, steps=steps, **{"run.seed": 5})
        np.testing.assert_array_equal(found, plain_frequencies(0)[0])


TWO_PROCESSES = f"""
import json, sys
from jaxtp.distributed.joining import join_processes
join_processes()
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import jax, numpy as np
from test_task import frequencies_of, train, with_columns, reading_stop

found, first = frequencies_of("run", mesh="dp=2,fsdp=2,tp=2", **{{"run.seed": 5}})
np.save(f"{{jax.process_index()}}.npy", found)
settings = {{"train.log_every": 1}}
losses, _ = train("columns", mesh="dp=4,fsdp=2", loss=reading_stop, batches=with_columns, settings=settings)
with open(f"{{jax.process_index()}}.json", "w") as file:
    json.dump([first, losses], file)
"""


@pytest.mark.journey
def test_two_processes_have_the_plain_arrays_and_columns_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(["--processes", "2", "--devices", "4", "--", "-c", TWO_PROCESSES]) == 0
    expected, loss_of_one = plain_frequencies(5)
    losses_of_one, _ = train(tmp_path / "one", loss=reading_stop, batches=with_columns)
    for process in range(2):
        np.testing.assert_array_equal(np.load(f"{process}.npy"), expected)
        first, losses = json.loads((tmp_path / f"{process}.json").read_text())
        assert first == pytest.approx(float(loss_of_one), rel=1e-5)
        np.testing.assert_allclose(losses, losses_of_one, rtol=1e-5)
    assert records(tmp_path / "columns", "stop") == {1: 1.0, 2: 1.0, 3: 1.0}


def test_a_loop_of_ones_own_gives_one_seed_for_weights_and_plain_arrays():
    mesh = jaxtp.make_mesh(fsdp=2)
    build = lambda rngs: jaxtp.parallelize(RandomFeatures(rngs=rngs), mesh=mesh)
    with pytest.raises(
        UserError, match=r"weights would be of seed 5, and model.frequencies, .* is of seed 0; .*seed=5"
    ):
        plan_state(jaxtp.ModelConfig(), optimizer, mesh, build).create(5)
    blueprint = plan_state(jaxtp.ModelConfig(), optimizer, mesh, build, 5)
    model = blueprint.merge(blueprint.create(5)).model
    np.testing.assert_array_equal(model.frequencies, plain_frequencies(5)[0])
    with pytest.raises(UserError, match=r"constants:\n  seed = -1"):
        blueprint.with_constants_of({"constants": {"seed": -1}})


def mean(model, batch, key):
    return losses_of(model, batch).mean(), ROWS // 2


def mean_over_rows(model, batch, key):
    losses = losses_of(model, batch)
    return losses.mean(), losses.size


def of_pairs(model, batch, key):
    losses = losses_of(model, batch)
    return (losses[:, None] * jnp.ones(losses.size)).sum(), losses.size


def mean_metric(model, batch, key):
    losses = losses_of(model, batch)
    return losses.sum(), losses.size, {"loss_again": losses.mean()}


def drawn(model, batch, key):
    mask = jax.random.uniform(key, batch["y"].shape) < 0.4
    return (losses_of(model, batch) * mask).sum(), mask.sum(), {"noise": mask.sum()}


def assigns(model, batch, key):
    model.up.bias[...] = 0.9 * model.up.bias[...]
    return loss(model, batch, key)


def grows(model, batch, key):
    model.mask.set_value(model.mask[...].astype(jnp.bfloat16))
    return loss(model, batch, key)


@pytest.mark.parametrize(
    ("parts", "message"),
    {
        "a mean": ({"loss": mean_over_rows}, "the loss is a mean"),
        "pairs of rows": ({"loss": of_pairs, "settings": {"train.accumulation": 2}}, "Micro-batches change it"),
        "a name": ({"loss": lambda m, b, k: (*loss(m, b, k)[:2], {"loss_tokens": 1})}, "a metric named 'loss_tokens'"),
        "no params": (
            {"model": nnx.Module, "loss": lambda m, b, k: (b["x"].sum(), ROWS)},
            "the model has no nnx.Param",
        ),
        "a name of the log": (
            {"loss": lambda m, b, k: (*loss(m, b, k)[:2], {"rows_per_second": 1})},
            "a metric named 'rows_per_second'",
        ),
        "two names of an evaluation": (
            {"loss": lambda m, b, k: (*loss(m, b, k)[:2], {"x": 1, "eval_x": 1})},
            "metrics named 'x' and 'eval_x'",
        ),
        "a name of an evaluation": (
            {"loss": lambda m, b, k: (*loss(m, b, k)[:2], {"eval_loss": 1})},
            "a metric named 'eval_loss'",
        ),
        "a number": ({"loss": lambda *_: 1.0}, "the loss returns a float; it should return"),
        "an array": ({"loss": lambda m, b, _: (losses_of(m, b), 1)}, r"the sum of the loss is an array float32\[32\]"),
        "another key": ({"loss": lambda m, b, _: b["z"]}, r"test_task.py, line \d+: .*: KeyError: 'z'"),
        "a parameter": ({"loss": assigns}, "assigns the parameter up.bias"),
        "a dtype": ({"loss": grows, "model": WithConstants}, "changes mask from float32"),
        "statistics": ({"model": Normalised, "settings": {"train.accumulation": 2}}, "a step changes norm.mean"),
        "equal paths": ({"model": DottedKeys}, r"two things at 'parts.a.b.bias', by the keys .*'a', 'b'.* and .*'a.b'"),
        "equal paths of random keys": (
            {"model": lambda rngs: DottedKeys(nnx.Dropout, rngs=rngs)},
            "two things at 'parts.a.b.rngs.count'",
        ),
        "no model": ({"model": lambda: 3}, "returns 3, and should return an nnx.Module"),
        "an instance": ({"model": Net(rngs=nnx.Rngs(0))}, "is a model; give its class"),
        "arguments": ({"model": lambda width: None}, "missing a required argument: 'width'; model.arguments can give"),
        "no optimizer": ({"optimizer": optax.adamw}, "missing 1 required positional argument: 'learning_rate'"),
        "a plan": ({"plan": {"sideways": jaxtp.Colwise()}, "mesh": "tp=2"}, "'sideways' matches no module"),
        "cp": ({"mesh": "cp=2"}, "no plan names their module"),
        "the end": ({"batches": finite(), "steps": 5}, "the iterator ended after 3 batches"),
        "rows": ({"batches": lambda step, rows=4: batches(step)}, "rename it"),
        "a size": ({"settings": {"data.global_batch_size": 8}}, "the batches have 32 rows; leave it out"),
        "a dim": (
            {"mesh": "dp=5"},
            r"batches have 32 rows, which dp\*fsdp\*accumulation=5 does not divide; dp can be 1, 2, 4$",
        ),
        "a dim of a dataset": (
            {"mesh": "dp=3", "batches": [{"x": np.ones(16), "y": 1}] * 64, "settings": {"data.global_batch_size": 8}},
            r"data.global_batch_size=8 is not divisible by .*=3; dp can be 1, 2, or global_batch_size 6 or 9$",
        ),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_error(tmp_path, parts, message):
    refused(tmp_path, parts, message)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": mean}, "the weight of the loss does not grow with the rows"),
        ({"loss": mean_metric}, "the metric 'loss_again' is a mean"),
    ],
    ids=["weight", "metric"],
)
def test_so_is_a_mean_among_sums(tmp_path, parts, message):
    refused(tmp_path, parts, message)


def refused(tmp_path, parts, message):
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", **parts)
    steps = sorted(int(each.name) for each in (tmp_path / "run").glob("checkpoints/*"))
    assert steps == ([3] if "ended" in message else [])


@pytest.mark.wide
def test_what_is_no_mistake(tmp_path, capsys):
    train(tmp_path / "drawn", loss=drawn)
    train(tmp_path / "pairs", loss=of_pairs)
    assert "WARNING: the loss is no sum over rows" in capsys.readouterr().out


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
    train(tmp_path, steps=9, callbacks=[callback], validation=batches, optimizer=worse, settings=settings)
    assert "stopped at step 4: enough; and saved" in capsys.readouterr().out
    evaluated = records(tmp_path, "eval_loss")
    assert min(evaluated, key=evaluated.get) == 0
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["2", "4"], "2 is the best saved one"
    halves, losses = records(tmp_path, "half"), records(tmp_path, "loss")
    assert {step: half * 2 for step, half in halves.items()} == pytest.approx(losses)


COLUMNS = ("stop", "experts", "step", "loss", "key", "model", "batch", "state", "flags", "weights")
"""Names that jaxtp uses for other things."""


def with_columns(step):
    return batches(step) | {name: np.full(ROWS, place + 1.0) for place, name in enumerate(COLUMNS)}


def test_columns_and_metrics_may_have_any_name_that_a_run_does_not_log_itself(tmp_path):
    names = [name for name in COLUMNS if name not in ("step", "loss")]

    def reading(model, batch, key):
        return *loss(model, batch, key)[:2], {"noise": 0.0} | {name: batch[name].sum() for name in names}

    seen = []

    def callback(trainer, step):
        seen.append({name: step.metrics[name] for name in names} | {"step": step.index})
        seen.append({name: step.metrics[f"eval_{name}"] for name in names} | {"step": step.index})

    settings = {"eval.every": 1, "train.log_every": 1, "train.accumulation": 2}
    parts = {"loss": reading, "batches": with_columns, "validation": with_columns}
    train(tmp_path, steps=2, callbacks=[callback], settings=settings, **parts)
    expected = {name: place + 1.0 for place, name in enumerate(COLUMNS) if name in names}
    assert seen == [expected | {"step": step} for step in (1, 1, 2, 2)]
    assert records(tmp_path, "stop") == {1: 1.0, 2: 1.0}
    logged = {name for line in (tmp_path / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    for name in logged - {*names, "noise", "eval_noise"} - {f"eval_{name}" for name in names}:
        with pytest.raises(UserError, match="a run does not use itself"):
            check_names([name], "the loss returns")


def reading_stop(model, batch, key):
    kept = 1 - 0.25 * batch["stop"]
    metrics = {"noise": kept.sum(), "stop": (batch["stop"].sum(), ROWS)}
    return (losses_of(model, batch) * kept).sum(), kept.sum(), metrics


def test_the_flags_of_several_processes_are_no_column(tmp_path, monkeypatch):
    parts = {"loss": reading_stop, "batches": with_columns, "mesh": "dp=2"}
    alone, _ = train(tmp_path / "alone", **parts)
    monkeypatch.setattr("jaxtp.train.stopping.is_multiprocess", lambda: True)
    settings = {"train.log_every": 1}
    stop_early = lambda trainer, step: trainer.stop("enough") if step.index == 2 else None
    together, _ = train(tmp_path / "together", steps=9, callbacks=[stop_early], settings=settings, **parts)
    assert together == alone, "the run ends after the step after the flag"
    assert records(tmp_path / "together", "stop") == {1: 1.0, 2: 1.0, 3: 1.0}


def test_a_column_of_weights_that_the_loss_does_not_read_pads_nothing(tmp_path):
    rows = {"x": np.ones((ROWS + 1, 16), np.float32), "y": np.zeros(ROWS + 1, np.int32), "weights": np.ones(ROWS + 1)}
    dataset = [{name: column[row] for name, column in rows.items()} for row in range(ROWS + 1)]
    evaluated = []

    def callback(trainer, step):
        evaluated.append(trainer.evaluate()["eval_rows_seen"])

    def counting(model, batch, key):
        return *loss(model, batch, key)[:2], {"rows_seen": ((batch["x"] != 0).all(1).sum(), ROWS)}

    train(tmp_path, steps=1, loss=counting, validation=dataset, callbacks=[callback])
    assert evaluated == [1.0], "of the first batch alone"


@pytest.mark.parametrize("name", ["step", "loss", "tokens_per_second"])
def test_a_name_of_the_log_is_not_logged_twice(tmp_path, name):
    with pytest.raises(UserError, match=f"trainer.log has a metric named '{name}'"):
        train(tmp_path, steps=1, callbacks=[lambda trainer, step: trainer.log({name: 1.0})])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mine": "text"}, "trainer.log has a metric 'mine' that is 'text', a str; it should be a number"),
        ({"fine": 1, "mine": np.ones(3)}, r"a metric 'mine' that is an array float64\[3\]; it should be a number"),
        ({"mine": jnp.ones(1)}, r"a metric 'mine' that is an array float32\[1\]; .* an array of shape \(\)"),
        ({"mine": None}, "a metric 'mine' that is a NoneType"),
        ({"mine": [1.0]}, "a metric 'mine' that is a list"),
        (1.0, "trainer.log has 1.0; it takes a dict"),
    ],
)
def test_what_is_logged_is_a_number(values, message, tmp_path):
    def callback(trainer, step):
        with pytest.raises(UserError, match=message) as error:
            trainer.log(values)
        assert "\n" not in str(error.value)
        trainer.log({"good": np.float32(2.5), "array": jnp.array(3), "flag": True})

    train(tmp_path, steps=1, callbacks=[callback])
    assert [records(tmp_path, name) for name in ("good", "array", "flag")] == [{1: 2.5}, {1: 3.0}, {1: 1.0}]
    assert not records(tmp_path, "fine"), "all of a call, or nothing"


@pytest.mark.parametrize("rows", [ROWS, ROWS // 2])
def test_the_first_evaluation_reports_although_the_step_fails_to_compile_meanwhile(tmp_path, monkeypatch, rows):
    def fail(*_):
        raise RuntimeError("no step")

    def held_out(step):
        return {name: column[: rows if step else ROWS] for name, column in batches(step).items()}

    monkeypatch.setattr("jaxtp.train.trainer.trace_step", fail)
    with pytest.raises(UserError, match="no step" if rows == ROWS else "short"):
        train(tmp_path, validation=held_out)
    assert list(records(tmp_path, "eval_loss")) == ([0] if rows == ROWS else [])


IN_MEMORY = [batches(step) for step in range(3)]
ROWS_IN_MEMORY = [{"x": x, "y": y} for x, y in zip(*IN_MEMORY[0].values(), strict=True)]
TOKENS = {"inputs": np.zeros((8, 16), np.int32), "labels": np.zeros((8, 16), np.int32)}
DECODER = jaxtp.ModelConfig(vocab_size=8, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8)


def flattening(model, batch, key):
    return loss(model, batch | {"x": batch["x"].reshape(len(batch["y"]), 16)}, key)


def only(*names):
    return lambda step: {name: column for name, column in batches(step).items() if name in names}


@pytest.mark.parametrize(
    ("parts", "message"),
    {
        "a list of batches": (
            {"batches": IN_MEMORY, "loss": flattening},
            r"list: .* each item of this one is a batch \(x float32\[32, 16\], y int32\[32\]\); .* iter\(BATCHES\)",
        ),
        "a batched pipeline": (
            {"batches": grain.MapDataset.source(ROWS_IN_MEMORY).batch(8).map(dict), "loss": flattening},
            r"grain MapMapDataset: .* is a batch .*leave out its batch\(\), or end it with \.to_iter_dataset\(\)",
        ),
        "a list to validate on": (
            {"validation": IN_MEMORY, "loss": flattening},
            r"validation batches: list: .* each item of this one is a batch",
        ),
        "validation without a column": (
            {"validation": only("x")},
            "validation batches .* are without 'y', unlike training batches, and the loss does not take them: .*'y'",
        ),
        "no ids": (
            {"model": DECODER, "loss": None},
            "has the columns x, y, and the decoder's loss reads 'inputs' and 'labels'",
        ),
        "a list of batches of ids": (
            {"model": DECODER, "loss": None, "batches": [TOKENS] * 3},
            r"'inputs' is \[16, 8, 16\] in a batch, .* each item of this one is a batch",
        ),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_batches_in_another_form_are_one_error(tmp_path, parts, message):
    refused(tmp_path, parts, message)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (
            {"batches": IN_MEMORY, "loss": lambda m, b, k: (m(b["x"]).sum(), len(b["x"]))},
            "note    list is read by rows, and an item (x float32[32, 16], y int32[32]) is one row; if it is a batch",
        ),
        ({"validation": lambda step: batches(step) | {"z": np.ones(ROWS)}}, "are with 'z', unlike training batches"),
        ({"batches": ROWS_IN_MEMORY}, None),
        ({"batches": grain.MapDataset.source(ROWS_IN_MEMORY).batch(8).to_iter_dataset()}, None),
        ({"batches": lambda: iter(IN_MEMORY)}, None),
    ],
    ids=["a list", "another column", "rows", "a batched stream", "a function"],
)
def test_what_may_be_meant_is_done_and_said(tmp_path, capsys, parts, line):
    train(tmp_path, steps=1, **parts)
    said = capsys.readouterr().out
    assert line in said if line else "note" not in said


def test_a_loop_that_is_left_saves_and_one_that_fails_does_not(tmp_path):
    task = jaxtp.Task(model=Net, loss=loss, batches=batches, optimizer=optimizer)
    with jaxtp.Trainer(task, mesh="dp=1", folder=tmp_path, steps=9) as trainer:
        for step in trainer:
            if step.index == 2:
                break
    assert not trainer.done

    def fail():
        with jaxtp.Trainer(task, mesh="dp=1", folder=tmp_path, steps=9) as trainer:
            assert next(iter(trainer)).index == 3
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["2"]


def test_after_its_block_a_trainer_says_how_to_continue(tmp_path):
    task = jaxtp.Task(model=Net, loss=loss, batches=batches, optimizer=optimizer, validation=batches)
    trainer = jaxtp.Trainer(task, mesh="dp=1", folder=tmp_path, steps=4)
    assert repr(trainer) == f"<Trainer folder='{tmp_path}', not started>"
    with trainer:
        steps = iter(trainer)
        step = next(steps)
        assert repr(trainer) == f"<Trainer folder='{tmp_path}', at step 1>"
    assert repr(trainer) == f"<Trainer folder='{tmp_path}', ended at step 1>"
    for use in (
        lambda: trainer.log({"mine": 1.0}),
        lambda: trainer.stop("enough"),
        lambda: iter(trainer),
        lambda: trainer.run_to_end(),
        lambda: next(steps),
    ):
        with pytest.raises(ConfigError, match=r"^the trainer is closed at step 1: .* enter the trainer again"):
            use()
    assert trainer.save() == tmp_path / "checkpoints/1", "it is there"
    assert step.metrics["loss"] > 0
    assert trainer.evaluate()["eval_loss"] > 0
    with trainer:
        assert [step.index for step in trainer] == [2, 3, 4]
    assert trainer.done


def test_after_an_error_what_was_computed_is_still_there(tmp_path):
    task = jaxtp.Task(model=Net, loss=loss, batches=batches, optimizer=optimizer)
    trainer = jaxtp.Trainer(task, mesh="dp=1", folder=tmp_path, steps=4)

    def fail():
        with trainer:
            next(iter(trainer))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert trainer.metrics_of(1)["loss"] > 0
    with pytest.raises(ConfigError, match="the trainer is closed at step 1"):
        trainer.save()


@pytest.mark.parametrize(("sizes", "text"), [({"fsdp": 2, "tp": 2}, "fsdp=2,tp=2"), ({}, "dp=1")])
def test_a_mesh_is_given_by_its_sizes(sizes, text, tmp_path):
    with pytest.raises(ConfigError, match=f'makes its own, of given sizes: mesh="{text}"$'):
        train(tmp_path, mesh=jaxtp.make_mesh(**sizes))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Net, r"not Net: jaxtp.Task\(model=Net, loss=..., batches=..., optimizer=...\)$"),
        (3, r"^Trainer takes a jaxtp.Task, not 3: jaxtp.Task\(model=MODEL, loss=..."),
        (TrainConfig(), "a TrainConfig is given by settings="),
    ],
)
def test_a_trainer_takes_a_task(given, message):
    with pytest.raises(ConfigError, match=message):
        jaxtp.Trainer(given, mesh="tp=1", steps=5)


USES = {
    "model": lambda trainer: trainer.model,
    "step": lambda trainer: trainer.step,
    "mesh": lambda trainer: trainer.mesh,
    "config": lambda trainer: trainer.config,
    "done": lambda trainer: trainer.done,
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


def test_before_a_trainer_starts_all_its_uses_are_one_message():
    trainer = jaxtp.Trainer(jaxtp.Task())
    public = {name for name in vars(jaxtp.Trainer) if not name.startswith("_")} - {"of"}
    assert public <= USES.keys()
    for use in USES.values():
        with pytest.raises(ConfigError, match=r"^the trainer has not started; write: with jaxtp.Trainer\(\.\.\.\) as"):
            use(trainer)
    assert not hasattr(trainer, "model")
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018


def test_the_command_takes_the_parts_and_records_them(tmp_path, capsys):
    parts = {"model.build": Net, "train.loss": loss, "data.batches": batches}
    flags = [word for name, part in parts.items() for word in (f"--{name}", f"{__file__}:{part.__name__}")]
    flags += ["--optimizer.build", f"{__file__}:optimizer", "--model.plan", f"{__file__}:PLAN"]
    run = ["--mesh", "tp=2", "--train.steps", "3", "--train.log-every", "1", "--run.dir", str(tmp_path / "run")]
    assert main([*flags, *run]) == 0
    expected, _ = train(tmp_path / "one")
    assert list(records(tmp_path / "run").values()) == pytest.approx([each for each, _ in expected], rel=1e-5)
    assert main(["--config", str(tmp_path / "run/config.yaml"), "--train.steps", "4"]) == 0
    assert "resumed from the checkpoint at step 3" in capsys.readouterr().out
    assert main([*flags[2:], *run]) == 2
    assert "needs" in (error := capsys.readouterr().err) or "split" in error


def test_references_name_functions_and_values():
    assert reference_to(train) == f"{__name__}:train"
    assert reference_to(PLAN, [train]) == f"{__name__}:PLAN"
    assert reference_to(optax.sgd(1.0)) == "<GradientTransformationExtraArgs>"


def weighted(model, batch, key):
    return (losses_of(model, batch) * batch["w"]).sum(), batch["w"].sum(), {"noise": batch["w"].sum()}


def with_weights(*without):
    def read(step):
        return batches(step) | {"w": np.full(ROWS, float(step + 1 not in without), np.float32)}

    return read


def parameters(trainer):
    return jax.device_get(jax.tree.leaves(nnx.state(trainer.model, nnx.Param)))


def test_a_step_without_weight_moves_no_parameter_and_has_no_loss(tmp_path, capsys):
    parts = {"model": Net, "loss": weighted, "optimizer": optax.adamw(1e-2), "batches": with_weights(2, 3)}
    moved, found = [], []
    settings = {"train.log_every": 1}
    with jaxtp.Trainer(jaxtp.Task(**parts), mesh="fsdp=2", folder=tmp_path, steps=5, settings=settings) as trainer:
        before = parameters(trainer)
        for step in trainer:
            after = parameters(trainer)
            moved.append(any((old != new).any() for old, new in zip(before, after, strict=True)))
            found.append(step.metrics["loss"])
            before = after
    assert moved == [True, False, False, True, True]
    assert np.isnan(found).tolist() == [False, True, True, False, False]
    assert [step for step, value in records(tmp_path).items() if value is None] == [2, 3]
    out = capsys.readouterr().out
    assert "step 2: the weight of the loss is 0, so there is no loss; the update is skipped" in out
    assert "step 3/5  no loss" in out


@pytest.mark.parametrize("also_in", [(), (7,)])
def test_a_run_of_steps_without_weight_ends_and_is_saved(tmp_path, also_in):
    settings = {"train.max_skipped": 2}
    parts = {"loss": weighted, "batches": with_weights(2, 3, 5, 6, *also_in), "settings": settings}
    if not also_in:
        train(tmp_path, steps=8, **parts)
        return
    with pytest.raises(UserError, match=r"the last 3 steps had no weight, more than train.max_skipped=2"):
        train(tmp_path, steps=9, **parts)
    assert [int(each.name) for each in (tmp_path / "checkpoints").iterdir()] == [7]


@pytest.mark.parametrize("weight", [jnp.nan, jnp.inf])
def test_a_weight_that_is_no_number_ends_the_run(tmp_path, weight):
    def odd(model, batch, key):
        total, count, metrics = weighted(model, batch, key)
        return total, jnp.where(count > 0, count, weight), metrics

    with pytest.raises(NumericsError, match="step 2"):
        train(tmp_path, steps=4, loss=odd, batches=with_weights(2))


@pytest.mark.parametrize(
    ("dtype", "weight", "said"),
    [
        (jnp.bfloat16, jnp.float32, "returns its sum in bfloat16, which"),
        (jnp.float16, jnp.bfloat16, "returns its sum in float16 and its weight in bfloat16, which"),
        (jnp.float32, jnp.int32, None),
    ],
)
def test_a_loss_that_sums_in_16_bits_is_warned_about(tmp_path, capsys, dtype, weight, said):
    def rounded(model, batch, key):
        total, count, metrics = loss(model, batch, key)
        return total.astype(dtype), jnp.asarray(count, weight), metrics

    train(tmp_path, steps=1, loss=rounded)
    lines = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(lines) == (said is not None)
    if said:
        assert said in lines[0]


HOSTILE = """
import functools, sys
from flax import nnx

class Sized:
    def __init__(self, length, item=None):
        self.length, self.item = length, item
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return self.item

class Raises:
    def __getattr__(self, name):
        raise RuntimeError(name)
    def __repr__(self):
        raise RuntimeError("no text")

class RaisesWhenCalled(Raises):
    def __call__(self, *arguments):
        raise RuntimeError("called")

class Metaclass(type):
    def __call__(cls, *arguments, **named):
        sys.exit()

class Exits(metaclass=Metaclass):
    pass

class NoException(BaseException):
    def __str__(self):
        raise ValueError("no message")

class OddSignature:
    __signature__ = 5
    def __call__(self, *arguments, **named):
        return 5

class NoIterator:
    def __iter__(self):
        return self

class ExitsInIter:
    def __iter__(self):
        sys.exit(0)

def stop(*arguments, **named):
    raise NoException

def leave(*arguments, **named):
    sys.exit()

def generator_exit(*arguments, **named):
    raise GeneratorExit

def deep(*arguments, **named):
    return deep(*arguments, **named)

def nothing(*arguments, **named):
    return None

def itself(*arguments, **named):
    return itself

def five(a, b, c, d, e):
    return 1

def __getattr__(name):
    lazy = {"lazy_exit": SystemExit, "lazy_stop": NoException, "lazy_key": KeyError}
    raise lazy.get(name, AttributeError)(name)

number, none, text, empty, numbers, a_type, builtin = 5, None, "text", [], {1: 2}, type, max
negative, huge, of_text, without = Sized(-1), Sized(10**30), Sized("x"), Sized(0)
of_nones, of_lists = Sized(5), Sized(5, [1])
raises, raises_when_called, odd_signature = Raises(), RaisesWhenCalled(), OddSignature()
no_iterator, exits_in_iter, iterator = NoIterator(), ExitsInIter(), iter([])
partial, module, linear = functools.partial(five, 1), sys, nnx.Linear
NAMES = [name for name in globals() if not name.startswith("_")]
"""
LAZY = ["lazy_exit", "lazy_stop", "lazy_key"]
OWN = {"model.build": Net, "train.loss": loss, "data.batches": batches}


@pytest.fixture
def refusal(tmp_path, capsys, monkeypatch):
    """Returns the message of a command with such a reference; checks that it is one line, before a run begins."""
    monkeypatch.chdir(tmp_path)

    def command(*files_and_names, mesh="tp=1"):
        own = {setting: f"{__file__}:{part.__name__}" for setting, part in OWN.items()} | dict(files_and_names)
        flags = [word for setting, reference in own.items() for word in (f"--{setting}", reference)]
        assert main([*flags, "--mesh", mesh, "--train.steps", "1", "--run.dir", "run"]) == 2, files_and_names
        assert not (tmp_path / "run").exists(), files_and_names
        error = capsys.readouterr().err
        assert error.startswith("jaxtp train: error: "), files_and_names
        assert error.count("\n") == 1, error
        return error

    return command


@pytest.mark.parametrize(
    ("content", "message"),
    {
        "exits": ("import sys\nsys.exit()", r"x.py, line 2: sys.exit\(\)\): it ends the process by sys.exit\(None\)"),
        "exits with a code": ("raise SystemExit(3)", r"it ends the process by sys.exit\(3\)"),
        "raises": ("1 / 0", r"x.py, line 1: 1 / 0\): ZeroDivisionError"),
        "is no code": ("def", r"\(.*x.py, line 1\): SyntaxError"),
        "no exception": ("class Stop(BaseException): pass\nraise Stop", "Stop: no message"),
        "lazy": ("def __getattr__(name): raise RuntimeError(name)", "RuntimeError: y"),
        "odd names": ("__all__ = [1, None, '']", "has no y; it has nothing for --model.build"),
        "removes itself": ("import sys\ndel sys.modules[__name__]\n1 / 0", "ZeroDivisionError"),
        "no function": ("y = 5", "x.py:y is 5, and should be a function that returns a model"),
        "none": ("y = None", "--model.build x.py:y is None"),
    }.values(),
    ids=lambda value: "",
)
def test_a_file_that_cannot_be_used_is_one_error(refusal, tmp_path, content, message):
    (tmp_path / "x.py").write_text(content)
    assert re.search(message, refusal(("model.build", "x.py:y")))


def test_a_link_to_itself_is_no_file(refusal, tmp_path):
    (tmp_path / "x.py").symlink_to("x.py")
    assert "--model.build x.py: no such file" in refusal(("model.build", "x.py:y"))


def without_rows(step):
    return {name: column[:0] for name, column in batches(step).items()}


def rows_without(step, rows):
    return without_rows(step)


def one_argument(trainer):
    """A callback that lacks the step."""


def one_result(model, batch):
    """A loss that lacks the key."""


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        ("data.batches", "without_rows", "its first batch has no rows"),
        ("data.validation_batches", "without_rows", "its first batch has no rows"),
        ("data.batches", "rows_without", "returned 0 rows, and was called with 1"),
        ("train.callbacks", "one_argument", "takes (trainer), and is called with (trainer, step)"),
        ("train.callbacks", "Net", "is a class; name a function (trainer, step)"),
        ("train.loss", "one_result", "takes (model, batch), and is called with (model, batch, key)"),
        ("model.plan", "ROWS", "a plan is a dict from patterns to styles, not 32"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run_begins(refusal, setting, name, message):
    assert message in refusal((setting, f"{__file__}:{name}"))
    assert message in refusal((setting, f"{__file__}:{name}"), mesh="fsdp=2")


@pytest.mark.parametrize(("name", "message"), [("negative", "should return >= 0"), ("huge", "cannot fit 'int'")])
def test_a_dataset_of_no_possible_length_is_refused(refusal, tmp_path, name, message):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    assert message in refusal(("data.batches", f"hostile.py:{name}"))


@pytest.mark.wide
@pytest.mark.parametrize("setting", [*OWN, "data.validation_batches", "optimizer.build", "model.plan"])
def test_whatever_a_reference_names_is_one_error(refusal, tmp_path, setting):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    names = runpy.run_path(str(tmp_path / "hostile.py"))["NAMES"]
    assert len(names) > 30
    for name in [*names, *LAZY]:
        refusal((setting, f"hostile.py:{name}"))


@pytest.mark.parametrize(("wrong", "message"), [(sys.exit, "by sys.exit(None)"), (dict, "'trainer'")])
def test_an_error_of_a_callback_names_its_line(tmp_path, wrong, message):
    def callback(trainer, step):
        wrong() or wrong()["trainer"]

    with pytest.raises(UserError, match=r"test_task.py, line \d+: wrong\(\) or") as error:
        train(tmp_path, steps=1, callbacks=[callback])
    assert message in str(error.value)


def test_a_callback_may_meet_an_error_of_the_run(tmp_path):
    def callback(trainer, step):
        raise NumericsError("copies differ")

    with pytest.raises(NumericsError, match="copies differ"):
        train(tmp_path, steps=1, callbacks=[callback])


class WithFeatures(Normalised):
    """Random features that are plain arrays, and no variables."""

    def __init__(self, width=32, *, rngs):
        super().__init__(rngs=rngs)
        self.features = jax.random.normal(rngs.params(), (width, 10))

    def __call__(self, x):
        return super().__call__(x) @ self.features.T


def in_build(rngs):
    return jaxtp.parallelize(WithFeatures(rngs=rngs), PLAN)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the folder of a run over four devices, and outputs of its model."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    task = jaxtp.Task(model=WithFeatures, loss=loss, batches=batches, optimizer=optimizer, plan=PLAN)
    settings = {"run.seed": 5}
    with jaxtp.Trainer(task, mesh="fsdp=2,tp=2", folder=folder, steps=2, settings=settings) as trainer:
        assert trainer.run_to_end()
        model = trainer.model
        model.eval()
        return folder, np.asarray(model(batches(7)["x"]))


@pytest.mark.parametrize(
    ("mesh", "given"),
    [
        (None, {"build": WithFeatures}),
        (None, {"build": f"{__file__}:WithFeatures"}),
        ({"tp": 4}, {"build": WithFeatures, "plan": PLAN}),
        ({"tp": 4}, {"build": WithFeatures, "plan": f"{__file__}:PLAN"}),
        pytest.param({"dp": 2, "tp": 2}, {"build": WithFeatures}, marks=pytest.mark.wide),
        pytest.param({"fsdp": 4}, {"build": WithFeatures}, marks=pytest.mark.wide),
        pytest.param({"tp": 2}, {"build": in_build}, marks=pytest.mark.wide),
        pytest.param(None, {"build": in_build}, marks=pytest.mark.wide),
        pytest.param(None, {"build": WithFeatures, "plan": PLAN}, marks=pytest.mark.wide),
    ],
    ids=lambda value: " ".join(value or ["no mesh"]),
)
def test_a_trained_model_is_loaded_on_another_mesh_and_on_none(trained, mesh, given):
    """With its statistics and its plain arrays, which no checkpoint has."""
    folder, expected = trained
    with nullcontext() if mesh is None else jax.set_mesh(jaxtp.make_mesh(**mesh)):
        model = jaxtp.load_run(folder, **given)
        model.eval()
        np.testing.assert_allclose(model(batches(7)["x"]), expected, rtol=1e-5, atol=1e-5)
        if "plan" in given and mesh is not None:
            assert model.up.kernel.sharding.spec[1] == "tp"


def test_a_model_that_is_loaded_without_a_mesh_is_plain_flax(trained):
    model = jaxtp.load_run(trained[0], build=WithFeatures)
    assert type(model.up) is nnx.Linear
    again = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    again.update(model, nnx.grad(lambda model: losses_of(model, batches(0)).sum())(model))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"runs no code that a folder names; .* name it: jaxtp\.load_run\('.*', build='.*:WithFeatures'\)$"),
        (
            {"build": Net},
            r"trained with .*:WithFeatures, and build makes another model: the model has no norm.bias; .*no norm.var",
        ),
        (
            {"build": lambda rngs: nnx.Dict(up=nnx.Linear(16, 8, rngs=rngs))},
            r"the model has no down.bias; .*; the model has no norm.mean; and 4 more$",
        ),
        (
            {"build": lambda rngs: nnx.Dict(up=nnx.Linear(16, 8, rngs=rngs), new=nnx.Param(jnp.ones(2)))},
            r"the model has no down.bias; the model has no down.kernel; the checkpoint has no new",
        ),
        ({"build": "nowhere.py:Net"}, r"build nowhere.py: no such file"),
        ({"build": 3}, r"build is 3, and should be a function, a class, settings, or FILE.py:NAME"),
        ({"build": lambda width: None}, r"missing a required argument: 'width'"),
        ({"build": WithFeatures, "plan": {"sideways": jaxtp.Colwise()}}, r"'sideways' matches no module"),
        ({"build": WithFeatures, "plan": f"{__file__}:ROWS"}, "plan is 32, and should be a dict of styles"),
        ({"build": WithFeatures, "base": "base"}, r"base names the base model of a decoder's adapters"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_model_that_cannot_be_loaded_is_one_error(trained, given, message):
    with pytest.raises(UserError, match=message):
        jaxtp.load_run(trained[0], **given)


def test_a_plain_array_that_is_another_is_said(trained):
    """No checkpoint has it, only its seed and its sums."""
    with pytest.warns(UserWarning, match="changed since: the values of model.features, an attribute and no variable"):
        model = jaxtp.load_run(trained[0], build=lambda rngs: WithFeatures(8, rngs=rngs))
    assert model.features.shape == (8, 10)


def test_a_model_of_another_size_is_one_error_with_its_parameters(tmp_path):
    train(tmp_path, steps=1)
    problem = (
        r"down.kernel is \(32, 10\) in the checkpoint, and \(8, 10\) in the model; "
        r"up.bias is \(32,\) in the checkpoint, and \(8,\) in the model; up.kernel is "
    )
    with pytest.raises(UserError, match=problem):
        jaxtp.load_run(tmp_path, build=lambda rngs: Net(8, rngs=rngs))


@pytest.mark.parametrize(
    ("build", "given"),
    [
        ("mine.py:Net", "'mine.py:Net'"),
        ("package.module:Net", "'package.module:Net'"),
        ("__main__:Net", "Net"),
        ("<lambda>", "..."),
        ("<Net.<locals>.<lambda>>", "..."),
    ],
)
def test_a_message_has_the_call_that_loads_a_run(build, given):
    assert call_of_load(Path("runs/a"), build) == f"jaxtp.load_run('runs/a', build={given})"


def test_over_cp_a_model_is_loaded_only_with_a_plan(trained):
    with jax.set_mesh(jaxtp.make_mesh(cp=2)), pytest.raises(UserError, match="no plan names their module"):
        jaxtp.load_run(trained[0], build=WithFeatures)


PROGRAM = """
import sys
from jaxtp.distributed.joining import join_processes
join_processes()
import jax, jaxtp
import numpy as np
from flax import nnx
folder, module = sys.argv[1:]
with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=2)):
    model = jaxtp.load_run(folder, build=f"{module}:WithFeatures", plan=f"{module}:PLAN")
    model.eval()
    graph, state = nnx.split(model)
    replicated = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P())
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x), out_shardings=replicated)
    outputs = run(state, np.eye(4, 16, dtype=np.float32))
    print("outputs", np.asarray(outputs).tolist())
"""


@pytest.mark.journey
def test_two_processes_load_a_trained_model(trained):
    shared = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "2"}
    tests = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(trained[0]), __file__],
            env={**os.environ, **shared, "JAX_PROCESS_ID": str(index), "PYTHONPATH": tests},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    model = jaxtp.load_run(trained[0], build=WithFeatures)
    model.eval()
    expected = np.asarray(model(np.eye(4, 16, dtype=np.float32)))
    for each in printed:
        outputs = json.loads(each.partition("outputs ")[2].splitlines()[0])
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
