"""A run of a user's model, loss, batches and optimizer: its numbers, its errors, and the trainer's methods."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import free_address, records

import jaxtp
from jaxtp.config.entry import UserError
from jaxtp.config.python_object import reference_to
from jaxtp.config.schema import ConfigError
from jaxtp.models.own_decoder import call_of_load
from jaxtp.train.__main__ import main

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
        "no model": ({"model": lambda: 3}, "returns 3, and should return an nnx.Module"),
        "an instance": ({"model": Net(rngs=nnx.Rngs(0))}, "is a model; give its class"),
        "arguments": ({"model": lambda width: None}, "missing a required argument: 'width'; model.arguments can give"),
        "no optimizer": ({"optimizer": optax.adamw}, "missing 1 required positional argument: 'learning_rate'"),
        "a plan": ({"plan": {"sideways": jaxtp.Colwise()}, "mesh": "tp=2"}, "'sideways' matches no module"),
        "cp": ({"mesh": "cp=2"}, "no plan names their module"),
        "the end": ({"batches": finite(), "steps": 5}, "the iterator ended after 3 batches"),
        "rows": ({"batches": lambda step, rows=4: batches(step)}, "rename it"),
        "a size": ({"settings": {"data.global_batch_size": 8}}, "the batches have 32 rows; leave it out"),
        "a dim": ({"mesh": "dp=3"}, "data.global_batch_size=32 is not divisible"),
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
    ids=str,
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
        ({}, r"runs no code that a folder names.*jaxtp.load_run takes build="),
        ({"build": lambda rngs: WithFeatures(8, rngs=rngs)}, None),
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
    ids=str,
)
def test_a_model_that_cannot_be_loaded_is_one_error(trained, given, message):
    if message is None:  # a plain array is no part of a checkpoint, so another size of it is not seen
        assert jaxtp.load_run(trained[0], **given).features.shape == (8, 10)
        return
    with pytest.raises(UserError, match=message):
        jaxtp.load_run(trained[0], **given)


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
