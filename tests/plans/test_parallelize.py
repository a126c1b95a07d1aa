"""Models that somebody wrote for one device, parallel by a plan: outputs, gradients and three
updates are the same.
"""

import functools
from functools import partial

import flax_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import D, T, V
from flax_parity import assert_same, train_alone, train_on
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from support import use_mesh
from tables import read_table

import jaxtp
from jaxtp.plans import (
    Colwise,
    ContextParallel,
    PrepareInput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Shard,
)

B = 8
RANDOM = default_rng(1)
X = RANDOM.standard_normal((B, T, D), np.float32)
IDS = RANDOM.integers(0, V, (B, T), np.int32)
IMAGES = RANDOM.standard_normal((B, 8, 8, 3), np.float32)
INPUTS = {models.Llama: IDS, models.TiedLanguageModel: IDS, models.ConvNet: IMAGES}
"""What models are called with that do not take activations."""
CASES = {
    "llama": (models.Llama, models.LLAMA_PLAN),
    "llama without a plan": (models.Llama, {}),
    "llama, all-reduced": (
        partial(models.LlamaBlock, kv_heads=2, use_bias=True),
        {
            "attention": PrepareInput(Replicate(), Replicate()),
            "attention.w{q,k,v}": Colwise(),
            "attention.wo": Rowwise(),
            "feed_forward.w[13]": Colwise(),
            "feed_forward.w2": Rowwise(),
        },
    ),
    "containers": (
        models.Perceptron,
        {
            "norms.*": SequenceParallel(),
            "body.layers.0": Colwise(input_layouts=Shard(1)),
            "body.layers.2": Rowwise(output_layouts=Shard(1)),
            "more.0": Colwise(output_layouts=Shard(1)),
            "more.1": Rowwise(input_layouts=Replicate(), output_layouts=Shard(-1)),
        },
    ),
    "tied vocabulary": (
        models.TiedLanguageModel,
        {
            "tokens": Rowwise(output_layouts=Shard(1)),
            "positions": Colwise(),
            "norm": SequenceParallel(output_layouts=Replicate()),
        },
    ),
    "tied features": (
        models.TiedLanguageModel,
        {"tokens": Colwise(), "positions": Rowwise(), "hidden": Replicate()},
    ),
    "dropout": (
        models.Noisy,
        {
            "up": Colwise(),
            "down": Rowwise(output_layouts=Shard(1)),
            "dropouts.1": SequenceParallel(),
        },
    ),
    "convolutions": (models.ConvNet, {"widen": Colwise(), "narrow": Rowwise()}),
    "shared": (
        models.Universal,
        {"again.w{1,3}": Colwise(), "first.w2": Rowwise(), "one": Colwise(), "two": Colwise()},
    ),
    "stacked": (
        models.Stack,
        {
            "blocks.norm": PrepareOutput(Replicate(), Replicate()),
            "blocks.mlp.w{1,3}": Colwise(),
            "blocks.mlp.w2": Rowwise(),
        },
    ),
    "multi-head attention": (
        models.Encoder,
        {
            "attention": PrepareInput(Replicate(), Replicate()),
            "attention.{query,key,value}": Colwise(),
            "attention.out": Rowwise(),
        },
    ),
    "general": (
        models.General,
        {
            "heads": Colwise(),
            "merge": Rowwise(output_layouts=Shard(1)),
            "up": Colwise(),
            "down": Rowwise(),
        },
    ),
    "homemade": (models.Homemade, {"norm": SequenceParallel(), "out": Rowwise()}),
    "grouped": (models.Grouped, {}),
}
"""Models and plans."""
MESHES = [tuple(mesh) for mesh in read_table(__file__, "meshes")["models"]]
"""Devices along dp, fsdp, cp and tp."""
PLACES = [
    pytest.param("containers", (1, 2, 1, 2)),
    pytest.param("grouped", (1, 2, 2, 2), marks=pytest.mark.wide),
]
"""Each case on one mesh, all meshes in turn; the first in the default suite."""
for index, name in enumerate(CASES):
    PLACES.append(pytest.param(name, MESHES[index % len(MESHES)], marks=pytest.mark.wide))


@functools.cache
def on_one_device(name):
    build, _ = CASES[name]
    return train_alone(lambda: build(nnx.Rngs(0)), [INPUTS.get(build, X)])


@pytest.mark.parametrize(("name", "mesh"), PLACES, ids=str)
def test_parallel_equals_one_device(name, mesh):
    build, plan = CASES[name]
    if mesh[2] > 1:
        plan = {"": ContextParallel(), **plan}
    make = lambda: build(nnx.Rngs(0))
    actual = train_on(mesh, make, plan, [INPUTS.get(build, X)], sharded=mesh != (2, 2, 1, 2))
    assert_same(actual, on_one_device(name))


def test_ids_that_are_not_there_give_what_flax_gives():
    """As do the scores of one row, which dp does not divide."""
    ids = np.array([[0, V - 1, -1, -V], [V, 3, -V - 1, 7]])
    build = lambda: nnx.Embed(V, D, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda embeds: [*(embed(ids) for embed in embeds), embeds[-1].attend(X[:1])])
    with use_mesh(dp=2, tp=2):
        found = run(
            [jaxtp.parallelize(build, plan) for plan in ({"": Colwise()}, {"": Rowwise()}, {})]
        )
    jax.tree.map(partial(assert_allclose, atol=1e-5), found, run([build()] * 3))


class RandomFeatures(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(5)
        self.frequencies = jax.random.normal(rngs.params(), (D, D))
        self.up = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return self.up(jnp.cos(x @ self.frequencies))


def test_plain_arrays_are_of_the_functions_seed():
    for model in (RandomFeatures, RandomFeatures()):
        found = jaxtp.parallelize(model, {"up": Colwise()}, mesh=jaxtp.make_mesh(fsdp=2, tp=2))
        assert_array_equal(found.frequencies, RandomFeatures().frequencies)
