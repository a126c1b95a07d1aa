"""`jaxtp estimate --model.build`: any Flax model, by the account of `explain`."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support import assert_refused, task_flags
from tables import read_json, read_table

import jaxtp
from jaxtp.analysis.hardware import find
from jaxtp.config.python_object import load_object
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate.__main__ import main
from jaxtp.tools.estimate.foreign import is_as_fast
from jaxtp.tools.estimate.search import simplest_first
from jaxtp.train.config import TrainConfig

WIDTH = 16
HIDDEN = 32
ROWS = 16
LENGTH = 8
X = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32)
MESHES = ["fsdp=8", "tp=8", "fsdp=2,tp=4", "dp=2,fsdp=2,tp=2"]
SOURCE = """
import jax, optax
import numpy as np
from flax import nnx
from jaxtp.plans import Colwise, PrepareInput, Replicate, Rowwise

class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(8, 16, decode=False, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)
    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.down(nnx.gelu(self.up(x)))

class Model(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jax.numpy.ones(16))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    def __call__(self, x):
        x = x * self.scale[...]
        for block in self.blocks:
            x = block(x)
        return x

def build():
    return Model(nnx.Rngs(0))

class Opaque(nnx.Module):
    def __init__(self, rngs, width=512):
        self.matrix = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (width, width)))
    def __call__(self, x):
        return x @ self.matrix[...]

class Mostly(nnx.Module):
    def __init__(self, rngs):
        self.opaque = nnx.List([Opaque(rngs) for _ in range(8)])
        self.up = nnx.Linear(512, 64, rngs=rngs)
        self.down = nnx.Linear(64, 512, rngs=rngs)
    def __call__(self, x):
        for layer in self.opaque:
            x = nnx.gelu(layer(x))
        return x + self.down(nnx.gelu(self.up(x)))

def mostly():
    return Mostly(nnx.Rngs(0))

def huge():
    return Opaque(nnx.Rngs(0), 2**17)

MOSTLY_PLAN = {"up": Colwise(), "down": Rowwise()}

PLAN = {
    "blocks.*.attention": PrepareInput(Replicate(), Replicate()),
    "blocks.*.attention.{query,key,value}": Colwise(), "blocks.*.attention.out": Rowwise(),
    "blocks.*.up": Colwise(), "blocks.*.down": Rowwise(),
}
SGD = optax.sgd(1e-3)
ADAM = optax.adamw(1e-3)

def loss(model, batch, key):
    return model(batch["x"]).sum(), 1

def batches(step):
    return {"x": np.zeros((16, 8, 16), np.float32)}

def flat(step):
    return {"x": np.zeros((16, 512), np.float32)}

def wide(step):
    return {"x": np.zeros((16, 2**17), np.float32)}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def estimated(file, *flags, **names):
    record = file.parent / "record.json"
    parts = {"model": "build", "loss": "loss", "batches": "batches", "optimizer": "ADAM"} | names
    words = [*task_flags(file, **parts), "--hardware=h100x8", f"--json={record}"]
    assert main([*words, *flags]) == 0
    return read_json(record)


@pytest.mark.wide
def test_bytes_and_flops_are_those_of_explain(file, capsys):
    record = estimated(file, "--mesh", *MESHES, plan="PLAN")
    assert len(record["meshes"]) == len(MESHES)
    assert "fsdp 2 x tp 4" in capsys.readouterr().out
    build = load_object(f"{file}:build", "build")
    plan = load_object(f"{file}:PLAN", "plan")
    attention = 2 * 2 * ROWS * LENGTH * LENGTH * WIDTH
    matrices = 2 * ROWS * LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN)
    for mesh in record["meshes"]:
        sizes = {axis: mesh[axis] for axis in mesh_shape()}
        found = jaxtp.explain(build, X, plan=plan, mesh=sizes)
        assert mesh["flops_per_device"] == found.flops == 2 * 3 * (attention + matrices) / 8
        sent = {"+".join(axes): sent for axes, sent in found.sent_by_axes().items()}
        assert mesh["bytes_sent"] == sent
        memory = mesh["bytes_per_device"]
        assert memory["parameters"] == memory["gradients"] == found.bytes_per_device
        # Two moments and three counters.
        assert memory["optimizer"] == 2 * found.bytes_per_device + 12
        assert memory["activations"] == found.saved > 0
        assert memory["total"] == pytest.approx(sum(memory.values()) / 2)
        assert 0 < mesh["seconds"]["overlapped"] <= mesh["seconds"]["serial"]
    order = expected_seconds(record)
    assert order[1:] == sorted(order[1:]), "all fit, so the fastest come first"


def expected_seconds(record):
    seconds = [mesh["seconds"] for mesh in record["meshes"]]
    return [each["serial"] + each["overlapped"] for each in seconds]


@pytest.mark.wide
def test_every_mesh_is_tried_with_a_plan_of_its_own(file):
    record = estimated(file, optimizer="SGD")
    assert len(record["meshes"]) + len(record["refused"]) == 20
    assert all(mesh["bytes_per_device"]["optimizer"] == 8 for mesh in record["meshes"])
    assert math.prod(record["meshes"][0][axis] for axis in mesh_shape()) == 8


@pytest.mark.wide
def test_a_tp_that_hardly_divides_the_model_does_not_win_by_what_it_does_not_send(file):
    """Each device of tp 8 computes 97% of the model, and sends less than one of dp 8."""
    parts = {"model": "mostly", "plan": "MOSTLY_PLAN", "batches": "flat"}
    record = estimated(file, "--mesh", "tp=8", "dp=8", **parts)
    dp, tp = record["meshes"]
    assert (dp["dp"], tp["tp"]) == (8, 8)
    seconds = expected_seconds(record)
    assert seconds[1] < seconds[0]


def timed(overlapped=1.0, serial=1.2, *, tp=8, cp=1, spare=1.0, flops=1.0):
    time = SimpleNamespace(serial=serial, overlapped=overlapped, expected=(serial + overlapped) / 2)
    fits = spare >= 0
    return SimpleNamespace(
        target=SimpleNamespace(hardware=find("h100")),
        config=TrainConfig(),
        time=time,
        spare=spare,
        fits=fits,
        has_margin=fits,
        flops=flops,
        sizes=mesh_shape(cp=cp, tp=tp),
    )


def test_the_simplest_of_equal_meshes_is_first():
    for first, other, wins in read_table(__file__):
        both = [timed(**first), timed(**other)]
        assert (simplest_first(both, is_as_fast)[0] is both[1]) == wins, (first, other)


@pytest.mark.wide
def test_a_model_that_does_not_fit_is_said(file, capsys):
    flags = task_flags(file, model="huge", loss="loss", batches="wide")
    assert main([*flags, "--hardware=l4x8", "--mesh=fsdp=8"]) == 1
    assert "does not fit" in capsys.readouterr().out


REFUSED = {
    "{file}:build --input 16x8x16": "--model.build, --train.loss and --data.batches",
    "{task} --mesh tp=4": "is 4 devices, and --hardware h100x8 is 8",
    "{task} --train.accumulation 4 --mesh dp=8": "no mesh of 8 devices that was tried can run",
    "{task} --hardware h101x8": "h101",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_refused(file, capsys, words):
    task = " ".join(task_flags(file, model="build", loss="loss", batches="batches"))
    assert_refused(main, words.format(file=file, task=task).split(), REFUSED[words], capsys)
