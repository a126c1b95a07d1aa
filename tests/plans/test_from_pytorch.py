"""Each row of the table "from PyTorch" in the README."""

import flax_models as models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_models import D, F, T, V
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

import jaxtp
from jaxtp import parallelize
from jaxtp.analysis.audit import audit
from jaxtp.plans import (
    Colwise,
    PrepareInput,
    PrepareInputOutput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Shard,
)

B = 8
RANDOM = default_rng(1)
X = jnp.asarray(RANDOM.standard_normal((B, T, D), np.float32))
IDS = jnp.asarray(RANDOM.integers(0, V, (B, T), np.int32))
LINEAR = lambda: nnx.Linear(D, F, rngs=nnx.Rngs(0))
EMBED = lambda: nnx.Embed(V, D, rngs=nnx.Rngs(0))
NORM = lambda: nnx.LayerNorm(D, rngs=nnx.Rngs(0))
HEADS = lambda: nnx.LinearGeneral(D, (2, 8), rngs=nnx.Rngs(0))
BATCH = ("dp", "fsdp")
WHOLE = jax.P(BATCH)
SEQUENCE = jax.P(BATCH, "tp")
FEATURES = jax.P(BATCH, None, "tp")
COLUMNS = jax.P("fsdp", "tp")
ROWS = jax.P("tp", "fsdp")

STYLES = {
    "ColwiseParallel()": (LINEAR, Colwise(), COLUMNS, FEATURES),
    "ColwiseParallel(input_layouts=Shard(1))": (
        LINEAR,
        Colwise(input_layouts=Shard(1)),
        COLUMNS,
        FEATURES,
    ),
    "ColwiseParallel(output_layouts=Replicate())": (
        LINEAR,
        Colwise(output_layouts=Replicate()),
        COLUMNS,
        WHOLE,
    ),
    "RowwiseParallel()": (LINEAR, Rowwise(), ROWS, WHOLE),
    "RowwiseParallel(output_layouts=Shard(1))": (
        LINEAR,
        Rowwise(output_layouts=Shard(1)),
        ROWS,
        SEQUENCE,
    ),
    "RowwiseParallel on nn.Embedding": (EMBED, Rowwise(Replicate(), Shard(1)), ROWS, SEQUENCE),
    "ColwiseParallel on nn.Embedding": (EMBED, Colwise(), COLUMNS, FEATURES),
    "SequenceParallel()": (NORM, SequenceParallel(), jax.P("fsdp"), SEQUENCE),
    "SequenceParallel, and features": (
        NORM,
        SequenceParallel(output_layouts=Shard(-1)),
        jax.P("fsdp"),
        FEATURES,
    ),
    "ColwiseParallel of heads": (HEADS, Colwise(), COLUMNS, FEATURES),
    "fully_shard": (LINEAR, None, jax.P(None, "fsdp"), WHOLE),
    "replicate": (LINEAR, Replicate(), jax.P(), WHOLE),
}
"""Modules, styles, and how the weight and the result are split."""


@pytest.fixture
def mesh():
    mesh = jaxtp.make_mesh(fsdp=2, tp=2)
    with jax.set_mesh(mesh):
        yield mesh


def splits(array, spec):
    return array.sharding.is_equivalent_to(jax.NamedSharding(array.sharding.mesh, spec), array.ndim)


@nnx.jit
def run(module, x):
    return module(x)


@pytest.mark.parametrize("row", STYLES)
def test_a_style_on_one_module(row, mesh):
    build, style, stored, leaves = STYLES[row]
    x = X
    if build is EMBED:
        x = IDS
    module = parallelize(build, {"": style} if style else {})
    y = run(module, x)
    weight = max(jax.tree.leaves(nnx.state(module, nnx.Param)), key=np.ndim)
    assert splits(weight, stored)
    assert splits(y, leaves)
    assert_allclose(y, build()(x), atol=1e-5)


class Keyword(nnx.Module):
    """Takes its input by keyword."""

    def __init__(self):
        self.up = LINEAR()

    def __call__(self, scale, *, x):
        return scale * self.up(x), x


def test_prepare_module_input_by_keyword_and_output(mesh):
    inputs = PrepareInput(
        input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}
    )
    outputs = PrepareOutput(output_layouts=(None, None), desired_output_layouts=(Shard(1), None))
    call = nnx.jit(lambda model, x: jax.tree.map(jnp.asarray, model(2.0, x=x)))
    y, seen = call(parallelize(Keyword, {"": inputs, "up": Colwise()}), X)
    z, _ = call(parallelize(Keyword, {"": outputs}), X)
    assert splits(z, SEQUENCE)
    assert_allclose(y, z, atol=1e-5)
    assert_array_equal(seen, X)


def test_prepare_module_input_output(mesh):
    layouts = {
        "input_layouts": Shard(1),
        "desired_input_layouts": Replicate(),
        "desired_output_layouts": Shard(1),
    }
    plan = {"": PrepareInputOutput(**layouts), "w{1,3}": Colwise(), "w2": Rowwise()}
    build = lambda: models.FeedForward(nnx.Rngs(0))
    y = run(parallelize(build, plan), X)
    assert splits(y, SEQUENCE)
    assert_allclose(y, run(build(), X), atol=1e-5)


def audit_gradient(mesh, layer, plan, loss):
    """Audits the gradient of a loss of a layer's output."""
    with jax.set_mesh(mesh):
        graph, state = nnx.split(parallelize(layer, plan))
    return audit(
        jax.jit(jax.grad(lambda state, x: loss(nnx.merge(graph, state)(x)))), state, X, mesh=mesh
    )


def test_mixed_precision_is_the_dtype_of_the_module():
    """`MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`: gathered in one,
    summed in the other.
    """
    layer = lambda: nnx.Linear(D, F, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    found = audit_gradient(
        jaxtp.make_mesh(fsdp=8), layer, {}, lambda y: y.astype(jnp.float32).sum()
    )
    assert {(c.kind, c.dtype) for c in found.written} == {
        ("all-gather", "bfloat16"),
        ("reduce-scatter", "float32"),
    }


def test_loss_parallel_is_a_head_that_is_left_split():
    """With `Colwise()` on the head the logits stay split over the vocabulary, and so does the
    loss on global arrays.
    """

    def loss(logits):
        picked = jnp.sum(jnp.where(jnp.arange(V) == IDS[..., None], logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    head = lambda: nnx.Linear(D, V, rngs=nnx.Rngs(0))
    found = audit_gradient(jaxtp.make_mesh(tp=4), head, {"": Colwise()}, loss)
    assert all(c.shape[-1:] != (V,) for c in found.realised)


def test_gradient_clipping_is_optax(mesh):
    """`clip_grad_norm_` over DTensors: the norm of global arrays."""
    norm_of = nnx.jit(
        lambda m: optax.tree.norm(nnx.as_pure(nnx.grad(lambda m: (m(X) ** 2).sum())(m)))
    )
    assert_allclose(norm_of(parallelize(LINEAR, {"": Colwise()})), norm_of(LINEAR()), rtol=1e-5)


def test_full_tensor_is_the_array_itself():
    model = parallelize(LINEAR(), {"": Colwise()}, mesh=jaxtp.make_mesh(fsdp=2, tp=2))
    assert_array_equal(model.kernel[...], LINEAR().kernel[...])
    # Without a mesh in context it is as it was
    assert_allclose(model(X), LINEAR()(X), atol=1e-5)
    assert isinstance(model, nnx.Linear)
