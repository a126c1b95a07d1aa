"""Models that somebody wrote for one device, parallel by a plan: outputs, gradients and three updates are the same."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flax_models as models
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_models import D, T, V
from flax_parity import assert_same, train_alone, train_on
from support import sweep_of

import jaxtp
from jaxtp import Colwise, ContextParallel, PrepareInput, PrepareOutput, Replicate, Rowwise, SequenceParallel, Shard

B = 8
X = jax.random.normal(jax.random.key(1), (B, T, D))
IDS = jax.random.randint(jax.random.key(2), (B, T), 0, V)
IMAGES = jax.random.normal(jax.random.key(4), (B, 8, 8, 3))

LLAMA = {
    "tok_embeddings": Rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "layers.*.attention.w{q,k,v}": Colwise(),
    "layers.*.attention.wo": Rowwise(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "layers.*.feed_forward.w{1,3}": Colwise(),
    "layers.*.feed_forward.w2": Rowwise(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": Colwise(input_layouts=Shard(1), output_layouts=Replicate()),
}


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, a plan."""

    build: Callable[[nnx.Rngs], nnx.Module]
    inputs: tuple[Any, ...] = (X,)
    plan: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case(functools.partial(models.Llama, num_layers=1), (IDS,), LLAMA),
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
FIRST = ("llama", (1, 2, 2, 2))
"""The model and mesh of the default suite."""


@functools.cache
def on_one_device(name):
    return train_alone(lambda: CASES[name].build(nnx.Rngs(0)), CASES[name].inputs)


MESHES = [(1, 1, 1), (1, 1, 8), (1, 2, 4), (2, 2, 2), (8, 1, 1), (1, 8, 1)]
OVER_CP = [(1, 2, 2, 2)]
"""Devices along dp, fsdp, cp and tp."""


@pytest.mark.parametrize(("name", "mesh"), sweep_of([CASES, MESHES + OVER_CP], FIRST), ids=str)
def test_parallel_equals_one_device(name, mesh):
    case = CASES[name]
    plan = {"": ContextParallel(), **case.plan} if mesh in OVER_CP else case.plan
    actual = train_on(mesh, lambda: case.build(nnx.Rngs(0)), plan, case.inputs, sharded=mesh != (2, 2, 2))
    assert_same(actual, on_one_device(name))


@pytest.mark.parametrize("style", [Colwise(), Rowwise(), None], ids=str)
def test_ids_that_are_not_there_give_what_flax_gives(style):
    ids = jnp.array([[0, V - 1, -1, -V], [V, 3, -V - 1, 7]])
    with jax.set_mesh(jaxtp.make_mesh(dp=2, tp=4)):
        embed = jaxtp.parallelize(nnx.Embed(V, D, rngs=nnx.Rngs(0)), {"": style} if style else {})
        found = nnx.jit(lambda embed, ids: embed(ids))(embed, ids)
    expected = nnx.Embed(V, D, rngs=nnx.Rngs(0))(ids)
    assert jnp.array_equal(found, expected, equal_nan=True)


def test_what_was_gathered_once_stands_for_the_array():
    """A module whose input is shared by column layers may do with it what it did before."""

    class Curious(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(D, D, rngs=rngs)

        def __call__(self, x):
            assert x.shape == (B, T, D)
            assert len(x) == B
            halves = jnp.concatenate([x[..., :8], x.reshape(B, T, D)[..., 8:]], axis=-1)
            return -x + 2 * self.up(x) - x * x + x.mean() + halves @ jnp.ones((D, D)) + (x > 0) + jax.nn.gelu(x) / 2

    plan = {"": PrepareInput(Shard(1), Replicate()), "up": Colwise()}
    expected = Curious(nnx.Rngs(0))(X)
    with jax.set_mesh(jaxtp.make_mesh(dp=2, tp=4)):
        found = nnx.jit(lambda model, x: model(x))(jaxtp.parallelize(lambda: Curious(nnx.Rngs(0)), plan), X)
    assert jnp.allclose(found, expected, atol=1e-5)


class RandomFeatures(nnx.Module):
    def __init__(self, rngs):
        self.frequencies = jax.random.normal(rngs.params(), (D, D))
        self.up = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return self.up(jnp.cos(x @ self.frequencies))


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 4)], ids=str)
def test_plain_arrays_are_of_the_functions_seed(sizes):
    alone = RandomFeatures(nnx.Rngs(5))
    mesh = jaxtp.make_mesh(*sizes)
    for model in (lambda: RandomFeatures(nnx.Rngs(5)), RandomFeatures(nnx.Rngs(5))):
        found = jaxtp.parallelize(model, {"up": Colwise()}, mesh=mesh)
        assert jnp.array_equal(found.frequencies, alone.frequencies)
