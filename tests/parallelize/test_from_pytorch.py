"""Each row of the table "from PyTorch" in the README."""

import flax_models as models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_models import D, F, T, V

import jaxtp
from jaxtp import Colwise, PrepareInput, PrepareInputOutput, PrepareOutput, Replicate, Rowwise, SequenceParallel, Shard
from jaxtp.analysis.audit import audit

B = 8
X = jax.random.normal(jax.random.key(1), (B, T, D))
IDS = jax.random.randint(jax.random.key(2), (B, T), 0, V)
LINEAR = lambda: nnx.Linear(D, F, rngs=nnx.Rngs(0))
EMBED = lambda: nnx.Embed(V, D, rngs=nnx.Rngs(0))
NORM = lambda: nnx.LayerNorm(D, rngs=nnx.Rngs(0))
BATCH = ("dp", "fsdp")

ROWS = {
    "ColwiseParallel()": (LINEAR, Colwise(), X, jax.P("fsdp", "tp"), jax.P(BATCH, None, "tp")),
    "ColwiseParallel(input_layouts=Shard(1))": (
        LINEAR,
        Colwise(input_layouts=Shard(1)),
        X,
        jax.P("fsdp", "tp"),
        jax.P(BATCH, None, "tp"),
    ),
    "ColwiseParallel(output_layouts=Replicate())": (
        LINEAR,
        Colwise(output_layouts=Replicate()),
        X,
        jax.P("fsdp", "tp"),
        jax.P(BATCH),
    ),
    "RowwiseParallel()": (LINEAR, Rowwise(), X, jax.P("tp", "fsdp"), jax.P(BATCH)),
    "RowwiseParallel(output_layouts=Shard(1))": (
        LINEAR,
        Rowwise(output_layouts=Shard(1)),
        X,
        jax.P("tp", "fsdp"),
        jax.P(BATCH, "tp"),
    ),
    "RowwiseParallel on nn.Embedding": (
        EMBED,
        Rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        IDS,
        jax.P("tp", "fsdp"),
        jax.P(BATCH, "tp"),
    ),
    "ColwiseParallel on nn.Embedding": (EMBED, Colwise(), IDS, jax.P("fsdp", "tp"), jax.P(BATCH, None, "tp")),
    "SequenceParallel()": (NORM, SequenceParallel(), X, jax.P("fsdp"), jax.P(BATCH, "tp")),
    "fully_shard": (LINEAR, None, X, jax.P(None, "fsdp"), jax.P(BATCH)),
    "replicate": (LINEAR, Replicate(), X, jax.P(), jax.P(BATCH)),
}


def splits(array, spec):
    return array.sharding.is_equivalent_to(jax.NamedSharding(array.sharding.mesh, spec), array.ndim)


@pytest.mark.parametrize("row", ROWS)
def test_a_style_on_one_module(row):
    build, style, x, stored, leaves = ROWS[row]
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        module = jaxtp.parallelize(build, {} if style is None else {"": style})
        y = nnx.jit(lambda module, x: module(x))(module, x)
    weight = next(getattr(module, name) for name in ("kernel", "embedding", "scale") if hasattr(module, name))[...]
    assert splits(weight, stored)
    assert splits(y, leaves)
    np.testing.assert_allclose(y, build()(x), atol=1e-5)


def test_the_plan_of_the_usual_llama_tutorial():
    """`parallelize_module` of the model, then of each block, is one plan with paths from the model."""
    block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": Colwise(),
        "attention.wk": Colwise(),
        "attention.wv": Colwise(),
        "attention.wo": Rowwise(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": Colwise(),
        "feed_forward.w2": Rowwise(output_layouts=Shard(1)),
        "feed_forward.w3": Colwise(),
    }
    plan = {
        "tok_embeddings": Rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": Colwise(input_layouts=Shard(1), output_layouts=Replicate()),
        **{f"layers.*.{path}": style for path, style in block.items()},
    }
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        model = jaxtp.parallelize(lambda: models.Llama(nnx.Rngs(0), num_layers=1), plan)
        logits = nnx.jit(lambda model: model(IDS))(model)
    expected = nnx.jit(lambda model: model(IDS))(models.Llama(nnx.Rngs(0), num_layers=1))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


class Keyword(nnx.Module):
    """Takes its input by keyword."""

    def __init__(self):
        self.up = nnx.Linear(D, F, rngs=nnx.Rngs(0))

    def __call__(self, scale, *, x):
        return scale * self.up(x), x


def test_prepare_module_input_by_keyword_and_output():
    inputs = PrepareInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()})
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        one = jaxtp.parallelize(Keyword, {"": inputs, "up": Colwise()})
        y, seen = nnx.jit(lambda m, x: jax.tree.map(jnp.asarray, m(2.0, x=x)))(one, X)[:2]
        outputs = PrepareOutput(output_layouts=(None, None), desired_output_layouts=(Shard(1), None))
        z, _ = nnx.jit(lambda m, x: m(2.0, x=x))(jaxtp.parallelize(Keyword, {"": outputs}), X)
    assert splits(z, jax.P(BATCH, "tp"))
    np.testing.assert_allclose(y, z, atol=1e-5)
    np.testing.assert_array_equal(jnp.asarray(seen), X)


def test_prepare_module_input_output():
    style = PrepareInputOutput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), desired_output_layouts=Shard(1)
    )
    plan = {"": style, "w{1,3}": Colwise(), "w2": Rowwise()}
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        y = nnx.jit(lambda m, x: m(x))(jaxtp.parallelize(lambda: models.FeedForward(nnx.Rngs(0)), plan), X)
    assert splits(y, jax.P(BATCH, "tp"))
    np.testing.assert_allclose(y, models.FeedForward(nnx.Rngs(0))(X), atol=1e-5)


def test_mixed_precision_is_the_dtype_of_the_module():
    """`MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`: gathered in one, summed in the other."""
    mesh = jaxtp.make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        build = lambda: nnx.Linear(D, F, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        graph, state = nnx.split(jaxtp.parallelize(build))
    loss = lambda state, x: nnx.merge(graph, state)(x).astype(jnp.float32).sum()
    found = audit(jax.jit(jax.grad(loss)), state, X, mesh=mesh)
    assert {(c.kind, c.dtype) for c in found.written} == {("all-gather", "bfloat16"), ("reduce-scatter", "float32")}


def test_loss_parallel_is_a_head_that_is_left_split():
    """With `Colwise()` on the head the logits stay split over the vocabulary, and so does the loss on global arrays."""
    mesh = jaxtp.make_mesh(tp=4)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(jaxtp.parallelize(lambda: nnx.Linear(D, V, rngs=nnx.Rngs(0)), {"": Colwise()}))

    def loss(state, x):
        logits = nnx.merge(graph, state)(x)
        picked = jnp.sum(jnp.where(jnp.arange(V) == IDS[..., None], logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    found = audit(jax.jit(jax.grad(loss)), state, X, mesh=mesh)
    assert all(c.shape[-1:] != (V,) for c in found.realised)


def test_gradient_clipping_is_optax():
    """`clip_grad_norm_` over DTensors: the norm of global arrays."""
    norm_of = nnx.jit(lambda m: optax.tree.norm(nnx.as_pure(nnx.grad(lambda m: (m(X) ** 2).sum())(m))))
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        norm = norm_of(jaxtp.parallelize(LINEAR, {"": Colwise()}))
    alone = norm_of(LINEAR())
    np.testing.assert_allclose(norm, alone, rtol=1e-5)


def test_full_tensor_is_the_array_itself():
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        model = jaxtp.parallelize(LINEAR(), {"": Colwise()})
    np.testing.assert_array_equal(model.kernel[...], LINEAR().kernel[...])
    np.testing.assert_allclose(model(X), LINEAR()(X), atol=1e-5)  # without a mesh in context it is as it was
    assert isinstance(model, nnx.Linear)


def test_fsdp_can_be_left_out():
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        model = jaxtp.parallelize(LINEAR, {"": Colwise()}, fsdp=False)
    assert model.kernel[...].sharding.spec == jax.P(None, "tp")
