"""What `explain` says of models whose answer is known."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_models import FeedForward
from support import decoder, use_mesh
from tables import read_table

import jaxtp
from jaxtp import explain
from jaxtp.errors import MeshError, PlanError
from jaxtp.plans import Colwise, ContextParallel, PrepareInput, PrepareOutput, Replicate, Rowwise
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import costs_of_step

WIDTH = 16
HIDDEN = 32
ROWS = 8
LENGTH = 6
X = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32)
REPLICATE = Replicate()


class Block(FeedForward):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + super().__call__(self.norm(x))


def build(depth=3):
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*(Block(rngs) for _ in range(depth)))


build_two = partial(build, 2)
COLUMN = {"layers.*.w2": Colwise()}
PAIR = {"layers.*.w{1,3}": Colwise(), "layers.*.w2": Rowwise()}
SHARED = PAIR | {"layers.*.norm": PrepareOutput(REPLICATE, REPLICATE)}
OVER_TP = {"tp": 4}
OVER_FSDP_AND_TP = {"fsdp": 2, "tp": 4}


def explained(plan, sizes=OVER_TP, make=build, **options):
    return explain(make, X, plan=plan, mesh=sizes, **options)


def bytes_of_shards(model):
    shards = [
        (each.sharding.shard_shape(each.shape), each.dtype)
        for each in jax.tree.leaves(nnx.state(model))
    ]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def sent(times, parts, sizes):
    """Bytes of so many all-reduces of an activation over tp."""
    return times * 2 * (sizes["tp"] - 1) / sizes["tp"] * ROWS * LENGTH * WIDTH * 4 / parts


@pytest.mark.parametrize(
    "sizes", [{"tp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 8}], ids=str
)
def test_bytes_stored_and_sent_are_those_by_hand(sizes):
    found = explained(SHARED, sizes)
    matrices = 3 * 3 * WIDTH * HIDDEN * 4 / (sizes["tp"] * sizes.get("fsdp", 1))
    assert found.bytes_per_device == matrices + 3 * 2 * WIDTH * 4 / sizes.get("fsdp", 1)
    assert found.sent("tp") == pytest.approx(
        sent(3 * 2, sizes.get("dp", 1) * sizes.get("fsdp", 1), sizes)
    )
    assert not found.notes
    table = " ".join(str(found).split())
    assert "layers.*.w1 x 3 Linear Colwise()" in table
    assert "layers.*.norm" in table
    assert "no sum over tp" not in table, "the norm before the first layer learns"


@pytest.mark.wide
def test_over_cp_weights_are_stored_and_tokens_divided():
    sizes = {"fsdp": 2, "cp": 2, "tp": 2}
    found = explained(SHARED | {"": ContextParallel()}, sizes, compiled=True)
    matrices = 3 * 3 * WIDTH * HIDDEN * 4 / 2
    norms = 3 * 2 * WIDTH * 4
    assert found.bytes_per_device == (matrices + norms) / 4
    assert found.sent("tp") == pytest.approx(sent(3 * 2, 4, sizes))
    assert found.sent("cp") == 2 * 3 / 4 * (matrices + norms)
    assert not found.added
    assert not found.notes
    assert "tp fsdp+cp" in str(found)
    with pytest.raises(
        PlanError, match="cp=2 divides sequences, and the plan does not say in which modules"
    ):
        explained(SHARED, sizes)


@pytest.mark.wide
def test_a_parallel_model_is_explained_on_its_mesh_and_on_any_other():
    with use_mesh(**OVER_FSDP_AND_TP):
        model = jaxtp.parallelize(build, SHARED)
        here = explain(model, X)
    assert here == explained(SHARED, OVER_FSDP_AND_TP)
    assert here.bytes_per_device == bytes_of_shards(model)
    other = {"tp": 16, "fsdp": 4}
    assert explain(model, X, mesh=other) == explained(SHARED, other)
    assert type(model.layers[0].w1).__call__ is not nnx.Linear.__call__, "the model stays as it was"


class Held(nnx.Module):
    """Has parameters in a container."""

    def __init__(self):
        self.matrices = nnx.List([nnx.Param(jnp.ones((WIDTH, 6))), nnx.Param(jnp.ones((6, WIDTH)))])

    def __call__(self, x):
        return x @ self.matrices[0][...] @ self.matrices[1][...]


def test_parameters_in_a_container_are_split_anew_for_another_mesh():
    """fsdp 4 splits the dims of 16, and fsdp 3 those of 6."""
    with use_mesh(fsdp=4):
        model = jaxtp.parallelize(Held)
    assert explain(model, X, mesh={"fsdp": 3}) == explain(Held, X, mesh={"fsdp": 3})


class Tables(nnx.Module):
    """Has arrays that are no variables."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.WeightNorm(nnx.Linear(HIDDEN, WIDTH, rngs=rngs), rngs=rngs)
        self.tables = nnx.data({"mask": jnp.ones(HIDDEN), "more": [jnp.ones(WIDTH)]})
        self.mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, x):
        return self.down(self.up(x) * self.tables["mask"]) @ self.mask + self.tables["more"][0]


def test_arrays_that_are_no_variables_are_explained():
    plan = {"up": Colwise()}
    model = Tables()
    found = explained(plan, OVER_FSDP_AND_TP, Tables)
    assert found == explained(plan, OVER_FSDP_AND_TP, model)
    with use_mesh(**OVER_FSDP_AND_TP):
        assert explain(jaxtp.parallelize(model, plan), X) == found
    proposed = jaxtp.propose_plan(Tables, X, mesh=OVER_FSDP_AND_TP, report=None)
    assert proposed == plan | {"down.layer_instance": Rowwise()}


@pytest.mark.wide
def test_collectives_of_the_compiler_are_told_from_those_of_layers():
    found = explained(COLUMN, make=build_two, compiled=True)
    assert {one.axes for one in found.added} == {("tp",)}, (
        "the residual stream has to be brought together"
    )
    assert not explained(SHARED, make=build_two, compiled=True).added


def test_without_inputs_only_storage_is_explained():
    found = explain(build, plan=SHARED, mesh=OVER_TP)
    assert not found.traffic
    assert found.rows == explained(SHARED).rows


SMALL = jaxtp.ModelConfig(num_layers=1, d_model=32, head_dim=4, d_ff=32, vocab_size=64)


def decoder_on(config, sizes, rows=8, length=32):
    """Explains a decoder on a mesh."""
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return explain(decoder(config), ids, mesh=sizes)


@pytest.mark.wide
def test_our_own_decoder_has_the_split_it_declares():
    """Frozen weights beside adapters too."""
    config = replace(SMALL, lora=jaxtp.LoraConfig(rank=4))
    found = decoder_on(config, OVER_FSDP_AND_TP)
    with use_mesh(**OVER_FSDP_AND_TP):
        abstract = nnx.eval_shape(decoder(config))
    assert found.bytes_per_device == bytes_of_shards(abstract)
    assert found.sent("tp") > 0


def test_a_second_plan_and_a_missing_mesh_are_refused():
    with use_mesh(tp=2):
        model = jaxtp.parallelize(build, PAIR)
        with pytest.raises(PlanError, match="already parallel"):
            explain(model, X, plan=SHARED)
    with pytest.raises(MeshError, match="needs a mesh"):
        explain(build, X)


NO_MESHES = read_table(__file__)


@pytest.mark.parametrize("message", NO_MESHES)
def test_sizes_that_are_no_mesh_are_refused(message):
    for ask in (explain, jaxtp.propose_plan):
        with pytest.raises(MeshError, match=message):
            ask(build, X, mesh=NO_MESHES[message])


class Settles(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = jax.lax.stop_gradient(jax.lax.while_loop(lambda x: x.sum() > 0, self.layer, x))
        return jax.lax.cond(x.sum() > 0, self.layer, lambda x: x, x)


def test_counts_of_collectives_say_if_they_are_not_exact():
    found = explain(Settles, X, mesh={"fsdp": 2})
    assert {one.counted for one in found.traffic} == {"a turn", "at most"}
    assert "1 a turn" in str(found)
    assert "1 at most" in str(found)


def test_a_model_without_fsdp_is_compiled_as_it_is():
    """Without fsdp the program has no gather, and the compiler adds none."""
    with use_mesh(fsdp=2):
        model = jaxtp.parallelize(Settles, {"layer": Replicate()})
        found = explain(model, X, compiled=True)
    assert "all-gather" not in {one.kind for one in (*found.traffic, *found.added)}


def test_a_module_shares_the_inputs_of_its_layers():
    plan = {
        "w1": Colwise(),
        "w3": Colwise(),
        "w2": Rowwise(),
        "": PrepareInput(REPLICATE, REPLICATE),
    }
    found = explained(plan, make=lambda: FeedForward(nnx.Rngs(0)))
    assert "the model itself" in str(found)
    assert "w1 has no sum over tp backward" in str(found), "its input is data"
    assert not found.notes


ON_MESHES = [(OVER_FSDP_AND_TP, "none", 4), ({"cp": 2, "tp": 2}, "none", 0)]


@pytest.mark.parametrize(("sizes", "remat", "experts"), ON_MESHES, ids=str)
def test_flops_of_the_decoder_are_those_of_its_formulas(sizes, remat, experts):
    model = replace(SMALL, num_layers=2, remat=remat, num_experts=experts)
    config = TrainConfig(model=model)
    found = decoder_on(model, sizes, config.data.global_batch_size, config.data.sequence_length)
    costs = costs_of_step(config, jaxtp.mesh.mesh_shape(**sizes))
    assert found.flops == costs.flops
    assert found.saved > 0
