"""Plans of parallel models that other systems took, and that did nothing or something else than
they said.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxtp
from jaxtp.errors import PlanError
from jaxtp.mesh import make_mesh
from jaxtp.plans import Colwise, Rowwise

D = 8
F = 16
PLAN = {"experts_up": Colwise(), "down": Rowwise()}


class Model(nnx.Module):
    def __init__(self, features=F):
        self.experts_up = nnx.Linear(D, features, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(features, D, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.relu(self.experts_up(x)))


def test_keras_hub_2810_a_pattern_that_matches_nothing_is_an_error():
    """https://github.com/keras-team/keras-hub/pull/2810: a rule for layers that had another name
    was passed over, and all experts lay whole on every device. Here each pattern names a module,
    and the error names the nearest.
    """
    split = jaxtp.parallelize(nnx.eval_shape(Model), PLAN, mesh=make_mesh(tp=4))
    assert "tp" in split.experts_up.kernel.get_metadata()["out_sharding"]
    with pytest.raises(PlanError, match=r"'up' matches no module; nearest: 'experts_up'"):
        jaxtp.parallelize(
            nnx.eval_shape(Model), {"up": Colwise(), "down": Rowwise()}, mesh=make_mesh(tp=4)
        )


def test_jax_26946_a_dim_that_devices_do_not_divide_is_not_left_whole():
    """https://github.com/jax-ml/jax/issues/26946: a constraint on a dim that the devices do not
    divide was dropped, and each held all of the array. Here sizes and nearest ones that fit are the
    error, of weights and of inputs.
    """
    with pytest.raises(
        PlanError, match=r"features of 6 .*not divisible by tp=4; nearest: 4 or 8, or tp 1, 2, 3, 6"
    ):
        jaxtp.parallelize(nnx.eval_shape(lambda: Model(6)), PLAN, mesh=make_mesh(tp=4))
    mesh = make_mesh(dp=2, tp=4)
    with jax.set_mesh(mesh):
        model = jaxtp.parallelize(Model(), PLAN)
        assert {shard.data.shape for shard in model.experts_up.kernel[...].addressable_shards} == {
            (D, F // 4)
        }
        layer = jaxtp.ColumnParallelLinear(D, F, rngs=nnx.Rngs(0))
        with pytest.raises(
            ValueError, match=r"dim 0 of shape \(3, 4, 8\) is 3, not divisible by dp=2"
        ):
            layer(jnp.ones((3, 4, D)))
