"""`jaxtp check` of a user's task: it passes on every plan, and names what is broken."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import assert_refused, swept, task_flags
from tables import read_json, read_table, write_json

import jaxtp
from jaxtp.collectives import axis_size
from jaxtp.config.schema import from_yaml, replace_nested
from jaxtp.layers import linear
from jaxtp.plans import Colwise, Rowwise
from jaxtp.tools.check.__main__ import CheckConfig, main
from jaxtp.tools.check.shrink import own_model_cases
from jaxtp.tools.check.subject import open_subject

HERE = str(Path(__file__))
WIDTH = 8
ROWS = 8


class Mlp(nnx.Module):
    """Two layers with another one between them; `up` and `down` are split."""

    def __init__(self, rngs, middle=nnx.LayerNorm):
        # Before batch norm the gradient of the bias is nothing but rounding.
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.norm = middle(2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


class LocalScale(nnx.Module):
    """A layer with a mistake: it divides by a number of devices."""

    def __init__(self, features, rngs):
        self.scale = nnx.Param(jnp.ones(features))

    def __call__(self, x):
        return x * self.scale[...] / axis_size("tp")


class Failing(LocalScale):
    """A layer that is written for one device."""

    def __call__(self, x):
        return x.reshape(-1, len(self.scale) * axis_size("tp")) + jnp.zeros((ROWS, 1))


WithBatchNorm = partial(Mlp, middle=nnx.BatchNorm)
WithDropout = partial(Mlp, middle=lambda features, rngs: nnx.Dropout(0.5, rngs=rngs))
WithLocalScale = partial(Mlp, middle=LocalScale)
WithFailure = partial(Mlp, middle=Failing)


class Huge(Mlp):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = nnx.Param(jnp.zeros((2**20, 2**20)))


class Odd(nnx.Module):
    """tp 2 divides its features, and tp 4 does not."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 6, rngs=rngs)
        self.down = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Layers(nnx.Module):
    """The scan hides the layers of the wrong module."""

    def __init__(self, features, rngs):
        make = nnx.split_rngs(splits=2)(nnx.vmap(partial(LocalScale, features)))
        self.stacked = make(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.stacked
        )


InScan = partial(Mlp, middle=Layers)


class Unsteady(Mlp):
    def __call__(self, x):
        return super().__call__(x) * np.random.default_rng().uniform(1, 2)


PLAN = {"up": Colwise(), "down": Rowwise()}


def batches(step):
    random = np.random.default_rng(step)
    return {
        "x": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "y": random.integers(4, size=ROWS),
    }


def summed(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), jnp.asarray(float(losses.size))


def loss(model, batch, key):
    return summed(model(batch["x"]), batch["y"])


def mean_loss(model, batch, key):
    total, count = loss(model, batch, key)
    return total / count, count


def contrastive_loss(model, batch, key):
    y = model(batch["x"])
    return -jnp.trace(jax.nn.log_softmax(y @ y.T)), jnp.asarray(float(len(y)))


def failing_loss(model, batch, key):
    return model(batch["z"]).sum(), 1.0


def loss_without_a_gradient(model, batch, key):
    total, count = loss(model, batch, key)
    return jax.pure_callback(lambda total: total, total, total), count


def decoder_loss(model, batch, key):
    return summed(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])


def tokens(step):
    return {"tokens": np.random.default_rng(step).integers(40, size=(4, 17))}


optimizer = optax.adamw(1e-2)


def command(model="Mlp", loss="loss", plan="PLAN", meshes=("tp=2",)):
    flags = task_flags(HERE, model=model, plan=plan, loss=loss, batches="batches")
    return [*flags, *(["--mesh", *meshes] if meshes else [])]


def check(*flags, **parts):
    return main([*command(**parts), *flags])


@pytest.mark.wide
def test_a_model_of_the_user_is_checked(tmp_path, capsys):
    file = tmp_path / "check.json"
    flags = [*task_flags(HERE, optimizer="optimizer"), f"--json={file}"]
    assert check(*flags, meshes=("fsdp=2,tp=2",)) == 0
    out = capsys.readouterr().out
    assert "shrunk  nothing: the model is your own" in out
    assert "audit   none" in out
    assert "all 2 equal one device" in out, "with two micro-batches instead of one"
    accumulated, over_axes = read_json(file)["cases"]
    assert (accumulated["mesh"]["fsdp"], over_axes["mesh"]["fsdp"]) == (1, 2)
    largest = max(over_axes["errors"]["gradients"].values())
    assert 0 < largest < 1e-5, "something was compared"


BROKEN = {
    "WithLocalScale": "first difference: norm: its output is off by 5.0e-01",
    "WithFailure": "norm on tp 2 fails (",
    "InScan": "first difference: norm: its output is off by 7.5e-01",
}


@swept("model", BROKEN)
def test_the_first_module_that_differs_is_named(model, capsys):
    assert check(model=model) == 1
    out = capsys.readouterr().out
    assert BROKEN[model] in out
    # A model that fails cannot run on half of the rows either.
    compared = 1 if model == "WithFailure" else 2
    assert f"1 of {compared} differ" in out


@swept("model", ["WithBatchNorm", "WithDropout"])
def test_statistics_and_random_masks_equal_those_of_one_device(model, capsys):
    """Micro-batches would change the statistics, and draw other masks."""
    assert check(model=model, meshes=("fsdp=2,tp=2",)) == 0
    assert "all 1 equal one device" in capsys.readouterr().out


MISTAKES = read_table(__file__)


@swept("message", MISTAKES, *list(MISTAKES)[:3])
def test_a_mistake_is_refused(message, capsys):
    assert_refused(main, command(**MISTAKES[message]), message, capsys)


@pytest.mark.wide
def test_a_default_mesh_that_the_plan_cannot_do_is_listed(capsys):
    assert check("--mesh.dp", "2", model="Odd", meshes=()) == 0
    out = capsys.readouterr().out
    assert "--    tp 4" in out
    assert "not divisible by tp=4" in out
    assert "ok    fsdp 2 x tp 2" in out
    assert out.count("  dp 2 ") == 1


@pytest.mark.wide
def test_a_loss_of_pairs_of_rows_passes_without_accumulation(capsys):
    assert check(loss="contrastive_loss", meshes=("fsdp=2",)) == 0
    out = capsys.readouterr().out
    assert "--    one device, accumulation 2" in out
    assert "the loss is not a sum over single rows" in out
    words = [*command(loss="contrastive_loss", meshes=("fsdp=2",)), "--train.accumulation=2"]
    assert_refused(main, words, "Micro-batches change it", capsys)


def decoder(*flags):
    sizes = ["--model.vocab-size=40", "--model.num-layers=1"]
    return main(
        [*sizes, *task_flags(HERE, loss="decoder_loss", batches="tokens"), "--mesh=tp=2", *flags]
    )


@pytest.mark.wide
def test_a_decoder_keeps_vocabulary_and_length_of_the_batches(capsys):
    assert decoder() == 0
    out = capsys.readouterr().out
    assert "model.d_model 128 -> " in out
    assert "vocab_size" not in out
    assert "sequence_length" not in out


def own_decoder(rngs):
    return jaxtp.Decoder(
        jaxtp.ModelConfig(vocab_size=40, num_layers=1, d_model=32, d_ff=64), rngs=rngs
    )


def pairs(step):
    ids = tokens(step)["tokens"].astype(np.int32)
    return {"inputs": ids[:, :-1], "labels": ids[:, 1:]}


def test_a_decoder_of_the_user_too_and_callbacks_are_not_loaded(tmp_path):
    parts = {"model": {"build": f"{HERE}:own_decoder"}, "data": {"batches": f"{HERE}:pairs"}}
    write_json(tmp_path / "run.yaml", parts | {"train": {"callbacks": ["/nothing.py:callback"]}})
    small, subject = open_subject(from_yaml(CheckConfig, tmp_path / "run.yaml"), ["cp=2"])
    assert small.config.data.sequence_length == 16
    assert all(case.sizes["cp"] == 2 for case in small.cases)
    assert subject.batches.global_batch_size == small.config.data.global_batch_size == 4


def test_a_loss_that_fails_on_one_device_is_a_failure(capsys):
    assert check(loss="loss_without_a_gradient") == 1
    out = capsys.readouterr().out
    assert "FAIL  one device " in out
    assert "do not support JVP" in out


@pytest.mark.wide
def test_a_wrong_layer_of_a_decoder_is_named_under_a_loss_of_the_user(monkeypatch, capsys):
    call = linear.RowParallelLinear.__call__

    def with_the_bias_of_every_device(self, x):
        return call(self, x) + (axis_size("tp") - 1) * self.bias[...]

    monkeypatch.setattr(linear.RowParallelLinear, "__call__", with_the_bias_of_every_device)
    assert decoder("--model.mlp-bias", "--model.attention-out-bias") == 1
    assert (
        "first difference: blocks.0.attention.out: its output is off by" in capsys.readouterr().out
    )


def test_default_meshes_of_the_model_of_a_user():
    own = replace_nested(CheckConfig(), {"mesh.dp": 4, "mesh.fsdp": 1, "mesh.tp": 64})
    cases, without_cp = (
        ", ".join(map(str, own_model_cases(own, (), over_cp=over_cp))) for over_cp in (True, False)
    )
    assert cases == "tp 16, tp 2, tp 4, fsdp 2, fsdp 2 x tp 2, dp 2, cp 2, cp 2 x tp 2"
    assert "cp" not in without_cp
