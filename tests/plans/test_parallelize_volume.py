"""What parallel models of others move and hold, in the compiled program."""

import math

import flax_models as models
import jax
import optax
import pytest
from flax import nnx
from flax_models import D, F, H, N, T
from moves import assert_weights_alone_move, audit_gradients, sent
from support import use_mesh
from tables import read_table

import jaxtp
from jaxtp import parallelize
from jaxtp.analysis.audit import audit
from jaxtp.layers import DecoderBlock
from jaxtp.mesh import AXES, STORAGE, MeshError
from jaxtp.plans import Colwise, PrepareInput, Replicate, Rowwise, SequenceParallel, Shard
from jaxtp.plans.parallelize import arrays_of

B = 8
COLUMNS = {"attention.w{q,k,v}": Colwise(), "feed_forward.w{1,3}": Colwise()}


def plan_of(layout):
    """Returns a plan of a block whose activations between branches are whole, or split along the
    sequence.
    """
    rows = Rowwise(output_layouts=layout)
    inputs = PrepareInput(layout, Replicate())
    plan = {
        "attention": inputs,
        "feed_forward": inputs,
        "attention.wo": rows,
        "feed_forward.w2": rows,
        **COLUMNS,
    }
    return plan | {"*_norm": SequenceParallel()} if layout == Shard(1) else plan


SEQUENCE = plan_of(Shard(1))
ALL_REDUCE = plan_of(Replicate())
GIVEN = (B, T, D)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mesh", "sequence", "kv_heads"),
    read_table(__file__, "meshes")["volume"],
)
def test_a_stock_llama_block_moves_over_tp_what_our_own_does(mesh, sequence, kv_heads):
    config = jaxtp.ModelConfig(
        d_model=D,
        num_heads=N,
        num_kv_heads=kv_heads,
        head_dim=H,
        d_ff=F,
        sequence_parallel=sequence,
    )
    plan = SEQUENCE if sequence else ALL_REDUCE
    build = lambda: parallelize(models.LlamaBlock(nnx.Rngs(0), kv_heads=kv_heads), plan)
    ours = audit_gradients(mesh, lambda: DecoderBlock(config, rngs=nnx.Rngs(0)), GIVEN)
    stock = audit_gradients(mesh, build, GIVEN)
    if kv_heads == N:
        assert sent(stock, "tp") == sent(ours, "tp")
        assert not [c for c in stock.added if math.prod(c.shape) > 1]
    # Heads shared by devices: the compiler moves parts of them, our own layer gathers weights
    else:
        assert sent(stock, "tp") <= 1.25 * sent(ours, "tp")


@pytest.mark.wide
def test_without_a_shared_input_each_projection_reduces_for_itself():
    def over_tp(plan):
        build = lambda: parallelize(models.LlamaBlock(nnx.Rngs(0)), plan)
        return sent(audit_gradients((1, 1, 4), build, GIVEN), "tp")

    shared = over_tp(ALL_REDUCE)
    assert shared == 4 * 2 * 3 / 4 * B * T * D * 4
    assert (
        over_tp({pattern: style for pattern, style in ALL_REDUCE.items() if "w" in pattern})
        >= 1.25 * shared
    )


def test_fsdp_gathers_weights_and_scatters_gradients_and_moves_nothing_else():
    found = audit_gradients((1, 4, 1), lambda: parallelize(models.LlamaBlock(nnx.Rngs(0))), GIVEN)
    assert_weights_alone_move(found, "fsdp")


def test_a_module_of_ones_own_gathers_too():
    found = audit_gradients((1, 4, 1), lambda: parallelize(models.Homemade(nnx.Rngs(0))), GIVEN)
    assert not {c.kind for c in found.realised if len(c.shape) == 3}, "an activation moves"
    listed = jax.tree.leaves(found.compiled.output_shardings[0]["kernels"])
    assert [grad.spec for grad in listed] == [jax.P("fsdp")] * 2, (
        "a gradient is split as its parameter in a list is"
    )


def test_the_optimizer_moves_nothing():
    mesh = jaxtp.make_mesh(fsdp=2, tp=4)
    with jax.set_mesh(mesh):
        model = parallelize(lambda: models.LlamaBlock(nnx.Rngs(0)), SEQUENCE)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        moments = nnx.to_flat_state(nnx.state(optimizer))
        graph, state = nnx.split((model, optimizer))

    def update(state, grads):
        model, optimizer = nnx.merge(graph, state)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    found = audit(jax.jit(update, donate_argnums=0), state, nnx.state(model, nnx.Param), mesh=mesh)
    assert not found.realised
    kernels = [v for path, v in moments if path[-2:] == ("wq", "kernel")]
    assert len(kernels) == 2
    assert all(v[...].sharding.spec == jax.P(STORAGE, "tp") for v in kernels)


def wide():
    return nnx.Linear(512, 2048, use_bias=False, rngs=nnx.Rngs(0))


def test_initialised_sharded():
    with use_mesh(1, 2, 4):
        kernel = parallelize(wide, {"": Colwise()}).kernel[...]
        create = jax.jit(lambda: arrays_of(wide), out_shardings=(kernel.sharding,))
    assert kernel.addressable_shards[0].data.nbytes * 8 == kernel.nbytes
    memory = create.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes < 1.01 * kernel.nbytes / 8
    assert memory.temp_size_in_bytes < kernel.nbytes / 2, "more than a part of it is there at once"


def test_a_mesh_that_is_not_there():
    mesh = jax.sharding.AbstractMesh((2, 4, 1, 64), AXES)
    kernel = parallelize(nnx.eval_shape(wide), {"": Colwise()}, mesh=mesh).kernel
    assert kernel.sharding.shard_shape(kernel.shape) == (128, 32)
    for model in (wide, wide()):
        with pytest.raises(MeshError, match=r"tp 64 is abstract.* nnx.eval_shape\(build\)"):
            parallelize(model, {"": Colwise()}, mesh=mesh)
