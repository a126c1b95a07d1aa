"""Models with their sequences divided over cp: what moves, what is refused, and parts that have no
sequence.

(That numbers are those of one device: test_parallelize.py.)
"""

import flax_models as models
import jax
import numpy as np
import pytest
from flax import nnx
from flax_models import D, T, V
from flax_parity import assert_same, train_alone, train_on
from moves import assert_weights_alone_move, audit_gradients, sent
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from support import use_mesh

import jaxtp
from jaxtp.errors import PlanError
from jaxtp.layers import DecoderBlock
from jaxtp.plans import Colwise, ContextParallel, PrepareInput, Replicate, Rowwise, Shard

X = default_rng(1).standard_normal((8, T, D), np.float32)
IDS = default_rng(2).integers(0, V, (1, T), np.int32)
WHOLE = {"": ContextParallel()}


class Pooled(nnx.Module):
    """A part whose sequences are divided, behind one that mixes positions, before one that has
    none.
    """

    def __init__(self, rngs):
        self.mix = nnx.Conv(D, D, (3,), rngs=rngs)
        self.norm = nnx.LayerNorm(D, reduction_axes=(-2, -1), rngs=rngs)
        self.body = models.FeedForward(rngs, use_bias=True)
        self.hidden = nnx.Linear(D, 2 * D, rngs=rngs)
        self.head = nnx.Linear(2 * D, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(self.body(self.norm(self.mix(x))).mean(axis=1))))


SPLIT = {
    "body.w{1,3}": Colwise(),
    "body.w2": Rowwise(),
    "hidden": Colwise(),
    "head": Rowwise(),
    "mix": Colwise(),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        (WHOLE, (2, 1, 4, 1)),
        ({"body": ContextParallel()}, (2, 1, 4, 1)),
        (WHOLE | SPLIT, (1, 2, 2, 2)),
    ],
    ids=["whole", "body", "split"],
)
def test_layers_without_sequences_compute_as_they_did(plan, mesh):
    build = lambda: Pooled(nnx.Rngs(0))
    assert_same(train_on(mesh, build, plan, (X,)), train_alone(build, (X,)))


SPLIT_OVER_CP = jax.P(None, ("cp", "tp"))


def test_layers_of_one_position_move_weights_over_cp_and_no_activations():
    """Of a batch of one row."""
    build = lambda: jaxtp.parallelize(models.FeedForward(nnx.Rngs(0)), WHOLE)
    assert_weights_alone_move(audit_gradients((1, 1, 4, 1), build, (1, T, D), SPLIT_OVER_CP), "cp")


def test_over_tp_a_device_moves_its_tokens_alone():
    plan = {
        "": ContextParallel(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "w{1,3}": Colwise(),
        "w2": Rowwise(output_layouts=Shard(1)),
    }
    alone = plan | {"": PrepareInput(Shard(1), Replicate())}

    def audited(cp, plan):
        build = lambda: jaxtp.parallelize(models.FeedForward(nnx.Rngs(0)), plan)
        return audit_gradients((1, 1, cp, 2), build, X.shape, SPLIT_OVER_CP)

    found = audited(2, plan)
    assert sent(found, "tp") == sent(audited(1, alone), "tp") / 2
    assert not found.added


def test_a_plan_that_does_not_say_where_cp_divides_is_refused():
    mesh = jaxtp.make_mesh(cp=2)
    for plan in (None, {"feed_forward.w2": Rowwise()}):
        with pytest.raises(
            PlanError, match=r"cp=2 .*the plan does not say .*\{'': ContextParallel\(\), \.\.\.\}"
        ):
            jaxtp.parallelize(
                nnx.eval_shape(lambda: models.LlamaBlock(nnx.Rngs(0))), plan, mesh=mesh
            )
    config = jaxtp.ModelConfig(d_model=D, num_heads=4, num_kv_heads=4, head_dim=4, d_ff=D)
    with jax.set_mesh(mesh):  # our own block knows of cp itself
        jaxtp.parallelize(nnx.eval_shape(lambda: DecoderBlock(config, rngs=nnx.Rngs(0))))


def test_inputs_that_cp_does_not_divide_are_refused():
    with use_mesh(cp=2):
        model = jaxtp.parallelize(nnx.Linear(D, D, rngs=nnx.Rngs(0)), WHOLE)
        with pytest.raises(ValueError, match=r"float32\[8, 16\], which has no sequence: use cp=1"):
            model(X[:, 0])
        with pytest.raises(
            ValueError, match=r"dim 1 of shape \(8, 7, 16\) is 7, .* cp=2; nearest: 6 or 8"
        ):
            model(X[:, :7])


def test_one_row_is_divided_too_and_ids_are_a_sequence():
    with use_mesh(cp=2, tp=2):
        model = jaxtp.parallelize(nnx.Embed(V, D, rngs=nnx.Rngs(0)), WHOLE)
        found = nnx.jit(lambda model, ids: model(inputs=ids))(model, IDS)
    assert found.sharding.shard_shape(found.shape) == (1, T // 2, D)
    assert_array_equal(found, nnx.Embed(V, D, rngs=nnx.Rngs(0))(IDS))
