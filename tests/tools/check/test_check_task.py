"""`jaxtp check` of a user's task: it passes on every plan, and names what is broken."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxtp
from jaxtp.collectives import axis_size
from jaxtp.tools.check.__main__ import main

EXAMPLES = Path(__file__).parent.parent.parent.parent / "scripts/examples"
HERE = str(Path(__file__))
WIDTH, ROWS = 8, 8


class Mlp(nnx.Module):
    """Two layers; `up` and `down` are split."""

    def __init__(self, rngs, width=WIDTH):
        self.up = nnx.Linear(width, 2 * WIDTH, rngs=rngs)
        self.norm = self.make_norm(rngs)
        self.down = nnx.Linear(2 * WIDTH, 4, rngs=rngs)

    def make_norm(self, rngs):
        return nnx.LayerNorm(2 * WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


class WithBatchNorm(Mlp):
    def make_norm(self, rngs):
        return nnx.BatchNorm(2 * WIDTH, rngs=rngs)


class WithDropout(Mlp):
    def make_norm(self, rngs):
        return nnx.Dropout(0.5, rngs=rngs)


class LocalScale(nnx.Module):
    """A layer with a mistake: it divides by a number of devices."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(2 * WIDTH))

    def __call__(self, x):
        return x * self.scale[...] / axis_size(jaxtp.TP)


class WithLocalScale(Mlp):
    def make_norm(self, rngs):
        return LocalScale(rngs)


class WithFailure(Mlp):
    def make_norm(self, rngs):
        return Failing()


class Failing(nnx.Module):
    def __call__(self, x):
        return (
            x.reshape(2 * (3 - axis_size(jaxtp.TP)), -1).reshape(x.shape) if axis_size(jaxtp.TP) < 3 else x[0, 99:][0]
        )


class InScan(nnx.Module):
    """The scan hides the layers of the wrong module."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return LocalScale(rngs)

        self.first = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.layers = Layers(make(rngs))
        self.last = nnx.Linear(2 * WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.layers(nnx.remat(lambda layer, x: layer(x))(self.first, x)))


class Layers(nnx.Module):
    def __init__(self, stacked):
        self.stacked = stacked

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stacked)


class Unsteady(Mlp):
    def __call__(self, x):
        return super().__call__(x) * np.random.default_rng().uniform(1, 2)


PLAN = {"up": jaxtp.Colwise(), "down": jaxtp.Rowwise()}


def batches(step):
    random = np.random.default_rng(step)
    return {"x": random.normal(size=(ROWS, WIDTH)).astype(np.float32), "y": random.integers(4, size=ROWS)}


def loss(model, batch, key):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return losses.sum(), jnp.asarray(float(len(losses)))


def mean_loss(model, batch, key):
    total, count = loss(model, batch, key)
    return total / count, count


def contrastive_loss(model, batch, key):
    y = model(batch["x"])
    return -jnp.trace(jax.nn.log_softmax(y @ y.T)), jnp.asarray(float(len(y)))


def failing_loss(model, batch, key):
    return model(batch["z"]).sum(), 1.0


def decoder_loss(model, batch, key):
    logits = model(batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses.sum(), jnp.asarray(float(losses.size))


def tokens(step):
    return {"tokens": np.random.default_rng(step).integers(40, size=(4, 17))}


optimizer = optax.adamw(1e-2)
zero_key_bias = optax.sgd(1e-2)


def check(*flags, model="Mlp", loss="loss", plan="PLAN", meshes=("tp=2",)):
    parts = {"model.build": model, "model.plan": plan, "train.loss": loss, "data.batches": "batches"}
    named = [word for flag, name in parts.items() for word in (f"--{flag}", f"{HERE}:{name}")]
    return main([*named, *(["--mesh", *meshes] if meshes else []), *flags])


def test_a_model_of_the_users_is_checked(tmp_path, capsys):
    file = tmp_path / "check.json"
    assert check("--optimizer.build", f"{HERE}:optimizer", "--json", str(file), meshes=("tp=2", "fsdp=2,tp=2")) == 0
    out = capsys.readouterr().out
    assert "shrunk  nothing: the model is your own; model.arguments can make it small" in out
    assert "audit   none" in out
    assert "all 3 equal one device" in out, "with two micro-batches instead of one"
    record = json.loads(file.read_text())
    assert [case["mesh"]["fsdp"] for case in record["cases"]] == [1, 1, 2]
    assert all(0 < case["errors"]["gradient"] < 1e-5 for case in record["cases"][1:]), "something was compared"
