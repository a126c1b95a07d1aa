"""A run of a user's model, loss, batches and optimizer: its numbers on meshes, and mistakes in
these parts.
"""

import itertools
import re
import runpy
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_net
from flax import nnx
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from runs import records
from small_net import (
    PLAN,
    ROWS,
    Net,
    Normalised,
    batches,
    checkpoints_in,
    loss,
    losses_of,
    train,
    trainer_of,
)
from support import swept, task_flags
from tables import read_json, read_table

import jaxtp
from jaxtp.config.entry import NumericsError, UserError
from jaxtp.plans import Colwise
from jaxtp.tools.launch.__main__ import main as launch
from jaxtp.train.__main__ import main
from jaxtp.train.loss_checks import inspect_loss
from jaxtp.train.own_model import set_precision


class Buffer(nnx.Variable):
    pass


class WithConstants(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.table = jnp.arange(10.0)
        self.steps = np.arange(10.0)
        self.mask = Buffer(jnp.full(10, -jnp.inf).at[:5].set(0.0))

    def __call__(self, x):
        return (
            super().__call__(x) + 0.01 * self.table * self.steps + jnp.maximum(self.mask[...], -1.0)
        )


EVERY_AXIS = "dp=2,fsdp=2,tp=2"


@pytest.mark.parametrize(
    ("model", "accumulation", "mesh"),
    [
        pytest.param(WithConstants, 2, "fsdp=2,tp=2", marks=pytest.mark.wide),
        pytest.param(Normalised, 1, EVERY_AXIS, marks=pytest.mark.wide),
    ],
    ids=["constants", "statistics"],
)
def test_no_mesh_changes_dropout_statistics_constants_or_the_losses_key(
    tmp_path, model, accumulation, mesh
):
    settings = {"train.accumulation": accumulation}
    expected, arrays = train(tmp_path / "one", model=model, settings=settings)
    found, others = train(tmp_path / "many", mesh, model=model, plan=PLAN, settings=settings)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for path, array in arrays.items():
        assert_allclose(others[path], array, rtol=1e-5, atol=1e-5, err_msg=str(path))


@pytest.mark.wide
def test_a_run_resumes_on_another_mesh_with_its_statistics_and_others_begin_with_them(tmp_path):
    run = tmp_path / "run"
    settings = {"checkpoint.every": 2, "checkpoint.keep": 3}
    whole, _ = train(run, "tp=2", model=Normalised, settings=settings)
    (run / "checkpoints/3").rename(tmp_path / "removed")
    rest, arrays = train(run, "fsdp=2", model=Normalised)
    assert_allclose(rest, whole[2:], rtol=1e-5, atol=1e-5)
    with trainer_of(
        tmp_path / "next", "tp=2", settings={"run.init_from": run}, model=Normalised
    ) as trainer:
        assert_allclose(trainer.model.norm.mean[...], arrays["norm", "mean"], rtol=1e-6)


class FixedFeatures(nnx.Module):
    """Has a plain array, which is no variable."""

    def __init__(self, *, key=None, rngs):
        key = jax.random.key(5) if key is None else key
        self.frequencies = jax.random.normal(key, (16, 32))
        self.down = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.cos(x @ self.frequencies))


def frequencies_of(trainer):
    """Returns the plain array and the losses of all steps."""
    losses = [step.metrics["loss"] for step in trainer]
    return np.asarray(trainer.model.frequencies), losses


def plain_frequencies(seed):
    """Returns the same of a model in plain Flax."""

    @jax.jit
    def made(batch):
        model = FixedFeatures(rngs=nnx.Rngs(seed))
        total, weight, _ = loss(model, batch, jax.random.key(0))
        return model.frequencies, total / weight

    return jax.device_get(made(batches(0)))


def random_features(*, rngs):
    return FixedFeatures(key=rngs.params(), rngs=rngs)


def numpy_features(*, rngs):
    model = FixedFeatures(rngs=rngs)
    model.frequencies = nnx.data(default_rng().normal(size=(16, 32)).astype(np.float32))
    return model


def with_stop(step):
    """Has a column with the name of the flag by which processes agree to stop."""
    return batches(step) | {"stop": np.ones(ROWS)}


def reading_stop(model, batch, key):
    kept = 1 - 0.25 * batch["stop"]
    metrics = {"noise": kept.sum(), "stop": (batch["stop"].sum(), ROWS)}
    return (losses_of(model, batch) * kept).sum(), kept.sum(), metrics


def stop_at_step_2(trainer, step):
    if step.index == 2:
        trainer.stop("enough")


def test_the_compute_dtype_is_for_layers_without_a_dtype():
    model = nnx.Dict(
        body=nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        head=nnx.Linear(4, 4, dtype=jnp.float32, rngs=nnx.Rngs(0)),
    )
    set_precision(model, jaxtp.Precision(compute="bfloat16", param="float16"))
    x = np.ones((2, 4), np.float32)
    dtypes = [model.body(x).dtype, model.head(x).dtype, model.body.kernel.dtype]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.float16]


TWO_PROCESSES = f"""
import json, sys
from jaxtp.distributed.joining import join_processes
join_processes()
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
import jax, jaxtp, numpy as np
from flax import nnx
from small_net import train, trainer_of
from test_task import EVERY_AXIS, FixedFeatures, frequencies_of, reading_stop, stop_at_step_2, with_stop

with trainer_of("run", EVERY_AXIS, 1, {{"run.seed": 5}}, model=FixedFeatures) as trainer:
    found, first = frequencies_of(trainer)
np.save(f"{{jax.process_index()}}.npy", found)
parts = dict(loss=reading_stop, batches=with_stop, callbacks=[stop_at_step_2])
losses, _ = train("columns", "dp=4,fsdp=2", 9, {{"train.log_every": 1}}, **parts)
with jax.set_mesh(jaxtp.make_mesh(fsdp=4, tp=2)):
    graph, state = nnx.split(jaxtp.load_run("run", build=FixedFeatures, plan={{"down": jaxtp.plans.Rowwise()}}))
    replicated = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x), out_shardings=replicated)
    outputs = np.asarray(run(state, np.eye(4, 16, dtype=np.float32)))
with open(f"{{jax.process_index()}}.json", "w") as file:
    json.dump([first, losses, outputs.tolist()], file)
"""  # noqa: E501


@pytest.mark.journey
def test_two_processes_have_the_plain_arrays_columns_and_loaded_model_of_one(tmp_path, monkeypatch):
    """And a run that one step stops ends after the next one."""
    monkeypatch.chdir(tmp_path)
    assert launch(["--processes=2", "--devices=4", "--", "-c", TWO_PROCESSES]) == 0
    expected, loss_of_one = plain_frequencies(5)
    losses_of_one, _ = train(tmp_path / "one", loss=reading_stop, batches=with_stop)
    outputs_of_one = jaxtp.load_run(tmp_path / "run", build=FixedFeatures)(
        np.eye(4, 16, dtype=np.float32)
    )
    for process in range(2):
        assert_array_equal(np.load(f"{process}.npy"), expected)
        first, losses, outputs = read_json(tmp_path / f"{process}.json")
        assert_allclose(first, [loss_of_one], rtol=1e-5)
        assert_allclose(losses, losses_of_one, rtol=1e-5)
        assert_allclose(outputs, outputs_of_one, rtol=1e-5, atol=1e-5)
    assert records(tmp_path / "columns", "stop") == {1: 1.0, 2: 1.0, 3: 1.0}


class DottedKeys(nnx.Module):
    """Two layers, of which a dict by dotted path has only one."""

    def __init__(self, *, rngs):
        inner = nnx.Linear(16, 10, rngs=rngs)
        self.parts = nnx.Dict({"a.b": nnx.Linear(10, 10, rngs=rngs), "a": nnx.Dict({"b": inner})})

    def __call__(self, x):
        return self.parts["a.b"](self.parts["a"]["b"](x))


def with_metrics(**metrics):
    """Returns a loss with other metrics, which are functions of the losses."""

    def changed(model, batch, key):
        losses = losses_of(model, batch)
        return losses.sum(), losses.size, {name: metric(losses) for name, metric in metrics.items()}

    return changed


def mean(model, batch, key):
    return losses_of(model, batch).mean(), ROWS // 2


def mean_over_rows(model, batch, key):
    losses = losses_of(model, batch)
    return losses.mean(), losses.size


def of_pairs(model, batch, key):
    losses = losses_of(model, batch)
    return (losses[:, None] * jnp.ones(losses.size)).sum(), losses.size


def drawn(model, batch, key):
    mask = jax.random.uniform(key, batch["y"].shape) < 0.4
    return (losses_of(model, batch) * mask).sum(), mask.sum()


def assigns(model, batch, key):
    model.up.bias[...] = 0.9 * model.up.bias[...]
    return loss(model, batch, key)


def grows(model, batch, key):
    model.mask.set_value(model.mask[...].astype(jnp.bfloat16))
    return loss(model, batch, key)


def flattening(model, batch, key):
    return loss(model, batch | {"x": batch["x"].reshape(len(batch["y"]), 16)}, key)


def finite():
    yield from map(batches, range(3))


IN_MEMORY = [batches(step) for step in range(3)]
ROWS_IN_MEMORY = [{"x": x, "y": y} for x, y in zip(*IN_MEMORY[0].values(), strict=True)]
BATCHED = grain.MapDataset.source(ROWS_IN_MEMORY).batch(8)
TOKENS = {"inputs": np.zeros((8, 16), np.int32), "labels": np.zeros((8, 16), np.int32)}
DECODER = jaxtp.ModelConfig(
    vocab_size=8, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8
)
OF_DECODER = {"model": DECODER, "loss": None}
EIGHT = {"data.global_batch_size": 8}
TWICE = {"train.accumulation": 2}

MISTAKES = {
    "a mean": ({"loss": mean_over_rows}, "the loss is a mean"),
    "a weight": ({"loss": mean}, "the weight of the loss does not grow with the rows"),
    "a metric": ({"loss": with_metrics(again=jnp.mean)}, "the metric 'again' is a mean"),
    "pairs of rows": ({"loss": of_pairs, "settings": TWICE}, "Micro-batches change it"),
    "a name": ({"loss": with_metrics(loss_tokens=jnp.sum)}, "'loss_tokens'"),
    "a random array": ({"model": random_features}, "model.frequencies is random, but an attribute"),
    "an array of NumPy's": ({"model": numpy_features}, "model.frequencies is random, but an attr"),
    "no params": (
        {"model": nnx.Module, "loss": lambda m, b, k: (b["x"].sum(), ROWS)},
        "no nnx.Param",
    ),
    "a number": ({"loss": lambda *_: 1.0}, "returns a float"),
    "another key": ({"loss": lambda m, b, _: b["z"]}, r"test_task.py, line \d+: .*: KeyError: 'z'"),
    "a parameter": ({"loss": assigns}, "assigns the parameter up.bias"),
    "a dtype": ({"loss": grows, "model": WithConstants}, "changes mask from float32"),
    "statistics": ({"model": Normalised, "settings": TWICE}, "a step changes norm.mean"),
    "equal paths": (
        {"model": DottedKeys},
        r"'parts.a.b.bias', by the keys .*'a', 'b'.* and .*'a.b'",
    ),
    "no model": ({"model": lambda: 3}, "returns 3, and should return an nnx.Module"),
    "an instance": ({"model": Net(rngs=nnx.Rngs(0))}, "is a model; give its class"),
    "no optimizer": ({"optimizer": optax.adamw}, "'learning_rate'"),
    "a plan": (
        {"plan": {"sideways": Colwise()}, "mesh": "tp=2"},
        "'sideways' matches no module",
    ),
    "cp": ({"mesh": "cp=2"}, "no plan names the module that takes them"),
    "the end": ({"batches": finite(), "steps": 5}, "ended after 3 batches"),
    "rows": ({"batches": lambda step, rows=4: batches(step)}, "rename it"),
    "epochs": ({"steps": None, "settings": {"train.epochs": 2}}, "unknown number of rows"),
    "no batches": ({"batches": None}, "needs batches"),
    "a plan of a decoder": (OF_DECODER | {"plan": PLAN}, "a plan splits a model of your own"),
    "validation alone": (
        OF_DECODER | {"batches": None, "validation": batches},
        "need batches to train on",
    ),
    "a size": ({"settings": EIGHT}, "the batches have 32 rows"),
    "a dim": (
        {"mesh": "dp=5"},
        r"32 rows, not divisible by mesh.dp=5; dp can be 1, 2, 4$",
    ),
    "a list of batches": (
        {"batches": IN_MEMORY, "loss": flattening},
        r"list is read by rows; if its items are batches, .* iter\(BATCHES\)",
    ),
    "a batched pipeline": (
        {"batches": BATCHED.map(dict), "loss": flattening},
        r"MapMapDataset is .*leave out its batch\(\), or end it with \.to_iter_dataset\(\)",
    ),
    "validation without a column": (
        {"validation": lambda step: {"x": batches(step)["x"]}},
        r"validation batches \(.*\): .*'y'",
    ),
    "no ids": (OF_DECODER, "the loss needs 'inputs', and batches have x, y: rename your token"),
    "batches of ids": (
        OF_DECODER | {"batches": [TOKENS] * 3},
        "if its items are batches, give its rows",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_part_is_one_error(tmp_path, name):
    parts, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", **parts)
    assert checkpoints_in(tmp_path / "run") == ([3] if name == "the end" else [])


@pytest.mark.wide
def test_a_loss_may_draw_its_weight_or_be_no_sum_over_rows(tmp_path, capsys):
    for own, is_warned_of in ((drawn, False), (of_pairs, True)):
        train(tmp_path / own.__name__, steps=1, loss=own)
        assert (
            "WARNING: the loss is not a sum over rows" in capsys.readouterr().out
        ) == is_warned_of


class Stacked(nnx.Module):
    """Layers in a scan that recomputes them: Flax returns their variables from both."""

    def __init__(self, *, layer, rngs):
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(layer))(rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        call = nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
        scan = nnx.jit(nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry))
        return self.head(scan(x, self.layers))


@pytest.mark.parametrize(
    ("layer", "changes"),
    [
        (lambda rngs: nnx.Linear(16, 16, rngs=rngs), ()),
        (lambda rngs: nnx.BatchNorm(16, rngs=rngs), ("layers.mean", "layers.var")),
    ],
    ids=["linear", "statistics"],
)
def test_what_scans_and_recomputation_return_unchanged_is_not_assigned(layer, changes):
    model = Stacked(layer=layer, rngs=nnx.Rngs(0))
    assert inspect_loss(loss, model, jax.eval_shape(lambda: batches(0))).changes == changes


class Swapping(nnx.Linear):
    """Exchanges two variables in a call: each is then an input, but not its own."""

    def __init__(self, *, rngs):
        super().__init__(16, 10, rngs=rngs)
        self.old = nnx.BatchStat(jnp.zeros(3))
        self.new = nnx.BatchStat(jnp.ones(3))
        self.kept = nnx.BatchStat(jnp.ones(3))

    def __call__(self, x):
        @nnx.jit
        def swap(layer):
            old = layer.old[...]
            layer.old[...] = layer.new[...]
            layer.new[...] = old

        swap(self)
        return super().__call__(x)


def test_variables_that_exchange_their_values_are_changed():
    shapes = jax.eval_shape(lambda: batches(0))
    assert inspect_loss(loss, Swapping(rngs=nnx.Rngs(0)), shapes).changes == ("new", "old")


def in_16_bits(model, batch, key):
    total, count, _ = loss(model, batch, key)
    return total.astype(jnp.bfloat16), count


NOTES = {
    "another column": ({"validation": lambda step: batches(step) | {"z": np.ones(ROWS)}}, []),
    "rows": ({"batches": ROWS_IN_MEMORY}, []),
    "a sum in 16 bits": ({"loss": in_16_bits}, ["WARNING", "its sum in bfloat16, which"]),
    "what an optimizer replicates": (
        {"mesh": "fsdp=2", "optimizer": optax.flatten(optax.adam(1e-3))},
        ["of it is replicated", "0.mu, 0.nu"],
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_a_run_notes_what_may_be_meant_otherwise(tmp_path, capsys, name):
    parts, words = NOTES[name]
    with trainer_of(tmp_path, **parts):
        said = capsys.readouterr().out
    assert all(word in said for word in words), said
    assert words or ("note " not in said and "WARNING" not in said), said


def test_the_command_takes_the_parts(tmp_path):
    parts = {"loss": "loss", "batches": "batches", "optimizer": "optimizer", "plan": "PLAN"}
    flags = task_flags(small_net.FILE, model="Net", **parts)
    run = ["--mesh=tp=2", "--train.steps=2", "--train.log-every=1", f"--run.dir={tmp_path}/run"]
    assert main([*flags, *run]) == 0
    (first, _), (second, _) = train(tmp_path / "one", steps=2)[0]
    assert records(tmp_path / "run") == pytest.approx({1: first, 2: second}, rel=1e-5)


def weighted(model, batch, key):
    return (losses_of(model, batch) * batch["w"]).sum(), batch["w"].sum()


def with_weights(*without):
    """Returns batches whose weights are 0 at some steps."""
    return lambda step: (
        batches(step) | {"w": np.full(ROWS, float(step + 1 not in without), np.float32)}
    )


@pytest.mark.wide
def test_steps_without_weight_move_no_parameter_and_too_many_in_a_row_end_the_run(tmp_path, capsys):
    losses = []
    kernels = []

    def callback(trainer, step):
        losses.append(step.metrics["loss"])
        kernels.append(np.asarray(trainer.model.up.kernel[...]))

    parts = {
        "loss": weighted,
        "optimizer": optax.adamw(1e-2),
        "batches": with_weights(2, 3, 5, 6, 7),
    }
    settings = {"train.log_every": 1, "train.max_skipped": 2}
    with pytest.raises(
        UserError, match=r"the last 3 steps had no weight, more than train\.max_skipped=2"
    ):
        train(tmp_path, "fsdp=2", 9, settings, callbacks=[callback], **parts)
    moved = [(before != after).any() for before, after in itertools.pairwise(kernels)]
    assert moved == [False, False, True, False, False, False]
    assert np.isnan(losses).tolist() == [False, True, True, False, True, True, True]
    assert [step for step, value in records(tmp_path).items() if value is None] == [2, 3, 5, 6, 7]
    assert checkpoints_in(tmp_path) == [7]
    out = capsys.readouterr().out
    assert "step 2: the weight of the loss is 0" in out
    assert "step 3/9  no loss" in out


def test_a_weight_that_is_no_number_ends_the_run(tmp_path):
    def odd(model, batch, key):
        total, count = weighted(model, batch, key)
        return total, jnp.where(count > 0, count, jnp.inf)

    with pytest.raises(NumericsError, match="step 2"):
        train(tmp_path, loss=odd, batches=with_weights(2))


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
OWN = {"model.build": "Net", "train.loss": "loss", "data.batches": "batches"}


@pytest.fixture
def refusal(tmp_path, capsys, monkeypatch):
    """Returns the message of a command with such a reference; checks that it is one line, before
    a run begins.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.py").write_text(HOSTILE)

    def command(setting, reference):
        own = {name: f"{small_net.FILE}:{part}" for name, part in OWN.items()} | {
            setting: reference
        }
        flags = [f"--{name}={value}" for name, value in own.items()]
        case = f"{setting} {reference}"
        assert main([*flags, "--mesh=fsdp=2", "--train.steps=1", "--run.dir=run"]) == 2, case
        assert not (tmp_path / "run").exists(), case
        error = capsys.readouterr().err
        assert error.startswith("jaxtp train: error: "), case
        assert error.count("\n") == 1, error
        return error

    return command


UNUSABLE_FILES = read_table(__file__)


def test_a_file_that_cannot_be_used_is_one_error(refusal, tmp_path):
    for index, (content, message) in enumerate(UNUSABLE_FILES.items()):
        (tmp_path / f"x{index}.py").write_text(content)
        error = refusal("model.build", f"x{index}.py:y")
        assert re.search(message, error), (content, error)
    (tmp_path / "loop.py").symlink_to("loop.py")
    assert "--model.build loop.py: no such file" in refusal("model.build", "loop.py:y")


def without_rows(step):
    return {name: column[:0] for name, column in batches(step).items()}


def rows_without(step, rows):
    return without_rows(step)


def one_argument(trainer):
    """A callback that lacks the step."""


def one_result(model, batch):
    """A loss that lacks the key."""


UNUSABLE = [
    ("data.batches", f"{__file__}:without_rows", "its first batch has no rows"),
    ("data.validation_batches", f"{__file__}:without_rows", "its first batch has no rows"),
    ("data.batches", f"{__file__}:rows_without", "returned 0 rows, but was called with 1"),
    (
        "train.callbacks",
        f"{__file__}:one_argument",
        "takes (trainer), and is called with (trainer, step)",
    ),
    ("train.callbacks", f"{__file__}:Net", "is a class; name a function (trainer, step)"),
    (
        "train.loss",
        f"{__file__}:one_result",
        "takes (model, batch), and is called with (model, batch, key)",
    ),
    ("model.plan", f"{__file__}:ROWS", "a plan is a dict from patterns to styles, not 32"),
    ("run.init_from", "run", "run.init_from=run is the run in run.dir itself"),
    ("data.batches", "hostile.py:negative", "should return >= 0"),
    ("data.batches", "hostile.py:huge", "cannot fit 'int'"),
]


def test_a_part_that_cannot_be_called_is_refused_before_the_run_begins(refusal):
    for setting, reference, message in UNUSABLE:
        error = refusal(setting, reference)
        assert message in error, (setting, reference, error)


@swept("setting", [*OWN, "data.validation_batches", "optimizer.build", "model.plan"])
def test_whatever_a_setting_names_is_one_error(refusal, tmp_path, setting):
    names = runpy.run_path(str(tmp_path / "hostile.py"))["NAMES"]
    assert len(names) > 30
    for name in [*names, *LAZY]:
        refusal(setting, f"hostile.py:{name}")
