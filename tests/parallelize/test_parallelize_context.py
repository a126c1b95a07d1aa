"""Models with their sequences divided over cp: what moves, what is refused, and parts that have no sequence.

(That numbers are those of one device: test_parallelize.py.)"""

import flax_models as models
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_models import D, T, V
from flax_parity import assert_same, train_alone, train_on
from moves import assert_weights_alone_move, audit_gradients, sent
from support import sweep_of

import jaxtp
from jaxtp import Colwise, ContextParallel, PlanError, PrepareInput, Replicate, Rowwise, Shard

X = jax.random.normal(jax.random.key(1), (8, T, D))
IDS = jax.random.randint(jax.random.key(2), (1, T), 0, V)
WHOLE = {"": ContextParallel()}


class Pooled(nnx.Module):
    """A part whose sequences are divided, behind one that mixes positions, before one that has none."""

    def __init__(self, rngs):
        self.mix = nnx.Conv(D, D, (3,), rngs=rngs)
        self.body = models.FeedForward(rngs, use_bias=True)
        self.hidden, self.head = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(self.body(self.mix(x)).mean(axis=1))))


SPLIT = {"body.w{1,3}": Colwise(), "body.w2": Rowwise(), "hidden": Colwise(), "head": Rowwise(), "mix": Colwise()}


@pytest.mark.parametrize(
    ("plan", "mesh"),
    sweep_of(
        [[WHOLE, {"body": ContextParallel()}, WHOLE | SPLIT], [(1, 2, 2, 2), (2, 1, 4, 1)]],
    ),
    ids=str,
)
def test_layers_without_sequences_compute_as_they_did(plan, mesh):
    build = lambda: Pooled(nnx.Rngs(0))
    assert_same(train_on(mesh, build, plan, (X,)), train_alone(build, (X,)))


SPLIT_OVER_CP = jax.P(None, ("cp", "tp"))


@pytest.mark.parametrize("x", [X, pytest.param(X[:1], marks=pytest.mark.wide)], ids=["rows", "one row"])
def test_layers_of_one_position_move_weights_over_cp_and_no_activations(x):
    found = audit_gradients(
        (1, 1, 4, 1), lambda: jaxtp.parallelize(models.FeedForward(nnx.Rngs(0)), WHOLE), x.shape, SPLIT_OVER_CP
    )
    assert_weights_alone_move(found, "cp")


def test_over_tp_a_device_moves_its_tokens_alone():
    plan = {
        "": ContextParallel(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "w{1,3}": Colwise(),
        "w2": Rowwise(output_layouts=Shard(1)),
    }
    alone = plan | {"": PrepareInput(Shard(1), Replicate())}
    found = {
        cp: audit_gradients(
            (1, 1, cp, 2),
            lambda p=p: jaxtp.parallelize(models.FeedForward(nnx.Rngs(0)), p),
            X.shape,
            SPLIT_OVER_CP,
        )
        for cp, p in ((1, alone), (2, plan))
    }
    assert sent(found[2], "tp") == sent(found[1], "tp") / 2
    assert not found[2].added


def test_a_plan_that_says_nothing_of_cp():
    message = (
        r"cp=2 divides sequences, and the plan does not say in which modules; .*\{'': ContextParallel\(\), \.\.\.\}"
    )
    for plan in (None, {"feed_forward.w2": Rowwise()}):
        with pytest.raises(PlanError, match=message):
            jaxtp.parallelize(models.LlamaBlock(nnx.Rngs(0)), plan, mesh=jaxtp.make_mesh(cp=2))
    config = jaxtp.ModelConfig(d_model=D, num_heads=4, num_kv_heads=4, head_dim=4, d_ff=D)
    mesh = jaxtp.make_mesh(cp=2)
    with jax.set_mesh(mesh):
        jaxtp.parallelize(jaxtp.DecoderBlock(config, rngs=nnx.Rngs(0)))  # knows of cp itself


@pytest.mark.parametrize(
    ("inputs", "message"),
    {
        "no sequence": (
            X[:, 0],
            r"Linear as ContextParallel takes .* float32\[8, 16\], which has no sequence: use cp=1",
        ),
        "length": (X[:, :7], r"dim 1 of shape \(8, 7, 16\) is 7, not divisible by cp=2; nearest: 6 or 8"),
    }.values(),
    ids=["no sequence", "length"],
)
def test_inputs_that_cp_does_not_divide(inputs, message):
    with jax.set_mesh(jaxtp.make_mesh(cp=2)):
        model = jaxtp.parallelize(nnx.Linear(D, D, rngs=nnx.Rngs(0)), WHOLE)
        with pytest.raises(ValueError, match=message):
            model(inputs)


def test_one_row_is_divided_too_and_ids_are_a_sequence():
    with jax.set_mesh(jaxtp.make_mesh(cp=2, tp=2)):
        model = jaxtp.parallelize(nnx.Embed(V, D, rngs=nnx.Rngs(0)), WHOLE)
        found = nnx.jit(lambda model, ids: model(inputs=ids))(model, IDS)
    assert found.sharding.shard_shape(found.shape) == (1, T // 2, D)
    assert jnp.array_equal(found, nnx.Embed(V, D, rngs=nnx.Rngs(0))(IDS))
