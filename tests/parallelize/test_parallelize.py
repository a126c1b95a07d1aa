"""Models that somebody wrote for one device, parallel by a plan: outputs, gradients and three
updates are the same."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flax_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import D, T, V
from flax_parity import assert_same, train_alone, train_on

import jaxtp
from jaxtp import Colwise, ContextParallel, PrepareInput, PrepareOutput, Replicate, Rowwise, SequenceParallel, Shard

B = 8
RANDOM = np.random.default_rng(1)
X = RANDOM.standard_normal((B, T, D), np.float32)
IDS = RANDOM.integers(0, V, (B, T), np.int32)
IMAGES = RANDOM.standard_normal((B, 8, 8, 3), np.float32)


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, a plan."""

    build: Callable[[nnx.Rngs], nnx.Module]
    inputs: tuple[Any, ...] = (X,)
    plan: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case(functools.partial(models.Llama, num_layers=1), (IDS,), models.LLAMA_PLAN),
    "llama_without_a_plan": Case(functools.partial(models.Llama, num_layers=1), (IDS,)),
    "llama_all_reduce": Case(
        functools.partial(models.LlamaBlock, kv_heads=2, use_bias=True),
        plan={
            "attention": PrepareInput(Replicate(), Replicate()),
            "attention.w{q,k,v}": Colwise(),
            "attention.wo": Rowwise(),
            "feed_forward.w[13]": Colwise(),
            "feed_forward.w2": Rowwise(),
        },
    ),
    "containers": Case(
        models.Perceptron,
        plan={
            "norms.*": SequenceParallel(),
            "body.layers.0": Colwise(input_layouts=Shard(1)),
            "body.layers.2": Rowwise(output_layouts=Shard(1)),
            "more.0": Colwise(output_layouts=Shard(1)),
            "more.1": Rowwise(input_layouts=Replicate(), output_layouts=Shard(-1)),
        },
    ),
    "tied_vocabulary": Case(
        models.TiedLanguageModel,
        (IDS,),
        {
            "tokens": Rowwise(output_layouts=Shard(1)),
            "positions": Colwise(),
            "norm": SequenceParallel(output_layouts=Replicate()),
        },
    ),
    "tied_features": Case(
        models.TiedLanguageModel, (IDS,), {"tokens": Colwise(), "positions": Rowwise(), "hidden": Replicate()}
    ),
    "dropout": Case(
        models.Noisy,
        plan={
            "up": Colwise(),
            "down": Rowwise(output_layouts=Shard(1)),
            "dropouts.1": SequenceParallel(),
        },
    ),
    "convolutions": Case(models.ConvNet, (IMAGES,), {"widen": Colwise(), "narrow": Rowwise()}),
    "shared": Case(
        models.Universal,
        plan={"again.w{1,3}": Colwise(), "first.w2": Rowwise(), "one": Colwise(), "two": Colwise()},
    ),
    "stacked": Case(
        models.Stack,
        plan={
            "blocks.norm": PrepareOutput(Replicate(), Replicate()),
            "blocks.mlp.w{1,3}": Colwise(),
            "blocks.mlp.w2": Rowwise(),
        },
    ),
    "multi_head_attention": Case(
        models.Encoder,
        plan={
            "attention": PrepareInput(Replicate(), Replicate()),
            "attention.{query,key,value}": Colwise(),
            "attention.out": Rowwise(),
        },
    ),
    "general": Case(
        models.General,
        plan={"heads": Colwise(), "merge": Rowwise(output_layouts=Shard(1)), "up": Colwise(), "down": Rowwise()},
    ),
    "homemade": Case(models.Homemade, plan={"norm": SequenceParallel(), "out": Rowwise()}),
    "grouped": Case(models.Grouped),
}
MESHES = [(1, 2, 2, 2), (1, 1, 1, 8), (2, 2, 1, 2), (8, 1, 1, 1), (1, 2, 1, 4), (1, 1, 4, 2), (1, 8, 1, 1)]
"""Devices along dp, fsdp, cp and tp."""
ROTATED = [
    (name, MESHES[(index + turn) % len(MESHES)])
    for index, name in enumerate(CASES)
    for turn in ((0, 3) if index % 2 else (0,))
]
DEFAULT = ("containers", (1, 2, 1, 2))


@functools.cache
def on_one_device(name):
    return train_alone(lambda: CASES[name].build(nnx.Rngs(0)), CASES[name].inputs)


@pytest.mark.parametrize(
    ("name", "mesh"), [DEFAULT, *(pytest.param(*each, marks=pytest.mark.wide) for each in ROTATED)], ids=str
)
def test_parallel_equals_one_device(name, mesh):
    case = CASES[name]
    plan = {"": ContextParallel(), **case.plan} if mesh[2] > 1 else case.plan
    actual = train_on(mesh, lambda: case.build(nnx.Rngs(0)), plan, case.inputs, sharded=mesh != (2, 2, 1, 2))
    assert_same(actual, on_one_device(name))


def test_ids_that_are_not_there_give_what_flax_gives():
    ids = np.array([[0, V - 1, -1, -V], [V, 3, -V - 1, 7]])
    build = lambda: nnx.Embed(V, D, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda embeds: {name: embed(ids) for name, embed in embeds.items()})
    with jax.set_mesh(jaxtp.make_mesh(dp=2, tp=2)):
        plans = {"columns": {"": Colwise()}, "rows": {"": Rowwise()}, "no plan": {}}
        found = run({name: jaxtp.parallelize(build, plan) for name, plan in plans.items()})
    expected = run({"alone": build()})["alone"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected, err_msg=name)


class RandomFeatures(nnx.Module):
    def __init__(self, rngs):
        self.frequencies = jax.random.normal(rngs.params(), (D, D))
        self.up = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return self.up(jnp.cos(x @ self.frequencies))


def test_plain_arrays_are_of_the_functions_seed():
    alone = RandomFeatures(nnx.Rngs(5))
    mesh = jaxtp.make_mesh(1, 2, 2)
    for model in (lambda: RandomFeatures(nnx.Rngs(5)), RandomFeatures(nnx.Rngs(5))):
        found = jaxtp.parallelize(model, {"up": Colwise()}, mesh=mesh)
        np.testing.assert_array_equal(found.frequencies, alone.frequencies)
