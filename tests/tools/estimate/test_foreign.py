"""`jaxtp estimate FILE.py:build`: any Flax model, by the account of `explain`."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support import assert_refused
from tables import read_json

import jaxtp
from jaxtp.config.python_object import load_object
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate.__main__ import main
from jaxtp.tools.estimate.foreign import simplest_first

WIDTH = 16
HIDDEN = 32
ROWS = 16
LENGTH = 8
X = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32)
MESHES = ["fsdp=8", "tp=8", "fsdp=2,tp=4", "dp=2,fsdp=2,tp=2"]
SOURCE = """
import jax, optax
from flax import nnx
from jaxtp import Colwise, PrepareInput, Replicate, Rowwise

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

class Broken(Model):
    def __call__(self, x):
        return self.lost

def build():
    return Model(nnx.Rngs(0))

class Opaque(nnx.Module):
    def __init__(self, rngs):
        self.matrix = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (512, 512)))
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

MOSTLY_PLAN = {"up": Colwise(), "down": Rowwise()}

PLAN = {
    "blocks.*.attention": PrepareInput(Replicate(), Replicate()),
    "blocks.*.attention.{query,key,value}": Colwise(), "blocks.*.attention.out": Rowwise(),
    "blocks.*.up": Colwise(), "blocks.*.down": Rowwise(),
}
SGD = optax.sgd(1e-3)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def estimated(file, *flags, model="build", shape="16x8x16"):
    record = file.parent / "record.json"
    words = [f"{file}:{model}", f"--input={shape}", "--hardware=h100x8", f"--json={record}"]
    assert main([*words, *flags]) == 0
    return read_json(record)


@pytest.mark.wide
def test_bytes_and_flops_are_those_of_explain(file, capsys):
    record = estimated(file, "--plan", f"{file}:PLAN", "--mesh", *MESHES)
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
    return [sum(mesh["seconds"].values()) for mesh in record["meshes"]]


@pytest.mark.wide
def test_every_mesh_is_tried_and_those_without_a_plan_are_refused(file):
    record = estimated(file, "--propose", "--optimizer", f"{file}:SGD")
    assert len(record["meshes"]) + len(record["refused"]) == 20
    assert all(mesh["bytes_per_device"]["optimizer"] == 8 for mesh in record["meshes"])
    without = estimated(file)
    assert {mesh["tp"] for mesh in without["meshes"]} == {1}
    assert math.prod(record["meshes"][0][axis] for axis in mesh_shape()) == 8


@pytest.mark.wide
def test_a_tp_that_hardly_divides_the_model_does_not_win_by_what_it_does_not_send(file, capsys):
    """Each device of tp 8 computes 97% of the model, and sends less than one of dp 8."""
    flags = ["--plan", f"{file}:MOSTLY_PLAN", "--mesh", "tp=8", "dp=8"]
    record = estimated(file, *flags, model="mostly", shape="16x512")
    dp, tp = record["meshes"]
    assert (dp["dp"], tp["tp"]) == (8, 8)
    seconds = expected_seconds(record)
    assert seconds[1] < seconds[0]
    assert "tp does not divide" not in capsys.readouterr().out


def timed(overlapped=1.0, serial=1.2, *, tp=8, cp=1, spare=1.0, flops=1.0):
    time = SimpleNamespace(serial=serial, overlapped=overlapped, expected=(serial + overlapped) / 2)
    fits = spare >= 0
    return SimpleNamespace(
        time=time,
        spare=spare,
        fits=fits,
        has_margin=fits,
        flops=flops,
        sizes={"cp": cp, "tp": tp},
    )


def test_the_simplest_of_equal_meshes_is_first():
    for first, other, wins in [
        (timed(), timed(1.03, 1.25, tp=1), True),
        (timed(), timed(1.1, 1.3, tp=1), False),
        (timed(), timed(cp=2), False),
        (timed(flops=8.0), timed(1.1, 3.0, tp=1), True),
        (timed(flops=8.0), timed(1.3, 1.4, tp=1), False),
        (timed(), timed(tp=1, spare=-1.0), False),
        (timed(spare=-1.0), timed(tp=1, spare=-2.0), False),
    ]:
        assert (simplest_first([first, other])[0] is other) == wins, (first, other)


@pytest.mark.wide
def test_a_model_that_does_not_fit_is_said(file, capsys):
    shape = f"{8 * 1024 * 1024}x1024x16"
    assert main([f"{file}:build", f"--input={shape}", "--hardware=l4x8", "--mesh=fsdp=8"]) == 1
    assert "does not fit" in capsys.readouterr().out


REFUSED = {
    "{file}:biuld --input 16x8x16": "has no biuld; did you mean build?",
    "{file}:PLAN --input 16x8x16": "and should be a function that returns a model",
    "{file}:Broken --input 16x8x16": ": return self.lost): AttributeError",
    "{file}:build": "give the shapes of its inputs",
    "{file}:build --input 16x8x16 --mesh tp=4": "is 4 devices, and --hardware h100x8 is 8",
    "{file}:build --input 16x8x16 --plan {file}:PLAN --propose": "leave one of them out",
    "{file}:build --input 16x8x15 --mesh dp=8": "no mesh of 8 devices can run it",
    "{file}:build --input 16x8x16 --hardware h101x8": "h101",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_refused(file, capsys, words):
    assert_refused(main, words.format(file=file).split(), REFUSED[words], capsys)
